"""What the tests of the block-scaled products have in common."""

import torch

from lessons.l19_kv_quantization.activations.block_scaled import naive
from lessons.l19_kv_quantization.activations.block_scaled.operands import BlockScaled, in_atoms
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
