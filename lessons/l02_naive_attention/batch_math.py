"""The parts of batch_sampling.py that know tensors only: cuts without a sort, draws without a loop.

Every row of a batch is cut into blocks: [B, V] is seen as [B, blocks, BLOCK]. Sums and searches
then run in two steps, first over the blocks of a row, then inside one block. No function reads a
value back to Python, so none of them waits for the GPU.

Sources: SplitMix64 (Steele, Lea and Flood 2014, *Fast splittable pseudorandom number generators*,
figure 16); the inverse-CDF draw (Devroye 1986, *Non-uniform random variate generation*, chapter 3).
"""

import math

import torch
from torch import Tensor

BLOCK = 256

# ---------------------------------------------------------------- random numbers


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits; PyTorch has no wider integers."""
    return constant - 2**64 if constant >= 2**63 else constant


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR, SECOND_FACTOR = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64 bits in which each input bit flips about half of
    the output bits. x: int64, any shape -> int64 of that shape; products wrap around.
    """
    x = (x ^ _shift_right(x, 30)) * FIRST_FACTOR
    x = (x ^ _shift_right(x, 27)) * SECOND_FACTOR
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # `>>` on int64 copies the sign bit downwards, so the copies are masked away.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(stream: Tensor, position: Tensor) -> Tensor:
    """The random number at `position` of each stream. Both: [B] int64 -> [B] float64, in [0, 1).

    SplitMix64 started at `stream`. Nothing is remembered between two calls, so a request that was
    preempted goes on where it stopped. Make streams by mix64(seed): those of neighbouring seeds
    would otherwise overlap.
    """
    bits = mix64(stream + (position + 1) * GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


# ---------------------------------------------------------------- blocks


class Workspace:
    """Memory that every step writes again. On a CPU fresh memory costs more than the arithmetic."""

    def __init__(self):
        self.memory = torch.empty(0)

    def tensors(self, count: int, shape: tuple, dtype: torch.dtype, device) -> Tensor:
        """`count` tensors of one shape, [count, *shape], that hold anything."""
        numel = count * math.prod(shape)
        fits = self.memory.dtype == dtype and self.memory.device == device
        if not fits or self.memory.numel() < numel:
            # A tensor made in inference mode could not be written outside it later.
            with torch.inference_mode(False):
                self.memory = torch.empty(numel, dtype=dtype, device=device)
        return self.memory[:numel].view(count, *shape)


def blocks_of(vocab_size: int) -> int:
    """How many blocks hold a row; the last may be partly empty."""
    return math.ceil(vocab_size / BLOCK)


def total(x: Tensor) -> Tensor:
    """The sum of each row. x: [B, blocks, BLOCK] -> [B, 1, 1] float64.

    Inside a block in x's own precision, so that a row is read once and not converted.
    """
    return x.sum(dim=-1, keepdim=True).sum(dim=1, keepdim=True, dtype=torch.float64)


def first_largest(x: Tensor, block_maxima: Tensor) -> Tensor:
    """The id of each row's largest entry, the smallest id among ties.

    x: [B, blocks, BLOCK], block_maxima: [B, blocks] -> [B]. A search among the blocks, then inside
    one: on a CPU an argmax over the whole row takes ten times as long.
    """
    block = block_maxima.argmax(dim=-1, keepdim=True)
    return (block * BLOCK + one_block(x, block).argmax(dim=-1, keepdim=True)).squeeze(1)


def one_block(x: Tensor, block: Tensor) -> Tensor:
    """One block of each row. x: [B, blocks, BLOCK], block: [B, 1] -> [B, BLOCK]."""
    return x.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)


# ---------------------------------------------------------------- draws


def block_masses(p: Tensor) -> Tensor:
    """The sum of each block, p: [B, blocks, BLOCK] -> [B, blocks] float64: an unlikely token keeps
    its exact share even behind a million others.
    """
    return p.sum(dim=-1, dtype=torch.float64)


def draw_tokens(p: Tensor, u: Tensor) -> Tensor:
    """One token a row by inverse CDF. p: [B, blocks, BLOCK], need not sum to 1; u: [B] float64, in
    [0, 1) -> [B] int64. The same u gives the same token as in sampling.draw.
    """
    masses = block_masses(p)
    return at_mass(p, masses, u[:, None] * masses.sum(dim=-1, keepdim=True)).squeeze(1)


def at_mass(p: Tensor, masses: Tensor, mass: Tensor) -> Tensor:
    """The first id at which the running sum of the row exceeds `mass`; never one where p is 0.

    p: [B, blocks, BLOCK]; masses: [B, blocks], of block_masses; mass: [B, 1] float64, below the
    row's sum -> [B, 1] int64.
    """
    block, rest = _first_above(masses, mass)
    slot, _ = _first_above(one_block(p, block).double(), rest)
    return block * BLOCK + slot


def _first_above(p: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """p: [B, N] float64, mass: [B, 1] -> the first index with running sum > mass, and how much of
    the mass is left when it is reached; both [B, 1].
    """
    # 0 where p is 0, because a parallel cumsum may round a zero into a small step
    reached = p.cumsum(dim=-1) * (p > 0)
    # The sum of a block and the running sum inside it round differently: stay below the end.
    mass = torch.minimum(mass, reached.amax(dim=-1, keepdim=True) * (1 - 2.0**-52))
    index = (reached > mass).to(torch.uint8).argmax(dim=-1, keepdim=True)  # the first 1
    return index, mass - (reached.gather(1, index) - p.gather(1, index))
