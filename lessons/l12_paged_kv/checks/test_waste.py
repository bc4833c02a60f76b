"""Proves the waste of pieces and of blocks, in the classic example and against counting."""

import random

import pytest

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.more.waste import (
    Arena,
    Lengths,
    Waste,
    expected_empty_share,
    more_requests,
    waste_of_arena,
    waste_of_blocks,
)

PROMPTS = (200, 500, 100)
LLAMA_2_7B_TOKEN_BYTES = 2 * 32 * 32 * 128 * 2  # K and V, layers, heads, head_dim, 16 bits


def test_the_classic_example():
    """Three prompts: 87 % of the reservations are empty, 3.8 % of the blocks."""
    arena, held = Arena(16000), [Lengths(n, n) for n in PROMPTS]
    pieces = {arena.allocate(2048): lengths for lengths in held}
    reserved = waste_of_arena(arena, pieces, 2048)
    assert reserved == Waste(800, 0, 3 * 2048 - 800, 0, 16000 - 3 * 2048)
    assert f"{reserved.empty_share:.1%}" == "87.0%"
    paged = waste_of_blocks(held, 1000, 16)
    assert paged == Waste(800, 0, 32, 0, 15168)
    assert f"{paged.empty_share:.1%}" == "3.8%"
    assert f"{16000 * LLAMA_2_7B_TOKEN_BYTES / 1e9:.1f} GB" == "8.4 GB"


def test_reserved_internal_and_external_are_told_apart():
    """Of 100 slots: a piece of 40 for 10 tokens of at last 25, a hole of 20, a piece of 30, a hole
    of 10; the next asks for 15.
    """
    arena = Arena(100)
    starts = [arena.allocate(n) for n in (40, 20, 30)]
    arena.free(starts[1])
    sequences = {starts[0]: Lengths(10, 25), starts[2]: Lengths(30, 30)}
    assert waste_of_arena(arena, sequences, 15) == Waste(40, 15, 15, 10, 20)
    assert waste_of_arena(arena, sequences, 25) == Waste(40, 15, 15, 30, 0)
    assert arena.allocate(25) is None  # though 30 slots are free
    assert arena.allocate(15) == 40


def test_an_arena_against_a_row_of_slots(seed):
    """Random requests come and go: no two pieces overlap, and a hole is found where there is
    one.
    """
    arena, owner, pieces = Arena(60), [None] * 60, {}
    for name in range(400):
        if pieces and random.random() < 0.5:
            start = random.choice(list(pieces))
            owner[start : start + pieces.pop(start)] = [None] * arena.pieces[start]
            arena.free(start)
        length = random.randint(1, 20)
        fits = [
            s for s in range(61 - length) if not any(x is not None for x in owner[s : s + length])
        ]
        start = arena.allocate(length)
        assert start == (fits[0] if fits else None)
        if start is not None:
            owner[start : start + length] = [name] * length
            pieces[start] = length
        assert sum(n for _, n in arena.holes()) == owner.count(None)


def test_waste_of_blocks_against_a_manager(seed):
    """The formula counts what a manager gives, shared prompts included."""
    for _ in range(50):
        size = random.randint(1, 20)
        manager, held = BlockManager(500, size), []
        for sequence in range(random.randint(1, 6)):
            now = random.randint(1, 60)
            manager.grow(sequence, 0, now)
            held.append(Lengths(now, now + random.randint(0, 30)))
        full = held[0].now // size
        manager.fork(0, 99)
        if held[0].now % size:
            manager.grow(99, held[0].now, held[0].now + 1)
            held.append(Lengths(held[0].now + 1, held[0].now + 1))
        else:
            held.append(held[0])
        waste = waste_of_blocks(held, 500, size, shared_blocks=full)
        assert waste.free == manager.num_free * size
        assert sum(waste) == 500 * size and min(waste) >= 0


def test_the_formula_is_the_mean(seed):
    """Over all lengths that end in a block, (block_size - 1) / 2 slots are empty in the mean."""
    for size in (1, 2, 16, 256):
        lengths = [Lengths(n, n) for n in range(10 * size + 1, 11 * size + 1)]
        mean = sum(x.now for x in lengths) / size
        waste = waste_of_blocks(lengths, 11 * size, size)
        assert expected_empty_share(mean, size) == pytest.approx(waste.empty_share)
    assert expected_empty_share(100, 1) == 0


def test_how_many_more_requests_fit():
    assert more_requests([200, 500, 100], 2048, 16) == pytest.approx(3 * 2048 / 832)
    assert more_requests([2048], 2048, 16) == 1


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="num_slots: got 0; accepted: 1 or more"):
        Arena(0)
