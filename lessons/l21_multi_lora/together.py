"""Layers that multiply the same x, as q, k and v do, with their adapters in two launches."""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels.slices import expand_slices_kernel, shrink_slices_kernel
from lessons.l21_multi_lora.kernels.weights import SlotWeights
from lessons.l21_multi_lora.optimized import Tiles, block_of_ranks, check_add_lora, tiles_for
from lessons.toolbox.kernels.triton_ import triton

MOST_SLICES = 3  # q, k and v; fewer work as well, as gate and up


class SliceWeights(NamedTuple):
    """The slots of several layers in one place: what SlotWeights has for each, one after the other.

    a: [slices, S, R, K]; b: [S · R · ΣN], a slice's [S, R, N] and then the next one's; scaling,
    ranks: [slices, S]. outputs: N of each slice.
    """

    a: Tensor
    b: Tensor
    scaling: Tensor
    ranks: Tensor
    outputs: tuple[int, ...]

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_rank: int,
        in_features: int,
        outputs: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "SliceWeights":
        """No adapter in any slot. Raises ValueError for more slices than the kernel has."""
        if not 0 < len(outputs) <= MOST_SLICES:
            raise ValueError(f"outputs: got {len(outputs)} slices; accepted: 1 to {MOST_SLICES}")
        new, count = dict(dtype=dtype, device=device), len(outputs)
        return cls(
            torch.zeros(count, num_slots, max_rank, in_features, **new),
            torch.zeros(num_slots * max_rank * sum(outputs), **new),
            torch.zeros(count, num_slots, dtype=torch.float32, device=device),
            torch.zeros(count, num_slots, dtype=torch.int32, device=device),
            outputs,
        )

    def layers(self) -> list[SlotWeights]:
        """Each slice as a layer of its own, over the same memory: what `put` writes is here."""
        num_slots, max_rank = self.a.shape[1:3]
        ends = [num_slots * max_rank * end for end in accumulate(self.outputs)]
        return [
            SlotWeights(a, self.b[begin:end].view(num_slots, max_rank, outputs), scaling, ranks)
            for a, begin, end, outputs, scaling, ranks in zip(
                self.a, [0, *ends], ends, self.outputs, self.scaling, self.ranks
            )
        ]


def add_lora_together(
    outs: list[Tensor],
    x: Tensor,
    weights: SliceWeights,
    batch: AdapterBatch,
    tiles: Tiles | None = None,
) -> list[Tensor]:
    """optimized.add_lora of each slice, in two launches instead of two each; returns outs. outs:
    [T, N] for each slice, the base products; x: [T, K]. Raises ValueError for what does not fit.
    """
    check(outs, x, weights, batch)
    if not len(batch.tiles) or not any(weights.outputs):
        return outs
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = tiles_for(x) if tiles is None else tiles
    (num_rows, size), (num_slices, num_slots, max_rank, _) = x.shape, weights.a.shape
    num_splits, block_r = triton.cdiv(size, tiles.split_k), block_of_ranks(max_rank)
    rank_blocks = triton.cdiv(max_rank, block_r)
    shape = num_slices, num_splits, num_rows, max_rank
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    shrink_slices_kernel[len(batch.tiles), num_splits, num_slices * rank_blocks](
        x,
        weights.a,
        batch.order,
        batch.tiles,
        weights.ranks,
        partials,
        num_rows,
        size,
        max_rank,
        num_slots,
        x.stride(0),
        BLOCK_M=batch.block_m,
        BLOCK_R=block_r,
        BLOCK_K=tiles.block_k,
        SPLIT_K=tiles.split_k,
        RANK_BLOCKS=rank_blocks,
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    missing = MOST_SLICES - num_slices  # a slice that is not there has no outputs, so no program
    shown, outputs = outs + outs[:1] * missing, (*weights.outputs, *[0] * missing)
    num_output_tiles = sum(triton.cdiv(count, tiles.block_n) for count in outputs)
    expand_slices_kernel[len(batch.tiles), num_output_tiles](
        partials,
        weights.b,
        batch.order,
        batch.tiles,
        weights.ranks,
        weights.scaling,
        *shown,
        num_rows,
        *outputs,
        max_rank,
        num_slots,
        num_splits,
        *(out.stride(0) for out in shown),
        BLOCK_M=batch.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_R=block_r,
        num_warps=tiles.num_warps,
    )
    return outs


def check(outs: list[Tensor], x: Tensor, weights: SliceWeights, batch: AdapterBatch) -> None:
    """Raise ValueError unless there is an out for each slice that check_add_lora accepts."""
    layers = weights.layers()
    if len(outs) != len(layers):
        raise ValueError(f"outs: got {len(outs)}; accepted: {len(layers)}, one a slice")
    for out, layer in zip(outs, layers):
        check_add_lora(out, x, layer, batch)


class Together:
    """Layers that are called one after the other with the same x: the first call computes all.

    layers: LoRALinears in the order in which they are called; their weights become slices of one
    SliceWeights.
    """

    def __init__(self, layers: list):
        num_slots, max_rank, size = layers[0].weights.a.shape
        outputs = tuple(layer.out_features for layer in layers)
        like = dict(dtype=layers[0].weights.a.dtype, device=layers[0].weights.a.device)
        self.weights = SliceWeights.empty(num_slots, max_rank, size, outputs, **like)
        self.layers = layers
        self.asked = None  # (x, batch) of the first call
        self.outs: dict[int, Tensor] = {}  # what the other layers have not been asked for yet
        for layer, slice_weights in zip(layers, self.weights.layers()):
            layer.weights, layer.together = slice_weights, self

    def output_of(self, layer, x: Tensor, batch: AdapterBatch) -> Tensor | None:
        """x: [T, K] -> [T, N] of one of the layers; None if the first one was called with another
        x or batch, so that this one has to compute its own.
        """
        if layer is self.layers[0]:
            outs = [each.base(x) for each in self.layers]
            add_lora_together(outs, x, self.weights, batch)
            self.asked, self.outs = (x, batch), dict(enumerate(outs))
        is_same = self.asked is not None and self.asked[0] is x and self.asked[1] is batch
        found = self.outs.pop(self.layers.index(layer), None) if is_same else None
        if not self.outs:
            self.asked = None  # so that x can be freed
        return found
