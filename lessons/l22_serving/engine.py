"""The engine that this lesson serves: lesson 15's scheduler and an executor, as three calls. The
engine of reference/ has the same ones, so what drives the one drives the other.

    engine = new_engine(VirtualModel, num_blocks=64)
    engine.add_request("a", prompt=[1, 2, 3], max_tokens=5, user="ann")
    while engine.has_unfinished_requests:
        for output in engine.step(): ...
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.loop import Executor
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler, by_arrival
from lessons.l22_serving.admission import Queue, Waiting
from lessons.l22_serving.fair import FairQueue, UserSequence
from lessons.toolbox.model.arguments import check_whole, refuse

BLOCK_SIZE = 16


@dataclass
class Output:
    """A request so far: the whole answer so far, so a newer one says all that an older said."""

    request_id: str
    tokens: list[int]
    finished: bool


@dataclass(eq=False)
class LessonSequence(UserSequence):
    """A sequence of one user. answer_len: where its answer ends, which no scheduler knows; None: at
    its limit.
    """

    request_id: str = ""
    answer_len: int | None = None
    was_scheduled: bool = False

    @property
    def finished(self) -> bool:
        return super().finished or len(self.output) == self.answer_len


class LessonEngine:
    """A scheduler, an executor, and who asks. One thread at a time may call it."""

    def __init__(self, scheduler: PreemptiveScheduler, execute: Executor):
        self.scheduler = scheduler
        self.execute = execute
        self.fair = FairQueue()
        self.sequences: dict[str, LessonSequence] = {}
        self.rows = count()
        self.last_step = Step([], [])

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.sequences)

    def add_request(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        user: str = "",
        answer_len: int | None = None,
    ) -> None:
        """Queue a request. answer_len: its tokens, if they are fewer than max_tokens. Raises
        ValueError for one that cannot be served; nothing is queued then.
        """
        check_whole(max_tokens=max_tokens)
        if not prompt:
            refuse("prompt", prompt, "one token or more")
        if request_id in self.sequences:
            refuse("request_id", request_id, "a string not in use")
        sequence = LessonSequence(
            next(self.rows),
            list(prompt),
            max_tokens,
            GREEDY,
            frozenset(),
            request_id=request_id,
            answer_len=answer_len,
        )
        sequence.ticket = self.fair.arrive(user, len(prompt) + max_tokens)
        try:
            self.scheduler.add(sequence)
        except ValueError:
            self.fair.leave(sequence.ticket, used=0)
            raise
        self.sequences[request_id] = sequence

    def abort_request(self, request_id: str) -> Output | None:
        """End a request at once; returns what it has so far. None: no request of that name."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return None
        self.scheduler.abort(sequence)
        self._leave(sequence)
        return Output(request_id, list(sequence.output), True)

    def step(self) -> list[Output]:
        """Schedule, run, sample, tell: lesson 14's run_step, and the users' turns."""
        step = self.last_step = self.scheduler.schedule()
        if not step.chunks:
            return []
        for chunk in step.chunks:
            chunk.sequence.was_scheduled = True
            self.fair.begin(chunk.sequence.ticket)
        tokens = self.execute(step)
        sampled = self.scheduler.finish(step)
        for sequence, token in zip(sampled, tokens):
            sequence.append(token)
        for sequence in self.scheduler.leave():
            self._leave(sequence)
        return [Output(one.request_id, list(one.output), one.finished) for one in sampled]

    def _leave(self, sequence: LessonSequence) -> None:
        del self.sequences[sequence.request_id]
        used = len(sequence.prompt) + len(sequence.output) if sequence.was_scheduled else 0
        self.fair.leave(sequence.ticket, used)
        self.scheduler.waiting.sort(key=self.scheduler.order)

    def queue(self) -> Queue:
        """For admission control: who waits, and how many places are free for them."""
        return queue_of(self.scheduler, waiting_one)


def waiting_one(sequence: LessonSequence) -> Waiting:
    """What admission asks of a sequence that waits."""
    return Waiting(sequence.ticket.user, len(sequence.tokens), sequence.max_new_tokens)


def queue_of(scheduler: PreemptiveScheduler, waiting_one: Callable[[Sequence], Waiting]) -> Queue:
    """A scheduler's queue. Places count as free only while there are blocks, too: if the first who
    waits has found too few, none after it comes in.
    """
    waiting = list(scheduler.waiting)  # a copy, because a replica's own thread may change it
    lacks_blocks = bool(waiting) and scheduler.refused[0] is waiting[0]
    taken = sum(sequence.places for sequence in scheduler.running)
    free_places = 0 if lacks_blocks else scheduler.max_num_seqs - taken
    return Queue([waiting_one(sequence) for sequence in waiting], free_places)


def new_engine(
    new_executor: Callable[[BlockManager], Executor],
    num_blocks: int,
    order: Callable[[Sequence], tuple] = by_arrival,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 2048,
) -> LessonEngine:
    """An engine over new blocks of 16 tokens. order: by_arrival, or fair.py's by_fair_share."""
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = ChunkedScheduler(blocks, max_num_seqs, max_num_batched_tokens, order=order)
    return LessonEngine(scheduler, new_executor(blocks))
