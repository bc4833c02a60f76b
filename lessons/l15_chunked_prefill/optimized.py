"""One budget of tokens for every step: running requests decode first, prompts fill up the rest in
chunks. Blocks are given as they are needed, and taken back from the newest when there are none.

Read `schedule`: first who runs already, then who waits. `make_room` is preemption.

Sources: Agrawal et al. 2024, Sarathi-Serve, section 4; Kwon et al. 2023, section 4.5 (preemption by
recomputation).
"""

from bisect import insort
from collections.abc import Callable

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step


def by_arrival(sequence: Sequence) -> tuple:
    """First come, first served: ids are given in the order of arrival."""
    return (sequence.row,)


class ChunkedScheduler:
    """Decides what runs in each step, and who owns which block.

    max_num_batched_tokens: the budget, at least one token for each of max_num_seqs places.
    enable_chunked_prefill: False lets a prompt run only as a whole. order: the key by which
    requests are served; whoever has the largest is preempted first.

    Nobody starves: the first by `order` is never preempted, so it finishes, and then there is
    another first.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        enable_chunked_prefill: bool = True,
        order: Callable[[Sequence], tuple] = by_arrival,
    ):
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: got {max_num_batched_tokens}; accepted: {max_num_seqs} "
                f"or more, a token for each of max_num_seqs"
            )
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.order = order
        # Both sorted by `order`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue. Raises ValueError for one that can never fit."""
        most, prompt = sequence.most_cached, len(sequence.prompt)
        if sequence.places > self.max_num_seqs:
            raise ValueError(
                f"request {sequence.row}: {sequence.places} answers at once; accepted: at most "
                f"{self.max_num_seqs} (max_num_seqs)"
            )
        if (need := self.blocks.blocks_for(most)) > self.blocks.num_blocks:
            raise ValueError(
                f"request {sequence.row}: {most} tokens need {need} blocks; accepted: at most "
                f"{self.blocks.num_blocks}, the whole pool"
            )
        if not self.enable_chunked_prefill and most > self.max_num_batched_tokens:
            # most, not prompt: a preempted request computes its answer again, too
            raise ValueError(
                f"request {sequence.row}: {prompt} tokens and their answer; accepted without "
                f"chunked prefill: at most {self.max_num_batched_tokens} (max_num_batched_tokens)"
            )
        insort(self.waiting, sequence, key=self.order)

    def abort(self, sequence: Sequence) -> None:
        """Forget a request, wherever it is; its blocks are free. One that is not here: nothing."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self.blocks.free(sequence.row)

    # ------------------------------------------------------------ a step

    def schedule(self) -> Step:
        """What runs next; nothing if nobody is here."""
        step, budget, waited = Step([], []), self.max_num_batched_tokens, len(self.waiting)
        # Decodes first: each is one token, and somebody waits for it.
        for sequence in sorted(self.running, key=lambda s: not s.is_decoding):
            if sequence in self.running and budget:  # it may have been preempted meanwhile
                budget -= self.run(sequence, budget, step)
        if len(self.waiting) > waited:
            return step  # because who was sent away just now would only send others away
        while self.waiting and budget and self.has_place(self.waiting[0]):
            if not (count := self.admit(self.waiting[0], budget, step)):
                break
            budget -= count
        return step

    def has_place(self, sequence: Sequence) -> bool:
        """Whether the places that it takes are free."""
        taken = sum(running.places for running in self.running)
        return taken + sequence.places <= self.max_num_seqs

    def run(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Add a running sequence's next tokens to the step. Returns how many: 0 if it is preempted
        itself.
        """
        count = min(sequence.to_compute, budget)
        held = sequence.computed
        while not self.blocks.can_grow(sequence.row, held, held + count):
            last = self.running[-1]
            self.preempt(last, step)
            if last is sequence:
                return 0
        step.copies.extend(self.blocks.grow(sequence.row, held, held + count))
        step.chunks.append(Chunk(sequence, count))
        return count

    def admit(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Let the first who waits run, if there is room for its next tokens. Returns how many."""
        if isinstance(self.blocks, CachingBlockManager) and sequence.reuses_prefix:
            sequence.computed = self.blocks.reuse(sequence.row, sequence.tokens)
        held, count = sequence.computed, min(sequence.to_compute, budget)
        fits_step = self.enable_chunked_prefill or count == sequence.to_compute
        if not fits_step or not self.blocks.can_grow(sequence.row, held, held + count):
            self.give_back(sequence)
            return 0
        self.waiting.pop(0)
        insort(self.running, sequence, key=self.order)
        step.copies.extend(self.blocks.grow(sequence.row, held, held + count))
        step.chunks.append(Chunk(sequence, count))
        return count

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` runs beside `parent` from where that stands, on the same blocks and on one of the
        places that `parent` has taken for it.
        """
        self.blocks.fork(parent.row, child.row)
        child.computed = parent.computed
        parent.places -= 1
        insort(self.running, child, key=self.order)

    def preempt(self, sequence: Sequence, step: Step) -> None:
        """Take back a running sequence's blocks; it waits, and computes its tokens again."""
        self.running.remove(sequence)
        step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]
        self.give_back(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self.order)

    def give_back(self, sequence: Sequence) -> None:
        """Free what a sequence owns, if it owns anything, and compute nothing of it."""
        if sequence.row in self.blocks.tables:
            self.blocks.free(sequence.row)
        sequence.computed = 0

    def finish(self, step: Step) -> list[Sequence]:
        """Count what the step has computed. Returns the sequences that want a token sampled, in the
        order of the chunks. Call `leave` when they have theirs.
        """
        sampled = [chunk.sequence for chunk in step.chunks if chunk.is_sampled]
        for sequence, count in step.chunks:
            full = sequence.computed // self.blocks.block_size
            sequence.computed += count
            is_fuller = sequence.computed // self.blocks.block_size > full
            if is_fuller and isinstance(self.blocks, CachingBlockManager):
                self.blocks.remember(sequence.row, sequence.tokens[: sequence.computed])
        return sampled

    def leave(self) -> list[Sequence]:
        """Who has finished gives back place and blocks before the next step is made."""
        done = [sequence for sequence in self.running if sequence.finished]
        for sequence in done:
            self.running.remove(sequence)
            self.blocks.free(sequence.row)
        return done
