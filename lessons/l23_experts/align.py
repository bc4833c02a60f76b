"""Which rows each expert multiplies: the pairs of a token and one of its experts, sorted by expert
and cut into tiles of equal height.

A router gives each token k experts, so T tokens make T · k pairs; pair p is token p // k. A product
that runs all experts in one launch gives each program a tile of block_m pairs of one expert.
Experts have different numbers of pairs, so each one's last tile is filled up with a number that is
no pair, T · k:

    chosen [[1, 0], [1, 2], [1, 0]], block_m 2            pairs 0 … 5, and 6 for "none"
    pairs   1 5 | 0 2 | 4 6 | 3 6 | 6 6                   expert 1 has three pairs, so two tiles
    experts   0     1     1     2    -1                   the last tile is not used

How many tiles are used depends on what the router chose, which Python does not know until the GPU
has told it. To wait for that would cost more than a few empty programs, and a CUDA graph cannot
wait at all. So there are always `most_tiles` of them, the most that so many pairs can need.

Source: vLLM's moe_align_block_size (csrc/moe/moe_align_sum_kernels.cu), whose layout this is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NOT_USED = -1  # the expert of a tile without pairs


class Alignment(NamedTuple):
    """pairs: [num_tiles · block_m] int32, T · k where a tile has no pair. experts: [num_tiles]
    int32, the expert of each tile, NOT_USED after the last one that is used.
    """

    pairs: Tensor
    experts: Tensor
    block_m: int


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Tiles that so many pairs may need: each expert's last one holds one pair or more."""
    return min(num_pairs, (num_pairs + num_experts * (block_m - 1)) // block_m)


def align_in_python(chosen: Tensor, num_experts: int, block_m: int) -> Alignment:
    """The same as `align`, pair by pair; Python waits for the values. chosen: [T, k]."""
    pairs_of = [[] for _ in range(num_experts)]
    for pair, expert in enumerate(chosen.flatten().tolist()):
        if 0 <= expert < num_experts:
            pairs_of[expert].append(pair)
    none = chosen.numel()
    pairs, experts = [], []
    for expert, own in enumerate(pairs_of):
        own += [none] * (-len(own) % block_m)
        pairs += own
        experts += [expert] * (len(own) // block_m)
    unused = most_tiles(none, num_experts, block_m) - len(experts)
    pairs += [none] * (unused * block_m)
    experts += [NOT_USED] * unused
    as_int32 = dict(dtype=torch.int32, device=chosen.device)
    return Alignment(torch.tensor(pairs, **as_int32), torch.tensor(experts, **as_int32), block_m)


def align(chosen: Tensor, num_experts: int, block_m: int) -> Alignment:
    """chosen: [T, k] integers, the experts of each token; those outside of 0 … num_experts - 1 are
    on another rank and in no tile. Pairs of an expert keep their order.

    Every shape follows from the shapes given, so Python waits for no value.
    """
    chosen = chosen.flatten()
    num_pairs, device = len(chosen), chosen.device
    is_own = (chosen >= 0) & (chosen < num_experts)
    key = torch.where(is_own, chosen, num_experts)  # the others after all experts
    key, order = key.sort(stable=True)
    expert = torch.arange(num_experts + 1, device=device)
    starts = torch.searchsorted(key, expert.to(key.dtype))  # of each expert in `order`
    counts = starts.diff()
    num_tiles = (counts + block_m - 1) // block_m  # of each expert
    tile_ends = num_tiles.cumsum(0)

    tile = torch.arange(most_tiles(num_pairs, num_experts, block_m), device=device)
    owner = torch.searchsorted(tile_ends, tile, right=True)
    is_used = owner < num_experts
    owner = owner.clamp(max=num_experts - 1)
    first_tile = (tile_ends - num_tiles)[owner]
    row = (tile - first_tile)[:, None] * block_m + torch.arange(block_m, device=device)
    is_pair = is_used[:, None] & (row < counts[owner, None])
    place = (starts[owner, None] + row).clamp(max=num_pairs - 1)
    pairs = torch.where(is_pair, order[place], num_pairs)
    experts = torch.where(is_used, owner, NOT_USED)
    return Alignment(pairs.flatten().int(), experts.int(), block_m)
