"""What the tests and exercises of this lesson share: schedulers with one planted slip each, and a
run of any scheduler without a model.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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

    Raises AssertionError if the scheduler makes no progress.
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
        assert step.chunks or scheduler.is_idle, f"step {number}: nothing runs, a request waits"
        look(step)
        for sequence in scheduler.finish(step):
            sequence.append(STOP if len(sequence.output) + 1 == ends[sequence.row] else 0)
        scheduler.leave()
    raise AssertionError(f"not done after {STEPS_AT_MOST} steps")


# ---------------------------------------------------------------- the rules of a history


class Limits(NamedTuple):
    """What a scheduler of a history has: blocks, tokens of a block, places, tokens of a step."""

    num_blocks: int = 12
    block_size: int = 4
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 20


LIMITS = Limits()


def check_history(kind: type, requests, limits: Limits = LIMITS) -> None:
    """Serve the requests of `run` by a scheduler of this class, and hold it to every rule after
    every schedule. Raises AssertionError that names the rule.
    """
    scheduler, admitted = new_scheduler(kind, *limits), []

    def look(step):
        check_step(scheduler, step, limits)
        new = [chunk.sequence.row for chunk in step.chunks if not chunk.sequence.output]
        admitted.extend(row for row in new if row not in admitted)

    sequences = run(scheduler, requests, look)
    for sequence, (_, _, limit, until_stop) in zip(sequences, requests):
        count, want = len(sequence.output), min(limit, until_stop)
        assert count == want, f"request {sequence.row} has {count} tokens, expected {want}"
    by_arrival = sorted(range(len(requests)), key=lambda row: (requests[row][0], row))
    assert admitted == by_arrival, f"a request overtook: {admitted}, expected {by_arrival}"
    free = scheduler.blocks.num_free
    assert free == limits.num_blocks, f"{limits.num_blocks - free} blocks are never given back"


def check_step(scheduler, step: Step, limits: Limits) -> None:
    """The rules that hold between schedule and finish. Raises AssertionError."""
    rows = [chunk.sequence.row for chunk in step.chunks]
    assert len(rows) == len(set(rows)), f"a sequence is twice in a step: {rows}"
    places = limits.max_num_seqs
    assert len(rows) <= places, f"{len(rows)} sequences run, there are {places} places"
    check_blocks(scheduler, step, limits)
    for chunk in step.chunks:
        row, to_compute = chunk.sequence.row, chunk.sequence.to_compute
        assert not chunk.sequence.finished, f"request {row} has finished, and is still computed"
        assert chunk.count == to_compute, f"request {row} runs {chunk.count} of {to_compute} tokens"
    budget = limits.max_num_batched_tokens
    fits = step.num_tokens <= budget or len(step.chunks) == 1
    assert fits, f"a step of {step.num_tokens} tokens; max_num_batched_tokens is {budget}"
    if scheduler.waiting and len(rows) < places:
        first = scheduler.waiting[0]
        has_blocks = scheduler.blocks.can_grow(first.row, 0, first.most_cached)
        has_room = step.num_tokens + first.to_compute <= budget or not rows
        assert not (has_blocks and has_room), f"request {first.row} waits although it could run"


def check_blocks(scheduler, step: Step, limits: Limits) -> None:
    """Who runs owns the blocks for its longest answer, alone; no other request owns any."""
    tables, running = scheduler.blocks.tables, {chunk.sequence.row for chunk in step.chunks}
    assert running <= set(tables), f"requests {running - set(tables)} run without blocks"
    others = set(tables) - running
    assert not others, f"requests {others} do not run, and own blocks"
    for chunk in step.chunks:
        row, most = chunk.sequence.row, chunk.sequence.most_cached
        room = len(tables[row]) * limits.block_size
        assert room >= most, f"request {row} may need {most} tokens, its blocks hold {room}"


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
    """Admits any request that fits, so that a large request may wait for ever."""

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
    """Lets no request in while another one runs: a static batch without padding."""

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
