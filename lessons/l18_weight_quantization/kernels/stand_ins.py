"""What replaces the kernels on a CPU: PyTorch's own products with packed integers, where it has
fast ones, and else the naive product.

PyTorch reads packed weights quickly for x in bfloat16 alone. There its products unpack in vector
registers, as our kernel does, and with few rows they beat BF16, because they read a half or a
quarter of its bytes. For float32 the same functions are plain loops over numbers, many times slower
than a float32 product, so float32 is dequantized. With more rows the arithmetic decides, and a
product that unpacks for every few rows again loses to one that does not unpack.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lessons.l03_kv_cache.arguments import DECODE_DTYPES
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.optimized import check_matmul
from lessons.l18_weight_quantization.weights import GroupedInt, QuantizedWeight, unpack

DTYPES = (*DECODE_DTYPES, torch.float64)  # naive's: a proof may want float64
MOST_ROWS = 64  # beyond, dequantizing once costs less than unpacking for every few rows
INT4_GROUPS = (32, 64, 128, 256)  # what PyTorch's kernel accepts
OUTPUTS = 16  # of both: a matrix has a multiple of them
_packed = WeakTensorKeyDictionary()  # codes of a matrix -> the same, as PyTorch wants them


def matmul(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As optimized.matmul, on a CPU. x: [M, K]; bias: [N] or None -> [M, N] in x's dtype.

    In bfloat16 scales are rounded to it, because PyTorch's products take them so.
    """
    check_matmul(x, weight, bias, DTYPES)
    multiply = product_for(weight)
    if x.dtype != torch.bfloat16 or multiply is None or not 0 < len(x) <= MOST_ROWS:
        return dequantize_matmul(x, weight, bias)
    if weight.order is not None:
        x = x[:, weight.order]
    if weight.codes not in _packed:
        _packed[weight.codes] = multiply.pack(weight)
    out = multiply.run(x.contiguous(), *_packed[weight.codes])
    return out if bias is None else out + bias


class Int8:
    """One scale a row, symmetric: torch._weight_int8pack_mm."""

    @staticmethod
    def accepts(weight: GroupedInt) -> bool:
        is_one_scale = weight.scales.shape[1] == 1 and weight.zeros is None
        return weight.bits == 8 and is_one_scale and weight.shape[0] % OUTPUTS == 0

    @staticmethod
    def pack(weight: GroupedInt) -> tuple[Tensor, Tensor]:
        """codes − 128 [N, K] int8, scales [N]."""
        return (weight.codes ^ 128).view(torch.int8), weight.scales[:, 0].bfloat16()

    run = staticmethod(torch._weight_int8pack_mm)


class Int4:
    """Groups, with or without zeros: torch.ops.aten._weight_int4pack_mm_for_cpu."""

    @staticmethod
    def accepts(weight: GroupedInt) -> bool:
        groups_fit = weight.group_size in INT4_GROUPS and weight.shape[0] % OUTPUTS == 0
        return weight.bits == 4 and groups_fit

    @staticmethod
    def pack(weight: GroupedInt) -> tuple[Tensor, int, Tensor]:
        """PyTorch's codes mean (code − 8) · scale + shift; so shift = (8 − zero) · scale."""
        codes = unpack(weight.codes, 4, weight.group_size).flatten(1).int()
        scales = weight.scales.float()
        zeros = 8.0 if weight.zeros is None else weight.zeros.float()
        pairs = torch.stack([scales, (8.0 - zeros) * scales], dim=-1)  # [N, groups, 2]
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        return packed, weight.group_size, pairs.transpose(0, 1).contiguous().bfloat16()

    run = staticmethod(torch.ops.aten._weight_int4pack_mm_for_cpu)


def product_for(weight: QuantizedWeight) -> type[Int8] | type[Int4] | None:
    """Which of PyTorch's products reads this matrix; None if none does."""
    if not isinstance(weight, GroupedInt):
        return None
    return next((product for product in (Int8, Int4) if product.accepts(weight)), None)
