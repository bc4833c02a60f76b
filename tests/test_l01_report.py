"""What lesson 1's command prints, the numbers of its README, and its picture."""

from pathlib import Path

import pytest

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.__main__ import main
from lessons.l01_roofline.lab.pictures import SVG, draw, floors
from lessons.l01_roofline.models import MODELS
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
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
            "811.7 GB needed, 253.8 GB usable on 2 x H200; 8 GPUs would do",
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
    assert code == 0 and "Only 23 of 64 sequences fit" in out and "decode step of 23" in out


# ---------------------------------------------------------------- what the README says


def test_the_numbers_of_the_readme():
    """Each is computed here and must stand in the text, so that neither can change alone."""
    text = " ".join((Path(calc.__file__).parent / "README.md").read_text(encoding="utf-8").split())
    chip, one, many = CHIPS["h200"], floors()["decode, batch 1"], floors()["decode, batch 256"]
    endless = calc.decode_floor(MODELS["llama-3-8b"], 10**9, 2048, 1e12, 1e12).intensity
    read = [MODELS["deepseek-v3"].params_read(batch) / 1e9 for batch in (1, 32)]
    ridge = chip.bf16_flops_per_s / chip.memory_bytes_per_s
    kib = {name: calc.kv_bytes_per_token(shape) / 1024 for name, shape in MODELS.items()}
    llama2 = f"1: {kib['llama-2-7b']:.0f} KiB; {kib['llama-2-13b']:.0f} KiB is Llama-2-13B"
    usable = 0.9 * CHIPS["rtx4090"].memory_bytes
    fit = calc.sequences_that_fit(
        usable, calc.weight_bytes(MODELS["llama-3-8b"]), kib["llama-3-8b"] * 1024, 8192
    )
    for quoted in (
        f"moves {one.bytes_moved / 1e9:.1f} GB and uses {one.compute_s / one.seconds:.1%}".replace(
            "%", " %"
        ),
        f"{ridge:.0f} FLOP/byte on an H200: B = {ridge:.0f} at 16 bits, {ridge / 2:.0f} at 8, "
        f"{ridge / 4:.0f} at 4",
        f"at n = 2048: {endless:.0f}, never {ridge:.0f}",
        f"from {one.seconds * 1e3:.3g} to {many.seconds * 1e3:.3g} ms",
        f"{read[1]:.0f}·10⁹ of DeepSeek-V3's weights, one token {read[0]:.0f}·10⁹",
        f"{llama2}. 4: {kib['mixtral-8x7b']:.0f} KiB",
        f"6: {kib['llama-3-405b']:.0f} KiB",
        f"7: {kib['qwen3-8b']:.0f} KiB",
        f"Llama-2-70B | {kib['llama-2-70b']:.0f} KB",
        f"Llama-3-8B | {kib['llama-3-8b']:.0f} KB",
        f"DeepSeek-V3 | {kib['deepseek-v3']:.0f} KB",
        f"{16 * kib['falcon-40b']:.0f} KiB a token",
        f"needs {kib['falcon-40b']:.0f}",
        f"</summary>{4096 * kib['llama-2-7b'] / 2**20:.1f}: 4096",
        f"</summary>{fit}: (21.6",
        f"</summary>{calc.cost_per_million_tokens(3, 1000):.2f}: 1000 s",
        f"{len(MODELS)} models",
    ):
        assert quoted in text, quoted


def test_the_picture_can_be_read():
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert SVG.exists() and "CHECK" not in figure._supxlabel.get_text()
