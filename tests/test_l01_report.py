"""What lesson 1's command prints."""

import pytest

from lessons.l01_roofline.__main__ import main
from lessons.l01_roofline.planner.elsewhere import DISK_LINK, GB, HOST_LINK, places
from lessons.l01_roofline.planner.models import MODELS, find_model
from lessons.l01_roofline.planner.plan import make_plan
from lessons.l26_kv_transfer.costs import LINKS, token_of
from lessons.toolbox.measure.hardware import CHIPS


def run(capsys, arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `python -m lessons.l01_roofline` with these arguments."""
    try:
        code = main(arguments.split())
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_the_report_of_the_readme(capsys):
    code, out, _ = run(capsys, "--model llama-3-70b --gpu h200 --batch 32 --context 4096")
    assert code == 0
    # two H200 move 182 GB (140 of weights, 42.9 of cache less the embedding) at 9.6 TB/s: 18.95 ms,
    # 32 / 0.01895 = 1688
    for text in (
        "2 x H200",
        "141 GB",
        "320 KiB",
        "1.34 GB",
        "254 GB",
        "182 GB",
        "19 ms",
        "1688 tokens/s",
        "$0.99",
        "197%",
        "905 MB",
        "28.2 GB",
        "1.01 M",
    ):
        assert text in out, text
    assert "Predictions, not measurements" in out and "data sheet" in out


def test_every_model_in_one_table(capsys):
    code, out, _ = run(capsys, "--model all --gpu h100")
    assert code == 0 and all(name in out for name in MODELS)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--model gpt-9", "'gpt-9'; known are llama-2-7b"),
        ("--gpu v100", "'v100', known are a100, h100"),
        ("--batch 0", "--batch: '0'"),
        ("--context -5", "--context: '-5'"),
        ("--batch 1.5", "--batch: '1.5'"),
        ("--dollars-per-hour nan", "'nan'"),
        ("--memory-share 2", "memory_share is 2.0; accepted: above 0 and at most 1"),
        (
            "--model llama-3-405b --gpus 2",
            "813.3 GB needed, 253.8 GB usable on 2 x H200; for 32 sequences would do: 8 GPUs",
        ),
        (
            "--gpu rtx4090 --gpus 1 --context 200000 --batch 1",
            "one sequence of 200000 tokens do not fit",
        ),
        ("--bogus", "--bogus"),
    ],
)
def test_a_wrong_argument_gets_one_line(capsys, arguments, says):
    code, out, err = run(capsys, arguments)
    assert code == 2 and not out and says in err and len(err.strip().splitlines()) == 1


def test_what_fits_of_a_batch_that_does_not(capsys):
    code, out, _ = run(capsys, "--gpu t4 --gpus 2 --batch 64")
    assert code == 0 and "Only 22 of 64 sequences fit" in out and "decode step of 22" in out
    assert "would do: a context of 1453 tokens" in out and "would do: 4 GPUs" in out


def test_places_of_sequences_that_pause_by_hand(capsys):
    """8192 tokens of 128 KiB are 1.07 GB: 186 of them in 200 GB, 16.8 ms over 64 GB/s, 76.7 ms more
    over 14 GB/s, 85.9 ms over 100 Gb/s, and 343.6 over 25, which is slower than computing.
    """
    size = "--model llama-3-8b --gpu h100 --batch 8 --context 8192"
    code, out, _ = run(capsys, f"{size} --host-gb 200 --disk-gb 2000 --link 100")
    assert code == 0
    for text in ("186", "16.8 ms", "1862", "93.5 ms", "85.9 ms"):
        assert text in out, text
    rows = [line for line in out.splitlines() if "another machine" in line]
    assert "faster" in rows[0]
    _, out, _ = run(capsys, f"{size} --link 25")
    (row,) = [line for line in out.splitlines() if "another machine" in line]
    assert "344 ms" in row and "slower" in row and "host memory" not in out
    _, out, _ = run(capsys, size)
    assert "pauses" not in out


def test_places_are_lesson_26s():
    """The links, and the time of a token, are those of its costs.py; two GPUs have two of each."""
    token = token_of("llama-3-8b")
    assert {HOST_LINK * GB, DISK_LINK * GB} == {LINKS["PCIe 5.0"], LINKS["NVMe"]}
    for gpus in (1, 2):
        plan = make_plan(find_model("llama-3-8b"), CHIPS["h100"], 4, 1000, gpus)
        host, disk, network = places(plan, 10, 20, 100)
        assert host.room_bytes == gpus * 10e9
        assert host.back_s == pytest.approx(1000 * token.move_s(gpus * LINKS["PCIe 5.0"]))
        disk_s = 1000 * token.move_s(gpus * LINKS["NVMe"])
        assert disk.back_s == pytest.approx(host.back_s + disk_s)
        assert network.back_s == pytest.approx(1000 * token.move_s(gpus * LINKS["100 Gb/s"]))
    for name in ("host_link", "disk_link", "network_gbit"):
        with pytest.raises(ValueError, match=name):
            places(plan, 1, 1, **{name: 0})
