"""Naive: every format by rounding to nearest, and a product that dequantizes first.

Each quantizer takes a matrix, [N, K], and looks at nothing else: no data, no other layer. It finds
a scale for each group of numbers, divides by it, and rounds. gptq.py and awq.py also look at what
the layer receives. Vocabulary: Gholami et al. 2021, A Survey of Quantization Methods, section 3.
"""

import torch
from torch import Tensor

from lessons.l18_weight_quantization.weights import (
    DYNAMIC_VALUES,
    E2M1_VALUES,
    E8M0_BIAS,
    MXFP4_BLOCK,
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4_VALUES,
    TILE,
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    QuantizedWeight,
    neighbours_packed,
    pack,
)
from lessons.toolbox.model.arguments import is_whole, refuse


def dequantize_matmul(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x: [T, K]; bias: [N] or None -> [T, N] in x's dtype. It writes the whole matrix in x's dtype
    and reads it again, so it moves more bytes than the matrix that was never quantized.
    """
    matrix = weight.dequantize().to(x.dtype)
    return torch.nn.functional.linear(x, matrix, bias)


# ---------------------------------------------------------------- whole numbers


def absmax(groups: Tensor, bits: int) -> tuple[Tensor, None]:
    """Symmetric scales: the largest magnitude becomes the largest code. groups: [N, groups, size]
    -> scales [N, groups] float32. The zero point is 2^(bits − 1), so nothing is stored for it.
    """
    largest = groups.abs().amax(-1)
    last = 2 ** (bits - 1) - 1
    return largest / last, None


def zero_point(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Asymmetric scales: the smallest number becomes code 0 and the largest the last code. groups:
    [N, groups, size] -> scales [N, groups] float32, and zeros of that shape: the code of 0.0,
    whole.
    """
    low = groups.amin(-1).clamp(max=0)  # 0.0 itself must have a code, because zeros is such a code
    high = groups.amax(-1).clamp(min=0)
    last = 2**bits - 1
    scales = (high - low) / last
    zeros = torch.round(-low / nonzero(scales))
    return scales, zeros.clamp(0, last)


def nonzero(scales: Tensor) -> Tensor:
    """scales: [...], with 1 for 0: a group of zeros then has codes that mean zero."""
    return torch.where(scales == 0, 1.0, scales)


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """scales: [...] as they are stored. What is too small for dtype becomes its smallest number,
    because 0 would divide by zero.
    """
    tiny = torch.finfo(dtype).tiny
    return nonzero(scales).clamp(min=tiny).to(dtype)


def round_to_nearest(
    weight: Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupedInt:
    """weight: [N, K] -> whole numbers of 4 or 8 bits. group_size: neighbouring inputs that share a
    scale, a divisor of K; None: one scale for each row ("per channel"). symmetric: absmax scales,
    else a zero point for each group. Raises ValueError for what does not fit.
    """
    group_size = check_groups(weight, bits, group_size)
    groups = grouped(weight, group_size)
    find_scales = absmax if symmetric else zero_point
    scales, zeros = find_scales(groups, bits)
    return grouped_int(groups, scales, zeros, bits, scale_dtype)


def per_tensor(
    weight: Tensor,
    bits: int = 8,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupedInt:
    """weight: [N, K] -> whole numbers with one scale for all of them: the largest weight of the
    matrix decides how finely every other one is rounded. The scale is stored for each row, because
    that is what GroupedInt has.
    """
    group_size = check_groups(weight, bits, None)
    groups = grouped(weight, group_size)
    find_scales = absmax if symmetric else zero_point
    together = groups.view(1, 1, -1)
    scales, zeros = find_scales(together, bits)
    rows = len(weight)
    scales = scales.expand(rows, 1)
    if zeros is not None:
        zeros = zeros.expand(rows, 1)
    return grouped_int(groups, scales, zeros, bits, scale_dtype)


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """weight: [N, K] -> [N, groups, group_size] float32."""
    weight = weight.detach().float()
    return weight.unflatten(1, (-1, group_size))


def grouped_int(
    groups: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    scale_dtype: torch.dtype = torch.float16,
    order: Tensor | None = None,
) -> GroupedInt:
    """Round groups, [N, groups, size], to given scales and zeros, [N, groups], and pack them."""
    stored = stored_scales(scales, scale_dtype)
    codes = to_codes(groups, stored.float(), zeros, bits)
    if zeros is not None:
        zeros = zeros.to(torch.uint8)
    group_size = groups.shape[-1]
    return GroupedInt(pack(codes, bits), stored, zeros, bits, group_size, order)


def to_codes(groups: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """[N, groups, size] uint8: the nearest code of each number. scales, zeros: [N, groups]."""
    last = 2**bits - 1
    middle = 2 ** (bits - 1)
    if zeros is not None:
        middle = zeros[..., None]
    steps = torch.round(groups / scales[..., None])
    codes = (steps + middle).clamp(0, last)
    return codes.to(torch.uint8)


def check_groups(weight: Tensor, bits: int, group_size: int | None) -> int:
    """The group size of weight: [N, K], which is K for None. Raises ValueError that names what does
    not fit.
    """
    check_matrix(weight)
    if bits not in (4, 8):
        refuse("bits", bits, "4 or 8")
    columns = weight.shape[1]
    if group_size is None:
        group_size = columns
    if not is_whole(group_size) or columns % group_size:
        refuse("group_size", group_size, f"a divisor of the matrix's {columns} columns, or None")
    if bits == 4 and group_size % 2:
        refuse(
            "group_size", group_size, "an even number with 4 bits, because a byte holds two codes"
        )
    return group_size


def check_matrix(weight: Tensor) -> None:
    """Raise ValueError unless weight is a matrix, [N, K], with numbers in it."""
    if weight.ndim != 2 or not weight.numel():
        refuse("weight", tuple(weight.shape), "a matrix, [N, K]")


# ---------------------------------------------------------------- floating numbers


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: [...] in an 8-bit float, and what is too large becomes the largest number: 448 for E4M3,
    57344 for E5M2. A plain cast may give NaN or infinity there, depending on the format and on the
    version.
    """
    most = torch.finfo(dtype).max
    return x.float().clamp(-most, most).to(dtype)


def to_float8(
    weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, per: str = "row"
) -> Float8Weight:
    """weight: [N, K] -> numbers of 8 bits. dtype: torch.float8_e4m3fn or torch.float8_e5m2. per:
    what shares a scale, "tensor", "row" or "block" (128 × 128).
    """
    check_matrix(weight)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        refuse("dtype", dtype, "torch.float8_e4m3fn or torch.float8_e5m2")
    weight = weight.detach().float()
    magnitudes = weight.abs()
    if per == "tensor":
        largest = magnitudes.amax().view(1, 1)
    elif per == "row":
        largest = magnitudes.amax(1, keepdim=True)
    elif per == "block":
        largest = largest_of_tiles(magnitudes)
    else:
        refuse("per", per, '"tensor", "row" or "block"')
    most = torch.finfo(dtype).max
    scales = stored_scales(largest / most, torch.float32)
    ones = torch.ones_like(weight).to(dtype)
    everywhere = Float8Weight(ones, scales).dequantize()  # each number's scale
    return Float8Weight(saturate(weight / everywhere, dtype), scales)


def largest_of_tiles(magnitudes: Tensor) -> Tensor:
    """magnitudes: [N, K] -> the largest of each tile of 128 × 128: [⌈N / 128⌉, ⌈K / 128⌉]."""
    rows, columns = magnitudes.shape
    padding = (0, -columns % TILE, 0, -rows % TILE)
    padded = torch.nn.functional.pad(magnitudes, padding)
    tiles = padded.unflatten(1, (-1, TILE))
    tiles = tiles.unflatten(0, (-1, TILE))
    return tiles.amax((1, 3))


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """x: [...] -> the index of the nearest of `values`, [codes], ascending: [...] int64."""
    middles = (values[:-1] + values[1:]) / 2
    return torch.bucketize(x, middles)


def to_nf4(weight: Tensor, double_quantization: bool = True) -> Nf4Weight:
    """weight: [N, K] -> NF4, 64 values a block. double_quantization: the absmax of each block in 8
    bits too, which takes 4.13 bits a weight instead of 4.5.
    """
    check_matrix(weight)
    shape = tuple(weight.shape)
    if weight.numel() % NF4_BLOCK:
        refuse("weight", shape, f"a matrix, [N, K], with a multiple of {NF4_BLOCK} values")
    blocks = weight.detach().float()
    blocks = blocks.reshape(-1, NF4_BLOCK)
    largest = blocks.abs().amax(1)
    table = torch.tensor(NF4_VALUES, device=weight.device)
    scaled = blocks / nonzero(largest)[:, None]
    codes = nearest(scaled, table).to(torch.uint8)
    pairs = codes.view(-1, 2)
    first, second = pairs.unbind(1)
    packed = first << 4 | second
    if not double_quantization:
        return Nf4Weight(packed, largest, shape)
    absmax_codes, scales, offset = nested(largest)
    return Nf4Weight(packed, absmax_codes, shape, scales, offset)


def nested(largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """largest: [blocks] float32 -> its codes, [blocks] uint8; the scale of each 256 of them; and
    their mean, [1].
    """
    offset = largest.mean().view(1)
    around = largest - offset  # positive and negative, so all 256 codes are of use
    padding = (0, -len(around) % NESTED_BLOCK)
    padded = torch.nn.functional.pad(around, padding)
    runs = padded.view(-1, NESTED_BLOCK)
    scales = runs.abs().amax(1)
    scaled = runs / nonzero(scales)[:, None]
    table = DYNAMIC_VALUES.to(largest.device)
    codes = nearest(scaled, table).view(-1)
    codes = codes[: len(largest)]
    return codes.to(torch.uint8), scales, offset


def to_e2m1(scaled: Tensor) -> Tensor:
    """scaled: [...] -> [...] uint8: the nearest E2M1 codes, of ties the even one; beyond 6 is 6."""
    magnitudes = torch.tensor(E2M1_VALUES[:8], device=scaled.device)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    above_odd = middles[1::2]
    middles[1::2] = torch.nextafter(above_odd, magnitudes[0])  # so that a tie goes up
    codes = torch.bucketize(scaled.abs(), middles)
    codes = codes.to(torch.uint8)
    signs = torch.signbit(scaled).to(torch.uint8)
    return codes | signs << 3


def to_mxfp4(weight: Tensor) -> Mxfp4Weight:
    """weight: [N, K], K a multiple of 32 -> MXFP4. The exponent of a block is that of its largest
    value, minus 2, because the largest E2M1 number, 6, has the exponent 2. A value between 6 and 8
    times that power saturates (OCP MX specification v1.0, section 6.3).
    """
    check_matrix(weight)
    shape = tuple(weight.shape)
    if shape[1] % MXFP4_BLOCK:
        refuse("weight", shape, f"a matrix, [N, K], with K a multiple of {MXFP4_BLOCK}")
    blocks = grouped(weight, MXFP4_BLOCK)
    largest = blocks.abs().amax(-1)
    # frexp's mantissa is in [0.5, 1), so its exponent is one above floor(log2)
    exponents = torch.frexp(largest).exponent - 1 - 2
    exponents = exponents.clamp(-E8M0_BIAS, 254 - E8M0_BIAS)
    scaled = torch.ldexp(blocks, -exponents[..., None])
    stored = (exponents + E8M0_BIAS).to(torch.uint8)
    codes = to_e2m1(scaled).flatten(1)
    packed = neighbours_packed(codes)
    return Mxfp4Weight(packed, stored)
