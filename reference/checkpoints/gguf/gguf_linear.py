"""Layers over llama.cpp's blocks, which stay as they are in memory.

A product on a CPU decodes a few rows at a time: as float32 they fit into a core's cache, so the
numbers are multiplied while they are there and never travel to memory. `dequantize_matmul` decodes
the whole matrix first, writes it to memory and reads it back.
"""

import torch
from torch import Tensor, nn

from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS, GgufWeight
from lessons.l18_weight_quantization.linear import Multiply
from lessons.l18_weight_quantization.weights import GroupedInt, QuantizedWeight

SLICE = 2**18  # numbers that are decoded at a time: 1 MiB of float32, a part of a core's L2 cache


def gguf_matmul(x: Tensor, weight: GgufWeight, bias: Tensor | None = None) -> Tensor:
    """x: [T, K]; bias: [N] or None -> [T, N] in x's dtype."""
    num_rows, columns = weight.shape
    out = torch.empty(*x.shape[:-1], num_rows, dtype=x.dtype, device=x.device)
    # a GPU decodes it all at once, because each slice would be a dozen launches
    step = num_rows if x.is_cuda else max(1, SLICE // columns)
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        out[..., rows] = x @ weight.rows(rows).dequantize().to(x.dtype).T
    return out if bias is None else out + bias


def as_grouped(weight: GgufWeight) -> QuantizedWeight:
    """Q4_0 and Q8_0 with codes and scales in a tensor each, as the lesson's kernels read them:
    groups of 32 without zero points, the same numbers. Other formats as they are.

    Q4_0's halves of a byte are 16 columns apart, which is half a group: GroupedInt's own order.
    """
    if weight.format not in ("Q4_0", "Q8_0"):
        return weight
    bits = 4 if weight.format == "Q4_0" else 8
    blocks = weight.blocks.unflatten(1, (-1, FORMATS[weight.format].bytes))
    scales, codes = blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]
    if bits == 8:
        codes = codes ^ 128  # from −128 … 127 to 0 … 255
    return GroupedInt(codes.flatten(1), scales, None, bits, 32)


def with_kernels(kernels: Multiply) -> Multiply:
    """The product of a model that was loaded with `as_grouped`: the kernels where they read the
    format, `gguf_matmul` elsewhere.
    """

    def multiply(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, GgufWeight):
            return gguf_matmul(x, weight, bias)
        return kernels(x, weight, bias)

    return multiply


class GgufEmbedding(nn.Module):
    """An embedding of quantized rows; a token's row is decoded when it is looked up."""

    def __init__(self, weight: GgufWeight, dtype: torch.dtype):
        super().__init__()
        self.quantized, self.dtype = weight, dtype

    def forward(self, tokens: Tensor) -> Tensor:  # [T] -> [T, hidden_size]
        rows = self.quantized.rows(tokens.flatten()).dequantize().to(self.dtype)
        return rows.unflatten(0, tokens.shape)
