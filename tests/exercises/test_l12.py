"""Checks of lesson 12's exercises. Each exists because it rejects a named wrong answer
(wrong/l12.py).
"""

import copy
import tempfile
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.lab.testing import far_apart
from lessons.l12_paged_kv.blocks import OutOfBlocks
from lessons.l12_paged_kv.lab.histories import random_history
from tests.exercises.checking import (
    assert_entries,
    assert_equal,
    assert_largest_tensor,
    call,
    check,
    compare,
    note,
)
from tests.exercises.kernel_work import kernel_does_it

# ---------------------------------------------------------------- 12.1 predict

PLAN_NAMES = ("lengths", "reserved_tokens", "block_size", "num_blocks", "kv_bytes_per_token")
PLAN_CASES = {  # name: (arguments, the answer, why)
    "example": (([5, 8], 16, 4, 10, 100), ([2, 2], 19 / 32, 3 / 16, 2, 4000), "the docstring's"),
    "classic": (
        ([200, 500, 100], 2048, 16, 1000, 524288),
        ([13, 32, 7], 1 - 800 / 6144, 32 / 832, 7, 8388608000),
        "52 of 1000 blocks; 87 % of the reservations are empty, 3.8 % of the blocks",
    ),
    "full_blocks": (
        ([32, 16], 64, 16, 8, 10),
        ([2, 1], 1 - 48 / 128, 0.0, 2, 1280),
        "a length that fills its last block needs no other, and nothing is empty",
    ),
    "blocks_of_one": (
        ([7, 3], 10, 1, 25, 3),
        ([7, 3], 0.5, 0.0, 2, 75),
        "a block of one token is never partly empty",
    ),
    "one_long_block": (
        ([3, 100], 256, 256, 5, 8),
        ([1, 1], 1 - 103 / 512, 1 - 103 / 512, 5, 10240),
        "a block as long as a reservation wastes as much",
    ),
    "ragged_reservation": (
        ([10], 50, 16, 11, 2),
        ([1], 0.8, 6 / 16, 2, 352),
        "50 tokens take 4 blocks of 16, so 11 blocks hold two of them",
    ),
}


@check("12.1", {case: why for case, (*_, why) in PLAN_CASES.items()}, seconds=5)
def test_plan(impl, case, seed):
    numbers, want, _ = PLAN_CASES[case]
    got = call(impl, copy.deepcopy(dict(zip(PLAN_NAMES, numbers))))
    assert isinstance(got, tuple) and len(got) == 5, (
        f"your result is {got!r}, expected a tuple of five"
    )
    labels = (
        "the blocks of each sequence",
        "the empty share of the reservations",
        "the empty share of the owned blocks",
        "how many longest sequences fit at once",
        "the bytes of the pool",
    )
    assert_entries(got, want, labels, atol=1e-12)


# ---------------------------------------------------------------- 12.2 the block manager

HISTORIES = {  # name: ((num_blocks, block_size), why)
    "blocks_of_four": ((14, 4), "sequences grow, fork and end in any order"),
    "blocks_of_one": ((9, 1), "every token is the first of a new block"),
    "one_block_each": ((6, 50), "no sequence ever fills a block"),
    "a_tight_pool": ((5, 3), "the pool runs full at every moment"),
}


@check("12.2", {case: why for case, (_, why) in HISTORIES.items()}, seconds=20)
def test_any_history(impl, case, seed):
    """Every sequence reads what it wrote; owners and free blocks add up; no block is lost."""
    for n in range(12):
        random_history(impl(*HISTORIES[case][0]), seed + n, 50)


@check("12.2", seconds=5)
def test_manager_example(impl, seed):
    manager = impl(8, 4)
    assert_equal(manager.grow(0, 0, 6), [], label="the copies of a new sequence's grow")
    assert_equal(manager.tables[0], [0, 1], label="the table of 6 tokens in blocks of 4")
    manager.fork(0, 1)
    assert_equal(manager.needs(1, 6, 7), 1, label="needs(1, 6, 7) after fork(0, 1)")
    assert_equal(manager.grow(1, 6, 7), [(1, 2)], label="the copies of grow(1, 6, 7)")
    assert_equal(manager.tables, {0: [0, 1], 1: [0, 2]}, label="the tables after the copy")
    assert_equal(manager.grow(0, 6, 7), [], label="the copies of the last owner's grow")
    assert_equal(manager.grow(0, 7, 9), [], label="the copies of grow(0, 7, 9)")
    assert_equal(manager.tables[0], [0, 1, 3], label="the table of 9 tokens in blocks of 4")


