"""Native sparse attention: three ways to see a long text, mixed by a gate.

    compressed    each block of keys as one key: the whole text, without detail
    selected      the keys of the few blocks that the compressed branch looked at most
    window        the last keys

A query of the model learns all three from the start, so no oracle has to be imitated. What is
selected is blocks and not tokens: their rows are side by side in memory, and all heads of a KV head
share the choice, so each block is read once for all of them.

The numbers of the paper: blocks of 32 that begin every 16 keys are compressed, 16 blocks of 64 are
selected (the first and the last two among them), the window has 512 keys.

Here a block is compressed to its mean. The paper has a small network, which sees the places inside
a block.

Source: Yuan et al. 2025, Native Sparse Attention, sections 3.2 and 3.3.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l28_sparse_attention.naive import sparse_attention, top_k, window_with_sinks


class NsaShape(NamedTuple):
    """Sizes in keys. A selected block is a whole number of strides."""

    block: int = 32  # that is compressed
    stride: int = 16  # from one compressed block to the next
    selected: int = 64  # keys of a selected block
    count: int = 16  # blocks that are selected
    window: int = 512


PAPER = NsaShape()


def compressed(x: Tensor, shape: NsaShape) -> Tensor:
    """Each whole block as its mean. x: [N, Hkv, D] -> [blocks, Hkv, D]."""
    if len(x) < shape.block:
        return x.new_empty(0, *x.shape[1:])
    return x.unfold(0, shape.block, shape.stride).mean(-1)


def compressed_weights(q: Tensor, k: Tensor, positions: Tensor, shape: NsaShape) -> Tensor:
    """What each query head gives each compressed block that ends before it. q: [T, Hq, D], k: [N,
    Hkv, D], positions: [T] -> [T, Hq, blocks]; zeros for a query before the end of the first block.
    """
    keys = compressed(k, shape).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,bhd->thb", q, keys) / math.sqrt(q.shape[-1])
    last = torch.arange(len(keys), device=q.device) * shape.stride + shape.block - 1
    seen = (last <= positions[:, None])[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    has_blocks = seen.any(-1, keepdim=True)
    return torch.where(has_blocks, scores, 0.0).softmax(-1) * has_blocks


def selected_blocks(weights: Tensor, positions: Tensor, count: int, shape: NsaShape) -> Tensor:
    """The blocks that each query looks at most closely. weights: [T, Hq, blocks] of the compressed
    branch, count: keys of the text -> [T, shape.count] int32, ascending, then -1.

    All heads choose together. The first block and the two that end with the query are always taken.
    """
    blocks = -(-count // shape.selected)
    starts = torch.arange(weights.shape[-1], device=weights.device) * shape.stride
    scores = weights.new_zeros(len(weights), blocks)
    # a compressed block lends its weight to each selected block that it touches
    for end in (starts, starts + shape.block - 1):
        scores.index_add_(1, (end // shape.selected).clamp(max=blocks - 1), weights.sum(1))
    own = (positions // shape.selected)[:, None]
    number = torch.arange(blocks, device=weights.device)
    always = (number == 0) | (number >= own - 1)
    scores = scores.masked_fill(always, math.inf).masked_fill(number > own, -math.inf)
    return top_k(scores, shape.count)


def keys_of_blocks(blocks: Tensor, positions: Tensor, size: int) -> Tensor:
    """The keys of blocks up to each query. blocks: [T, count], -1: none -> [T, count * size] int32,
    -1 where there is none.
    """
    keys = blocks[:, :, None] * size + torch.arange(size, device=blocks.device)
    is_key = (blocks[:, :, None] >= 0) & (keys <= positions[:, None, None])
    return torch.where(is_key, keys, -1).flatten(1).to(torch.int32)


def nsa(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, positions: Tensor, shape: NsaShape = PAPER
) -> Tensor:
    """The three branches, each with its gate. q: [T, Hq, D], k: [N, Hkv, D], v: [N, Hkv, Dv],
    gates: [T, Hq, 3] from 0 to 1, positions: [T] -> [T, Hq, Dv].

    In the paper each branch has K and V of its own, so that they do not learn each other's part.
    """
    weights = compressed_weights(q, k, positions, shape)
    values = compressed(v, shape).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    whole = torch.einsum("thb,bhd->thd", weights, values)
    blocks = selected_blocks(weights, positions, len(k), shape)
    chosen = keys_of_blocks(blocks, positions, shape.selected)
    closely = sparse_attention(q, k, v, chosen)
    near = sparse_attention(q, k, v, window_with_sinks(positions, shape.window))
    branches = torch.stack([whole, closely, near], dim=2)  # [T, Hq, 3, Dv]
    return (branches * gates[..., None]).sum(2)
