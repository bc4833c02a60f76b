"""Several batches in the pipeline: while one is in the second stage, the next is in the first.

With one batch in flight, each of p stages works a p-th of the time. So the engine launches up to p
batches before it waits for the oldest. A request whose token is on its way is in no other batch:
its next step needs that token. Chunks of a prompt follow each other without waiting, because stages
run them in the order in which they were launched.

The tokens are those of one batch in flight. Lesson 25's loop is what this is made of: a token on
its way has a placeholder, and what a batch has sampled is told when it has come.

Source: vLLM's batch queue (vllm/v1/engine/core.py, step_with_batch_queue). The bubble that is left
is that of lesson 20's pipeline.py.
"""

from collections import deque

from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from reference.engine.engine import Engine
from reference.engine.request import EngineRequest
from reference.parallel.ahead import RemoteAhead, UnderWay


class PipelinedScheduler(ChunkedScheduler):
    """A ChunkedScheduler of several batches. num_batches: in flight at most; each has its share of
    the sequences that decode, or the first would take all of them. on_their_way: sequences whose
    token is. Other arguments are ChunkedScheduler's.
    """

    def __init__(self, *arguments, num_batches: int, **named_arguments):
        super().__init__(*arguments, **named_arguments)
        self.num_batches = num_batches
        self.on_their_way: set[Sequence] = set()

    @property
    def share(self) -> int:
        """Sequences that decode in one batch, at most."""
        return -(-len(self.running) // self.num_batches)

    def run(self, sequence: Sequence, most: int, step: Step) -> None:
        """As in lesson 15, for a sequence that this batch may have."""
        # Those that decode are the first of a step.
        has_enough = sequence.is_decoding and len(step.chunks) >= self.share
        if sequence not in self.on_their_way and not has_enough:
            super().run(sequence, most, step)

    def admit(self, sequence: Sequence, most: int, step: Step) -> bool:
        """As in lesson 15. One that was preempted while its token was on its way waits for it."""
        return sequence not in self.on_their_way and super().admit(sequence, most, step)


class InFlight(RemoteAhead):
    """An engine with several batches in its workers. Its scheduler: a PipelinedScheduler."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.queue: deque[UnderWay] = deque()

    def run(self, step: Step) -> list[EngineRequest]:
        """Launch a batch. If the pipeline is full, or nothing can be launched, wait for the oldest
        and tell it. Returns the requests that got a token. If it raises, no batch is told.
        """
        try:
            if step.chunks:
                # Also a batch that samples nothing counts, until the workers have run it.
                launched = self.sample(step, self.launch(step))
                self.queue.append(launched or self.begin(self.hidden, [], []))
            is_full = len(self.queue) == self.engine.scheduler.num_batches
            touched = self.tell() if is_full or not step.chunks else []
        except BaseException:
            self.queue.clear()
            raise
        finally:
            self.note()
        return touched

    def launch(self, step: Step):
        """As in Ahead. No token of the step is on its way."""
        self.hidden = super().launch(step)
        return self.hidden

    def tell(self) -> list[EngineRequest]:
        """As in Ahead, of the oldest batch."""
        self.launched = self.queue.popleft()
        try:
            return super().tell()
        finally:
            self.launched = None

    def note(self) -> None:
        """Whose tokens are on their way now."""
        sequences = [sequence for launched in self.queue for sequence in launched.sequences]
        self.engine.under_way = sequences
        self.engine.scheduler.on_their_way = set(sequences)
