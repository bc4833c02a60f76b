"""Naive: NVFP4 by rounding to nearest, in its two levels of scales.

The largest magnitude of a block of 16 shall become 6, the largest E2M1 number, so the block's scale
is largest / 6. These scales are stored in 8 bits, too, as E4M3, which reaches from 2^−9 to 448.
The float32 scale of the matrix moves them into this range: the largest of them becomes 448.
"""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.naive import (
    check_matrix,
    grouped,
    nonzero,
    saturate,
    to_e2m1,
)
from lessons.l18_weight_quantization.weights import NVFP4_BLOCK, Nvfp4Weight, neighbours_packed
from lessons.toolbox.model.arguments import refuse

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0
SMALLEST_SCALE = 2.0**-9  # above 0


def to_nvfp4(weight: Tensor) -> Nvfp4Weight:
    """weight: [N, K], K a multiple of 16 -> NVFP4. Raises ValueError for another shape."""
    check_matrix(weight)
    shape = tuple(weight.shape)
    if shape[1] % NVFP4_BLOCK:
        refuse("weight", shape, f"a matrix, [N, K], with K a multiple of {NVFP4_BLOCK}")
    blocks = grouped(weight, NVFP4_BLOCK)
    tensor_scale = tensor_scale_of(blocks)
    scales = block_scales(blocks, tensor_scale)
    # Divided by the scale as it is stored, so that the code makes up for the scale's rounding.
    scaled = blocks / (scales.float() * tensor_scale)[..., None]
    codes = to_e2m1(scaled).flatten(1)
    return Nvfp4Weight(neighbours_packed(codes), scales, tensor_scale)


def tensor_scale_of(x: Tensor) -> Tensor:
    """x: [...] -> [1] float32: one divided by what makes the largest number 6 · 448, because files
    of compressed-tensors store that divisor.
    """
    largest = x.abs().amax().float().view(1)
    divisor = LARGEST_CODE * LARGEST_SCALE / nonzero(largest)
    return 1 / divisor.clamp(max=torch.finfo(torch.float32).max)


def block_scales(blocks: Tensor, tensor_scale: Tensor) -> Tensor:
    """blocks: [N, groups, 16]; tensor_scale: [1] -> [N, groups] E4M3. None is 0, because the codes
    are divided by it; a block whose scale would be smaller has small codes, or zeros.
    """
    wanted = blocks.abs().amax(-1) / LARGEST_CODE / tensor_scale
    return saturate(wanted.clamp(min=SMALLEST_SCALE), torch.float8_e4m3fn)
