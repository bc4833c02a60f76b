"""One replica on a virtual clock: a lesson's own scheduler decides each step, and a formula says
how long the step takes.

Read `begin` and `complete`. Most steps of a server are like the step before: the same sequences
decode one token each. Then the scheduler is asked once for all of them, up to the step in which the
first answer ends. `steps_alike` says when this is allowed; tests/test_cluster_simulator.py proves
that the result is the same as asking before each step.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from lessons.l12_paged_kv.blocks import BlockManager, BlockPool, OutOfBlocks
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l14_continuous_batching.loop import Scheduler
from lessons.l14_continuous_batching.naive import DynamicScheduler, PaddedStep
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler
from reference.features.windows.blocks import GONE
from reference.simulator.costs import Deployment
from reference.simulator.tiers import NOWHERE, POOL, VirtualTieredBlocks, VirtualTiers
from reference.simulator.traces import next_tokens

NEVER = float("inf")


class Planned(NamedTuple):
    """A step that the scheduler chose, and the steps like it that follow. ends_s: when each ends;
    began_s: when the first begins.
    """

    step: Step | PaddedStep
    ends_s: np.ndarray
    began_s: float

    def until(self, at_s: float) -> "Planned":
        """Without the steps that would begin later."""
        return self._replace(ends_s=self.ends_s[: 1 + np.searchsorted(self.ends_s, at_s)])


class Replica:
    """A scheduler, its blocks (None for waves, which reserve their memory) and its clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager | None,
        deployment: Deployment,
        clock: VirtualClock,
    ):
        self.scheduler = scheduler
        self.blocks = blocks
        self.deployment = deployment
        self.clock = clock
        self.is_alive = True
        self.planned: Planned | None = None
        self.token_s: dict[int, list[np.ndarray]] = {}  # of each request that is here
        self.here: dict[int, Sequence] = {}
        self.history: list[tuple[float, list[tuple[int, int]]]] | None = None
        self.caches = isinstance(blocks, CachingBlockManager)
        # Whether windows give blocks back while a sequence runs, in steps that take none, too.
        grows = isinstance(scheduler, PreemptiveScheduler)
        self.gives_back = grows and deployment.groups is not None
        tiered = isinstance(blocks, VirtualTieredBlocks)
        self.tiers: VirtualTiers | None = blocks.connector if tiered else None
        self.found: Counter[str] = Counter()  # tokens of prompts by where their K and V were

    @property
    def next_event_s(self) -> float:
        """When it can do something by itself: a step ends, a load, or the window of a wave."""
        if not self.is_alive:
            return NEVER
        if self.planned is not None:
            return float(self.planned.ends_s[-1])
        if self.tiers is not None:
            return self.tiers.next_event_s
        if isinstance(self.scheduler, DynamicScheduler):
            return self.scheduler.opens_at_s
        return NEVER

    # ------------------------------------------------------------ in

    def receive(self, sequence: Sequence, at_s: float) -> None:
        """A request comes. The step that runs now is not disturbed, those planned behind it are."""
        if self.planned is None:
            self.clock.now_s = at_s
        else:
            self.planned = self.planned.until(at_s)
        with self.clock.at(at_s):
            self.scheduler.add(sequence)
        self.here[sequence.row] = sequence
        self.token_s[sequence.row] = []

    # ------------------------------------------------------------ steps

    def begin(self, now_s: float) -> None:
        """Plan the next step, and those that will be like it. Nothing, if nothing can run."""
        if not self.is_alive:
            return
        self.clock.now_s = now_s
        if self.tiers is not None:
            self.blocks.settle()
        waited = len(self.scheduler.waiting)
        ran = set(self.scheduler.running) if self.caches else set()
        step = self.scheduler.schedule()
        if not step.chunks:
            return
        if self.caches:
            self.count_found([chunk.sequence for chunk in step.chunks if chunk.sequence not in ran])
        began_s = self.clock.now_s  # later than now_s, if the scheduler had to wait for a load
        count = 1 if len(self.scheduler.waiting) != waited else self.steps_alike(step)
        seconds = np.atleast_1d(self.deployment.seconds(step, count))
        # summed from the front, as a clock is that each step moves
        ends_s = np.cumsum(np.concatenate(([began_s], seconds)))[1:]
        self.planned = Planned(step, ends_s, began_s)
        if self.tiers is not None:
            self.planned = self.planned.until(self.tiers.next_event_s)

    def count_found(self, begin: list[Sequence]) -> None:
        """Where K and V of those were that begin, or begin again after preemption."""
        for sequence in begin:
            known = -(-sequence.computed // self.blocks.block_size)
            blocks = self.blocks.tables[sequence.row][:known]
            for block in blocks:
                tier = POOL if self.tiers is None else self.blocks.tier_of(block)
                self.found[tier] += self.blocks.block_size
            self.found[NOWHERE] += sequence.to_compute

    def steps_alike(self, step: Step | PaddedStep) -> int:
        """How many times the scheduler would choose this step, one token of each sequence, if no
        request came.

        It lasts until the first answer ends: only then is a place or a block given back, so a
        request that could not come in now cannot come in before. But it ends before the blocks do,
        because then one is preempted.
        """
        count = MOST_ALIKE
        for sequence, _ in step.chunks:
            if not sequence.is_decoding:
                return 1
            count = min(count, sequence.max_new_tokens - len(sequence.output))
            if self.tiers is not None or (self.caches and sequence.tokens[-1] >= 0):
                # A block that is full is saved then, or found to be another request's.
                count = min(
                    count, self.blocks.block_size - sequence.computed % self.blocks.block_size
                )
            if self.scheduler.waiting and self.gives_back:
                count = min(count, self.until_given_back(sequence))
        while count > 1 and self.blocks is not None and not self.has_blocks(step, count):
            count //= 2
        return count

    def until_given_back(self, sequence: Sequence) -> int:
        """Steps until a window gives a block back, because then another request may come in."""
        size, table = self.deployment.block_size, self.blocks.tables[sequence.row]
        # The first block that a window still has goes when a token runs that is `window` tokens
        # past the block's last one.
        return min(
            max(1, size * (1 + pages.count(GONE)) + window - 1 - sequence.computed)
            for window, pages in zip(self.deployment.groups.windows, table.groups)
            if window is not None
        )

    def has_blocks(self, step: Step, count: int) -> bool:
        """Whether there are blocks for so many tokens of each sequence, the step's own included."""
        blocks = self.blocks
        need = 0
        for sequence, _ in step.chunks:
            held = sequence.computed
            # not negative: lesson 14's scheduler takes the blocks of the whole answer at once
            need += max(0, blocks.needs(sequence.row, held, held + count))
        return need <= blocks.num_free

    def complete(self) -> list[Sequence]:
        """The planned steps have run. Returns who has left."""
        step, ends_s, _ = self.planned
        if self.history is not None:
            chunks = [(chunk.sequence.row, chunk.count) for chunk in step.chunks]
            self.history += [(float(end_s), chunks) for end_s in ends_s]
        self.planned = None
        self.clock.now_s = float(ends_s[-1])  # when blocks that are full now are saved
        more = len(ends_s) - 1
        for sequence in self.scheduler.finish(step):
            sequence.append(*next_tokens(sequence.tokens[-1], 1))
            self.token_s[sequence.row].append(ends_s)
            if more:
                self.skip(sequence, more)
        left = self.scheduler.leave()
        for sequence in left:
            del self.here[sequence.row]
        return left

    def skip(self, sequence: Sequence, count: int) -> None:
        """What `count` steps of one token each do to a sequence: blocks, tokens, the prefix
        cache.
        """
        held = sequence.computed
        sequence.computed += count
        tokens = next_tokens(sequence.tokens[-1], count)
        sequence.output += tokens
        sequence.all_tokens += tokens
        if self.blocks is None:
            return
        size = self.blocks.block_size
        is_longer = sequence.computed > len(self.blocks.tables[sequence.row]) * size
        if is_longer or self.gives_back:
            self.blocks.grow(sequence.row, sequence.computed - 1, sequence.computed)
        is_fuller = sequence.computed // size > held // size
        if is_fuller and self.caches:
            self.blocks.remember(sequence.row, sequence.tokens[: sequence.computed])

    def die(self, at_s: float) -> list[Sequence]:
        """It stops at once: the step that runs now is lost. Returns who was here and has to go."""
        left = []
        if self.planned is not None:
            ends_s = self.planned.ends_s
            done = ends_s[: np.searchsorted(ends_s, at_s, side="right")]
            if len(done):
                self.planned = self.planned._replace(ends_s=done)
                left = self.complete()
            self.planned = None
        assert not left, "a step that ends now was completed before"
        self.is_alive = False
        orphans, self.here = list(self.here.values()), {}
        return orphans


MOST_ALIKE = 4096  # steps planned at once


class LazyPool(BlockPool):
    """A BlockPool that makes a block when it is first taken, so that a thousand replicas fit into a
    laptop's memory. It gives out the same blocks: those that were never used come first in its
    list.
    """

    def __init__(self, num_blocks: int):
        super().__init__(1)
        self.num_blocks = self.num_new = num_blocks
        self.free = {}
        self.owners = []

    @property
    def num_free(self) -> int:
        return len(self.free) + self.num_new

    def take(self, count: int) -> list[int]:
        if not count:  # as most often: a token goes into a block that its sequence has
            return []
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        new = min(count, self.num_new)
        first = len(self.owners)
        self.owners += [1] * new
        self.num_new -= new
        return [*range(first, first + new), *super().take(count - new)]
