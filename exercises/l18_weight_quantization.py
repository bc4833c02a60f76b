# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=18
# Generated from solutions/l18_weight_quantization.py, checksum ed85a3bf3594. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 18: four grids for one matrix, two codes in a byte, GPTQ's error feedback,
and a kernel that unpacks weights in registers.
"""

import torch
from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton

# The 16 numbers of NF4 (QLoRA, appendix E): quantiles of a normal distribution, the largest at ±1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# The 15 numbers of E2M1, the 4-bit float of MXFP4 and NVFP4: 0 has two codes.
E2M1 = (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)


@exercise("18.1", "By hand: one matrix on four grids", minutes=35, difficulty=1)
def round_to_formats(
    weight: Tensor, group_size: int, e4m3_scale: float
) -> dict[str, tuple[Tensor, float]]:
    """What a matrix becomes in four formats: {"int4", "e4m3", "nf4", "nvfp4": (values,
    bits_per_weight)}.

    weight: [N, K] float64; values: the same shape and dtype, what the stored codes mean.
    bits_per_weight: all that is stored, scales too, divided by the numbers of the matrix. Groups
    are runs of group_size neighbours in a row; group_size divides K. Rounding is torch.round's.
    Errors: none to raise. A group of zeros stays zero.

    int4: whole codes 0 to 15 with a zero point, per group. lo = min(0, the smallest), hi = max(0,
        the largest), scale = (hi - lo) / 15, zero = round(-lo / scale), code = round(w / scale) +
        zero, clamped to 0 … 15; it means (code - zero) · scale. A scale takes 16 bits of storage, a
        zero 4. (Here the scale is not rounded to 16 bits.)
    e4m3: the nearest number of torch.float8_e4m3fn to w / e4m3_scale, times e4m3_scale; what is
        beyond the largest one, 448, becomes 448 with its sign. The one scale of the whole matrix
        counts as 0 bits.
    nf4: per group, scale = the largest |w|, the nearest number of the table NF4 above to w / scale,
        times scale. A scale takes 32 bits.
    nvfp4: two levels of scales. whole = the largest |w| of the matrix / (6 · 448). Per group, scale
        = the number of torch.float8_e4m3fn nearest to (the largest |w| of the group / 6) / whole,
        but 2⁻⁹ at least. Then the nearest number of the table E2M1 above to w / (scale · whole),
        times scale · whole. A scale takes 8 bits; whole counts as 0 bits.

    Example: weight [[-1, 0, 0.5, 2]], group_size 4, e4m3_scale 0.25
        int4: scale 3 / 15 = 0.2, zero 5, codes 0, 5, 5 + 2 (2.5 rounds to even), 15
              -> ([[-1, 0, 0.4, 2]], 4 + (16 + 4) / 4 = 9.0)
        e4m3: -4, 0, 2 and 8 are numbers of E4M3                     -> ([[-1, 0, 0.5, 2]], 8.0)
        nf4:  -0.5 -> -0.525, 0.25 -> 0.246 -> ([[-1.0501, 0, 0.4922, 2]], 4 + 32 / 4 = 12.0)
        nvfp4: whole 2 / 2688, scale 448, scale · whole = 1 / 3: -3, 0, 1.5 and 6 are in the table
              -> ([[-1, 0, 0.5, 2]], 4 + 8 / 4 = 6.0)
    """
    raise NotImplementedError("Exercise 18.1: By hand: one matrix on four grids")


@exercise(
    "18.2",
    "Pack two codes to a byte, and multiply",
    minutes=40,
    difficulty=2,
    replaces="lessons.l18_weight_quantization.naive:dequantize_matmul",
    through="reference.ladder.yours.formats:dequantize_matmul",
)
class PackedLinear:
    """A linear layer whose matrix is stored as 4-bit codes.

    codes: [N, K] uint8, 0 to 15, in the columns of the matrix. order: [K] int64: stored column j is
    column order[j] of the matrix (GPTQ's act-order); None: columns are stored as they are. Groups
    are runs of group_size *stored* columns, and scales: [N, K / group_size] float32 and zeros: the
    same shape, uint8, belong to them. A code means (code - zero) · scale.

    self.packed: [N, K / 2] uint8. Byte i of a group holds the group's stored column i in its low
    four bits and stored column i + group_size / 2 in its high four. group_size is even.

    input_scales: [K] float32, in the columns of the matrix, or None. With AWQ each column k of the
    matrix was multiplied by input_scales[k] before it was quantized.

    Called with x: [T, K] float32 it gives the product of x with the transposed original matrix,
    before AWQ's scales and in its own order of columns: [T, N] float32. Aim: no Python loop over
    rows, columns or groups, and the layer keeps no tensors but packed, scales, zeros, order and
    input_scales. Errors: none to raise. The arguments are not changed.

    Example: codes [[1, 2, 3, 4]], scales [[0.5]], zeros [[1]], group_size 4
        bytes: 1 + 16 · 3 = 49 and 2 + 16 · 4 = 66
        the matrix is [[0, 0.5, 1, 1.5]], so x = [[1, 1, 1, 1]] gives [[3]]
        with order [3, 2, 1, 0] the stored columns are 4, 3, 2, 1: bytes 4 + 16 · 2 = 36 and 19; the
        same product. With input_scales [1, 2, 1, 1] column 1 was 0.25 before: [[2.75]].
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        group_size: int,
        order: Tensor | None = None,
        input_scales: Tensor | None = None,
    ):
        self.scales, self.zeros, self.group_size = scales, zeros, group_size
        self.order, self.input_scales = order, input_scales
        raise NotImplementedError("Exercise 18.2: Pack two codes to a byte, and multiply")

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] float32 -> [T, N] float32, from self.packed."""
        raise NotImplementedError("Exercise 18.2: Pack two codes to a byte, and multiply")


def factor_of(inputs: Tensor, damping: float) -> Tensor:
    """Upper triangular U: [K, K] with UᵀU = H⁻¹, where H is the mean of x xᵀ over the inputs of a
    layer, [T, K] float64, plus `damping` times the mean of its diagonal.
    """
    hessian = inputs.T @ inputs / len(inputs)
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=inputs.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)


@exercise("18.3", "GPTQ: pass the error on", minutes=40, difficulty=3)
def gptq(weight: Tensor, factor: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantize a matrix column by column so that its product with the inputs changes little:
    (codes: [N, K] int64, -8 to 7; scales: [N, K / group_size] float64).

    weight: [N, K] float64, factor: [K, K] float64, the U of `factor_of` above. Groups are runs of
    group_size columns; a code means code · scale of its group.

    From the first column to the last: if a group begins here, its scales are the largest |w| of
    each row in the group's columns *as they are now*, divided by 7. The column's codes are round(w
    / scale), clamped to -8 … 7. Let e be w - code · scale, divided by U[j, j]. Then each later
    column k loses e · U[j, k], which is the best that the later columns can do for the outputs. A
    row of a group that is all zeros gets scale 0 and codes 0. Rounding is torch.round's. Aim: no
    Python loop over rows. Errors: none to raise. The arguments are not changed.

    Example: weight [[7, 2.4]], group_size 2, factor [[1, 0.5], [0, 2]]
        scale 7 / 7 = 1; column 0: code 7, no error; column 1: code 2     -> ([[7, 2]], [[1]])
        weight [[7, 2.4, 1.6]], group_size 3, factor [[1, 0, 0], [0, 2, 1], [0, 0, 1]]
        column 1: code 2, e = 0.4 / 2 = 0.2; column 2: 1.6 - 0.2 · 1 = 1.4, code 1
                                                                          -> ([[7, 2, 1]], [[1]])
    """
    raise NotImplementedError("Exercise 18.3: GPTQ: pass the error on")


