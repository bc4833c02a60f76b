"""Checks of 3.5, the kernel with a loop: which rows it reads, and what it adds up."""

import tempfile
from pathlib import Path

import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from tests.exercises.checking import assert_equal, check, compare, note
from tests.exercises.kernel_work import kernel_does_it


def rows_of(seed, lengths, heads=2, head_dim=16, capacity=48, apart=0):
    """Inputs whose rows after the lengths are NaN. apart: numbers between two rows of V."""
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    memory = torch.full((batch, capacity, heads, head_dim + apart), torch.nan)
    v_cache = memory[..., :head_dim]
    v_cache.copy_(torch.randn(v_cache.shape, generator=g))
    weights = torch.rand(batch, heads, capacity, generator=g)
    for sequence, length in enumerate(lengths):
        v_cache[sequence, length:] = weights[sequence, :, length:] = torch.nan
    context_lens = torch.tensor(lengths, dtype=torch.int64)
    return dict(weights=weights, v_cache=v_cache, context_lens=context_lens)


def by_slicing(weights, v_cache, context_lens):
    sums = [
        torch.einsum("hn,nhd->hd", w[:, :n].double(), v[:n].double())
        for w, v, n in zip(weights, v_cache, context_lens.tolist())
    ]
    return torch.stack(sums)


VALUE_CASES = {  # name: (arguments of rows_of after the seed, why)
    "one_tile": (dict(lengths=[16]), "a tile is full, and it is the only one"),
    "several_tiles": (dict(lengths=[48]), "the sum grows from tile to tile"),
    "last_tile": (dict(lengths=[21]), "the last tile is not full, and what follows is NaN"),
    "few_rows": (dict(lengths=[3]), "less than a tile"),
    "one_row": (dict(lengths=[1]), "the first token of a prompt"),
    "head_dim": (dict(lengths=[48], head_dim=12), "D is no power of two, and the cache is full"),
    "sequences": (dict(lengths=[5, 33, 16]), "each sequence has a length of its own"),
    "no_row": (dict(lengths=[4, 0]), "a sequence without rows gives zeros"),
    "one_head": (dict(lengths=[9, 18], heads=1), "one KV head"),
    "apart": (dict(lengths=[7, 19], apart=5), "between two rows of V there are other numbers"),
}


@check("3.5", {case: why for case, (_, why) in VALUE_CASES.items()}, seconds=30)
def test_weighted_values(impl, case, seed):
    inputs = rows_of(seed, **VALUE_CASES[case][0])
    compare(impl, inputs, by_slicing(**inputs), atol=1e-5, dtype=torch.float32)


@check("3.5", seconds=30)
def test_weighted_example(impl, seed):
    inputs = dict(
        weights=torch.tensor([[[0.5, 0.25, 0.25, torch.nan]]]),
        v_cache=torch.tensor([[[[2.0, 0]], [[4, 8]], [[0, 4]], [[torch.nan, torch.nan]]]]),
        context_lens=torch.tensor([3]),
    )
    compare(impl, inputs, torch.tensor([[[2.0, 3.0]]]), atol=1e-6)


@check("3.5", {"far": "the third row is after number 2³¹ of the memory"}, seconds=30)
def test_weighted_rows_far_apart(impl, case, seed):
    """In a sparse file, which takes no more room than its values."""
    inputs = rows_of(seed, [3], heads=1, capacity=3)
    with tempfile.TemporaryDirectory() as folder:
        far = far_apart(inputs["v_cache"], 1, Path(folder) / "v")
        got = note(impl(**{**inputs, "v_cache": far}))
    assert_equal(got, by_slicing(**inputs), atol=1e-5, dtype=torch.float32)


test_the_values_kernel_does_it = kernel_does_it(
    "3.5", lambda seed: rows_of(seed, [20], capacity=20), once=("v_cache",)
)
