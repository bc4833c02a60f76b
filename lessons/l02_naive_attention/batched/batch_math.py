"""Sums, maxima and draws for a batch; part of batch_sampling.py.

A row of the vocabulary is seen in blocks: [B, V] as [B, blocks, BLOCK]. A sum or a search then goes
over the blocks first, and into one block afterwards. No function reads a value back to Python, so
none of them waits for the GPU.

Source: the inverse-CDF draw (Devroye 1986, *Non-uniform random variate generation*, chapter 3).
"""

import math

import torch
from torch import Tensor

BLOCK = 256

# ---------------------------------------------------------------- blocks


class Workspace:
    """Memory that every step writes again. On a CPU fresh memory costs more than the arithmetic."""

    def __init__(self):
        self.memory = torch.empty(0)

    def tensors(
        self, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """`count` tensors of one shape, [count, *shape], that hold anything."""
        numel = count * math.prod(shape)
        is_alike = self.memory.dtype == dtype and self.memory.device == device
        if not is_alike or self.memory.numel() < numel:
            # A tensor made in inference mode could not be written outside it later.
            with torch.inference_mode(False):
                self.memory = torch.empty(numel, dtype=dtype, device=device)
        return self.memory[:numel].view(count, *shape)


def blocks_of(vocab_size: int) -> int:
    """How many blocks hold a row; the last may be partly empty."""
    return math.ceil(vocab_size / BLOCK)


def one_block(x: Tensor, block: Tensor) -> Tensor:
    """One block of each row. x: [B, blocks, BLOCK], block: [B, 1] -> [B, BLOCK]."""
    index = block[:, :, None].expand(-1, -1, BLOCK)
    return x.gather(1, index).squeeze(1)


def total(x: Tensor) -> Tensor:
    """The sum of each row. x: [B, blocks, BLOCK] -> [B, 1, 1] float64.

    Inside a block in x's own precision, because converting a row costs more than summing it.
    """
    sums = x.sum(dim=-1, keepdim=True)
    return sums.sum(dim=1, keepdim=True, dtype=torch.float64)


def first_largest(x: Tensor, block_maxima: Tensor) -> Tensor:
    """The id of each row's largest entry, the smallest id among ties.

    x: [B, blocks, BLOCK], block_maxima: [B, blocks] -> [B]. On a CPU an argmax over the whole row
    takes ten times as long as these two.
    """
    block = block_maxima.argmax(dim=-1, keepdim=True)
    slot = one_block(x, block).argmax(dim=-1, keepdim=True)
    return (block * BLOCK + slot).squeeze(1)


# ---------------------------------------------------------------- draws


def block_masses(p: Tensor) -> Tensor:
    """The sum of each block. p: [B, blocks, BLOCK] -> [B, blocks] float64, so that a token keeps
    its share even if it is a billionth of the row.
    """
    return p.sum(dim=-1, dtype=torch.float64)


def draw_tokens(p: Tensor, u: Tensor) -> Tensor:
    """One token a row by inverse CDF. p: [B, blocks, BLOCK], need not sum to 1; u: [B] float64, in
    [0, 1) -> [B] int64. The same u gives the same token as in sampling.draw.
    """
    masses = block_masses(p)
    mass = u[:, None] * masses.sum(dim=-1, keepdim=True)
    return at_mass(p, masses, mass).squeeze(1)


def at_mass(p: Tensor, masses: Tensor, mass: Tensor) -> Tensor:
    """The first id at which the running sum of the row exceeds `mass`; never one where p is 0.

    p: [B, blocks, BLOCK]; masses: [B, blocks], made by block_masses; mass: [B, 1] float64. A mass
    beyond the row's sum gives the last id with p > 0. -> [B, 1] int64.
    """
    block, rest = _first_above(masses, mass)
    entries = one_block(p, block).double()
    slot, _ = _first_above(entries, rest)
    return block * BLOCK + slot


def _first_above(p: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """p: [B, N] float64, mass: [B, 1] -> the first index whose running sum exceeds the mass, and
    what the mass exceeds the sum in front of it by; both [B, 1].
    """
    running = p.cumsum(dim=-1)
    # 0 where p is 0, because a parallel cumsum may round a zero into a small step
    reached = running * (p > 0)
    # A block's sum and the running sum inside it round differently, so stay below the end.
    end = reached.amax(dim=-1, keepdim=True)
    mass = torch.minimum(mass, end * (1 - 2.0**-52))
    is_above = (reached > mass).to(torch.uint8)
    index = is_above.argmax(dim=-1, keepdim=True)  # the first 1
    in_front = running.gather(1, index) - p.gather(1, index)
    return index, mass - in_front
