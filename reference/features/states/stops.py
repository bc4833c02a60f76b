"""Where prompts and drafts stop so that a state can be copied."""

from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler


class StopsAtSnapshots:
    """A part of a scheduler: its functions take the place of the scheduler's own, whatever kind of
    ChunkedScheduler it is. Prompts that have to run whole do.
    """

    def __init__(self, scheduler: ChunkedScheduler):
        self.scheduler = scheduler
        self.put_all, scheduler.put = scheduler.put, self.put
        if hasattr(scheduler, "count_for"):
            self.count_all, scheduler.count_for = scheduler.count_for, self.count_for

    def put(self, sequence: Sequence, count: int, step: Step) -> None:
        """Add the next tokens of a running sequence to the step, `count` or fewer."""
        if self.scheduler.enable_chunked_prefill:
            held, total = sequence.computed, len(sequence.tokens)
            count = self.scheduler.blocks.chunk_of(sequence.row, held, count, total)
        self.put_all(sequence, count, step)

    def count_for(self, sequence: Sequence) -> int:
        """How many tokens are drafted for a sequence: none after the next place for a snapshot, or
        a step of several tokens would pass by it.
        """
        every = self.scheduler.blocks.every
        return min(self.count_all(sequence), every - 1 - sequence.computed % every)
