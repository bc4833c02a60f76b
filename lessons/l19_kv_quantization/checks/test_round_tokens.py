"""Tokens become codes, atoms and row scales by one kernel: the bits of operands.of_tokens."""

import pytest
import torch

from lessons.l09_flash_attention.tiles import chip_of
from lessons.l18_weight_quantization.weights import e2m1_numbers
from lessons.l19_kv_quantization.activations.block_scaled import tokens
from lessons.l19_kv_quantization.activations.block_scaled.operands import in_rows, of_tokens
from lessons.l19_kv_quantization.activations.block_scaled.tokens import round_tokens_kernel
from lessons.l19_kv_quantization.checks.block_scaled_cases import DEVICE
from lessons.l19_kv_quantization.lab import block_scaled_specs
from lessons.toolbox.kernels.compile_check import check_all
from lessons.toolbox.proof.numerics import NotEquivalent
from lessons.toolbox.proof.planted import with_bug


@pytest.fixture
def from_hopper_on():
    if (chip_of(DEVICE) or 90) < 90:
        pytest.skip("NOT RUN: needs a chip that rounds to E4M3 as PyTorch does")


def hold(round_tokens, x: torch.Tensor) -> None:
    """Raises NotEquivalent unless every bit is that of the naive version."""
    found, wanted = round_tokens(x), of_tokens(x)
    for part in ("codes", "atoms", "row_scale"):
        bits = [getattr(each, part).contiguous().view(torch.uint8) for each in (found, wanted)]
        if not torch.equal(*bits):
            raise NotEquivalent("E0", f"{part} differ")


def of_any_size(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows and blocks of very different sizes."""
    torch.manual_seed(seed)
    blocks = torch.randn(rows, columns // 16, 16) * torch.exp2(torch.randn(rows, columns // 16, 1))
    return (blocks.flatten(1) * torch.logspace(-6, 6, rows)[:, None]).to(DEVICE)


def with_ties() -> torch.Tensor:
    """Two rows whose larger scale is 1: a block that sets it, then blocks of scale 1 that hold all
    codes and all middles between two of them.
    """
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    first = torch.zeros(16)
    first[3] = 6 * 448.0
    row = torch.cat([first, middles, codes, codes[:1], -middles, -codes, codes[7:]])
    return torch.stack([row, -row])[:, : 16 * 3].repeat(1, 2).to(DEVICE)


SHAPES = [(1, 32), (3, 64), (33, 96), (129, 288), (5, 1056)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.sample(3)
def test_tokens_of_any_size(shape, dtype, seed, proof, from_hopper_on):
    x = of_any_size(*shape, seed)
    hold(tokens.round_tokens, (x if dtype != torch.float16 else x.clamp(-6e4, 6e4)).to(dtype))
    proof.record(round_tokens_kernel)


def test_ties_go_to_the_even_code(from_hopper_on):
    x = with_ties()
    hold(tokens.round_tokens, x)
    found = e2m1_numbers(tokens.round_tokens(x).codes)[0, 16:23]
    assert found.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_zeros_and_rows_with_gaps(seed, from_hopper_on):
    x = of_any_size(3, 128, seed)[:, :96]
    x[1] = 0
    hold(tokens.round_tokens, x)
    assert not bool(tokens.round_tokens(x).codes[1].any())


def test_a_nan_is_told_by_its_rows_scale(seed, from_hopper_on):
    x = of_any_size(3, 64, seed)
    x[1, 40] = torch.nan
    found, wanted = tokens.round_tokens(x), of_tokens(x[[0, 2]])
    assert found.row_scale.isnan().tolist() == [False, True, False]
    assert torch.equal(found.codes[[0, 2]], wanted.codes)
    scales = in_rows(found.atoms, 3, 4).view(torch.uint8)[[0, 2]]
    assert torch.equal(scales, in_rows(wanted.atoms, 2, 4).view(torch.uint8))


def test_it_refuses_what_it_does_not_do():
    for x in (torch.zeros(4), torch.zeros(2, 48), torch.zeros(2, 64, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"x: got .*; accepted: floating"):
            tokens.round_tokens(x)
    with pytest.raises(ValueError, match="dense rows"):
        tokens.round_tokens(torch.zeros(64, 64).T[:, :32])
    assert tokens.round_tokens(torch.zeros(0, 64)).shape == (0, 64)


BUGS = {
    "a tie goes down": ("(size >= 3.5)", "(size > 3.5)"),
    "a tie goes up": ("(size > 2.5)", "(size >= 2.5)"),
    "no sign": ("code | (sign << 3)", "code"),
    "the second of two in the lower half": ("first | (second << 4)", "second | (first << 4)"),
    "rows side by side in an atom": ("row % 32 * 16 + row // 32 * 4", "row * 4"),
    "the next atom is the next rows'": ("token // 128 * parts + s // 4", "token // 128 + s // 4"),
    "the scale before it is rounded": ("scale.to(tl.float32) * whole", "wanted * whole"),
    "the larger scale is left out": ("scale.to(tl.float32) * whole", "scale.to(tl.float32)"),
    "one scale for all blocks": (
        "tl.reduce(tl.abs(blocks), 1, larger)",
        "tl.reduce(tl.abs(blocks), 1, larger) * 0 + largest",
    ),
    "small scales become 0": ("0.001953125", "0.0"),
    "a row of zeros divides by 0": ("tl.where(largest == 0.0, 1.0, largest)", "largest"),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.sample(3)
def test_a_planted_bug_is_caught(bug, tmp_path, seed, from_hopper_on):
    round_tokens = with_bug(tokens, tmp_path, *BUGS[bug]).round_tokens
    zeros = torch.zeros(2, 32, device=DEVICE)
    with pytest.raises(NotEquivalent):  # the last one, with two rows of atoms, takes longest
        for x in (with_ties(), zeros, of_any_size(5, 288, seed), of_any_size(130, 128, seed)):
            hold(round_tokens, x)


@pytest.mark.compiler
def test_the_compiler_spills_nothing():
    specs = [spec for spec in block_scaled_specs.KERNELS if spec.name.startswith("round_")]
    for report in check_all(specs):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, report
        assert report.loads_128bit, report
