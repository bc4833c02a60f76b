"""Proves that the numbers and excerpts of the README are those of the code, that a plan and its
advice agree, and that the memories of a GPU follow from its data sheet.
"""

import dataclasses
import re
from pathlib import Path

import pytest

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline import hierarchy
from lessons.l01_roofline.lab import phases, pictures
from lessons.l01_roofline.planner.models import MODELS
from lessons.l01_roofline.planner.plan import make_plan, ways_out
from lessons.l01_roofline.planner.report import amount
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS, Chip, ridge_point
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
README = pages(ROOM)
LLAMA, LARGE = MODELS["llama-3-8b"], MODELS["llama-3-70b"]


def most_tokens_per_s(chip: Chip, context: int, bits_per_weight: float) -> float:
    """The ceiling of Llama-3-70B on one chip filled with sequences, cache in 16 bits."""
    weights, kv = calc.weight_bytes(LARGE, bits_per_weight), calc.kv_bytes_per_token(LARGE)
    fit = calc.sequences_that_fit(0.9 * chip.memory_bytes, weights, kv, context)
    rates = chip.memory_bytes_per_s, chip.bf16_flops_per_s
    step = calc.decode_floor(LARGE, fit, context, *rates, bits_per_weight)
    return fit / step.seconds


def test_the_numbers_of_the_readme():
    """Each is computed here and must stand in the text, so that neither can change alone."""
    floors = pictures.floors()
    one, many = floors["decode, batch 1"], floors["decode, batch 256"]
    endless = calc.decode_floor(LLAMA, 10**9, 2048, 1e12, 1e12).intensity
    read = [MODELS["deepseek-v3"].params_read(batch) / 1e9 for batch in (1, 32)]
    ridge = {
        name: ridge_point(CHIPS[name].bf16_flops_per_s, CHIPS[name].memory_bytes_per_s)
        for name in ("a100", "h100", "h200")
    }
    kib = {name: calc.kv_bytes_per_token(shape) / 1024 for name, shape in MODELS.items()}
    usable = 0.9 * CHIPS["rtx4090"].memory_bytes
    fit = calc.sequences_that_fit(usable, calc.weight_bytes(LLAMA), kib["llama-3-8b"] * 1024, 8192)
    plan = make_plan(LLAMA, CHIPS["h200"], 32, 4096)
    rented = pictures.rented()
    best = calc.cost_per_million_tokens(4 * 4.5, rented.tokens_per_s)
    alone = calc.decode_floor(LARGE, 1, 1, 2.039e12, 312e12)
    for quoted in (
        f"moves {one.bytes_moved / 1e9:.1f} GB and uses {one.compute_s / one.seconds * 100:.1f} %",
        f"= {one.seconds * 1e3:.2f} ms",
        f"312 / 2.039 = {ridge['a100']:.0f}",
        f"989.5 / 3.35 = {ridge['h100']:.0f}",
        f"989.5 / 4.8 = {ridge['h200']:.0f} FLOP/byte",
        f"B = {ridge['h200']:.0f} at 16 bits, {ridge['h200'] / 2:.0f} at 8, "
        f"{ridge['h200'] / 4:.0f} at 4",
        f"N = 2048 that is {2 * LLAMA.params_read(1) / 2048 / kib['llama-3-8b'] / 1024:.0f} + "
        f"{2 * 4 / 2:.0f} = {endless:.0f}, never {ridge['h200']:.0f}",
        f"FLOPs = 2 · {LLAMA.params_read(1) / 1e9:.2f}·10⁹ + attention     "
        f"= {one.flops / 1e9:.1f}·10⁹",
        f"989.5·10¹² = {one.compute_s * 1e3:.3f} ms",
        f"8 · 32 · 128256 = {calc.activation_bytes(LLAMA, 2048, 32) / 1e9:.2f}·10⁹ bytes",
        f"({plan.usable_bytes / 1e9:.1f} − {plan.weight_bytes / 1e9:.2f} − "
        f"{plan.activation_bytes / 1e9:.2f})·10⁹",
        f"so {plan.sequences} sequences",
        f"cost {best:.2f} dollars for 10⁶ tokens at best, {1e3 / best:.0f} thousand",
        f"from {one.seconds * 1e3:.3g} to {many.seconds * 1e3:.3g} ms",
        f"{read[1]:.0f}·10⁹ of DeepSeek-V3's weights, one token {read[0]:.0f}·10⁹",
        f"Row 1 is {kib['llama-2-7b']:.0f} KiB; {kib['llama-2-13b']:.0f} KiB is Llama-2-13B",
        f"Row 4 is {kib['mixtral-8x7b']:.0f} KiB",
        f"Row 6 is {kib['llama-3-405b']:.0f} KiB",
        f"Row 7 is {kib['qwen3-8b']:.0f} KiB",
        f"Llama-2-70B | {kib['llama-2-70b']:.0f} KB",
        f"Llama-3-8B | {kib['llama-3-8b']:.0f} KB",
        f"DeepSeek-V3 | {kib['deepseek-v3']:.0f} KB",
        f"{16 * kib['falcon-40b']:.0f} KiB a token",
        f"needs {kib['falcon-40b']:.0f}",
        f"take {alone.memory_s * 1e3:.1f} ms and the FLOPs {alone.compute_s * 1e3:.3f} ms, which "
        f"is {alone.memory_s / alone.compute_s:.0f}×",
        f"</summary>{4096 * kib['llama-2-7b'] / 2**20:.1f}: 4096",
        f"</summary>{fit}: (21.6",
        f"</summary>{calc.cost_per_million_tokens(3, 1000):.2f}: 1000 s",
        f"{len(MODELS)} models",
    ):
        assert quoted in README, quoted


