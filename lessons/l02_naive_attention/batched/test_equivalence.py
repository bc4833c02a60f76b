"""Proves that the kernels draw the specification's token for the same random number: ties, holes,
cuts of every kind, penalties, greedy rows beside sampled ones, logits that are no distribution.
"""

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.batched import batch_sampling, fused
from lessons.l02_naive_attention.batched.draw_kernel import draw_kernel
from lessons.l02_naive_attention.batched.sample_kernels import (
    bands_kernel,
    largest_kernel,
    lists_kernel,
    narrow_kernel,
    penalize_kernel,
)
from lessons.l02_naive_attention.lab.specs import KERNELS
from lessons.l02_naive_attention.lab.testing import (
    DEVICE,
    HOSTILE,
    KINDS,
    Rows,
    check_numbers,
    hostile_rows,
    mixed_rows,
    random_rows,
)
from lessons.l02_naive_attention.sampling import GREEDY, SamplingParams
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.compiled import Bounds
from lessons.toolbox.proof.traps import poisoned, poisoned_empty

# A difference of two infinite logits, about which NumPy, the interpreter's engine, warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero):RuntimeWarning"),
    pytest.mark.usefixtures("seed"),
]
CUTS = largest_kernel, bands_kernel, narrow_kernel, lists_kernel, draw_kernel
ALL = *CUTS, penalize_kernel
PART = 16


def assert_draws(rows: Rows, part: int = PART, sample=fused.sample_fused) -> None:
    """sample gives the specification's tokens, and reads nothing that nothing has written."""
    batch, logits = rows.batch(), rows.logits.to(DEVICE)
    check_numbers(batch, rows)
    before = logits.clone()
    with poisoned_empty():
        tokens = sample(logits, batch, part=part)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert tokens.tolist() == rows.expected()


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(2)
def test_random_rows(kind, vocab_size, proof):
    assert_draws(random_rows(8, vocab_size, kind))
    proof.record(draw_kernel)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sample(3)
def test_hostile_rows(name, proof):
    """Each with the smallest random number and the largest, 1 - 2^-24, and some between."""
    assert_draws(hostile_rows(name))
    for kernel in ALL if "penalties" in name else CUTS:
        proof.record(kernel)


@pytest.mark.sample(1)
def test_rows_stay_apart(proof):
    """NaN, inf and nothing but -inf are told; greedy rows and drawn ones share a launch."""
    rows = mixed_rows()
    assert rows.expected().count(-1) == 4
    assert_draws(rows)
    for kernel in ALL:
        proof.record(kernel)


def assert_penalizes(penalized=fused.penalized) -> None:
    """The logits are PyTorch's to the bit, also after tokens that were new and others."""
    rows = random_rows(6, 40, "normal", frequency_penalty=0.3, presence_penalty=0.7)
    rows.params[1:3] = [SamplingParams(repetition_penalty=1.3), GREEDY]
    rows.prompts[0] = rows.outputs[0] = []
    rows.outputs[3] = [7, 7, 7, 2]
    batch, logits = rows.batch(), rows.logits.to(DEVICE)
    for _ in range(3):
        batch.append(torch.randint(40, (6,), device=DEVICE))
        want = logits.clone()
        batch.seen.penalize_(want)
        assert torch.equal(penalized(logits, batch.seen), want)


def test_penalties_to_the_bit(proof):
    assert_penalizes()
    proof.record(penalize_kernel)


@pytest.mark.parametrize("settings", [{}, dict(min_p=0.2), dict(temperature=0)])
@pytest.mark.sample(1)
def test_fewer_launches(settings, monkeypatch):
    """Where no row is cut by rank, or none is drawn, the launches that would find the cut are not
    made.
    """
    unused = ["bands_kernel", "narrow_kernel"] + (
        ["lists_kernel"] if "temperature" in settings else []
    )
    for name in unused:
        monkeypatch.setattr(fused, name, None)
    assert_draws(random_rows(4, 40, "ties", **dict(temperature=0.8, top_k=0, top_p=1.0) | settings))


@pytest.mark.parametrize("part", [32, 128])
@pytest.mark.sample(1)
def test_any_part_gives_the_same_token(part, proof):
    assert_draws(random_rows(8, 100, random.choice(KINDS)), part)
    for kernel in CUTS:
        proof.record(kernel)


