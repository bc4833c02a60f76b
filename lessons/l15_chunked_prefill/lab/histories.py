"""Histories for a scheduler: who comes when, with what, and who gives up; and the rules that hold
after every step of each of them.

    Trial(scheduler, requests).run()     # AssertionError at the first broken rule

The rules are in `Rules`. test_schedule.py draws the histories at random.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l14_continuous_batching.sequence import Sequence, Step
from lessons.l15_chunked_prefill.lab.virtual import VirtualModel, answer, new_request
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler

COMMON = [(7 * i) % 89 for i in range(12)]  # how the prompts of some requests begin
ROWS_EACH = 8  # numbers that belong to a request: its own, and those of its other answers


class Asked(NamedTuple):
    """A request of a history. Steps are counted from 0.

    answers: so many fork from one prompt. aborts: the step in which its client gives up;
    after_pass: between the pass of that step and `finish`, else before `schedule`.
    """

    arrives: int
    prompt_len: int
    limit: int
    answers: int = 1
    priority: int = 0
    begins_as_others: bool = False
    aborts: int | None = None
    after_pass: bool = False

    def prompt(self, index: int) -> list[int]:
        own = [(31 * index + 5 * i) % 91 for i in range(self.prompt_len)]
        return (COMMON + own)[: self.prompt_len] if self.begins_as_others else own


def order_of(requests: list[Asked]) -> Callable[[Sequence], tuple]:
    """By priority, then by arrival."""
    return lambda sequence: (requests[sequence.row // ROWS_EACH].priority, sequence.row)


class Trial:
    """A history under way. waiting_to_fork: {row of a request: the
    answers that begin with its first token}."""

    def __init__(self, scheduler: PreemptiveScheduler, requests: list[Asked], model=None):
        self.scheduler = scheduler
        self.requests = requests
        self.model = VirtualModel(scheduler.blocks) if model is None else model
        self.rules = Rules(scheduler)
        self.sequences: dict[int, list[Sequence]] = {}
        self.waiting_to_fork: dict[int, list[Sequence]] = {}
        self.refused: set[int] = set()
        self.steps = 0

    def run(self) -> list[Sequence]:
        """All of it. Returns the sequences that were served to their end."""
        coming = sorted(range(len(self.requests)), key=lambda i: self.requests[i].arrives)
        while coming or not self.scheduler.is_idle:
            while coming and self.requests[coming[0]].arrives <= self.steps:
                self.arrive(coming.pop(0))
            self.abort_those(after_pass=False)
            self.step()
            self.steps += 1
            assert self.steps <= self.most_steps(), "a request starves"
        self.rules.check_end()
        return self.check_answers()

    def arrive(self, index: int) -> None:
        """Hand a request to the scheduler, with its children if it has several answers."""
        asked = self.requests[index]
        prompt, row = asked.prompt(index), index * ROWS_EACH
        parent = new_request(row, prompt, asked.limit, places=asked.answers)
        children = [new_request(row + n, prompt, asked.limit) for n in range(1, asked.answers)]
        try:
            self.scheduler.add(parent)
        except ValueError:
            self.refused.add(index)  # it can never fit
            return
        self.sequences[index] = [parent, *children]
        self.waiting_to_fork[row] = children

    def abort_those(self, after_pass: bool) -> None:
        """The clients that give up at this point of this step."""
        for index, sequences in self.sequences.items():
            asked = self.requests[index]
            if asked.aborts == self.steps and asked.after_pass == after_pass:
                for sequence in sequences:
                    self.scheduler.abort(sequence)
                self.waiting_to_fork[sequences[0].row] = []
                self.rules.departures += 1

    def step(self) -> None:
        """Schedule, hold to the rules, run, count, fork, leave: the engine's step without it."""
        step = self.scheduler.schedule()
        self.rules.check(step)
        tokens = self.model(step)
        self.abort_those(after_pass=True)
        newest_ran = [
            sequence.row for sequence, count in step.chunks if count == sequence.to_compute
        ]
        sampled = self.scheduler.finish(step)
        assert [s.row for s in sampled] == newest_ran, "sampled without its newest token, or not"
        for parent, token in zip(sampled, tokens):
            for child in self.waiting_to_fork.pop(parent.row, ()):
                self.scheduler.fork(parent, child)
                child.append(answer(child.row, child.prompt, 1)[0])
            parent.append(token)
        self.rules.departures += len(self.scheduler.leave())

    def most_steps(self) -> int:
        """Each step the first of the running gets a token at least, and only one that goes before
        it can take that place.
        """
        work = sum(s.most_cached + 1 for group in self.sequences.values() for s in group)
        newcomers = len({asked.priority for asked in self.requests})
        last = max((asked.arrives for asked in self.requests), default=0)
        return last + 1 + newcomers * work

    def check_answers(self) -> list[Sequence]:
        """Each request has the tokens of running alone, as many as asked for unless aborted."""
        served = []
        for index, sequences in self.sequences.items():
            for sequence in sequences:
                alone = answer(sequence.row, sequence.prompt, sequence.max_new_tokens)
                assert sequence.output == alone[: len(sequence.output)], "tokens of another request"
                if self.requests[index].aborts is None:
                    assert sequence.output == alone, "an answer is not complete"
                if sequence.finished:
                    served.append(sequence)
        return served