def test_the_speeds_of_the_museum():
    h100, l40s = CHIPS["h100"], CHIPS["l40s"]
    one, many = (pictures.floors()[f"decode, batch {batch}"].seconds for batch in (1, 64))
    for quoted in (
        f"at most {most_tokens_per_s(h100, 4096, 8):.0f} tokens/s",
        f"at most {most_tokens_per_s(h100, 512, 8):.0f}.",
        f"at most {most_tokens_per_s(l40s, 2048, 4.5):.0f} tokens/s",
        f"{calc.weight_bytes(LARGE, 4) / 1e9:.1f} GB of weights alone do not fit",
        f"= {4 * 4.5 * 730:,.0f} dollars",
        f"takes {many / one:.1f} times as long as one of a single sequence and gives 64 tokens, so "
        f"the price falls {64 * one / many:.0f}-fold",
        f"cost {calc.cost_per_million_tokens(3, 100):.2f} dollars",
    ):
        assert quoted in README, quoted
    assert calc.weight_bytes(LARGE, 4) > CHIPS["rtx4090"].memory_bytes
    month = pictures.rented().tokens_per_s * 86400 * pictures.DAYS
    assert round(month / 1e9) == 10


def test_the_example_of_the_derivation():
    kv = 2 * 2 * 1 * 2 * 2
    assert 2 * 328 + 3 * 5 * kv == 896 and 3 * 2 * 328 + 3 * 5 * 2 * (2 * 2 * (2 + 2)) == 2448
    assert f"2 · 32 · 8 · 128 · 2 = {calc.kv_bytes_per_token(LLAMA):.0f} bytes" in README


def test_the_excerpts_of_the_readme_are_the_code():
    code = "".join((ROOM / name).read_text("utf-8") for name in ("naive.py", "optimized.py"))
    excerpts = README.split("```python\n")[1:]
    assert len(excerpts) == 3
    for excerpt in excerpts:
        assert excerpt.split("```")[0] in code


# ---------------------------------------------------------------- the memories of a GPU


def test_the_memories_of_an_a100_by_hand():
    # 19.5 TFLOP/s = 108 SMs · 64 units · 2 FLOPs · clock
    assert hierarchy.clock_hz(CHIPS["a100"]) == pytest.approx(1.41e9, rel=1e-3)
    registers, shared, l2, hbm = hierarchy.levels(CHIPS["a100"])
    assert registers.num_bytes == 108 * 256 * 1024 and shared.num_bytes == 108 * 163 * 1024
    assert shared.bytes_per_s == pytest.approx(108 * 128 * 1.41e9, rel=1e-3)
    assert l2.bytes_per_s == pytest.approx(5120 * 1.41e9, rel=1e-3)
    assert (hbm.num_bytes, hbm.bytes_per_s) == (80e9, 2.039e12)


@pytest.mark.parametrize("name", CHIPS)
def test_each_memory_is_slower_than_the_one_before(name):
    rates = [level.bytes_per_s for level in hierarchy.levels(CHIPS[name])]
    known = [rate for rate in rates if rate is not None]
    assert known == sorted(known, reverse=True) and len(known) >= 3


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_the_table_of_memories(name):
    cells = []
    for level in hierarchy.levels(CHIPS[name]):
        rate = level.bytes_per_s
        cells.append(
            f"{amount(level.num_bytes, 'B')}, "
            + ("not published" if rate is None else amount(rate, "B/s"))
        )
    assert f"| {name.upper()} | {' | '.join(cells)} |" in README


