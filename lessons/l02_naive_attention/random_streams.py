"""The random numbers of sampling: one stream for each seed, one number for each token.

Which number draws a token is part of the specification: the seed says which stream, and the count
of tokens drawn so far says which place in it. No sampler keeps a state between two tokens. So a
seeded request gets the same numbers from every sampler, alone or in any batch, and also when it is
computed again after a preemption.

Source: SplitMix64 (Steele, Lea and Flood 2014, *Fast splittable pseudorandom number generators*,
figure 16).
"""

import torch
from torch import Tensor


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits, which is what PyTorch has."""
    return constant - 2**64 if constant >= 2**63 else constant


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR = _signed(0x94D049BB133111EB)


def streams_of(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Where the stream of each seed begins: 0 <= seed < 2**63, B of them -> [B] int64.

    Mixed, because the streams of two seeds that differ by a multiple of GOLDEN would overlap.
    """
    return mix64(torch.tensor(seeds, dtype=torch.int64, device=device))


def uniform(stream: Tensor, position: Tensor) -> Tensor:
    """The random number at `position` of each stream. Both: [B] int64 -> [B] float64, in [0, 1).

    stream: made by streams_of. position: the tokens drawn so far, 0 for the first token.
    """
    # + 1, because SplitMix64 advances before it gives its first number
    bits = mix64(stream + (position + 1) * GOLDEN)
    # a float64 has 53 bits
    return _shift_right(bits, 11).double() * 2.0**-53


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer: different numbers stay different, and similar ones become unlike.

    x: int64, any shape -> int64 of that shape. Products wrap around, as they do in the original.
    """
    x = x ^ _shift_right(x, 30)
    x = x * FIRST_FACTOR
    x = x ^ _shift_right(x, 27)
    x = x * SECOND_FACTOR
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # `>>` on int64 copies the sign bit downwards, so the copies are masked away.
    mask = (1 << (64 - bits)) - 1
    return (x >> bits) & mask
