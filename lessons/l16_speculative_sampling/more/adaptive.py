"""How many tokens to draft: a fixed number, or the number that the formula of speed.py recommends
for the acceptance that a request has shown so far.
"""

from lessons.l02_naive_attention.request import Request
from lessons.l16_speculative_sampling.more.speed import best_count

# What is believed before the first step: this many tokens of which so many stayed.
BELIEVED_TESTED, BELIEVED_KEPT = 8, 6


class FixedCount:
    """Always K."""

    def __init__(self, count: int):
        self.most = count

    def count_for(self, request: Request) -> int:
        """How many tokens to draft for it now."""
        return self.most

    def note(self, request: Request, drafted: int, kept: int) -> None:
        """What became of a step's draft."""

    def forget(self, request: Request) -> None:
        """It has finished."""


class AdaptiveCount:
    """For each request the best K from 0 to `most`.

    It looks only at tokens whose fate is decided. A K that depended on the drafted tokens
    themselves would change the distribution.
    """

    def __init__(self, most: int, cost_ratio: float, every: int = 16):
        self.most, self.cost_ratio = most, cost_ratio
        self.every = every  # steps after which a request that drafts nothing tries a token again
        self.seen: dict[int, tuple[int, int, int]] = {}  # tested, kept, steps without a draft

    def count_for(self, request: Request) -> int:
        """How many tokens to draft for it now."""
        tested, kept, idle = self.seen.get(request.row, (0, 0, 0))
        alpha = (kept + BELIEVED_KEPT) / (tested + BELIEVED_TESTED)
        count = best_count(alpha, self.cost_ratio, self.most)
        return 1 if count == 0 and idle >= self.every else count

    def note(self, request: Request, drafted: int, kept: int) -> None:
        """What became of a step's draft."""
        tested, was_kept, idle = self.seen.get(request.row, (0, 0, 0))
        # After the first rejection nothing was tested.
        tested += min(drafted, kept + 1)
        idle = 0 if drafted else idle + 1
        self.seen[request.row] = tested, was_kept + kept, idle

    def forget(self, request: Request) -> None:
        """It has finished, and another request may get its number."""
        self.seen.pop(request.row, None)
