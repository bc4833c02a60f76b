"""Proves the alignment: every pair of an expert of this rank is in one tile of its expert, once."""

import random

import torch

from lessons.l23_experts import optimized
from lessons.l23_experts.align import NOT_USED, align, align_in_python, most_tiles
from lessons.l23_experts.kernels import align_kernel
from lessons.toolbox.measure.device import default_device

DEVICE = default_device()


def assert_aligned(found, expected):
    """Equal, but for pairs of tiles that are not used."""
    assert torch.equal(found.experts, expected.experts)
    is_used = (expected.experts != NOT_USED).repeat_interleave(expected.block_m)
    assert torch.equal(found.pairs[is_used], expected.pairs[is_used])


def random_chosen():
    """T, k and E at random; some experts of another rank, and now and then one that all tokens
    want.
    """
    num_experts, num_tokens = random.randint(1, 9), random.randint(1, 40)
    shape = num_tokens, random.randint(1, 4)
    chosen = torch.randint(-2, num_experts + 2, shape)
    if random.random() < 0.3:
        chosen[torch.rand(shape) < 0.8] = random.randrange(num_experts)
    return chosen.to(DEVICE), num_experts


def test_align_in_torch(seed):
    for _ in range(30):
        chosen, num_experts = random_chosen()
        block_m = random.choice([1, 2, 16])
        expected = align_in_python(chosen, num_experts, block_m)
        found = align(chosen, num_experts, block_m)
        assert torch.equal(found.pairs, expected.pairs)
        assert_aligned(found, expected)


def test_align_in_one_launch(seed, proof, monkeypatch):
    """Pairs in several blocks, tiles in several blocks."""
    monkeypatch.setattr(optimized, "ALIGN_BLOCK", 16)
    for _ in range(5):
        chosen, num_experts = random_chosen()
        block_m = random.choice([2, 16])
        expected = align_in_python(chosen, num_experts, block_m)
        assert_aligned(optimized.align(chosen, num_experts, block_m), expected)
    proof.record(align_kernel)


def test_an_alignment_by_hand():
    """The one in align.py's text."""
    chosen = torch.tensor([[1, 0], [1, 2], [1, 0]], device=DEVICE)
    for form in (align_in_python, align):
        pairs, experts, _ = form(chosen, 3, 2)
        assert pairs.tolist() == [1, 5, 0, 2, 4, 6, 3, 6]
        assert experts.tolist() == [0, 1, 1, 2]


def test_most_tiles_is_reached_and_never_passed():
    """Some choice needs them all, none needs more."""
    for num_pairs in range(1, 9):
        for num_experts in (1, 2, 3):
            for block_m in (1, 2, 4):
                needed = 0
                for cut in torch.cartesian_prod(*[torch.arange(num_pairs + 1)] * num_experts):
                    cut = cut.reshape(-1)
                    if cut.sum() == num_pairs:
                        needed = max(needed, int(((cut + block_m - 1) // block_m).sum()))
                assert needed == most_tiles(num_pairs, num_experts, block_m)
