"""What the tests and exercises of this lesson share: schedulers with one planted slip each, and a
run of any scheduler without a model.
"""

from collections.abc import Callable, Sequence

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching import sequence as scheduled
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Chunk, Step

STOP = 7  # ends an answer, in the runs below
STEPS_AT_MOST = 2000


def new_request(row: int, prompt_len: int, max_new_tokens: int) -> scheduled.Sequence:
    """A request that ends at the token STOP, or at its limit."""
    return scheduled.Sequence(row, [1] * prompt_len, max_new_tokens, GREEDY, frozenset({STOP}))


def run(
    scheduler,
    requests: Sequence[tuple[int, int, int, int]],
    look: Callable[[Step], None] = lambda step: None,
) -> list[scheduled.Sequence]:
    """Serve requests without a model. Each is (step at which it arrives, prompt tokens, limit,
    tokens until STOP). look(step) is called between schedule and finish.

    Raises AssertionError if the scheduler stands still.
    """
    sequences = [new_request(row, *request[1:3]) for row, request in enumerate(requests)]
    ends = [request[3] for request in requests]
    coming = sorted(range(len(requests)), key=lambda row: (requests[row][0], row))
    for number in range(STEPS_AT_MOST):
        while coming and requests[coming[0]][0] <= number:
            scheduler.add(sequences[coming.pop(0)])
        if not coming and scheduler.is_idle:
            return sequences
        step = scheduler.schedule()
        assert step.chunks or scheduler.is_idle, f"step {number}: nothing runs, somebody waits"
        look(step)
        for sequence in scheduler.finish(step):
            sequence.append(STOP if len(sequence.output) + 1 == ends[sequence.row] else 0)
        scheduler.leave()
    raise AssertionError(f"not done after {STEPS_AT_MOST} steps")


# ---------------------------------------------------------------- planted slips


class LeavesLate(ContinuousScheduler):
    """Who finishes keeps place and blocks for one step more, and is computed in it."""

    def leave(self):
        gone = getattr(self, "gone", [])
        self.gone = [sequence for sequence in self.running if sequence.finished]
        for sequence in gone:
            self.blocks.free(sequence.row)
        self.running = [s for s in self.running if s not in gone]
        return gone


class NeverBinds(ContinuousScheduler):
    """Admits while max_len · max_batch tokens would fit a limit that is max_len · max_batch."""

    def schedule(self):
        chunks = [Chunk(sequence, 1) for sequence in self.running]
        while self.waiting and len(self.running) < self.max_num_seqs:
            first = self.waiting.popleft()
            self.running.append(first)
            self.blocks.grow(first.row, 0, first.most_cached)
            chunks.append(Chunk(first, first.to_compute))
        return Step(chunks, [])


class ReservesPrompts(ContinuousScheduler):
    """Admits by the blocks of the prompt; the answer finds none."""

    def schedule(self):
        chunks = [Chunk(sequence, 1) for sequence in self.running]
        for sequence in self.running:
            self.blocks.grow(sequence.row, sequence.computed, sequence.computed + 1)
        while self.waiting and len(self.running) < self.max_num_seqs:
            first = self.waiting[0]
            if not self.blocks.can_grow(first.row, 0, first.to_compute):
                break
            self.running.append(self.waiting.popleft())
            self.blocks.grow(first.row, 0, first.to_compute)
            chunks.append(Chunk(first, first.to_compute))
        return Step(chunks, [])


class Overtakes(ContinuousScheduler):
    """Admits whoever fits, so that a large request may wait for ever."""

    def schedule(self):
        step = super().schedule()
        for sequence in list(self.waiting):
            has_place = len(self.running) < self.max_num_seqs
            if has_place and self.blocks.can_grow(sequence.row, 0, sequence.most_cached):
                self.waiting.remove(sequence)
                self.running.append(sequence)
                self.blocks.grow(sequence.row, 0, sequence.most_cached)
                step.chunks.append(Chunk(sequence, sequence.to_compute))
        return step


class OnePlaceTooMany(ContinuousScheduler):
    """Counts places with <= instead of <."""

    def schedule(self):
        self.max_num_seqs += 1
        step = super().schedule()
        self.max_num_seqs -= 1
        return step


class NoBudget(ContinuousScheduler):
    """All prompts that find a place run in one pass, however long they are."""

    def schedule(self):
        budget, self.max_num_batched_tokens = self.max_num_batched_tokens, 10**9
        step = super().schedule()
        self.max_num_batched_tokens = budget
        return step


class InWaves(ContinuousScheduler):
    """Lets nobody in while anybody runs: a static batch without padding."""

    def schedule(self):
        if self.running:
            return Step([Chunk(sequence, 1) for sequence in self.running], [])
        return super().schedule()


class KeepsBlocks(ContinuousScheduler):
    """Who finishes gives back the place, and not the blocks."""

    def leave(self):
        done = [sequence for sequence in self.running if sequence.finished]
        self.running = [sequence for sequence in self.running if not sequence.finished]
        return done


SLIPS = (
    LeavesLate,
    NeverBinds,
    ReservesPrompts,
    Overtakes,
    OnePlaceTooMany,
    NoBudget,
    InWaves,
    KeepsBlocks,
)


def new_scheduler(
    kind: type = ContinuousScheduler,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
) -> ContinuousScheduler:
    """A scheduler of this class over an empty block manager."""
    return kind(BlockManager(num_blocks, block_size), max_num_seqs, max_num_batched_tokens)