@pytest.mark.sample(1)
def test_more_parts_than_columns(monkeypatch):
    """Lists that are longer than what is looked at together."""
    monkeypatch.setattr(fused, "SLOTS", 8)
    assert_draws(random_rows(3, 100, "flat", temperature=0.8, top_k=0, top_p=0.6107), 64)
    assert_draws(random_rows(3, 100, "ties", temperature=0.8, top_k=50, top_p=0.9513), 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.sample(1)
def test_sixteen_bits_and_strides(dtype, proof):
    """Rows that lie apart, columns that lie apart, one row for all: NaN between them."""
    rows = random_rows(4, 40, "normal", top_p=1.0)
    rows.logits = rows.logits.to(dtype)
    for count, step in ((43, 1), (120, 3)):
        apart = poisoned((4, count), dtype)[:, : 40 * step : step]
        apart.copy_(rows.logits)
        rows.logits = apart
        assert_draws(rows)
    rows.logits = rows.logits[:1].expand(4, -1)
    assert_draws(rows)
    for kernel in CUTS:
        proof.record(kernel)


@pytest.mark.sample(1)
def test_a_batch_asks_the_kernels():
    """By way of sample_batch, and goes on with its rows; float64 stays in PyTorch."""
    rows = random_rows(6, 40, "normal")
    batch, other = rows.batch(), rows.batch()
    batch.shortcut = fused.sample_fused
    logits = rows.logits.to(DEVICE)
    for _ in range(2):
        tokens = batch_sampling.sample_batch(logits, batch)
        assert torch.equal(tokens, batch_sampling.sample_batch(logits, other))
        batch.append(tokens)
        other.append(tokens)
    chosen = [4, 1]
    got = batch_sampling.sample_batch(logits[chosen], batch.select(chosen))
    assert torch.equal(got, batch_sampling.sample_batch(logits[chosen], other.select(chosen)))
    assert fused.sample_fused(logits.double(), batch) is None
    hot = random_rows(1, 40, "normal", temperature=1e300)
    assert fused.sample_fused(hot.logits.to(DEVICE), hot.batch()) is None


@pytest.mark.compiler
def test_the_compiler_spills_nothing():
    Bounds("^(largest|bands|narrow|lists|draw|penalize)$", registers=128).check(KERNELS)


# ---------------------------------------------------------------- wrong versions

# bug: (what the source says, what it says then, the case that finds it)
BUGS = {
    "NaN is not seen": ("x == x, x, float", "x == x, x, -float", "mixed"),
    "the last part is cut short": (
        "mask=ids < vocab_size",
        "mask=ids < vocab_size // 16 * 16",
        "all equal",
    ),
    "keys of negative logits fall": (
        "return tl.where(bits >= 0, bits, bits ^ LARGEST_INT)",
        "return bits",
        "top-k is one fewer",
    ),
    "faint tokens are cut": (
        "return (weight * UNIT + 0.5)",
        "return (weight * UNIT / 1024)",
        "faint",
    ),
    "min-p cuts what equals it": ("weight >= min_p", "weight > min_p", "min-p is 1"),
    "the next number": ("(drawn + 1).to", "(drawn + 2).to", "all equal"),
    "half of the number": ("return (x >> 11) << 11", "return (x >> 12) << 11", "all equal"),
    "one band too low": (
        "short = tl.min(tl.where(is_short, begins",
        "short = tl.min(tl.where(is_enough, begins",
        "all equal, top-p",
    ),
    "top-p counts tokens": (
        "(top_k < vocab_size) & (worth > 0), 1.0",
        "worth > 0, 1.0",
        "top-p among ties",
    ),
    "top-k ends at the band": (
        'tl.where(top_k < vocab_size, float("inf"), high)',
        "high",
        "one token, top-k",
    ),
    "each band begins one further": (
        "height >= begin_of(band, low",
        "height >= begin_of(band + 1, low",
        "top-p among ties",
    ),
    "places overlap": (
        "tl.cumsum(is_inside.to(tl.int32), axis=0) - 1",
        "tl.cumsum(is_inside.to(tl.int32), axis=0) // 2",
        "all equal, top-k",
    ),
    "the mass above the band is lost": (
        "tl.where(height >= high, units, 0)",
        "tl.where(height >= high, 0, 0)",
        "holes, top-p",
    ),
    "one fewer is not enough": (
        "tl.sum(reached) >= wanted",
        "tl.sum(reached) > wanted",
        "top-k without ties",
    ),
    "the cut itself is cut": ("ties += (x == cut)", "ties += (x > cut)", "all equal, top-k"),
    "top-p keeps all ties": (
        "tl.maximum(number - in_front, 0), ties)",
        "tl.maximum(number, ties), ties)",
        "all equal, top-p",
    ),
    "top-p keeps the last ties": (
        "in_front = tl.cumsum(ties, axis=0) - ties",
        "in_front = tl.sum(ties, axis=0) - tl.cumsum(ties, axis=0)",
        "all equal, top-p",
    ),
    "top-p keeps one tie fewer": (
        "- tl.sum(above, axis=0) + each - 1) // each",
        "- tl.sum(above, axis=0)) // each",
        "all equal, top-p",
    ),
    "top-p of the whole mass": (
        "if top_k < vocab_size:\n        cut",
        "if top_k < 0:\n        cut",
        "top-k ties across parts",
    ),
    "the token before": (
        "(reached <= target).to(tl.int32)",
        "(reached < target).to(tl.int32)",
        "holes",
    ),
    "the part before": (
        "(tl.cumsum(units, axis=0) <= target)",
        "(tl.cumsum(units, axis=0) < target)",
        "holes",
    ),
    "each part begins at 0": (
        "target -= tl.sum(tl.where(parts < part, units, 0), axis=0)",
        "target -= 0",
        "all equal",
    ),
    "greedy takes the last": (
        "tl.min(tl.where(maxima == highest, parts, num_parts)",
        "tl.max(tl.where(maxima == highest, parts, 0)",
        "greedy among ties",
    ),
    "greedy is drawn": ("min_p, temperature <= 0", "min_p, temperature < 0", "greedy among ties"),
    "bad logits give a token": (
        "tl.full((), BAD_LOGITS, tl.int32)",
        "tl.full((), 0, tl.int32)",
        "mixed",
    ),
    "a negative logit is divided": (
        "tl.div_rn(x, repetition), x * repetition",
        "tl.div_rn(x, repetition), tl.div_rn(x, repetition)",
        "to the bit",
    ),
    "frequency is presence": (
        "frequency * count.to(tl.float32)",
        "frequency * (count > 0).to(tl.float32)",
        "to the bit",
    ),
    "the prompt counts as output": (
        "presence * (count > 0)",
        "presence * (count >= 0)",
        "to the bit",
    ),
    "the last seen token is forgotten": (
        "inside = places < tl.minimum(width, tl.load(distinct_ptr + row))",
        "inside = places < tl.load(distinct_ptr + row) - 1",
        "to the bit",
    ),
    "penalized twice": (
        "- presence * (count > 0).to(tl.float32)",
        "- 2 * presence * (count > 0).to(tl.float32)",
        "to the bit",
    ),
}


def buggy_sampler(folder: Path, monkeypatch, old: str, new: str):
    """fused.py, whose kernels are those of copies in `folder` in which `old` says `new`."""
    package, found = f"buggy_{folder.name}", 0
    (folder / package).mkdir()
    monkeypatch.syspath_prepend(folder)
    names = "kernel_math", "sample_kernels", "draw_kernel", "fused"
    for name in names:
        text = (Path(fused.__file__).parent / f"{name}.py").read_text("utf-8")
        found += text.count(old)
        text = text.replace(old, new)
        for other in names:
            text = text.replace(
                f"lessons.l02_naive_attention.batched.{other} ", f"{package}.{other} "
            )
        (folder / package / f"{name}.py").write_text(text, "utf-8")
    assert found == 1, f"{old!r} is there {found} times"
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.fused")


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: each bug would compile all kernels anew")
@pytest.mark.parametrize("name", BUGS)
@pytest.mark.sample(2)
def test_a_planted_bug_is_found(name, tmp_path, monkeypatch):
    old, new, case = BUGS[name]
    buggy = buggy_sampler(tmp_path, monkeypatch, old, new)
    with pytest.raises(AssertionError):
        if case == "to the bit":
            assert_penalizes(buggy.penalized)
        rows = hostile_rows(case) if case in HOSTILE else mixed_rows()
        assert_draws(rows, sample=buggy.sample_fused)


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: as the bugs above")
def test_the_copies_without_a_bug_pass(tmp_path, monkeypatch):
    """Otherwise the test above would prove nothing."""
    same = buggy_sampler(
        tmp_path, monkeypatch, "sample_fused(logits: Tensor", "sample_fused(logits: Tensor"
    )
    assert same.__name__ in sys.modules and same.draw_kernel is not draw_kernel
    assert_draws(mixed_rows(), sample=same.sample_fused)


def test_rows_of_a_large_batch_are_cut_less_often():
    assert fused.part_size(1, 128_256) == fused.SMALL_PART
    assert fused.part_size(64, 128_256) == fused.LARGE_PART
    assert not fused.has_ranks(GREEDY) and not fused.has_ranks(SamplingParams(min_p=0.5))
