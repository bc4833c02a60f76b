"""Where prompts stop so that a state can be copied."""

from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler


class StopsAtSnapshots:
    """A part of a scheduler: its `put` takes the place of the scheduler's own, whatever kind of
    ChunkedScheduler it is. Prompts that have to run whole do.
    """

    def __init__(self, scheduler: ChunkedScheduler):
        self.scheduler = scheduler
        self.put_all = scheduler.put

    def put(self, sequence: Sequence, count: int, step: Step) -> None:
        """Add the next tokens of a running sequence to the step, `count` or fewer."""
        if self.scheduler.enable_chunked_prefill:
            held, total = sequence.computed, len(sequence.tokens)
            count = self.scheduler.blocks.chunk_of(sequence.row, held, count, total)
        self.put_all(sequence, count, step)
