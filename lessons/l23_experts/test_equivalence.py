"""Proves the kernels of the experts against the naive loop: each token gets its own experts with
its own weights, however uneven the load; and the planted bugs are seen.
"""

import pytest
import torch

from lessons.l23_experts import kernels, naive, optimized, stand_ins
from lessons.l23_experts.kernels import (
    align_kernel,
    down_kernel,
    gate_up_kernel,
    sum_kernel,
)
from lessons.l23_experts.lab.moe_cases import UNEVEN, problem, random_routes, routes
from lessons.l23_experts.lab.testing import assert_far_rows, assert_same_in_any_company
from lessons.l23_experts.optimized import Tiles
from lessons.toolbox.proof.numerics import (
    NotEquivalent,
    prove,
)
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import guarded_empty

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # silu of large numbers

SMALL = Tiles(16, 16, 16, 16, num_warps=4, num_stages=2)
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def small(x, weights, chosen, gate_up, down):
    """optimized.experts with small tiles."""
    y = optimized.expert_rows(x, chosen, gate_up, down, SMALL)
    return optimized.weighted_sum(y, weights, chosen, len(gate_up))


def record(proof, errors):
    proof.record(align_kernel, errors)
    proof.record(gate_up_kernel, errors)
    proof.record(down_kernel, errors)
    proof.record(sum_kernel, errors)


# ---------------------------------------------------------------- the layer


