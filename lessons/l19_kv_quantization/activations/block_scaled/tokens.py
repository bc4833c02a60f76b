"""Activations become the first operand in one launch: codes, atoms of scales and row scales.

Naive is operands.of_tokens, and the results are the same bits. An engine does this before each
product, or at the end of the norm before it. The kernel stores each scale where its atom wants it,
so no copy has to bring scales into that order later.
"""

import torch
from torch import Tensor

from lessons.l19_kv_quantization.activations.block_scaled.operands import (
    ATOM_BYTES,
    ROWS,
    SCALES,
    BlockScaled,
)
from lessons.l19_kv_quantization.optimized import larger, writes_e4m3
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def e2m1_codes(x):
    """x: [...] float32 -> [...] int32: the nearest E2M1 codes, of ties the even one; beyond 6 is 6.

    A code is the number of middles between neighbours that |x| has passed: 0 | 0.25 | 0.5 | 0.75 |
    1 | 1.25 | 1.5 | 1.75 | 2 | 2.5 | 3 | 3.5 | 4 | 5 | 6. A tie goes up where the upper code is
    even.
    """
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    return code | (sign << 3)


@triton.jit
def round_tokens_kernel(
    x_ptr, codes_ptr, atoms_ptr, row_scale_ptr, stride_x, num_inputs, parts, BLOCK_K: tl.constexpr
):
    """One program per token. x: [T, K]; codes: [T, K / 2]; atoms: [.., parts, 512]."""
    token = tl.program_id(0).to(tl.int64)  # because token · stride may pass 2^31
    column = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + token * stride_x + column, mask=column < num_inputs, other=0.0)
    x = x.to(tl.float32)
    largest = tl.reduce(tl.abs(x), 0, larger)
    whole = tl.div_rn(tl.where(largest == 0.0, 1.0, largest), 2688.0)  # 6 · 448
    tl.store(row_scale_ptr + token, whole)

    blocks = tl.reshape(x, (BLOCK_K // 16, 16))
    of_block = tl.div_rn(tl.reduce(tl.abs(blocks), 1, larger), 6.0)
    wanted = tl.div_rn(of_block, tl.zeros_like(of_block) + whole)
    scale = tl.minimum(tl.maximum(wanted, 0.001953125), 448.0).to(tl.float8e4nv)  # from 2^−9 on
    s, row = tl.arange(0, BLOCK_K // 16), token % 128
    atom = token // 128 * parts + s // 4
    place = atom * 512 + row % 32 * 16 + row // 32 * 4 + s % 4
    tl.store(atoms_ptr + place, scale, mask=s < num_inputs // 16)

    step = tl.expand_dims(scale.to(tl.float32) * whole, 1)
    code = e2m1_codes(tl.div_rn(blocks, tl.zeros_like(blocks) + step))
    first, second = tl.split(tl.reshape(code, (BLOCK_K // 2, 2)))
    byte = tl.arange(0, BLOCK_K // 2)
    packed = (first | (second << 4)).to(tl.uint8)
    tl.store(codes_ptr + token * (num_inputs // 2) + byte, packed, mask=byte < num_inputs // 2)


def round_tokens(x: Tensor) -> BlockScaled:
    """x: [T, K] floating, K a multiple of 32 -> NVFP4, each token with a larger scale of its own.
    Raises ValueError.
    """
    if x.dim() != 2 or not x.is_floating_point() or x.shape[1] % 32 or x.stride(-1) != 1:
        raise ValueError(
            f"x: got {x.dtype} {tuple(x.shape)} with strides {x.stride()}; accepted: floating "
            f"[T, K] with K a multiple of 32, dense rows"
        )
    if not writes_e4m3(x.device):
        raise ValueError(f"x: got {x.device}; accepted: a GPU from Hopper on, a CPU")
    tokens, inputs = x.shape
    parts = triton.cdiv(inputs, 16 * SCALES)
    new = dict(device=x.device)
    codes = torch.empty(tokens, inputs // 2, dtype=torch.uint8, **new)
    # zeros, because the last atoms have room for more rows and scales
    atoms = torch.zeros(triton.cdiv(tokens, ROWS), parts, ATOM_BYTES, dtype=torch.uint8, **new)
    atoms = atoms.view(torch.float8_e4m3fn)
    row_scale = torch.empty(tokens, dtype=torch.float32, **new)
    if x.numel():
        block = triton.next_power_of_2(inputs)
        round_tokens_kernel[(tokens,)](
            x,
            codes,
            atoms,
            row_scale,
            x.stride(0),
            inputs,
            parts,
            BLOCK_K=block,
            num_warps=warps_of(block),
        )
    return BlockScaled(codes, atoms, row_scale)


def warps_of(block: int) -> int:
    """So that a thread has at most 32 numbers, where 16 warps are enough for that."""
    return min(16, max(1, block // 1024))
