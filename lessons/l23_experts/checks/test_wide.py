"""Proves the wide tiles against the naive loop, and that planted bugs are seen."""

import json

import pytest
import torch

from lessons.l23_experts import grouped as grouped_module
from lessons.l23_experts import naive, optimized
from lessons.l23_experts.lab import orders, prefill
from lessons.l23_experts.lab.moe_cases import DEVICE, UNEVEN, problem, random_routes, routes
from lessons.l23_experts.lab.testing import assert_far_rows
from lessons.l23_experts.more import wide
from lessons.l23_experts.more.wide import (
    WideTiles,
    place_of,
    wide_down_kernel,
    wide_gate_up_kernel,
)
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.numerics import prove
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import guarded_empty

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

SMALL = WideTiles(part=16, block_n=32, block_k=16, group=2, num_warps=4, num_stages=2)
KERNELS = ("wide_gate_up_kernel", "wide_down_kernel")
CAUGHT = "out of bounds|E[0-4]"  # an access beyond a tensor, or one of the rules of `prove`


def small(x, weights, chosen, gate_up, down, tiles=SMALL):
    y = wide.expert_rows(x, chosen, gate_up, down, tiles)
    return optimized.weighted_sum(y, weights, chosen, len(gate_up))


def record(proof, errors):
    proof.record(wide_gate_up_kernel, errors)
    proof.record(wide_down_kernel, errors)


