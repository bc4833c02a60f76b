"""Products of which each row has the same bits, whatever rows are computed beside it.

A sum of floating-point numbers depends on the order of its additions, and a library takes another
order for another number of rows: another tile, another split of the long dimension, another
function for a single row. So a row of `x @ weight.T` changes in its last bits when a neighbour
arrives. Two ways out:

- `InTiles`, on a CPU: any layer is called with ROWS rows at a time, always. The library then sees
  one shape, and takes one order.
- `linear_kernel`, on a GPU: its tiles are those of the dtype and the chip, never those of the
  batch, and one program adds up a whole row of the weight. It is lesson 7's product without an
  epilogue.

Source: He et al. 2025, Defeating Nondeterminism in LLM Inference (Thinking Machines Lab).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder, swap
from lessons.l07_kernel_fusion.epilogue import check_product, launch, load_tile, store_tile
from lessons.toolbox.kernels.triton_ import tl, triton

ROWS = 16  # as many tokens as a small batch decodes; more would be padding for it


class InTiles(nn.Module):
    """A layer that is given ROWS rows at a time, the last of them padded with zeros."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.widths = getattr(layer, "widths", None)  # of several layers in one

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        tiles = F.pad(x, (0, 0, 0, -len(x) % ROWS)).split(ROWS)
        return torch.cat([self.layer(tile) for tile in tiles])[: len(x)]


@triton.jit
def linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    size,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: a tile of x · weightᵀ, over all of K. x: [R, K], weight: [I, K] -> out: [R,
    I].
    """
    start_m, start_n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, size, BLOCK_K):
        x = load_tile(x_ptr, start_m, num_rows, stride_x, k, size, BLOCK_M, BLOCK_K)
        w = load_tile(weight_ptr, start_n, num_columns, stride_weight, k, size, BLOCK_N, BLOCK_K)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    store_tile(out_ptr, acc, start_m, start_n, num_rows, num_columns, BLOCK_M, BLOCK_N)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ, each row with the same bits in any batch. x: [R, K], weight: [I, K], rows dense
    -> [R, I]. Raises ValueError.
    """
    check_product(x, weight=weight)
    return launch(linear_kernel, x, weight)


class KernelLinear(nn.Module):
    """An nn.Linear by `linear_kernel`, its bias added afterwards, value by value."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias


def with_same_bits(model: Decoder, kinds: tuple[type, ...] = (nn.Linear,)) -> Decoder:
    """A twin whose products have the same bits in any batch. kinds: of the layers that multiply; on
    a GPU those are nn.Linear.
    """
    new = KernelLinear if model.device.type == "cuda" else InTiles
    return swap(model, dict.fromkeys(kinds, new))
