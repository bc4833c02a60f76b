"""Proves the kernels: each row gets the correction of its own adapter, in any order of rows, at any
mixture of ranks; and the planted bugs are seen.
"""

import random
from functools import partial

import pytest
import torch

from lessons.l21_multi_lora import naive, optimized
from lessons.l21_multi_lora.batch import AdapterBatch, most_tiles
from lessons.l21_multi_lora.kernels import segments as kernels
from lessons.l21_multi_lora.kernels import stand_ins
from lessons.l21_multi_lora.kernels.segments import expand_kernel, shrink_kernel
from lessons.l21_multi_lora.lab.testing import DEVICE, slots_of
from lessons.l21_multi_lora.optimized import Tiles
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.inputs import far_apart
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    assert_same_bits,
    draw,
    prove,
    with_canaries,
)
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import guarded_empty

SMALL = Tiles(block_k=16, split_k=32, block_n=16, num_warps=4, num_stages=2)
TYPES = [torch.float32, torch.float16, torch.bfloat16]
RANKS = [5, 0, 20, 16]  # an adapter that leaves the layer alone, and two blocks of 16 ranks for one
MOST_RANKS = 16  # in these tests, so that 20 ranks are two blocks
ROWS = [2, 0, -1, 3, 0, 1, 2, -1, 3, 3]  # no slot side by side


def problem(
    row_slots, ranks=RANKS, size=40, outputs=19, dtype=torch.float32, seed=0, kind="normal"
):
    """out, x, weights, batch."""
    out = draw("normal", (len(row_slots), outputs), dtype=dtype, seed=seed + 7, device=DEVICE)
    x = draw(kind, (len(row_slots), size), dtype=dtype, seed=seed + 8, device=DEVICE)
    weights = slots_of(ranks, max(max(ranks), 1), size, outputs, dtype, seed)
    return out, x, weights, AdapterBatch.of(row_slots, DEVICE)


def proved(add_lora, inputs, **options):
    return prove(add_lora, naive.add_lora, inputs, mutates=[0], **options)


def record(proof, errors):
    proof.record(shrink_kernel, errors[0])
    proof.record(expand_kernel, errors[0])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(optimized, "MOST_RANKS", MOST_RANKS)


# ---------------------------------------------------------------- the product


@pytest.mark.parametrize("dtype", TYPES)
def test_each_row_gets_its_own_adapter(dtype, seed, proof):
    """Mixed ranks and rows without an adapter; columns and outputs that end within a tile; what
    lies beyond a slot's rank is NaN.
    """
    inputs = problem(ROWS, dtype=dtype, seed=seed)
    record(proof, proved(partial(optimized.add_lora, tiles=SMALL), inputs))


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_segments_around_a_tile(rows, seed, proof):
    row_slots = [2] * rows + [0]
    random.shuffle(row_slots)
    inputs = problem(row_slots, size=33, outputs=16, seed=seed)
    record(proof, proved(partial(optimized.add_lora, tiles=SMALL), inputs))


@pytest.mark.parametrize("kind", ["large", "non_contiguous"])
def test_hard_inputs(kind, seed, proof):
    record(proof, proved(optimized.add_lora, problem(ROWS, size=40, seed=seed, kind=kind)))


def test_the_tiles_of_a_gpu(seed, proof, request):
    """What is launched there: several splits of 512 columns, 128 outputs a program."""
    size = 1100 if request.config.getoption("--all") else 520
    inputs = problem([1, 0], ranks=[3, 16], size=size, outputs=130, dtype=torch.float16, seed=seed)
    record(proof, proved(optimized.add_lora, inputs))


@pytest.mark.parametrize("form", [stand_ins.add_lora, stand_ins.padded, stand_ins.by_segment])
@pytest.mark.parametrize("row_slots", [ROWS, [0, 3, 2, 1] * 3, [3, 3, 3], [0] * 9 + [2]])
def test_the_stand_ins(form, row_slots, seed):
    """Segments of equal length, of different lengths, all rows of one adapter."""
    out, x, weights, batch = problem(row_slots, seed=seed)
    for slot, rank in enumerate(RANKS):  # AdapterSlots leaves zeros there
        weights.a[slot, rank:] = weights.b[slot, rank:] = 0
    proved(form, (out, x, weights, batch))


@pytest.mark.parametrize("add_lora", [naive.add_lora, optimized.add_lora, stand_ins.add_lora])
def test_nobody_has_an_adapter(add_lora, seed):
    out, x, weights, _ = problem([0, 1, 2], seed=seed)
    before = out.clone()
    assert add_lora(out, x, weights, AdapterBatch.of([-1] * 3, DEVICE)) is out
    assert_same_bits(out, before)


