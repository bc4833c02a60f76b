"""Proves that pages packed by the kernels, or by PyTorch's indexing, are the bytes of the naive
copies, for every kind of pool, and that nothing else of a pool is read or written.
"""

import pytest
import torch

from lessons.l03_kv_cache.lab.testing import far_apart
from lessons.l26_kv_transfer import naive, optimized, stand_ins
from lessons.l26_kv_transfer.lab.testing import (
    DEVICE,
    KINDS,
    by_tensors,
    bytes_in,
    pool_from,
    pool_of,
)
from lessons.l26_kv_transfer.naive import block_bytes, pages_of
from lessons.l26_kv_transfer.optimized import gather_kernel, launches, piece_for, scatter_kernel
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.numerics import NotEquivalent, poison_, prove
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.refusals import assert_message
from lessons.toolbox.proof.traps import guarded_empty

WAYS = {"kernels": optimized, "indexing": stand_ins}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
BLOCKS = ([3], [0, 6], [6, 2, 5, 0], [])


# ---------------------------------------------------------------- bit by bit


# Hkv, width, slots of a block, dtype; the words of their pages have 16, 8, 4, 2 and 1 bytes
SHAPES = [
    (2, 64, 16, torch.bfloat16),
    (1, 2, 3, torch.float32),
    (3, 3, 1, torch.float32),
    (1, 3, 5, torch.float16),
    (1, 3, 3, torch.uint8),
    (2, 300, 16, torch.float16),  # more than one piece, and the last is not full
]


def tensors_of(heads, width, block_size, dtype, layers=2, num_blocks=7):
    """Two tensors of a pool, of different widths, that hold all bytes there are."""
    found = []
    for more in (0, 2):
        shape = (layers, num_blocks * block_size + 1, heads, width + more)
        values = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), device=DEVICE)
        found.append(values.to(torch.uint8).view(dtype))
    return found


def as_bytes(tensors):
    return [tensor.view(torch.uint8) for tensor in tensors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_copy_every_byte(shape, seed, proof):
    """In any order of the programs, with poison wherever nothing was written yet."""
    tensors = as_bytes(tensors_of(*shape))
    for blocks in BLOCKS:
        ways = (by_tensors(way.gather, 7, blocks) for way in (optimized, naive))
        proof.record(gather_kernel, prove(*ways, tensors))
        packed = naive.gather(pool_from(7, *tensors), blocks).random_(0, 256)
        ways = (by_tensors(way.scatter, 7, blocks) for way in (optimized, naive))
        proof.record(scatter_kernel, prove(*ways, [*tensors, packed], mutates=(0, 1)))


def test_words_are_as_wide_as_the_addresses_allow(seed):
    found = set()
    for shape in SHAPES:
        pool = pool_from(7, *tensors_of(*shape))
        for launch in launches(pool, naive.gather(pool, [0])):
            found.add(launch.pages.itemsize * launch.aligned)
    assert found == {16, 8, 4, 2, 1}
    assert piece_for(2048, 2) == (1024, 4) and piece_for(96, 2) == (128, 2)


def test_indexing_moves_words_of_every_width(seed):
    """In 8, 4, 2 and 1 bytes; in wider ones than the addresses allow it would raise."""
    found = set()
    for shape in SHAPES:
        pool, other = pool_from(7, *tensors_of(*shape)), pool_from(7, *tensors_of(*shape))
        packed = stand_ins.gather(pool, [6, 2, 5])
        assert packed.equal(naive.gather(pool, [6, 2, 5]))
        stand_ins.scatter(other, [0, 4, 1], packed)
        assert packed.equal(naive.gather(other, [0, 4, 1]))
        for pages, place in zip(pages_of(pool), naive.split_row(pool, packed)):
            found |= {words.itemsize for words in stand_ins.in_words(pages, place)}
    assert found == {8, 4, 2, 1}


@each_way
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pool(kind, way, seed):
    """Plain, latents, codes with scales: what is gathered is the naive row; what is scattered into
    another pool is there again; and all other pages keep every byte.
    """
    pool, other = pool_of(kind, 7, 4, seed), pool_of(kind, 9, 4, seed + 1)
    for blocks in BLOCKS:
        packed = way.gather(pool, blocks)
        assert packed.shape == (len(blocks), way.block_bytes(pool))
        assert torch.equal(packed, naive.gather(pool, blocks))
        before = bytes_in(other)
        targets = [8, 1, 4, 0][: len(blocks)]
        way.scatter(other, targets, packed)
        assert torch.equal(naive.gather(other, targets), packed)
        rest = [block for block in range(9) if block not in targets]
        for old, new in zip(before, pages_of(other)):
            assert torch.equal(old[:, :, rest], new[:, :, rest])


def test_a_row_holds_layer_after_layer_of_k_then_of_v():
    """By hand: 2 layers, 3 blocks of 2 slots, one head of one number."""
    k = torch.arange(14, dtype=torch.uint8, device=DEVICE).view(2, 7, 1, 1)
    pool = pool_from(3, k, k + 100)
    rows = [[2, 3, 9, 10, 102, 103, 109, 110], [4, 5, 11, 12, 104, 105, 111, 112]]
    for way in (naive, *WAYS.values()):
        assert way.block_bytes(pool) == 8
        assert way.gather(pool, [1, 2, 1]).tolist() == [*rows, rows[0]]


def test_block_bytes_are_those_of_a_token_times_the_block():
    """Scales and latents included; the slot that no block owns is not."""
    for kind in KINDS:
        pool = pool_of(kind, 7, 4)
        own = sum(slots[:, :4].numel() * slots.itemsize for slots in pool.tensors)
        assert block_bytes(pool) == own


# ---------------------------------------------------------------- nothing else


@each_way
def test_nothing_else_is_read_or_written(way, seed):
    """Other pages are poison; memory beside the rows is guarded; addresses stay within tensors."""
    pool = pool_of("bfloat16", 7, 4, seed)
    chosen = [5, 1]
    expected = naive.gather(pool, chosen)
    for slots in pool.tensors:
        poison_(slots)
    naive.scatter(pool, chosen, expected)
    before = bytes_in(pool)
    with in_bounds(), guarded_empty() as checks:
        assert torch.equal(way.gather(pool, chosen), expected)
        for check in checks:
            check()
    with in_bounds():
        way.scatter(pool, chosen, expected)
    assert all(map(torch.equal, before, pages_of(pool)))


def test_rows_may_begin_inside_a_larger_tensor(seed):
    """A part of a staging buffer: its addresses decide how wide the words are."""
    pool = pool_of("float32", 7, 4, seed)
    expected = naive.gather(pool, [4, 2])
    for shift in (0, 1, 2, 4, 8, 12):
        memory = torch.empty(expected.numel() + shift, dtype=torch.uint8, device=DEVICE)
        packed = memory[shift:].view(expected.shape).copy_(expected)
        other = pool_of("float32", 7, 4, seed + 1)
        optimized.scatter(other, [0, 6], packed)
        assert torch.equal(naive.gather(other, [0, 6]), expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="NOT RUN: needs rows in a buffer of Python's")
def test_rows_may_begin_anywhere_in_a_foreign_buffer(seed):
    """Its memory begins at an odd address, so an even one within it has an odd offset."""
    pool = pool_of("float32", 7, 4, seed)
    expected = naive.gather(pool, [4, 2])
    memory = torch.frombuffer(bytearray(expected.numel() + 32), dtype=torch.uint8, offset=1)
    for shift in range(17):
        packed = memory[shift : shift + expected.numel()].view(expected.shape).copy_(expected)
        other = pool_of("float32", 7, 4, seed + 1)
        optimized.scatter(other, [0, 6], packed)
        assert torch.equal(naive.gather(other, [0, 6]), expected)


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="NOT RUN: needs a sparse file as memory, which no GPU reads"
)
def test_a_pool_past_two_to_the_31_words(seed, tmp_path):
    """Three layers, so far apart that int32 cannot tell where the third is; and rows likewise."""
    tensors = tensors_of(1, 3, 3, torch.uint8, layers=3)
    away = [far_apart(x, 0, tmp_path / str(i)) for i, x in enumerate(tensors)]
    expected = naive.gather(pool_from(7, *tensors), [6, 1])
    pool = pool_from(7, *away)
    assert next(launches(pool, expected)).pages.itemsize == 1
    assert torch.equal(optimized.gather(pool, [6, 1]), expected)
    optimized.scatter(pool, [0, 2], expected)
    assert torch.equal(naive.gather(pool, [0, 2]), expected)


