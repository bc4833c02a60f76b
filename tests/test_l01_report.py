"""What lesson 1's command prints."""

import pytest

from lessons.l01_roofline.__main__ import main
from lessons.l01_roofline.planner.models import MODELS


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
