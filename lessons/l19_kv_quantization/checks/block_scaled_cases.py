"""What the tests of the block-scaled products have in common."""

from dataclasses import replace

import torch

from lessons.l19_kv_quantization.activations.block_scaled import naive
from lessons.l19_kv_quantization.activations.block_scaled.operands import (
    BlockScaled,
    in_atoms,
    in_rows,
)
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import NotEquivalent

DEVICE = default_device()
NVFP4, MXFP4 = torch.float8_e4m3fn, torch.uint8  # by the type of their scales


def random_operand(rows: int, columns: int, scale_type: torch.dtype, seed: int) -> BlockScaled:
    """Any codes, and scales of which neighbours differ much."""
    random = torch.Generator().manual_seed(seed)

    def drawn(low, high, *shape):
        return torch.randint(low, high, shape, generator=random).to(torch.uint8)

    codes = drawn(0, 256, rows, columns // 2)
    if scale_type == torch.uint8:
        scales = drawn(120, 135, rows, columns // 32)
    else:  # from 2^−9 to 448
        scales = drawn(1, 127, rows, columns // 16).view(scale_type)
    row_scale = torch.rand(rows, generator=random) + 0.5
    parts = (x.to(DEVICE) for x in (codes, in_atoms(scales), row_scale))
    return BlockScaled(*parts)


def check(kernel, a: BlockScaled, b: BlockScaled, block_n: int = 128) -> None:
    """Raises NotEquivalent unless kernel(a, b, block_n) is the product of the numbers."""
    hold(kernel(a, b, block_n), a, b)


def hold(found: torch.Tensor, a: BlockScaled, b: BlockScaled) -> None:
    """Codes times scales are exact in float32, and so are their products. Left are K additions and
    three products with row scales in float32, and one rounding to bfloat16. Raises NotEquivalent.
    """
    left, right = naive.dequantize(a), naive.dequantize(b)
    exact = left @ right.T
    bound = (a.shape[1] + 3) * 2.0**-24 * (left.abs() @ right.abs().T) + 2.0**-8 * exact.abs()
    gap = (found.double() - exact).abs() - 1.001 * bound
    if found.shape != exact.shape or not bool((gap <= 0).all()):
        worst = divmod(int(gap.nan_to_num(torch.inf).argmax()), exact.shape[1])
        raise NotEquivalent("E1", f"{worst} is {found[worst]}, not {exact[worst]}")


# ---------------------------------------------------------------- operands in another order


def other_nibbles(x: BlockScaled) -> BlockScaled:
    """The second of two neighbours in the lower half of a byte."""
    return replace(x, codes=x.codes << 4 | x.codes >> 4)


def not_swizzled(x: BlockScaled) -> BlockScaled:
    """Atoms that hold 4 scales of row 0, then of row 1, …"""
    rows, each = 128 * x.atoms.shape[0], 4 * x.atoms.shape[1]
    plain = in_rows(x.atoms, rows, each).view(torch.uint8).view(-1, 128, each // 4, 4)
    return replace(x, atoms=plain.permute(0, 2, 1, 3).reshape(x.atoms.shape).view(x.atoms.dtype))


def atoms_down_the_rows(x: BlockScaled) -> BlockScaled:
    """The next atom is that of the next 128 rows, not of the next 4 scales."""
    stored = x.atoms.view(torch.uint8)
    turned = stored.transpose(0, 1).reshape(stored.shape).view(x.atoms.dtype)
    return replace(x, atoms=turned)


def scale_of_the_neighbouring_block(x: BlockScaled) -> BlockScaled:
    scales = in_rows(x.atoms, x.shape[0], x.shape[1] // x.block).view(torch.uint8)
    return replace(x, atoms=in_atoms(scales.roll(1, dims=1).view(x.atoms.dtype)))


def row_scale_of_the_neighbour(x: BlockScaled) -> BlockScaled:
    return replace(x, row_scale=x.row_scale.roll(1))


WRONG = (
    other_nibbles,
    not_swizzled,
    atoms_down_the_rows,
    scale_of_the_neighbouring_block,
    row_scale_of_the_neighbour,
)