@triton.jit
def gemv_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K,
    stride_packed,
    stride_group,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_N outputs. x: [K] float16, out: [N] float32; rows of packed: [N, K / 2]
    are stride_packed bytes apart, rows of scales and zeros: [N, K / GROUP_SIZE] stride_group
    elements.
    """
    HALF: tl.constexpr = GROUP_SIZE // 2
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < N
    byte = tl.arange(0, HALF)  # of a group
    acc = tl.zeros((BLOCK_N,), tl.float32)
    raise NotImplementedError("Exercise 18.4: A kernel that unpacks in registers")
    tl.store(out_ptr + row, acc, mask=is_row)


@exercise("18.4", "A kernel that unpacks in registers", minutes=50, difficulty=3)
def w4a16_gemv(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """The product of a matrix of 4-bit codes and one vector, [N] float32, by `gemv_kernel` above,
    whose inner loop is yours to write; this wrapper is done.

    x: [K] float16. packed: [N, K / 2] uint8, packed as in 18.2, its rows may be apart. scales:
    [N, K / group_size] float16 and zeros: the same shape, uint8, the same strides. out[n] = Σ over
    k of (code[n, k] - zero) · scale · x[k], the scale and the zero of k's group; multiply and add
    in float32. group_size is a power of two and at least 4. N need not be a multiple of BLOCK_N:
    rows beyond N are outside of every tensor, so their loads have a mask and `other=`. Aim: every
    byte of the matrix is loaded once, and no unpacked weight leaves the kernel. Errors: none to
    raise.

    Example: K = 4, group_size 4, bytes [[49, 66]] (codes 1, 2, 3, 4), scales [[0.5]], zeros [[1]],
        x = [1, 1, 1, 2]: 0.5 · (0 · 1 + 1 · 1 + 2 · 1 + 3 · 2) -> [4.5]
    """
    (N, _), (K,) = packed.shape, x.shape
    out = torch.empty(N, dtype=torch.float32, device=x.device)
    BLOCK_N = 8
    gemv_kernel[(triton.cdiv(N, BLOCK_N),)](
        x,
        packed,
        scales,
        zeros,
        out,
        N,
        K,
        packed.stride(0),
        scales.stride(0),
        GROUP_SIZE=group_size,
        BLOCK_N=BLOCK_N,
    )
    return out