def many(num_tokens=130):
    """Routes of expert 1 in three tiles and more, of 0 and 3 in others; none of 2."""
    return routes((UNEVEN * num_tokens)[:num_tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_token_gets_its_own_experts(dtype, seed, proof):
    """Tiles that are full, and such with one, two and three parts; columns end within a block."""
    record(proof, prove(small, naive.experts, problem(many(), 4, dtype=dtype, seed=seed)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, size, inner",
    [
        (1, 1, 1, 40, 19),
        (1, 8, 64, 17, 13),
        (97, 1, 1, 16, 16),
        (48, 1, 1, 33, 15),
        (49, 2, 2, 31, 17),
        (150, 3, 7, 40, 40),
        (5, 8, 11, 70, 3),
    ],
)
def test_shapes(num_tokens, top_k, num_experts, size, inner, seed, proof):
    """One token; all tokens to one expert; a part, a tile and one row more; empty experts."""
    given = random_routes(num_tokens, top_k, num_experts)
    record(proof, prove(small, naive.experts, problem(given, num_experts, size, inner, seed=seed)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["large", "non_contiguous"])
def test_hard_inputs(kind, seed, proof):
    record(proof, prove(small, naive.experts, problem(many(), 4, seed=seed, kind=kind)))


def test_the_tiles_of_a_gpu(seed, proof):
    given = random_routes(200, 1, 1)
    inputs = problem(given, 1, 130, 70, dtype=torch.float16, seed=seed)
    record(proof, prove(wide.experts, naive.experts, inputs))


def test_experts_of_other_ranks_add_nothing(seed, proof):
    def halves(x, weights, chosen, gate_up, down):
        first = small(x, weights, chosen, gate_up[:2], down[:2])
        return first + small(x, weights, chosen - 2, gate_up[2:], down[2:])

    record(proof, prove(halves, naive.experts, problem(many(60), 4, seed=seed)))


def test_a_token_has_the_same_bits_as_in_low_tiles(seed):
    """In the interpreter, whose sums do not depend on a tile's shape, both kernels agree."""
    x, _, chosen, *stacks = problem(many(40), 4, seed=seed)
    tiles = optimized.Tiles(16, 16, 32, 16, 4, 2)
    if interpreting():
        expected = optimized.expert_rows(x, chosen, *stacks, tiles)
        assert torch.allclose(wide.expert_rows(x, chosen, *stacks, SMALL), expected, atol=1e-5)


def test_nothing_is_written_beside_the_results(seed):
    inputs = problem(many(60), 4, seed=seed)
    with guarded_empty() as checks:
        out = small(*inputs)
    assert len(checks) == 5 and out.isfinite().all()


def test_nothing_beside_the_operands_is_read(seed):
    x, weights, chosen, *stacks = problem(many(60), 4, seed=seed)
    with in_bounds():
        small(x, weights, chosen, *(stack.contiguous() for stack in stacks))


def test_no_tokens(seed):
    x, weights, chosen, *stacks = problem(routes(UNEVEN), 4, seed=seed)
    assert wide.experts(x[:0], weights[:0], chosen[:0], *stacks).shape == (0, 40)


FAR = {
    "x": (".to(tl.int64)\n\n\n@triton.jit\ndef sums_of", "\n\n\n@triton.jit\ndef sums_of"),
    "gate_up": (
        "TOP_K * stride_x,\n        is_0,\n        is_1,\n        is_2,\n        "
        "weight_ptr + expert",
        "TOP_K * stride_x,\n        is_0,\n        is_1,\n        is_2,\n        weight_ptr + "
        "expert.to(tl.int32)",
    ),
    "down": (
        "* inner,\n        is_0,\n        is_1,\n        is_2,\n        weight_ptr + expert",
        "* inner,\n        is_0,\n        is_1,\n        is_2,\n        weight_ptr + "
        "expert.to(tl.int32)",
    ),
}


@pytest.mark.parametrize("argument", FAR)
def test_rows_further_apart_than_an_int32_counts(argument, seed, tmp_path, monkeypatch):
    def plant():
        buggy = with_bug(wide, tmp_path, *FAR[argument])
        for name in KERNELS:
            monkeypatch.setattr(wide, name, getattr(buggy, name))

    assert_far_rows(small, argument, seed, plant)


# ---------------------------------------------------------------- the order of tiles


@triton.jit
def places_kernel(out_ptr, blocks_n, num_tiles, GROUP: tl.constexpr):
    tile, block = place_of(blocks_n, num_tiles, GROUP)
    tl.store(out_ptr + 2 * tl.program_id(0), tile)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, block)


@pytest.mark.parametrize(
    "num_tiles, num_blocks, group", [(1, 1, 8), (7, 5, 3), (9, 2, 3), (2, 9, 8)]
)
def test_the_order_is_that_which_is_counted(num_tiles, num_blocks, group):
    """And each place has one program."""
    count = num_tiles * num_blocks
    out = torch.full((count, 2), -1, dtype=torch.int32, device=DEVICE)
    places_kernel[count,](out, num_blocks, num_tiles, GROUP=group)
    found = [tuple(place) for place in out.tolist()]
    assert found == list(orders.in_groups(num_tiles, num_blocks, group))
    assert sorted(found) == sorted(orders.rows_first(num_tiles, num_blocks))


def test_bytes_of_an_order_by_hand(monkeypatch):
    """Waves of two programs over 2 tiles of rows and 2 blocks, strips of 16 bytes: with room for
    all each strip moves once; with room for two, a wave that changes everything moves it again.
    """
    monkeypatch.setattr(orders, "WAVE", 2)
    monkeypatch.setattr(orders, "CHIPS", {"h200": type("C", (), {"l2_bytes": 64})})

    def moved(order):
        return orders.moved_bytes(order, [0, 0], 8, 1, 1)

    assert moved(orders.rows_first(2, 2)) == 4 * 16
    monkeypatch.setattr(orders, "CHIPS", {"h200": type("C", (), {"l2_bytes": 32})})
    assert moved([(0, 0), (1, 1), (0, 1), (1, 0)]) == 6 * 16
    assert orders.moved_bytes([(0, 0)], [-1], 8, 1, 1) == 0


# ---------------------------------------------------------------- who uses them


def test_a_layer_uses_them_for_many_rows(seed, monkeypatch):
    """On Hopper in 16 bits, where the average expert has a tile's rows."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x = type("OnGpu", (), dict(is_cuda=True, dtype=torch.bfloat16, device="cuda"))
    least = wide.FEWEST_ROWS * 8
    assert grouped_module.ops_for(x, least, 8) is wide
    assert grouped_module.ops_for(x, least - 1, 8) is optimized
    x.dtype = torch.float32
    assert grouped_module.ops_for(x, least, 8) is optimized
    x.dtype = torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert grouped_module.ops_for(x, least, 8) is optimized


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "up in gate's place": ("column % 2 * inner", "column * 0"),
    "gate's half after up's": ("n = first + column // 2", "n = first + column % (BLOCK_N // 2)"),
    "gate and up change places": ("gate, up = tl.split", "up, gate = tl.split"),
    "no silu": ("gate * tl.sigmoid(gate) * up", "gate * up"),
    "the second part's rows for the third": (
        "x = tl.load(rows_ptr + row_2 + column, mask=is_2",
        "x = tl.load(rows_ptr + row_1 + column, mask=is_1",
    ),
    "the second part's rows for the first": (
        "x = tl.load(rows_ptr + row_0 + column, mask=is_0",
        "x = tl.load(rows_ptr + row_1 + column, mask=is_1",
    ),
    "the first sum goes on as the second": ("tl.dot(x, w, sum_1", "tl.dot(x, w, sum_0"),
    "the third sum starts anew": ("tl.dot(x, w, sum_2", "tl.dot(x, w, tl.zeros_like(sum_2)"),
    "the tail of the sum is dropped": ("is_k = column < size", "is_k = column < size - 1"),
    "a block of it is dropped": ("range(0, size, BLOCK_K)", "range(BLOCK_K, size, BLOCK_K)"),
    "one expert for all tiles": (
        "tile, block = place_of(tl.cdiv(inner, BLOCK_N // 2), num_tiles, GROUP)\n"
        "    expert = tl.load(experts_ptr + tile)",
        "tile, block = place_of(tl.cdiv(inner, BLOCK_N // 2), num_tiles, GROUP)\n"
        "    expert = tl.load(experts_ptr)",
    ),
    "one expert for all tiles of down": (
        "tile, block = place_of(tl.cdiv(size, BLOCK_N), num_tiles, GROUP)\n"
        "    expert = tl.load(experts_ptr + tile)",
        "tile, block = place_of(tl.cdiv(size, BLOCK_N), num_tiles, GROUP)\n"
        "    expert = tl.load(experts_ptr)",
    ),
    "the last group has a whole group's tiles": (
        "rows = tl.minimum(num_tiles - first, GROUP)",
        "rows = GROUP + 0 * num_tiles",
    ),
    "groups begin at the first block": ("within = at - first * blocks_n", "within = at % GROUP"),
    "half of the blocks of gate and up": (
        "n = first + tl.arange(0, acc.shape[1])[None, :]",
        "n = first // 2 + tl.arange(0, acc.shape[1])[None, :]",
    ),
    "the first part's pairs for a whole tile": ("place * PART +", "place // 3 * 3 * PART +"),
    "the pair's row of x, not its token's": (
        "pair_1 // TOP_K * stride_x", "pair_1 % (num_pairs // TOP_K) * stride_x",
    ),
    "rows of another dense tensor": ("pair * outputs + n", "pair * (outputs + 1) + n"),
    "the row's own stride is taken for dense": ("row * stride_row", "row * size"),
    "experts without their gap": (
        "expert * stride_expert + n.to(tl.int64)",
        "expert * size * stride_row + n.to(tl.int64)",
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(wide, tmp_path, *BUGS[bug])
    for name in KERNELS:
        monkeypatch.setattr(wide, name, getattr(buggy, name))
    with in_bounds(), pytest.raises(Exception, match=CAUGHT):
        prove(small, naive.experts, problem(many(), 4, seed=3))


# ---------------------------------------------------------------- predictions


def test_the_record_says_what_is_gained():
    """Large experts: 60 % of the peak is predicted. In groups memory gives less."""
    record = json.loads(prefill.RECORD.read_text(encoding="utf-8"))
    large, small_ones = record["Mixtral 8x7B"]["4096"], record["Qwen3-30B-A3B"]["4096"]
    assert large["more/wide.py"]["peak_share"] > 0.6 > large["kernels.py"]["peak_share"]
    for each, share in ((large, 0.65), (small_ones, 0.9)):
        assert each["more/wide.py"]["predicted_s"] < share * each["kernels.py"]["predicted_s"]
        assert each["order"]["once_gb"] < each["order"]["in_groups"] < each["order"]["rows_first"]
        assert {k["spill_bytes"] for k in each["more/wide.py"]["kernels"].values()} == {0}


def test_the_order_of_the_record_is_counted_again():
    record = json.loads(prefill.RECORD.read_text(encoding="utf-8"))
    for layer, (num_experts, _, size, inner) in prefill.LAYERS.items():
        chosen = prefill.chosen_of(4096, layer)
        assert (
            orders.memory_bytes(chosen, num_experts, size, inner) == record[layer]["4096"]["order"]
        )


@pytest.mark.compiler
@pytest.mark.sample(0)
def test_the_record_is_predicted_again():
    kept = json.loads(prefill.RECORD.read_text(encoding="utf-8"))["Qwen3-30B-A3B"]["4096"]
    where = f"{prefill.__name__}:predicted"
    found = call(where, "more/wide.py", "Qwen3-30B-A3B", 4096, chip=90)
    assert found["predicted_s"] == pytest.approx(kept["more/wide.py"]["predicted_s"], rel=0.05)
