"""Planted bugs of the chunks' and the convolution's kernels are found by the proofs."""

import pytest

from lessons.l27_states import chunk_kernels, convolution, prompts
from lessons.l27_states.checks.test_prompts import proved
from lessons.l27_states.lab.testing import conv_by_heads, conv_inputs
from lessons.toolbox.proof.numerics import NotEquivalent, prove
from lessons.toolbox.proof.planted import with_bug

CHUNKS = {
    "the last row is not solved for": ("for t in range(1, SIZE):", "for t in range(1, SIZE - 1):"),
    "A has a diagonal": (
        "a = tl.where(row > column, beta[:, None]",
        "a = tl.where(row >= column, beta[:, None]",
    ),
    "keys do not fade to the chunk's end": (
        "faded = k.to(tl.float32) * until_end[:, None]",
        "faded = k.to(tl.float32)",
    ),
    "the state does not fade over a chunk": (
        "state = tl.exp(tl.sum(g)) * state + added",
        "state = state + added",
    ),
    "the state before the first chunk for all": ("        place += 1\n", ""),
    "every sequence begins with its slot": (
        "rows = tl.where(tl.load(has_state_ptr + sequence) != 0, KEY_DIM, 0)",
        "rows = KEY_DIM + 0 * tl.load(has_state_ptr + sequence).to(tl.int32)",
    ),
    "tokens do not see themselves": (
        "return tl.where(row >= column, tl.exp(tl.cumsum(terms, axis=0)), 0.0)",
        "return tl.where(row > column, tl.exp(tl.cumsum(terms, axis=0)), 0.0)",
    ),
    "a chunk sees the next sequence": (
        "return start + index * SIZE, start + length, place",
        "return start + index * SIZE, num_tokens, place",
    ),
    "one chunk's place for two sequences": (
        "place = start // SIZE + sequence + index",
        "place = start // SIZE + index",
    ),
}
TILES = {
    "outputs by the first rows of a state": (
        "for i in range(0, KEY_DIM, BLOCK_K):",
        "for i in range(0, BLOCK_K, BLOCK_K):",
    ),
    "the same rows of a state for all coordinates of q": (
        "before_ptr, i, KEY_DIM, VALUE_DIM, first",
        "before_ptr, 0, KEY_DIM, VALUE_DIM, first",
    ),
    "all blocks of outputs are the first": (
        "tl.program_id(0) % blocks * BLOCK_V",
        "0 * (tl.program_id(0) % blocks)",
    ),
}


@pytest.mark.parametrize("bug", TILES)
def test_a_planted_bug_of_the_tiles_is_found(bug, seed, tmp_path, monkeypatch):
    """In more rows and columns than a tile has."""
    wrong = with_bug(chunk_kernels, tmp_path, *TILES[bug])
    monkeypatch.setattr(prompts, "outputs_kernel", wrong.outputs_kernel)
    with pytest.raises(NotEquivalent):
        proved(([19], 1, 72, 80, 16), seed=seed)


@pytest.mark.parametrize("bug", CHUNKS)
def test_a_planted_bug_of_the_chunks_is_found(bug, seed, tmp_path, monkeypatch):
    """Each stays inside the tensors, so what it computes is only wrong."""
    wrong = with_bug(chunk_kernels, tmp_path, *CHUNKS[bug])
    for name in ("prepare_kernel", "states_kernel", "outputs_kernel"):
        monkeypatch.setattr(prompts, name, getattr(wrong, name))
    with pytest.raises(NotEquivalent):
        proved(([16, 3, 35], 1, 16, 16, 16), seed=seed)


CONVOLUTION = {
    "the state backwards": ("WIDTH - 1 + position\n", "0 - 1 - position\n"),
    "the token itself is left out": ("token - (WIDTH - 1) + i", "token - WIDTH + i"),
    "the state of a short prompt is not shifted": (
        "last = length.to(tl.int64) - (WIDTH - 1) + column",
        "last = tl.maximum(length, WIDTH - 1).to(tl.int64) - (WIDTH - 1) + column",
    ),
    "what an earlier request left is read": (
        "in_state = kept & ((last >= 0) | has_state)",
        "in_state = kept",
    ),
}


@pytest.mark.parametrize("bug", CONVOLUTION)
def test_a_planted_bug_of_the_convolution_is_found(bug, seed, tmp_path):
    wrong = with_bug(convolution, tmp_path, *CONVOLUTION[bug])
    given = conv_inputs([5, 2, 40], 5, 4, seed=seed)
    with pytest.raises(NotEquivalent):
        prove(wrong.conv_prompts, conv_by_heads, given, mutates=(2,))


STEPS = {
    "weights are kept, not inputs": ("+ i - 1, x, mask", "+ i - 1, weight, mask"),
    "the oldest input is left out": (
        "y += weight.to(tl.float32) * x.to(tl.float32)",
        "y += tl.where(i > 0, weight, 0.0).to(tl.float32) * x.to(tl.float32)",
    ),
}


@pytest.mark.parametrize("bug", STEPS)
def test_a_planted_bug_of_the_convolutions_step_is_found(bug, seed, tmp_path):
    wrong = with_bug(convolution, tmp_path, *STEPS[bug])
    x, weight, states, slots, *_ = conv_inputs([1, 1, 1], 5, 4, seed=seed)
    with pytest.raises(NotEquivalent):
        given = (x, weight, states.nan_to_num_(3.0), slots)
        prove(wrong.conv_step, conv_by_heads, given, mutates=(2,))