def test_the_command_prints_every_chip(capsys):
    hierarchy.main()
    printed = capsys.readouterr().out
    assert all(chip.name in printed for chip in CHIPS.values()) and "7.22 TB/s" in printed


def test_a_measured_chip_has_no_memories():
    chip = dataclasses.replace(CHIPS["a100"], name="mine", compute_capability=None)
    with pytest.raises(ValueError, match="'mine', measured; accepted: one of a100"):
        hierarchy.levels(chip)


# ---------------------------------------------------------------- the planner


@pytest.mark.parametrize(
    "chip, gpus, batch, context",
    [("t4", 2, 64, 4096), ("h100", 1, 256, 8192), ("rtx4090", 1, 32, 4096), ("h200", 1, 300, 4096)],
)
def test_every_way_out_fits(chip, gpus, batch, context):
    plan = make_plan(LLAMA, CHIPS[chip], batch, context, gpus)
    ways = ways_out(plan)
    assert not plan.fits and ways
    for way in ways:
        digits = int(way.split()[0]) if way[0].isdigit() else None
        if "sequences" in way:
            better, worse = {"batch": digits}, {"batch": digits + 1}
        elif "context" in way:
            digits = int(way.split()[-2])
            better, worse = {"context": digits}, {"context": digits + 1}
        elif way.endswith("GPUs"):
            better, worse = {"gpus": digits}, {"gpus": digits // 2}
        elif "cache" in way:
            better, worse = {"bits_per_kv": 8}, {}
        else:
            better, worse = {"bits_per_weight": 8 if way.startswith("8") else 4.5}, {}
        assert dataclasses.replace(plan, **better).fits, way
        assert not dataclasses.replace(plan, **worse).fits, way


def test_a_plan_that_fits_needs_no_advice():
    assert ways_out(make_plan(LLAMA, CHIPS["h200"], 32, 4096)) == []


def test_activations_that_fit_nowhere_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"batched_tokens is 1000000000.*accepted: fewer") as error:
        make_plan(LLAMA, CHIPS["h200"], 1, 16, batched_tokens=10**9)
    assert "\n" not in str(error.value)


def test_tokens_per_dollar_by_hand():
    # $3.60 an hour is $0.001 a second, and a second gives 1000 tokens
    assert calc.tokens_per_dollar(3.60, 1000) == pytest.approx(1e6)


def test_activation_bytes_by_hand():
    # llama-3-8b, 2048 tokens: 2 residual streams of 4096, the MLP's 3 · 14336, 2 bytes each;
    # 32 rows of 128256 logits and probabilities of 4 bytes
    want = 2048 * 2 * (2 * 4096 + 3 * 14336) + 32 * 128256 * 8
    assert calc.activation_bytes(LLAMA, 2048, 32) == want


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
@pytest.mark.sample(4, of="pictures")
def test_pictures_are_legible(name):
    figure = pictures.PICTURES[name][0]()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert (ROOM / "lab" / f"{name}.svg").exists()
    assert "CHECK" not in figure._supxlabel.get_text()


def test_the_queue_is_drawn_as_it_happened():
    figure = pictures.draw_queue(setup_s=0.02, work_s=0.01, calls=2)
    (shown,) = re.findall(r"the work takes ([\d.]+) ms", figure._suptitle.get_text())
    # 10 ms of sleep take longer on a busy machine, and never less.
    assert not texts_outside(figure) and 10 <= float(shown) < 100


def test_the_phases_are_drawn_with_their_ratio():
    measured = phases.Phases([16, 64], [(2.0,) * 3] * 2, [(8.0,) * 3] * 2, "float32")
    figure = phases.draw_phases(measured, {"device": "a CPU"})
    assert "costs 4x less" in figure._suptitle.get_text() and not texts_outside(figure)
    assert phases.band([1, 2, 3, 4, 5, 6]) == (3.5, 2, 5)


def test_the_break_even_of_the_picture():
    monthly = 4 * 4.5 * 24 * pictures.DAYS
    tokens = pictures.break_even_tokens_per_month(4 * 4.5, 3.0)
    assert tokens * 3.0 / 1e6 == pytest.approx(monthly)
