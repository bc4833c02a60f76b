"""What the tests of sparse attention share: sequences whose index keys and latents are in pages in
any order, with poison wherever no key is, and rows of scores that are hard to choose from.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l06_mla.optimized import Tiles
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.inputs import apart
from lessons.toolbox.proof.numerics import poison_

DEVICE = default_device()  # without a GPU the kernels run in Triton's interpreter


class Paged(NamedTuple):
    """Queries of several sequences and what they read."""

    q: Tensor  # [T, H, rank + rope]
    latents: Tensor  # [num_blocks, block_size, rank + rope]
    q_index: Tensor  # [T, Hi, Di]
    weights: Tensor  # [T, Hi] float32
    keys: Tensor  # [num_blocks, block_size, Di]
    scales: Tensor | None  # [num_blocks, block_size] float32
    block_table: Tensor  # [B, max_blocks] int32; what is not used is 2^30
    sequences: Tensor  # [T] int32
    positions: Tensor  # [T] int32


def paged(
    lengths: list[int],
    block_size: int = 4,
    heads: int = 3,
    rank: int = 32,
    rope: int = 16,
    index_heads: int = 5,
    index_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    new: list[int] | None = None,
) -> Paged:
    """Random sequences of these lengths, the last `new` tokens of each as queries (default: one).
    Blocks are given out in a random order, and one block is no sequence's. Tensors are `apart`.
    """
    counts = [-(-n // block_size) for n in lengths]
    num_blocks = sum(counts) + 1
    order = torch.randperm(num_blocks, device=DEVICE)[: sum(counts)].int()
    table = torch.full((len(lengths), max([1, *counts]) + 1), 2**30, device=DEVICE).int()
    latents = torch.randn(num_blocks, block_size, rank + rope, dtype=dtype, device=DEVICE)
    keys = torch.randn(num_blocks, block_size, index_dim, dtype=dtype, device=DEVICE)
    scales = None
    if fp8:
        keys, scales = FORMATS["fp8"].quantize(keys.float())
        scales = scales[..., 0]
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=DEVICE)
    for b, blocks in enumerate(order.split(counts)):
        table[b, : len(blocks)] = blocks
        places = torch.arange(lengths[b], device=DEVICE)
        used[blocks[places // block_size].long(), places % block_size] = True
    for x in (latents, scales if fp8 else keys):
        x[~used] = poison_(x[~used])
    new = new or [1] * len(lengths)
    sequences = torch.tensor([b for b, n in enumerate(new) for _ in range(n)]).int().to(DEVICE)
    positions = [lengths[b] - n + i for b, n in enumerate(new) for i in range(n)]
    tokens = len(positions)
    q, latents, q_index, weights, keys, table, *coded = apart(
        torch.randn(tokens, heads, rank + rope, dtype=dtype, device=DEVICE),
        latents,
        torch.randn(tokens, index_heads, index_dim, dtype=dtype, device=DEVICE),
        torch.randn(tokens, index_heads, device=DEVICE),
        keys,
        table,
        *([scales] if fp8 else []),
    )
    return Paged(
        q,
        latents,
        q_index,
        weights,
        keys,
        coded[0] if fp8 else None,
        table,
        sequences,
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
    )


def some_keys(case: Paged, k: int) -> Tensor:
    """A random list for each query, of at most k keys that it sees: [T, k] int32, ascending, then
    -1.
    """
    indices = torch.full((len(case.q), k), -1, dtype=torch.int32, device=DEVICE)
    for t, position in enumerate(case.positions.tolist()):
        own = torch.randperm(position + 1)[:k].sort().values
        indices[t, : len(own)] = own
    return apart(indices)[0]


def hard_rows(width: int) -> dict[str, Tensor]:
    """Rows of scores in which a choice is easily wrong: {what they are: [width] float32}."""
    normal = torch.randn(width, device=DEVICE)
    few = torch.randint(0, 3, (width,), device=DEVICE).float()
    signs = few - 1.0
    signs[::2] *= -1.0  # makes -0.0 of 0.0
    tiny = normal * 1e-42  # subnormal
    some = normal.clone()
    some[::3] = -math.inf
    broken = normal.clone()
    broken[torch.randperm(width)[: max(1, width // 9)]] = math.nan
    limits = normal.clone()
    limits[0], limits[-1] = math.inf, torch.finfo(torch.float32).max
    near = 1.0 + torch.randint(0, 4, (width,), device=DEVICE) * 2.0**-23  # differ in the last bits
    return {
        "normal": normal,
        "all equal": torch.ones(width, device=DEVICE),
        "all zero": torch.zeros(width, device=DEVICE),
        "few values": few,
        "both zeros": signs,
        "negative": -normal.abs(),
        "subnormal": tiny,
        "some are not there": some,
        "none is there": torch.full((width,), -math.inf, device=DEVICE),
        "NaN": broken,
        "all NaN": torch.full((width,), math.nan, device=DEVICE),
        "infinity": limits,
        "last bits": near,
    }


def index_inputs(case: Paged, width: int) -> list:
    """The arguments of `index_scores`, for scores of so many keys."""
    return [
        case.q_index,
        case.weights,
        case.keys,
        case.scales,
        case.block_table,
        case.sequences,
        case.positions,
        width,
    ]


def clean(inputs: list) -> list:
    """Arguments of `sparse_mla` with zeros for poison, because the plain version multiplies what
    was not chosen by 0.
    """
    return [inputs[0], inputs[1].nan_to_num(0.0), *inputs[2:]]


SMALL_TILES = Tiles(16, 16, 4, 1)
