"""Proves the kernels of experts in FP8 against the loop over dequantized matrices.

A number of h that differs by a last bit may round to the next FP8 number, 6 % away. So each product
is proved by itself, from the codes that it got, and the rounding between them bit for bit.
"""

import pytest
import torch
from torch.nn.functional import silu

from lessons.l18_weight_quantization.naive import to_float8
from lessons.l23_experts import optimized
from lessons.l23_experts.lab.fp8_cases import assert_rounded, decoded, problem
from lessons.l23_experts.lab.moe_cases import DEVICE, UNEVEN, random_routes, routes
from lessons.l23_experts.lab.testing import assert_same_in_any_company
from lessons.l23_experts.more import fp8, naive_fp8
from lessons.l23_experts.more.fp8 import (
    Stack,
    Tiles,
    fp8_down_kernel,
    fp8_gate_up_kernel,
    quantize_groups_kernel,
)
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.measure.device import compiled_chip
from lessons.toolbox.proof.numerics import (
    assert_close_to_oracle,
    draw,
    poisoned,
)
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import guarded_empty

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
    pytest.mark.skipif(compiled_chip() == 80, reason="an A100 has no FP8 instruction"),
]

SMALL = Tiles(16, 16, 32, num_warps=4, num_stages=2)
KERNELS = ("quantize_groups_kernel", "fp8_gate_up_kernel", "fp8_down_kernel")
CAUGHT = "out of bounds|E[0-4]|bit"  # an access beyond a tensor, or a rule of the proofs


def small(x, weights, chosen, gate_up, down, tiles=SMALL):
    y = fp8.expert_rows(x, chosen, gate_up, down, tiles)
    return optimized.weighted_sum(y, weights, chosen, len(down.values))


def stages(inputs, monkeypatch, tiles=SMALL):
    """[(input, its codes, its scales)] of both products, and the rows of y."""
    kept = []
    plain = fp8.quantize_groups

    def noting(x):
        kept.append((x, *plain(x)))
        return kept[-1][1:]

    x, _, chosen, gate_up, down = inputs
    with monkeypatch.context() as patched:
        patched.setattr(fp8, "quantize_groups", noting)
        y = fp8.expert_rows(x, chosen, gate_up, down, tiles)
    return kept, y