# ---------------------------------------------------------------- wrong versions must fail

BUGS = {
    "always the first layer": ("(run // parts) * stride_layer", "(run // parts) * 0"),
    "pages of a row in another order": ("stride_row + run * PAGE", "stride_row + (run ^ 1) * PAGE"),
    "blocks in the order of the rows": ("tl.load(blocks_ptr + row)", "row"),
    "the last piece is forgotten": ("word < PAGE", "word < PAGE // PIECE * PIECE"),
    "every program copies the first piece": ("tl.program_id(2) * PIECE", "tl.program_id(2) * 0"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, seed, tmp_path):
    """Each stays inside the tensors, so what it copies is only wrong."""
    wrong = with_bug(optimized, tmp_path, *BUGS[bug])
    tensors = as_bytes(tensors_of(2, 300, 16, torch.float16))
    blocks = [6, 2, 5]
    with pytest.raises(NotEquivalent):
        ways = (by_tensors(way.gather, 7, blocks) for way in (wrong, naive))
        prove(*ways, tensors)
    packed = naive.gather(pool_from(7, *tensors), blocks).random_(0, 256)
    with pytest.raises(NotEquivalent):
        ways = (by_tensors(way.scatter, 7, blocks) for way in (wrong, naive))
        prove(*ways, [*tensors, packed], mutates=(0, 1))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("way", (naive, *WAYS.values()))
def test_refuses_foreign_blocks_and_rows(way):
    pool = pool_of("float32", 7, 4)
    for blocks, message in (
        ([0, 7], "blocks: got 7; accepted: 0 to 6"),
        ([-1], "blocks: got -1"),
        ([True], "blocks: got True"),
        ([1.0], "blocks: got 1.0"),
        (3, "blocks: got 3; accepted: a list"),
    ):
        assert_message(way.gather, dict(pool=pool, blocks=blocks), message)
        packed = torch.zeros(2, block_bytes(pool), dtype=torch.uint8)
        assert_message(way.scatter, dict(pool=pool, blocks=blocks, packed=packed), message)
    packed = way.gather(pool, [0, 1])
    wide = torch.cat([packed, packed], dim=1)
    for rows, message in (
        (packed[:1], r"packed: got \[1, "),
        (packed[:, 1:], r"packed: got \[2, "),
        (packed.float(), "float32"),
        (packed.to("meta"), "on meta"),
        (wide[:, : packed.shape[1]], "contiguous"),
        (packed.tolist(), "packed: got 'list'"),
    ):
        assert_message(way.scatter, dict(pool=pool, blocks=[4, 5], packed=rows), message)
    twice = dict(pool=pool, blocks=[4, 4], packed=packed)
    assert_message(way.scatter, twice, "blocks: got '4 twice'")


def test_a_cpu_gets_the_stand_ins():
    assert stand_ins.movers(torch.device("cpu")) is stand_ins
    assert stand_ins.movers(torch.device("cuda")) is optimized