@pytest.mark.parametrize("dtype", TYPES)
def test_each_token_gets_its_own_experts(dtype, seed, proof):
    """Columns that end within a tile; an expert that no token wants."""
    inputs = problem(routes(UNEVEN), 4, dtype=dtype, seed=seed)
    record(proof, prove(small, naive.experts, inputs))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts",
    [(1, 1, 1), (1, 8, 64), (17, 1, 3), (33, 2, 2), (13, 3, 7), (5, 8, 11), (16, 1, 1), (6, 4, 64)],
)
def test_shapes(num_tokens, top_k, num_experts, seed, proof):
    """One token, one expert with all tokens, many experts for few tokens, primes."""
    given = random_routes(num_tokens, top_k, num_experts)
    record(proof, prove(small, naive.experts, problem(given, num_experts, 17, 13, seed=seed)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["large", "non_contiguous"])
def test_hard_inputs(kind, seed, proof):
    inputs = problem(routes(UNEVEN), 4, seed=seed, kind=kind)
    record(proof, prove(small, naive.experts, inputs))


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", list(optimized.TILES))
def test_the_tiles_of_a_gpu(rows, seed, proof):
    """What is launched there, in 16 bits."""
    tiles = optimized.TILES[rows]
    inputs = problem(random_routes(20, 2, 2), 2, 130, 70, dtype=torch.float16, seed=seed)

    def run(x, weights, chosen, gate_up, down):
        y = optimized.expert_rows(x, chosen, gate_up, down, tiles)
        return optimized.weighted_sum(y, weights, chosen, len(gate_up))

    record(proof, prove(run, naive.experts, inputs))


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_the_stand_ins(dtype, seed):
    prove(stand_ins.experts, naive.experts, problem(routes(UNEVEN), 4, dtype=dtype, seed=seed))
    given = random_routes(40, 3, 5)
    prove(stand_ins.experts, naive.experts, problem(given, 5, dtype=dtype, seed=seed))


@pytest.mark.parametrize("experts", [small, optimized.experts, stand_ins.experts])
def test_no_tokens(experts, seed):
    x, weights, chosen, *stacks = problem(routes(UNEVEN), 4, seed=seed)
    assert experts(x[:0], weights[:0], chosen[:0], *stacks).shape == (0, 40)


def test_bad_operands_are_refused_in_one_line(seed):
    x, weights, chosen, gate_up, down = problem(routes(UNEVEN), 4, seed=seed)
    for wrong, name in (
        ((x[0], weights, chosen, gate_up, down), "x: got"),
        ((x.double(), weights, chosen, gate_up, down), "x: got"),
        ((x, weights, chosen[:-1], gate_up, down), "chosen: got"),
        ((x, weights, chosen.int(), gate_up, down), "chosen: got"),
        ((x, weights[:, :1], chosen, gate_up, down), "weights: got"),
        ((x, weights, chosen, gate_up[:, 1:], down), "gate_up: got"),
        ((x, weights, chosen, gate_up.half(), down), "gate_up: got"),
        ((x, weights, chosen, gate_up, down[:, 1:]), "down: got"),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            optimized.experts(*wrong)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- experts of other ranks


def test_pairs_of_other_ranks_are_left_out(seed, proof):
    """Experts 2 and 3 of 4 are here, as 0 and 1. The sum over both halves is the whole layer."""
    inputs = problem(routes(UNEVEN), 4, seed=seed)
    record(proof, prove(in_halves(small), naive.experts, inputs))
    prove(in_halves(stand_ins.experts), naive.experts, inputs)


def in_halves(experts):
    """The layer as the sum of two ranks' shares."""

    def halves(x, weights, chosen, gate_up, down):
        first = experts(x, weights, chosen, gate_up[:2], down[:2])
        return first + experts(x, weights, chosen - 2, gate_up[2:], down[2:])

    return halves


# ---------------------------------------------------------------- company, canaries


def test_a_token_has_the_same_bits_in_any_company(seed):
    """At the same tiles, because a row's sums read only that row and its experts. At most six rows
    of an expert here: from the seventh on, the CPU's own product adds in another order.
    """
    assert_same_in_any_company(small, problem(routes(UNEVEN[:4]), 4, seed=seed))


def test_nothing_is_written_beside_the_results(seed):
    inputs = problem(routes(UNEVEN), 4, seed=seed)
    with guarded_empty() as checks:
        out = small(*inputs)
    assert len(checks) == 5 and out.isfinite().all()


# ---------------------------------------------------------------- far in memory

# argument of `small` -> the line that counts in 64 bits, and the same in 32
FAR = {
    "x": ("return expert, pair.to(tl.int64), pair", "return expert, pair, pair"),
    "gate_up": (
        "expert = tl.load(experts_ptr + tile).to(tl.int64)",
        "expert = tl.load(experts_ptr + tile)",
    ),
    "down": (
        "expert = tl.load(experts_ptr + tile).to(tl.int64)",
        "expert = tl.load(experts_ptr + tile)",
    ),
}


@pytest.mark.parametrize("argument", FAR)
def test_rows_further_apart_than_an_int32_counts(argument, seed, tmp_path, monkeypatch):
    def plant():
        buggy = with_bug(kernels, tmp_path, *FAR[argument])
        for name in ("gate_up_kernel", "down_kernel"):
            monkeypatch.setattr(optimized, name, getattr(buggy, name))

    assert_far_rows(small, argument, seed, plant)


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "up in gate's place": (
        "up_ptr = gate_ptr + tl.cast(inner, tl.int64) * stride_row",
        "up_ptr = gate_ptr",
    ),
    "no silu": ("h = gate * tl.sigmoid(gate) * up", "h = gate * up"),
    "the router's weight is forgotten": (
        "y.to(tl.float32) * tl.load(weights_ptr + pair)",
        "y.to(tl.float32)",
    ),
    "the weight of the first place for all": (
        "tl.load(weights_ptr + pair)",
        "tl.load(weights_ptr + token * TOP_K)",
    ),
    "the pair's row of x, not its token's": ("pair // TOP_K", "pair % (num_pairs // TOP_K)"),
    "one expert for all tiles": ("tl.load(experts_ptr + tile)", "tl.load(experts_ptr)"),
    "the first tile's pairs for all tiles": ("pairs_ptr + tile * BLOCK_M", "pairs_ptr"),
    "the last share only": ("acc += y.to(tl.float32)", "acc = y.to(tl.float32)"),
    "a tail of columns is dropped": (
        "mask=is_row & (start + k < inner), other=0.0)",
        "mask=is_row & (start + k < inner - 1), other=0.0)",
    ),
    "one pair of each block is not counted": (
        "seen += tl.sum(is_own)",
        "seen += tl.maximum(tl.sum(is_own) - 1, 0)",
    ),
    "tiles of the experts before are rounded down": (
        "(counts + BLOCK_M - 1) // BLOCK_M, 0)",
        "counts // BLOCK_M, 0)",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(kernels, tmp_path, *BUGS[bug])
    for kernel in (align_kernel, gate_up_kernel, down_kernel, sum_kernel):
        name = kernel.__name__
        monkeypatch.setattr(optimized, name, getattr(buggy, name))
    with pytest.raises(NotEquivalent):
        prove(small, naive.experts, problem(routes(UNEVEN * 3), 4, seed=3))
