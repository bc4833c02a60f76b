"""What speculation gains, as a formula: alpha, K and c.

alpha: the probability that a drafted token stays, taken as the same for each. K: drafted tokens of
a step. c: the time of one pass of the draft over the time of one pass of the target.

Source: Leviathan et al. 2023, section 3.
"""

import torch
from torch import Tensor


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """The probability that a token drawn from q stays: Σ min(p, q). p, q: [..., V] -> [...]."""
    return torch.minimum(p, q).sum(dim=-1)


def expected_tokens(alpha: float, count: int) -> float:
    """Tokens that a step emits on average: 1 + α + α² + … + α^K."""
    return sum(alpha**kept for kept in range(count + 1))


def speedup(alpha: float, count: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """Tokens per second over those of plain decoding.

    verify_cost: time of a pass over K + 1 tokens of each sequence, over that with one token of
    each. It is 1 while reading the weights takes longer than the arithmetic.
    """
    return expected_tokens(alpha, count) / (count * cost_ratio + verify_cost)


def best_count(alpha: float, cost_ratio: float, most: int) -> int:
    """The K from 0 to `most` with the largest speed-up; 0 is plain decoding."""
    return max(range(most + 1), key=lambda count: speedup(alpha, count, cost_ratio))
