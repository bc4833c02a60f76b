"""Loads that are measured while a model serves, and a placement that follows them.

    balancer = Balancer(in_order(256, 32), window=8, interval=8, renew=anew)
    for chosen in steps:
        balancer.see(chosen)             # counts pairs; every 8th step the placement may change

Engines do it for each layer. They count pairs on the GPU, and add up the counts of all ranks now
and then, because every rank has to find the same placement.

Source: vLLM's EPLBConfig (window_size, step_interval) and vllm/distributed/eplb.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from lessons.l23_experts.ranks.load import load_of
from lessons.l23_experts.ranks.mending import mended
from lessons.l23_experts.ranks.placement import Placement, moved, place
from lessons.toolbox.model.arguments import check_whole

Renew = Callable[[Placement, Sequence[float]], Placement]


def anew(before: Placement, loads: Sequence[float]) -> Placement:
    """As EPLB: whatever was before."""
    return place(loads, len(before.experts), before.size)


def by_few_moves(most_moves: int) -> Renew:
    """Of `before` what so many moves make of it."""
    return partial(mended, most_moves=most_moves)


class Balancer:
    """window: of how many steps loads are added up; interval: after how many steps the placement is
    renewed; renew: by which rule, from (placement, loads). num_moved: experts that travelled.
    """

    def __init__(self, placement: Placement, window: int, interval: int, renew: Renew):
        check_whole(window=window, interval=interval)
        self.placement, self.renew, self.interval = placement, renew, interval
        self.recent: deque[tuple[int, ...]] = deque(maxlen=window)
        self.num_steps = self.num_moved = 0

    @property
    def loads(self) -> list[int]:
        """Pairs of each expert in the last steps."""
        return [sum(counts) for counts in zip(*self.recent)]

    def see(self, chosen: Tensor) -> None:
        """Note a step's choices, [T, k], after the step has run; the next one may run on another
        placement.
        """
        self.recent.append(load_of(chosen, len(self.placement.slots_of)).counts)
        self.num_steps += 1
        if self.num_steps % self.interval == 0:
            after = self.renew(self.placement, self.loads)
            self.num_moved += moved(self.placement, after)
            self.placement = after
