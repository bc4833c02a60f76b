"""Proves that the kernels draw the specification's token for the same random number: ties, holes,
cuts of every kind, penalties, greedy rows beside sampled ones, logits that are no distribution.
"""

import random

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
from lessons.toolbox.proof.compiled import Bounds
from lessons.toolbox.proof.traps import poisoned, poisoned_empty

pytestmark = pytest.mark.usefixtures("seed")
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
    proof.record(largest_kernel)
    proof.record(bands_kernel)
    proof.record(narrow_kernel)
    proof.record(lists_kernel)
    proof.record(draw_kernel)
    if "penalties" in name:
        proof.record(penalize_kernel)


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


def test_rows_of_a_large_batch_are_cut_less_often():
    assert fused.part_size(1, 128_256) == fused.SMALL_PART
    assert fused.part_size(64, 128_256) == fused.LARGE_PART
    assert not fused.has_ranks(GREEDY) and not fused.has_ranks(SamplingParams(min_p=0.5))