def by_pair(x, chosen, stack, rows, tiles, top_k, dtype):
    """x[pair // top_k] · Wᵀ of each pair's expert, rows and tiles slices of its matrix."""
    out = []
    for pair, expert in enumerate(chosen.flatten().tolist()):
        matrix = stack.values[expert][rows], stack.scales[expert][tiles]
        out.append(naive_fp8.product(x[pair // top_k].to(dtype)[None], *matrix))
    return torch.cat(out)


def prove_stages(inputs, monkeypatch, tiles=SMALL):
    """Each product in the budgets of `prove`; its input rounded as the definition says."""
    _, _, chosen, gate_up, down = inputs
    kept, y = stages(inputs, monkeypatch, tiles)
    assert len(kept) == 2
    for given, *found in kept:
        assert_rounded(found, given)
    inner, top_k, h = down.values.shape[2], chosen.shape[1], kept[1][0]
    half = len(gate_up.scales[0]) // 2

    def h_in(dtype):
        row = decoded(*kept[0][1:], dtype)
        gate = by_pair(row, chosen, gate_up, slice(inner), slice(half), top_k, dtype)
        last = slice(inner, None), slice(half, None)
        return silu(gate) * by_pair(row, chosen, gate_up, *last, top_k, dtype)

    def y_in(dtype):
        row = decoded(*kept[1][1:], dtype)
        return by_pair(row, chosen, down, slice(None), slice(None), 1, dtype)

    errors = assert_close_to_oracle(h, h_in(h.dtype), h_in(torch.float64))
    assert_close_to_oracle(y, y_in(y.dtype), y_in(torch.float64))
    return errors


def record(proof, errors):
    proof.record(quantize_groups_kernel, errors)
    proof.record(fp8_gate_up_kernel, errors)
    proof.record(fp8_down_kernel, errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_product(dtype, seed, proof, monkeypatch):
    record(proof, prove_stages(problem(routes(UNEVEN), 4, dtype=dtype, seed=seed), monkeypatch))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, size, inner",
    [
        (1, 1, 1, 128, 128),
        (1, 8, 16, 16, 16),
        (33, 1, 1, 257, 30),
        (17, 1, 3, 127, 129),
        (7, 3, 7, 300, 260),
        (5, 8, 11, 70, 3),
    ],
)
def test_shapes(num_tokens, top_k, num_experts, size, inner, seed, proof, monkeypatch):
    """One token; all to one expert; empty experts; sizes around a tile of scales."""
    given = random_routes(num_tokens, top_k, num_experts)
    inputs = problem(given, num_experts, size, inner, torch.float32, seed)
    record(proof, prove_stages(inputs, monkeypatch))


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", list(fp8.TILES))
def test_the_tiles_of_a_gpu(rows, seed, proof, monkeypatch):
    inputs = problem(random_routes(20, 2, 2), 2, 300, 200, torch.float16, seed)
    record(proof, prove_stages(inputs, monkeypatch, fp8.TILES[rows]))


@pytest.mark.parametrize("kind", ["normal", "large", "non_contiguous"])
def test_a_layer_beside_the_loop(kind, seed):
    """All of it together, within what rounding h again may change."""

    def flat(run):
        return lambda x, weights, chosen, *parts: run(
            x, weights, chosen, Stack(*parts[:2]), Stack(*parts[2:])
        )

    x, weights, chosen, gate_up, down = problem(routes(UNEVEN * 2), 4, seed=seed, kind=kind)
    inputs = x, weights, chosen, *gate_up, *down
    expected, found = (flat(run)(*inputs).double() for run in (naive_fp8.experts, small))
    assert found.isfinite().all()
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_rounding_groups_bit_for_bit(seed):
    """Zeros, NaN, infinity, subnormal numbers; short last groups; gaps; many groups in a row."""
    x = draw("normal", (9, 300), seed=seed, device=DEVICE)
    x[0], x[1, 128:256], x[2, 5], x[3, 299], x[4] = 0, 0, float("nan"), float("inf"), x[4] * 1e-40
    x[6, :256] = float("nan")
    x[5] *= 10.0 ** torch.randint(-30, 30, (300,), device=DEVICE)
    gaps = poisoned((9, 400), torch.float32, DEVICE)
    gaps[:, :300] = x
    for given in (x, x.bfloat16(), gaps[:, :300], x.view(2, 1350)):
        assert_rounded(fp8.quantize_groups(given), given)


def test_a_scale_of_nan_makes_its_outputs_nan(seed):
    x, weights, chosen, gate_up, down = problem(routes(UNEVEN), 4, seed=seed)
    down.scales[3, 1, 0] = float("nan")  # outputs 128 to 199 of expert 3
    out = small(x, weights, chosen, gate_up, down)
    uses = (chosen == 3).any(1)
    assert out[uses][:, 128:].isnan().all() and not out[uses][:, :128].isnan().any()
    assert not out[~uses].isnan().any()


def test_experts_of_other_ranks_add_nothing(seed):
    x, weights, chosen, gate_up, down = problem(routes(UNEVEN), 4, dtype=torch.float32, seed=seed)
    whole = small(x, weights, chosen, gate_up, down)
    parts = [
        small(x, weights, chosen - first, *(Stack(*(t[own] for t in s)) for s in (gate_up, down)))
        for first, own in ((0, slice(2)), (2, slice(2, 4)))
    ]
    assert torch.allclose(sum(parts), whole, atol=1e-4)


def test_a_token_has_the_same_bits_in_any_company(seed):
    x, weights, chosen, *stacks = inputs = problem(routes(UNEVEN), 4, seed=seed)
    assert_same_in_any_company(small, inputs)
    assert small(x[:0], weights[:0], chosen[:0], *stacks).shape == (0, 200)


def test_nothing_is_written_beside_the_results(seed):
    with guarded_empty() as checks:
        out = small(*problem(routes(UNEVEN), 4, seed=seed))
    assert len(checks) == 9 and out.isfinite().all()


def test_a_stack_is_the_matrices_of_its_experts(seed):
    """gate's rows and then up's, each with its own tiles of scales."""
    matrices = [to_float8(torch.randn(144, 200), per="block") for _ in range(6)]
    values, scales = fp8.stack_of(matrices[:3], matrices[3:])
    for expert in range(3):
        for part, rows, tiles in ((0, slice(144), slice(2)), (3, slice(144, 288), slice(2, 4))):
            one = matrices[part + expert]
            got = naive_fp8.product(torch.eye(200), values[expert, rows], scales[expert, tiles]).T
            assert torch.equal(got, one.dequantize())


def test_bad_operands_are_refused_in_one_line(seed):
    x, _, chosen, gate_up, down = problem(routes(UNEVEN), 4, seed=seed)
    for wrong, name in (
        ((x.double(), chosen, gate_up, down), "x: got"),
        ((x, chosen.int(), gate_up, down), "chosen: got"),
        ((x, chosen, Stack(gate_up.values[:, 1:], gate_up.scales), down), "gate_up.values: got"),
        ((x, chosen, Stack(gate_up.values, gate_up.scales[:, 1:]), down), "gate_up.scales: got"),
        ((x, chosen, gate_up, Stack(down.values, down.scales.half())), "down.scales: got"),
        ((x, chosen, gate_up, Stack(down.values.float(), down.scales)), "down.values: got"),
    ):
        with pytest.raises(ValueError, match=f"^{name}") as caught:
            fp8.expert_rows(*wrong)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "up in gate's place": (
        "up_ptr = gate_ptr + tl.cast(inner, tl.int64) * size", "up_ptr = gate_ptr",
    ),
    "gate's scales for up": ("tl.load(gate_scales + tiles_n * steps + step)", "tl.load(gate_scales + step)"),
    "the first tile's scales for all rows": ("(2 * tiles_n) + first // TILE)", "(2 * tiles_n))"),
    "the first tile's scales for all rows of down": (
        "tl.cdiv(size, TILE) + first // TILE)", "tl.cdiv(size, TILE))",
    ),
    "the first step's scales": ("tl.load(gate_scales + step)", "tl.load(gate_scales + 0 * step)"),
    "the first step's scales of down": ("tl.load(down_scales + step)", "tl.load(down_scales + 0 * step)"),
    "the first group's scale of a row": ("row * steps + step,", "row * steps + 0 * step,"),
    "the scale of x of the step before": ("        of_x = ahead\n", ""),
    "the scale of h of the step before": ("        of_h = ahead\n", ""),
    "the scale of x of this step again": ("is_scale, steps, step + 1)\n        start = step * TILE\n        x", "is_scale, steps, step)\n        start = step * TILE\n        x"),
    "the pair's scale of x, not its token's": (
        "tl.reshape(pair // TOP_K, (BLOCK_M,))",
        "tl.reshape(pair % (num_pairs // TOP_K), (BLOCK_M,))",
    ),
    "the pair's row of x, not its token's": (
        "x_ptr + pair // TOP_K * size", "x_ptr + pair % (num_pairs // TOP_K) * size",
    ),
    "one expert's scales for all": (
        "(expert * (2 * tiles_n) + first", "(0 * expert + first",
    ),
    "one expert's scales of down for all": (
        "(expert * tl.cdiv(size, TILE) + first", "(0 * expert + first",
    ),
    "one expert for all tiles": (
        "weight_ptr + expert * (2 * inner) * size", "weight_ptr + 0 * expert",
    ),
    "one expert of down for all tiles": (
        "weight_ptr + expert * size * inner", "weight_ptr + 0 * expert",
    ),
    "no silu": ("gate * tl.sigmoid(gate) * up", "gate * up"),
    "the last step only": ("acc += tl.dot", "acc = tl.dot"),
    "the last step of gate only": ("gate += tl.dot", "gate = tl.dot"),
    "a tail of h is dropped": (
        "h_row + start + k, mask=is_row & (start + k < inner)",
        "h_row + start + k, mask=is_row & (start + k < inner - 1)",
    ),
    "a group's scale from its first half": (
        "tl.max(tl.abs(x), axis=1", "tl.max(tl.where(column % GROUP < 64, tl.abs(x), 0.0), axis=1",
    ),
    "zeros divided by zero": ("scale = tl.where(scale == 0.0, 1.0, scale)", "scale = scale * 1.0"),
    "scales of the row before": (
        "scales_ptr + row * num_groups + group", "scales_ptr + row * num_groups // 2 + group",
    ),
    "a NaN becomes a number": (
        "tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL)", "tl.maximum(x, -LARGEST)",
    ),
}  # fmt: skip


def prove_with_faults(monkeypatch):
    """A token begins with zeros, another one holds a NaN, so its h is nothing else."""
    inputs = problem(routes(UNEVEN), 4, dtype=torch.float32, seed=3)
    inputs[0][2, :128] = 0
    inputs[0][4, 150] = float("nan")
    with in_bounds():
        prove_stages(inputs, monkeypatch)


def test_without_a_bug_nothing_is_seen(monkeypatch):
    prove_with_faults(monkeypatch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(fp8, tmp_path, *BUGS[bug])
    for name in KERNELS:
        monkeypatch.setattr(fp8, name, getattr(buggy, name))
    with pytest.raises(Exception, match=CAUGHT):
        prove_with_faults(monkeypatch)
