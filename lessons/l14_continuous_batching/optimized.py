"""Iteration-level scheduling: after every step finished requests leave, and waiting ones come
in. One ragged pass runs the prompts of the new and the single tokens of the old.

Read `schedule`. A request is admitted when a place is free and so are the blocks for its longest
possible answer. So it is never sent away again.

Source: Yu et al. 2022, Orca, sections 3.1 and 3.2.
"""

from collections import deque

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step


class ContinuousScheduler:
    """Requests in the order of their arrival; none overtakes another, so none starves.

    max_num_seqs: places. max_num_batched_tokens: tokens of a step, but one prompt at least.
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int = 32, max_num_batched_tokens: int = 4096
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue. Raises ValueError for one that can never fit."""
        need = self.blocks.blocks_for(sequence.most_cached)
        if need > self.blocks.num_blocks:
            raise ValueError(
                f"request {sequence.row}: needs {need} blocks for {sequence.most_cached} tokens; "
                f"accepted: at most {self.blocks.num_blocks}, the whole pool"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """What runs next: one token of each running request, then whole prompts of new ones."""
        chunks = [Chunk(sequence, 1) for sequence in self.running]
        budget = self.max_num_batched_tokens - len(chunks)
        while self.waiting and len(self.running) < self.max_num_seqs:
            first = self.waiting[0]
            fits_step = first.to_compute <= budget or not chunks
            if not fits_step or not self.blocks.can_grow(first.row, 0, first.most_cached):
                break
            self.waiting.popleft()
            self.running.append(first)
            self.blocks.grow(first.row, 0, first.most_cached)
            chunks.append(Chunk(first, first.to_compute))
            budget -= first.to_compute
        return Step(chunks, copies=[])

    def finish(self, step: Step) -> list[Sequence]:
        """Count what the step has computed. Returns the sequences that want a token sampled, in the
        order of the chunks. Call `leave` when they have theirs.
        """
        sampled = [chunk.sequence for chunk in step.chunks if chunk.is_sampled]
        for sequence, count in step.chunks:
            sequence.computed += count
        return sampled

    def leave(self) -> list[Sequence]:
        """Finished requests give back place and blocks before the next step. Returns them."""
        done = [sequence for sequence in self.running if sequence.finished]
        for sequence in done:
            self.blocks.free(sequence.row)
        self.running = [sequence for sequence in self.running if not sequence.finished]
        return done