class Rules:
    """What must hold after `schedule`, in each step."""

    def __init__(self, scheduler: PreemptiveScheduler):
        self.scheduler = scheduler
        self.departures = 0  # of who has finished, or was aborted
        self.has_preempted = False  # in this step
        # {row: (how often it was preempted, departures until then)}
        self.sent_away: dict[int, tuple[int, int]] = {}

    def check(self, step: Step) -> None:
        """Raises AssertionError, which says what is wrong with the step or the blocks."""
        scheduler = self.scheduler
        assert step.chunks or scheduler.is_idle, "a request is here, and nothing runs"
        assert step.num_tokens <= scheduler.max_num_batched_tokens, "more tokens than the budget"
        in_step = [chunk.sequence.row for chunk in step.chunks]
        assert len(in_step) == len(set(in_step)), "a sequence twice in a step"
        running = [sequence.row for sequence in scheduler.running]
        assert set(in_step) <= set(running), "a chunk of who does not run"
        places = sum(sequence.places for sequence in scheduler.running)
        assert places <= scheduler.max_num_seqs, "more sequences than places"
        for queue in (scheduler.waiting, scheduler.running):
            assert queue == sorted(queue, key=scheduler.order), "out of order"
        for sequence, count in step.chunks:
            assert 1 <= count <= sequence.to_compute and not sequence.finished
        self.check_blocks(step)
        self.check_preempted()
        self.check_progress(step)

    def check_progress(self, step: Step) -> None:
        """The first of the running is in every step."""
        first = self.scheduler.running[:1]
        in_step = [chunk.sequence.row for chunk in step.chunks]
        assert not first or first[0].row in in_step, "the first makes no progress"

    def check_blocks(self, step: Step) -> None:
        """Each block has as many owners as tables name it, and without one it is free."""
        blocks, running = self.scheduler.blocks, self.scheduler.running
        assert set(blocks.tables) == {s.row for s in running}, "blocks of who does not run"
        owners = Counter(block for table in blocks.tables.values() for block in table)
        assert blocks.pool.owners == [owners[block] for block in range(blocks.num_blocks)]
        assert set(blocks.pool.free) == set(range(blocks.num_blocks)) - set(owners)
        copied = set()
        for sequence, count in step.chunks:
            end, table = sequence.computed + count, blocks.tables[sequence.row]
            assert self.is_right(sequence, end, len(table)), "not the blocks that its tokens need"
            written = table[sequence.computed // blocks.block_size :]
            assert all(owners[block] == 1 for block in written), "writes what others read"
            copied.add(written[0])
        assert {target for _, target in step.copies} <= copied, "a copy that no sequence needs"

    def is_right(self, sequence: Sequence, end: int, owned: int) -> bool:
        """Whether a sequence that holds `end` tokens after the step may own so many blocks."""
        return owned == self.scheduler.blocks.blocks_for(end)

    def check_preempted(self) -> None:
        """Who was sent away comes back only when a request has left since."""
        self.has_preempted = False
        for sequence in self.scheduler.waiting:
            if sequence.preemptions > self.sent_away.get(sequence.row, (0, 0))[0]:
                self.sent_away[sequence.row] = sequence.preemptions, self.departures
                self.has_preempted = True
        for sequence in self.scheduler.running:
            if sequence.row in self.sent_away:
                _, departures = self.sent_away.pop(sequence.row)
                # A prefix cache also frees blocks when two have computed the same tokens.
                has_cache = isinstance(self.scheduler.blocks, CachingBlockManager)
                # And a step that drafts fewer tokens than the last one takes fewer blocks.
                varies = getattr(self.scheduler, "chooser", None) is not None
                assert has_cache or varies or self.departures > departures, (
                    "sent away, and back before a request left"
                )

    def check_end(self) -> None:
        """When all have gone, no sequence owns a block."""
        blocks = self.scheduler.blocks
        assert not blocks.tables and blocks.num_free == blocks.num_blocks, "blocks leak"


class PrefillFirstRules(Rules):
    """A step is prompts or decodes. The first may have to wait while prompts run."""

    def check_progress(self, step: Step) -> None:
        if isinstance(self.scheduler.blocks, CachingBlockManager):
            return  # because who comes back, and finds all but one token there, looks like a decode
        decodes = [chunk.sequence.is_decoding for chunk in step.chunks]
        assert all(decodes) or not any(decodes), "prompts and decodes in one step"
        if any(decodes):
            super().check_progress(step)


class ChunkedRules(Rules):
    """Also: decodes never wait, and neither does a prompt without reason."""

    def check(self, step: Step) -> None:
        super().check(step)
        scheduler = self.scheduler
        in_step = {chunk.sequence.row for chunk in step.chunks}
        for sequence in scheduler.running:
            assert sequence.row in in_step or not sequence.is_decoding, "a decode waits"
        room = scheduler.room(step)
        waits = [s for s in scheduler.running if s.row not in in_step]
        assert not (waits and room), "a prompt waits, and the step has room"
        has_cache = isinstance(scheduler.blocks, CachingBlockManager)
        if scheduler.waiting and not self.has_preempted and not has_cache:
            self.check_head(scheduler.waiting[0], room)

    def check_head(self, head: Sequence, room: int) -> None:
        """The first who waits lacks a place, room in the step, or blocks."""
        scheduler = self.scheduler
        lacks_room = not room or not scheduler.has_place(head)
        needed = scheduler.blocks.blocks_for(len(head.tokens))
        lacks_blocks = needed > scheduler.blocks.num_free
        assert lacks_room or lacks_blocks, "a request waits without a reason"
