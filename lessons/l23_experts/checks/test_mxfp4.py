"""Proves the kernels of gpt-oss' experts in 4 bits against the loop over dequantized matrices."""

from functools import partial

import pytest
import torch

from lessons.l18_weight_quantization.weights import E2M1_VALUES, MXFP4_BLOCK, Mxfp4Weight
from lessons.l23_experts import optimized
from lessons.l23_experts.lab.moe_cases import DEVICE, UNEVEN, random_routes, routes
from lessons.l23_experts.lab.testing import assert_same_in_any_company
from lessons.l23_experts.more import mxfp4, mxfp4_kernels, naive_mxfp4
from lessons.l23_experts.more.mxfp4 import Stack, Tiles
from lessons.l23_experts.more.mxfp4_kernels import mxfp4_down_kernel, mxfp4_gate_up_kernel
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.proof.numerics import assert_same_bits, draw, prove
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.traps import guarded_empty

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

SMALL = Tiles(16, 32, 32, num_warps=4, num_stages=2)
LONGER = Tiles(16, 16, 64, num_warps=4, num_stages=2)
KERNELS = ("mxfp4_gate_up_kernel", "mxfp4_down_kernel")
CAUGHT = "out of bounds|E[0-4]"  # an access beyond a tensor, or one of the rules of `prove`


