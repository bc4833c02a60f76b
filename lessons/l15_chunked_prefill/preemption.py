"""Requests that get blocks as they need them, and give them back when an earlier one needs them
more.

Lesson 14 admits a request when its longest possible answer fits. Most answers end long before that,
so blocks stay empty. Here a request is admitted when the tokens that it has now fit. If the blocks
run out, the last request in the order of service gives back all of its blocks and waits again. That
is preemption; what it has generated is kept, and its K and V are computed anew.

Read `run`, `admit` and `preempt`. What goes into a step is decided by naive.py and optimized.py.

Source: Kwon et al. 2023, section 4.5 (preemption by recomputation).
"""

from bisect import insort
from collections.abc import Callable

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step


def by_arrival(sequence: Sequence) -> tuple:
    """First come, first served: ids are given in the order of arrival."""
    return (sequence.row,)


def always(sequence: Sequence, running: list[Sequence]) -> bool:
    """No rule about which requests run together."""
    return True


class Nowhere:
    """Where K and V of preempted requests wait: nowhere, so they are computed again. swap.py has
    the other place, host memory.

    asked, found: tokens of waiting requests that were looked for far away, and that came.
    """

    asked = found = 0

    def keep(self, sequence: Sequence, step: Step) -> None:
        """Save what a running sequence has computed, before its blocks are taken back."""

    def fetch(self, sequence: Sequence) -> None:
        """Before the first of `waiting` is given blocks: begin to bring what is far away."""

    def has(self, sequence: Sequence) -> bool:
        """Whether its K and V wait here."""
        return False

    def bring_back(self, sequence: Sequence) -> bool:
        """Put what waits into blocks of the pool. False: too few are free."""
        raise NotImplementedError("nothing waits here")

    def forget(self, sequence: Sequence) -> None:
        """Drop what waits, if anything does."""

    def settle(self) -> None:
        """Before a step is scheduled: take note of copies that have ended beside the last ones."""

    def wait(self) -> None:
        """Until such a copy has ended, when there is nothing else to do."""

    def close(self) -> None:
        """End all copies."""