@check("12.2", seconds=5)
def test_copies_only_what_is_written(impl, seed):
    """A shared block that is full is not written any more, so it is not copied."""
    manager = impl(8, 4)
    manager.grow(0, 0, 8)
    manager.fork(0, 1)
    assert_equal(manager.needs(1, 8, 9), 1, label="needs after a full shared block")
    assert_equal(manager.grow(1, 8, 9), [], label="the copies after a full shared block")
    assert_equal(manager.num_free, 5, label="the free blocks after it")
    manager.grow(0, 8, 10)
    manager.fork(0, 2)
    assert_equal(manager.needs(2, 10, 10), 0, label="needs where nothing is written")
    assert_equal(manager.grow(2, 10, 10), [], label="the copies where nothing is written")
    assert_equal(manager.needs(0, 10, 11), 1, label="needs of the parent, which copies as well")


@check("12.2", seconds=5)
def test_who_has_a_table(impl, seed):
    manager = impl(4, 2)
    manager.needs(0, 0, 5)
    assert_equal(manager.tables, {}, label="the tables after needs of a new sequence")
    with pytest.raises(OutOfBlocks):
        manager.grow(0, 0, 9)
    assert_equal(manager.tables, {}, label="the tables after a refused grow of a new sequence")
    manager.grow(0, 0, 3)
    manager.free(0)
    assert_equal(manager.tables, {}, label="the tables after free")


@check("12.2", seconds=5)
def test_refused_changes_nothing(impl, seed):
    manager = impl(4, 2)
    manager.grow(0, 0, 5)
    manager.fork(0, 1)
    assert_equal(manager.needs(1, 5, 7), 2, label="needs for a copy and a new block, of 1 free")
    before = copy.deepcopy((manager.tables, manager.pool.owners, list(manager.pool.free)))
    with pytest.raises(OutOfBlocks):
        manager.grow(1, 5, 7)
    after = manager.tables, manager.pool.owners, list(manager.pool.free)
    assert_equal(after, before, label="tables, owners and free blocks after a refused grow")
    assert_equal(
        manager.grow(1, 5, 6), [(2, 3)], label="the copies where exactly one block is left"
    )


# ---------------------------------------------------------------- 12.3 the kernel