def stack(num_experts, rows, columns, seed, low=119, high=124):
    """Random codes and exponents; each expert's numbers have their own size."""
    generator = torch.Generator().manual_seed(seed)
    new = dict(dtype=torch.uint8, generator=generator)
    codes = torch.randint(0, 256, (num_experts, rows, columns // 2), **new)
    exponents = torch.randint(low, high, (num_experts, columns // MXFP4_BLOCK, rows), **new)
    bias = draw("normal", (num_experts, rows), dtype=torch.bfloat16, seed=seed)
    return [each.to(DEVICE) for each in (codes, exponents, bias)]


def problem(given, num_experts, size=96, inner=32, seed=0, kind="normal"):
    """x, weights, chosen, then the three tensors of both stacks. Experts that no token chose have
    NaN for exponents.
    """
    weights, chosen = given
    x = draw(kind, (len(chosen), size), dtype=torch.bfloat16, seed=seed + 8, device=DEVICE)
    gate_up = stack(num_experts, 2 * inner, size, seed)
    down = stack(num_experts, size, inner, seed + 1)
    for expert in set(range(num_experts)) - set(chosen.flatten().tolist()):
        gate_up[1][expert] = down[1][expert] = 255
    return x, weights, chosen, *gate_up, *down


def small(x, weights, chosen, *stacks, tiles=SMALL):
    y = mxfp4.expert_rows(x, chosen, Stack(*stacks[:3]), Stack(*stacks[3:]), tiles)
    return optimized.weighted_sum(y, weights, chosen, len(stacks[0]))


def naive(x, weights, chosen, *stacks):
    return naive_mxfp4.experts(x, weights, chosen, Stack(*stacks[:3]), Stack(*stacks[3:]))


def record(proof, errors):
    proof.record(mxfp4_gate_up_kernel, errors)
    proof.record(mxfp4_down_kernel, errors)


@pytest.mark.parametrize("kind", ["normal", "large", "non_contiguous"])
def test_each_token_gets_its_own_experts(kind, seed, proof):
    inputs = problem(routes(UNEVEN * 3), 4, seed=seed, kind=kind)
    record(proof, prove(small, naive, inputs))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "num_tokens, top_k, num_experts, size, inner",
    [
        (1, 1, 1, 32, 32),
        (1, 4, 32, 64, 32),
        (33, 1, 1, 32, 160),
        (17, 1, 3, 160, 96),
        (13, 3, 7, 96, 64),
        (5, 8, 11, 224, 32),
    ],
)
def test_shapes(num_tokens, top_k, num_experts, size, inner, seed, proof):
    """One token; all to one expert; empty experts; columns and rows that end within a tile."""
    given = random_routes(num_tokens, top_k, num_experts)
    inputs = problem(given, num_experts, size, inner, seed)
    for tiles in (SMALL, LONGER):
        record(proof, prove(lambda *a, tiles=tiles: small(*a, tiles=tiles), naive, inputs))


@pytest.mark.sample(1)
@pytest.mark.parametrize("tiles", [mxfp4.FEW, mxfp4.MIDDLE, mxfp4.TALL])
def test_the_tiles_of_a_gpu(tiles, seed, proof):
    inputs = problem(random_routes(20, 2, 2), 2, 160, 96, seed)
    record(proof, prove(lambda *a: small(*a, tiles=tiles), naive, inputs))


def test_tiles_are_as_tall_as_an_expert_has_rows():
    x = torch.empty(1, 32)
    assert [mxfp4.tiles_for(x, rows).block_m for rows in (0.5, 8, 9, 32, 33, 4096)] == [
        16, 16, 64, 64, 128, 128,
    ]  # fmt: skip


def test_a_block_of_nan_makes_its_outputs_nan(seed, proof):
    """Exponent 255, in gate's, up's and down's rows: other rows and other experts stay numbers."""
    x, weights, chosen, *stacks = problem(routes(UNEVEN), 4, seed=seed)
    stacks[4][3, 0, 7] = 255
    record(proof, prove(small, naive, (x, weights, chosen, *stacks)))
    uses = (chosen == 1).any(1)
    for row in (2, 3):  # gate's, then up's
        exponents = stacks[1].clone()
        exponents[1, 1, row] = 255
        out = small(x, weights, chosen, stacks[0], exponents, *stacks[2:])
        assert out[uses].isnan().all() and not out[~uses][:, :7].isnan().any()


@triton.jit
def numbers_kernel(words_ptr, exponents_ptr, out_ptr, UNPACKED: tl.constexpr, POWER: tl.constexpr):
    row = tl.arange(0, 256)[:, None, None]
    tiny = UNPACKED(tl.load(words_ptr + row * 4 + tl.arange(0, 4)[None, None, :]))
    w = tiny * tl.full((1, 1, 1), 2.0**126, tl.bfloat16) * POWER(tl.load(exponents_ptr + row))
    tl.store(out_ptr + row * 32 + tl.arange(0, 32)[None, None, :], w)


def every_number(module):
    """What the module makes of 32 codes, all 16 among them, with each exponent, in the order of
    columns: [256, 32] float64.
    """
    codes = torch.arange(32, dtype=torch.uint8) * 7 % 16
    words = (codes[0::2] | codes[1::2] << 4).view(torch.int32).expand(256, 4).contiguous()
    exponents = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, 32, dtype=torch.bfloat16, device=DEVICE)
    numbers_kernel[(1,)](
        words.to(DEVICE), exponents.to(DEVICE), out,
        UNPACKED=module.unpacked, POWER=module.power_of_two, num_warps=4,
    )  # fmt: skip
    order = mxfp4_kernels.interleaved(torch.arange(32)[None])[0]
    return torch.empty(256, 32, dtype=torch.float64).index_copy_(1, order, out.cpu().double())


def test_every_code_with_every_exponent(tmp_path):
    """All 16 · 256 pairs are what lesson 18 says, rounded to bfloat16 where it does not hold
    them.
    """
    found = every_number(mxfp4_kernels)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[torch.arange(32) * 7 % 16]
    exact = values * 2.0 ** (torch.arange(255, dtype=torch.float64)[:, None] - 127)
    assert torch.equal(found[:255], exact.bfloat16().double())
    assert found[255].isnan().all()
    bug = "tl.where(exponent == 255, 0x7FC0, bits)", "bits"
    assert not every_number(with_bug(mxfp4_kernels, tmp_path, *bug))[255].isnan().all()


def test_experts_of_other_ranks_add_nothing(seed, proof):
    def halves(x, weights, chosen, *stacks):
        first = small(x, weights, chosen, *(each[:2] for each in stacks))
        return first + small(x, weights, chosen - 2, *(each[2:] for each in stacks))

    record(proof, prove(halves, naive, problem(routes(UNEVEN), 4, seed=seed)))


def test_a_token_has_the_same_bits_in_any_company(seed):
    assert_same_in_any_company(small, problem(routes(UNEVEN), 4, seed=seed))


def test_nothing_is_written_beside_the_results(seed):
    with guarded_empty() as checks:
        out = small(*problem(routes(UNEVEN), 4, seed=seed))
    assert len(checks) == 5 and out.isfinite().all()


def test_nothing_beside_the_operands_is_read(seed):
    """Nor where a tile has more rows or columns than are left."""
    tiles = Tiles(16, 64, 64, num_warps=4, num_stages=2)
    with in_bounds():
        small(*problem(routes(UNEVEN), 4, 160, 96, seed), tiles=tiles)


def test_no_tokens(seed):
    x, weights, chosen, *stacks = problem(routes(UNEVEN), 4, seed=seed)
    assert small(x[:0], weights[:0], chosen[:0], *stacks).shape == (0, 96)


def test_a_stack_is_the_matrices_of_its_experts(seed):
    codes, exponents, bias = stack(3, 8, 64, seed)
    weights = [Mxfp4Weight(codes[e], exponents[e].T.contiguous()) for e in range(3)]
    for part, expected in zip(mxfp4.stack_of(weights, bias), (codes, exponents, bias)):
        assert_same_bits(part, expected)


def test_bad_operands_are_refused_in_one_line(seed):
    x, _, chosen, *stacks = problem(routes(UNEVEN), 4, seed=seed)
    for wrong, name in (
        ((x.half(), chosen, *stacks), "x: got"),
        ((x, chosen.int(), *stacks), "chosen: got"),
        ((x, chosen[:-1], *stacks), "chosen: got"),
        ((x, chosen, stacks[0][:, 1:], *stacks[1:]), "gate_up.codes: got"),
        ((x, chosen, stacks[0], stacks[1].int(), *stacks[2:]), "gate_up.exponents: got"),
        ((x, chosen, *stacks[:2], stacks[2][:3], *stacks[3:]), "gate_up.bias: got"),
        ((x, chosen, *stacks[:4], stacks[4][..., :0], stacks[5]), "down.exponents: got"),
    ):
        with pytest.raises(ValueError, match=f"^{name}") as caught:
            mxfp4.expert_rows(*wrong[:2], Stack(*wrong[2:5]), Stack(*wrong[5:]))
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- planted bugs

BUGS = {
    "the sign is lost": ("a = (words << 12) & 0x80008000 |", "a ="),
    "the sign of the last pair is lost": ("d = words & 0x80008000 |", "d ="),
    "the mantissa is lost": ("(words << 2) & 0x01C001C0", "(words << 2) & 0x01800180"),
    "a shift of one too many": ("(words >> 6)", "(words >> 7)"),
    "the wrong power": ("2.0**126", "2.0**125"),
    "halves change places": (
        "(pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)",
        "(pairs >> 16).to(tl.uint16), (pairs & 0xFFFF).to(tl.uint16)",
    ),
    "pairs change places": (
        "tl.join(tl.join(a, c), tl.join(b, d))",
        "tl.join(tl.join(a, b), tl.join(c, d))",
    ),
    "x in its own order": (", 2, 4).transpose(2, 3)", ", 2, 4)"),
    "h in its own order": ("(0, 1, 3, 2))  # as `interleaved`", "(0, 1, 2, 3))"),
    "one exponent for two blocks": (
        "block = start // 32 + tl.arange(0, BLOCK_K // 32)[:, None]",
        "block = start // 32 + tl.arange(0, BLOCK_K // 32)[:, None] // 2",
    ),
    "exponents of the step before": ("        exponents = ahead\n", ""),
    "exponents of this step again": (
        "exponent_column, start + BLOCK_K,",
        "exponent_column, start,",
    ),
    "exponents of another column": ("block * outputs,", "block * (outputs + 1),"),
    "exponents of another expert": (
        "expert * outputs * (size // 32)",
        "expert * outputs * (size // 16)",
    ),
    "the tail is dropped": (
        "is_block = is_n[:, None, None] & (block < size // 32)",
        "is_block = is_n[:, None, None] & (block < 1)",
    ),
    "a step of columns is dropped": ("range(0, size, BLOCK_K)", "range(BLOCK_K, size, BLOCK_K)"),
    "no bias": ("return tl.trans(acc) + tl.load(", "return tl.trans(acc) + 0 * tl.load("),
    "one expert's bias for all": ("tl.load(bias_ptr + row", "tl.load(bias_ptr + n"),
    "gate and up change places": ("gate, up = tl.split", "up, gate = tl.split"),
    "gate's half after up's": (
        "tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2))",
        "tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))",
    ),
    "up without its one": ("h = (up + 1) * gate", "h = up * gate"),
    "silu without alpha": ("tl.sigmoid(ALPHA * gate)", "tl.sigmoid(gate)"),
    "gate is not clamped": ("gate = tl.minimum(gate, LIMIT", "gate = tl.minimum(gate, 1e9"),
    "up is not clamped below": ("up = tl.maximum(up, -LIMIT", "up = tl.maximum(up, -1e9"),
    "up is not clamped above": ("up = tl.minimum(up, LIMIT", "up = tl.minimum(up, 1e9"),
    "one expert's rows for all": ("row = expert * outputs + n", "row = n + 0 * expert"),
    "the pair's row of x, not its token's": (
        "pair // TOP_K * stride_x",
        "pair % (num_pairs // TOP_K) * stride_x",
    ),
    "columns of h are stored twice as far": ("j = first // 2 +", "j = first +"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, tmp_path, monkeypatch):
    buggy = with_bug(mxfp4_kernels, tmp_path, *BUGS[bug])
    for name in (*KERNELS, "interleaved"):
        monkeypatch.setattr(mxfp4, name, getattr(buggy, name))
    x, weights, chosen, *stacks = problem(routes(UNEVEN * 3), 4, seed=3)
    stacks[4][3, 0, 7] = 255
    with in_bounds(), pytest.raises(Exception, match=CAUGHT):
        prove(partial(small, tiles=LONGER), naive, (x * 3, weights, chosen, *stacks))
