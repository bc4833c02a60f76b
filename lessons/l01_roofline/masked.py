"""The same kernel as tutorials write it, every load under a mask: right, and slow for lengths that
are no multiple of 16.

Kept to be compiled beside `optimized.scale_copy_kernel`: `python -m
lessons.toolbox.kernels.compile_check lessons.l01_roofline.lab.specs:masked_kernel`.
"""

import torch
from torch import Tensor

from lessons.l01_roofline.optimized import TILE_BYTES
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def masked_kernel(x_ptr, out_ptr, n, factor, TILE: tl.constexpr):
    """One program per TILE elements: out = x · factor. x, out: [n], contiguous."""
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0)
    scaled = (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, scaled, mask=inside)


def masked_scale_copy(x: Tensor, factor: float) -> Tensor:
    """x · factor by the masked kernel. x: [n], contiguous, at most 2^31 - 1 elements -> [n]."""
    out = torch.empty_like(x)
    tile = TILE_BYTES // x.element_size()
    if x.numel():
        masked_kernel[triton.cdiv(x.numel(), tile),](x, out, x.numel(), factor, TILE=tile)
    return out