def test_bad_operands_are_refused_in_one_line(seed):
    out, x, weights, batch = problem(ROWS, seed=seed)
    for wrong, name in (
        ((out, x[:-1], weights, batch), "x: got"),
        ((out, x.double(), weights, batch), "x: got"),
        ((out[:, :-1], x, weights, batch), "out: got"),
        ((out.half(), x, weights, batch), "out: got"),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            optimized.add_lora(*wrong)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- company


def test_a_row_has_the_same_bits_in_any_company(seed):
    """Alone, and among rows of other adapters: because a split's length is fixed and each row reads
    only itself and its adapter.
    """
    out, x, weights, batch = problem(ROWS, size=40, seed=seed)
    together = optimized.add_lora(out.clone(), x, weights, batch, SMALL)
    for row, slot in enumerate(ROWS):
        alone = AdapterBatch.of([slot], DEVICE)
        single = optimized.add_lora(
            out[row : row + 1].clone(), x[row : row + 1], weights, alone, SMALL
        )
        assert_same_bits(together[row : row + 1], single)


def test_padding_tiles_and_stale_order_change_nothing(seed):
    """A CUDA graph's buffers: more tiles than needed, filled by copy_in with one step after
    another.
    """
    out, x, weights, _ = problem(ROWS, size=40, seed=seed)
    num_tiles = most_tiles(len(ROWS), len(RANKS))
    buffers = AdapterBatch.of([3] * len(ROWS), DEVICE, num_tiles=num_tiles)
    for row_slots in (ROWS, [-1] * len(ROWS), ROWS[::-1]):
        step = AdapterBatch.of(row_slots, DEVICE)
        buffers.copy_in(AdapterBatch.of(row_slots, DEVICE, num_tiles=num_tiles))
        assert_same_bits(
            optimized.add_lora(out.clone(), x, weights, buffers, SMALL),
            optimized.add_lora(out.clone(), x, weights, step, SMALL),
        )


def test_most_tiles_is_enough():
    """For any rows: each slot adds at most one tile that is not full."""
    for _ in range(50):
        num_slots, num_rows = random.randint(1, 5), random.randint(1, 70)
        row_slots = [random.randint(-1, num_slots - 1) for _ in range(num_rows)]
        assert len(AdapterBatch.of(row_slots).tiles) <= most_tiles(num_rows, num_slots)


def test_nothing_is_written_beside_the_results(seed):
    out, x, weights, batch = problem(ROWS, size=40, seed=seed)
    guarded_out, check_out = with_canaries(out.shape, out.dtype, out.device, guard=4096)
    guarded_out.copy_(out)
    with guarded_empty() as checks:
        optimized.add_lora(guarded_out, x, weights, batch, SMALL)
    assert len(checks) == 1 and guarded_out.isfinite().all()
    check_out()


# ---------------------------------------------------------------- far in memory

FAR = {
    "x and out": (
        "row = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)",
        "row = tl.load(order_ptr + place, mask=is_row, other=0)",
    ),
    "slots": (
        "slot = tl.load(tiles_ptr + 3 * tile).to(tl.int64)",
        "slot = tl.load(tiles_ptr + 3 * tile)",
    ),
}


@pytest.mark.parametrize("what", FAR)
def test_rows_and_slots_further_away_than_an_int32_counts(what, seed, tmp_path, monkeypatch):
    row_slots = [0, 1, 1]
    out, x, weights, batch = problem(row_slots, [16, 16], 16, 16, torch.float16, seed)
    expected = optimized.add_lora(out.clone(), x, weights, batch, SMALL)
    if what == "slots":
        last = 2**31 // (16 * 16) + 1
        weights = with_slot_at(last, weights)
        batch = AdapterBatch.of([0, last, last], DEVICE)
    else:
        x = far_apart(x)

    def run():
        far = far_apart(out) if what == "x and out" else out.clone()
        return optimized.add_lora(far, x, weights, batch, SMALL)

    with in_bounds():
        assert_same_bits(run(), expected)
        if not interpreting():
            return  # a kernel that leaves its tensors may end the process
        buggy = with_bug(kernels, tmp_path, *FAR[what])
        for name in ("shrink_kernel", "expand_kernel"):
            monkeypatch.setattr(optimized, name, getattr(buggy, name))
        with pytest.raises(Exception, match="out of bounds"):
            run()


def with_slot_at(last, weights):
    """The two adapters of `weights`, of which the second is now in slot `last`."""
    moved = []
    for tensor in weights:
        many = torch.empty(last + 1, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        many[0], many[last] = tensor[0], tensor[1]
        moved.append(many)
    return type(weights)(*moved)


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "the scaling is forgotten": ("acc * tl.load(scaling_ptr + slot)", "acc"),
    "the base product is overwritten": ("acc = base + acc *", "acc = acc *"),
    "the row of the tile, not of the batch": (
        "row = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)",
        "row = place",
    ),
    "the first slot for every tile": (
        "slot = tl.load(tiles_ptr + 3 * tile).to(tl.int64)",
        "slot = tl.load(tiles_ptr).to(tl.int64)",
    ),
    "the last split only": ("h += tl.load(partial,", "h = tl.load(partial,"),
    "rows of B beyond the slot's rank": ("mask=(r < rank) & is_n", "mask=is_n"),
    "the first block of ranks only": ("range(0, rank, BLOCK_R)", "range(0, 1, BLOCK_R)"),
    "a tail of columns is not masked": ("is_k = start + k < size", "is_k = start + k < size - 1"),
    "h rounded to 16 bits": ("tl.dot(h.to(b.dtype)", "tl.dot(h.to(tl.float16).to(b.dtype)"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(kernels, tmp_path, *BUGS[bug])
    for name in ("shrink_kernel", "expand_kernel"):
        monkeypatch.setattr(optimized, name, getattr(buggy, name))
    inputs = problem(ROWS, seed=3)
    tiles = partial(optimized.add_lora, tiles=SMALL)
    with pytest.raises(NotEquivalent):
        proved(tiles, inputs)