def pages(seed, lengths, block_size, heads=(2, 1), head_dim=8, scale=1.0, gaps=False, far=False):
    """q, k_cache, v_cache, block_table and context_lens. Pages in random order; NaN in what is not
    in use, and in one block, which is in the table where a sequence has no block.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    total = sum(counts) + 4
    order = torch.randperm(total, generator=g).tolist()
    unowned = order.pop()
    shape = (total, block_size, heads[1], head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan")) for _ in range(2))
    if gaps:  # blocks and rows are apart, V's further than K's
        wide = torch.full((total, block_size + 1, heads[1], head_dim + 2), float("nan"))
        k_cache = wide[:, :block_size, :, :head_dim]
        wide = torch.full((total, block_size + 2, heads[1], head_dim + 4), float("nan"))
        v_cache = wide[:, :block_size, :, :head_dim]
    table = torch.full((len(lengths), max(counts) + 2), unowned, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for index in range(counts[b]):
            table[b, index] = block = order.pop()
            held = min(block_size, length - index * block_size)
            for cache in (k_cache, v_cache):
                rows = torch.randn(held, heads[1], head_dim, generator=g)
                cache[block, :held] = scale * rows
    q = scale * torch.randn(len(lengths), heads[0], head_dim, generator=g)
    if far:
        q[..., 0] = 128 * head_dim**0.5
        k_cache[..., 0] = torch.where(k_cache[..., 0].isnan(), torch.nan, -160.0)
    lens = torch.tensor(lengths, dtype=torch.int32)
    names = ("q", "k_cache", "v_cache", "block_table", "context_lens")
    return dict(zip(names, (q, k_cache, v_cache, table, lens)))


def by_gathering(q, k_cache, v_cache, block_table, context_lens):
    """The definition, in float64."""
    outs = []
    for b, length in enumerate(context_lens.tolist()):
        count = -(-length // k_cache.shape[1])
        blocks = block_table[b, :count].long()
        k, v = (x[blocks].flatten(0, 1)[:length].double() for x in (k_cache, v_cache))
        out = attention(q[b : b + 1].double(), k, v)[0] if length else torch.zeros_like(q[b])
        outs.append(out.double())
    return torch.stack(outs)


PAGE_CASES = {  # name: (options, why)
    "pages_of_16": (dict(lengths=[40], block_size=16), "a tile of keys is a page"),
    "pages_of_1": (dict(lengths=[5], block_size=1), "every key has a page of its own"),
    "pages_of_5": (
        dict(lengths=[23], block_size=5),
        "a tile of 16 keys is in four or five pages",
    ),
    "pages_of_40": (dict(lengths=[70], block_size=40), "a page holds several tiles"),
    "ragged": (dict(lengths=[17, 3], block_size=4), "each sequence has its own row of the table"),
    "full_page": (dict(lengths=[16, 8], block_size=8), "the last page is full"),
    "empty": (dict(lengths=[0, 3], block_size=4), "a sequence without keys gives zeros, not NaN"),
    "heads": (
        dict(lengths=[9], block_size=4, heads=(4, 2)),
        "two query heads share a KV head: h // group",
    ),
    "large": (dict(lengths=[20], block_size=4, scale=9.0), "exp of a large score overflows"),
    "far_below": (
        dict(lengths=[20], block_size=4, far=True),
        "all scores are near -20000: neither a maximum nor a mask is large enough there",
    ),
    "gaps": (
        dict(lengths=[9, 9], block_size=4, heads=(2, 2), head_dim=6, gaps=True),
        "V's strides are not K's, and a head may be no power of two wide",
    ),
}


@check("12.3", {case: why for case, (_, why) in PAGE_CASES.items()}, seconds=30)
def test_paged_values(impl, case, seed):
    inputs = pages(seed, **PAGE_CASES[case][0])
    # one float32 rounding of such a score
    atol = {"far_below": 2e-2, "large": 2e-4}.get(case, 2e-5)
    compare(impl, inputs, want=by_gathering(**inputs), atol=atol, rtol=1e-4, dtype=torch.float32)


@check("12.3", seconds=30)
def test_paged_example(impl, seed):
    v_cache = torch.full((4, 2, 1, 1), float("nan"))
    v_cache[3, :, 0, 0], v_cache[1, 0, 0, 0] = torch.tensor([1.0, 4.0]), 10.0
    inputs = dict(
        q=torch.zeros(1, 1, 1),
        k_cache=torch.where(v_cache.isnan(), v_cache, 0.5),
        v_cache=v_cache,
        block_table=torch.tensor([[3, 1]], dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
    )
    compare(impl, inputs, want=torch.tensor([[[5.0]]]), atol=1e-6)


@check("12.3", seconds=30)
def test_nothing_is_gathered(impl, seed):
    """Five pages are in the table again and again, so a copy of 200 keys is larger than the pool.
    A dense copy of a cache with gaps is as large as the pool: 9 pages of 4 keys.
    """
    inputs = pages(seed, [20], 4, heads=(1, 1), head_dim=16, gaps=True)
    block_table = inputs["block_table"][:, :5].repeat(1, 10)
    inputs |= dict(block_table=block_table, context_lens=torch.tensor([200], dtype=torch.int32))
    got = assert_largest_tensor(9 * 4 * 16, "read the pages where they are", impl, **inputs)
    assert_equal(got, by_gathering(**inputs), atol=2e-5, dtype=torch.float32)


@check("12.3", {"far": "the third block is after value 2³¹ of the memory"}, seconds=30)
def test_pages_far_apart(impl, case, seed):
    """In sparse files, which take no more room than their values; the last block is in use."""
    inputs = pages(seed, [3], 4, heads=(1, 1))
    own, last = int(inputs["block_table"][0, 0]), len(inputs["k_cache"]) - 1
    inputs["block_table"][0, 0] = last
    with tempfile.TemporaryDirectory() as folder:
        for name in ("k_cache", "v_cache"):
            inputs[name][last] = inputs[name][own].clone()
        want = by_gathering(**inputs)
        for name in ("k_cache", "v_cache"):
            inputs[name] = far_apart(inputs[name], 0, Path(folder) / name)
        got = note(impl(**inputs))
    assert_equal(got, want, atol=2e-5, dtype=torch.float32)


test_the_kernel_does_it = kernel_does_it("12.3", lambda seed: pages(seed, [20, 3], 4))