class PreemptiveScheduler:
    """Which requests wait, which run, and which blocks they own. A subclass says what a step is:
    `schedule`.

    max_num_seqs: places. max_num_batched_tokens: the budget of a step, at least one token for each
    place. order: the key by which requests are served; the one with the largest is preempted first.
    may_join: whether a request may run beside those that run. host: where K and V of preempted
    requests wait.

    No request starves. The first of the running is never preempted, so it ends, and then the next
    one is first. No request overtakes the first of the waiting, so its turn comes too.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        order: Callable[[Sequence], tuple] = by_arrival,
        may_join: Callable[[Sequence, list[Sequence]], bool] = always,
        host: Nowhere | None = None,
    ):
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: got {max_num_batched_tokens}; accepted: {max_num_seqs} "
                f"or more, a token for each of max_num_seqs"
            )
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.order = order
        self.may_join = may_join
        self.host = Nowhere() if host is None else host
        # Both sorted by `order`.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # (the first of `waiting`, how many blocks were free when they were too few for it)
        self.refused: tuple[Sequence | None, int] = (None, 0)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    # ------------------------------------------------------------ come and go

    def add(self, sequence: Sequence) -> None:
        """Put a request into the queue. Raises ValueError for one that can never fit."""
        most = sequence.most_cached
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
        insort(self.waiting, sequence, key=self.order)

    def refuse_longer_than_a_step(self, sequence: Sequence) -> None:
        """For schedulers that run prompts whole: raises ValueError for one that no step holds."""
        # most_cached, not the prompt: a preempted request computes its answer again, too.
        if sequence.most_cached > self.max_num_batched_tokens:
            raise ValueError(
                f"request {sequence.row}: {len(sequence.prompt)} tokens and their answer; accepted "
                f"without chunked prefill: at most {self.max_num_batched_tokens} "
                f"(max_num_batched_tokens)"
            )

    def abort(self, sequence: Sequence) -> None:
        """Forget a request, wherever it is; its blocks are free. One that is not here: nothing."""
        self.host.forget(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self.blocks.free(sequence.row)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` runs beside `parent` from its newest token on: on the same blocks, and on one
        of the places that `parent` has taken for it. Raises ValueError if it has taken none.
        """
        if parent.places < 2:
            raise ValueError(
                f"request {parent.row}: {parent.places} place left; accepted: 2 or more (places), "
                f"because a child takes one"
            )
        self.blocks.fork(parent.row, child.row)
        child.computed = parent.computed
        parent.places -= 1
        insort(self.running, child, key=self.order)

    # ------------------------------------------------------------ a step

    def schedule(self) -> Step:
        """What runs next; nothing if no request is here."""
        raise NotImplementedError

    def room(self, step: Step) -> int:
        """Tokens of the budget that the step has left. Counted from its chunks, because a chunk
        that is preempted out of the step gives its tokens back.
        """
        return self.max_num_batched_tokens - step.num_tokens

    def run(self, sequence: Sequence, most: int, step: Step) -> None:
        """Add a running sequence's next tokens to the step, at most `most`. If there are no blocks
        for them, the last of the running is preempted, until there are or it was itself the last.
        """
        count, held = min(sequence.to_compute, most), sequence.computed
        while not self.blocks.can_grow(sequence.row, held, held + count):
            last = self.running[-1]
            self.preempt(last, step)
            if last is sequence:
                return
        self.put(sequence, count, step)

    def admit(self, sequence: Sequence, most: int, step: Step) -> bool:
        """Let the first of `waiting` run, at most `most` tokens in this step. False: no place, or
        too few blocks for the tokens that it has.
        """
        if not most or not self.has_place(sequence) or not self.take_blocks(sequence):
            return False
        self.waiting.pop(0)
        insort(self.running, sequence, key=self.order)
        self.put(sequence, min(sequence.to_compute, most), step)
        return True

    def take_blocks(self, sequence: Sequence) -> bool:
        """Whether there are blocks for all tokens of the first of `waiting`. Takes those that a
        prefix cache knows.

        For all tokens, although a step may run only some of them. With blocks for one chunk alone
        it would start, find none for the next chunk, and be preempted, again and again. All free
        blocks may be counted: no running prompt waits for some of them, because the one prompt
        that a step cuts short leaves no room in the budget to admit another.
        """
        self.host.fetch(sequence)
        if self.host.has(sequence):
            return self.host.bring_back(sequence)
        refused, too_few = self.refused
        if refused is sequence and self.blocks.num_free <= too_few:
            return False  # because a search in the cache is as long as the prompt
        if isinstance(self.blocks, CachingBlockManager) and sequence.reuses_prefix:
            sequence.computed = self.blocks.reuse(sequence.row, sequence.known_as)
        held, tokens = sequence.computed, len(sequence.tokens)
        if self.blocks.needs(sequence.row, held, tokens) > self.blocks.num_free:
            self.give_back(sequence)
            self.refused = (sequence, self.blocks.num_free)
            return False
        return True

    def put(self, sequence: Sequence, count: int, step: Step) -> None:
        """Add the next `count` tokens of a running sequence to the step. Their blocks are free."""
        held = sequence.computed
        step.copies.extend(self.blocks.grow(sequence.row, held, held + count))
        step.chunks.append(Chunk(sequence, count))

    def has_place(self, sequence: Sequence) -> bool:
        """Whether the places that it takes are free."""
        taken = sum(running.places for running in self.running)
        fits = taken + sequence.places <= self.max_num_seqs
        return fits and self.may_join(sequence, self.running)

    def preempt(self, sequence: Sequence, step: Step) -> None:
        """Take back a running sequence's blocks; it waits, and computes its tokens again, unless
        they wait on the host.
        """
        self.host.keep(sequence, step)
        self.running.remove(sequence)
        self.take_out(sequence, step)
        self.give_back(sequence)
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=self.order)

    def take_out(self, sequence: Sequence, step: Step) -> None:
        """Leave a sequence out of a step that may hold its chunk already, and a copy for it."""
        step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]
        # Its copy, too: the target may soon be another sequence's, and be the target of its copy.
        table = self.blocks.tables[sequence.row]
        step.copies[:] = [copy for copy in step.copies if copy[1] not in table]

    def give_back(self, sequence: Sequence) -> None:
        """Free what a sequence owns, if it owns anything, and compute nothing of it."""
        if sequence.row in self.blocks.tables:
            self.blocks.free(sequence.row)
        sequence.computed = 0

    # ------------------------------------------------------------ after a step

    def finish(self, step: Step) -> list[Sequence]:
        """Count what the step has computed. Returns the sequences that want a token sampled, in the
        order of the chunks. Call `leave` when they have theirs.
        """
        sampled = [chunk.sequence for chunk in step.chunks if chunk.is_sampled]
        for sequence, count in step.chunks:
            full = sequence.computed // self.blocks.block_size
            sequence.computed += count
            is_fuller = sequence.computed // self.blocks.block_size > full
            # A request that was aborted while the step ran has no table any more.
            is_here = sequence.row in self.blocks.tables
            if is_fuller and is_here and isinstance(self.blocks, CachingBlockManager):
                self.blocks.remember(sequence.row, sequence.known_as[: sequence.computed])
        return sampled

    def leave(self) -> list[Sequence]:
        """Finished requests give back place and blocks before the next step. Returns them."""
        done = [sequence for sequence in self.running if sequence.finished]
        for sequence in done:
            self.running.remove(sequence)
            self.blocks.free(sequence.row)
        return done
