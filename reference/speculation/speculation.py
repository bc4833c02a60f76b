"""Speculation as a part of the engine: `Engine.run` calls it at three points of a step.

Read it beside engine.py's `run`. `draft` is called before the pass, `verify` in the place of the
sampler, and `keep` before the scheduler counts what has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lessons.l12_paged_kv.runner import copy_blocks
from lessons.l14_continuous_batching.sequence import Chunk, Step
from lessons.l17_tree_speculation.runner import compact, path_moves
from reference.engine.model_runner import ModelRunner
from reference.engine.outputs import SpeculationCounts
from reference.engine.request import EngineSequence, ends
from reference.speculation.lookahead import LookaheadScheduler, look_ahead
from reference.speculation.protocol import NO_DRAFT, Draft, Ran
from reference.speculation.verification import Verified, Verifier

if TYPE_CHECKING:  # few models keep states
    from reference.features.states.drafted import DraftedStates


class Speculation:
    """Lets the sequences of an engine get several tokens from one pass of the target.

    runner: of the target. scheduler: gives sequences room for drafts; its proposer fills it.
    counts: of all steps. drafts, verified: of the step under way. in_step: of the last one, {row of
    a sequence: (drafted, accepted)}.
    """

    def __init__(self, runner: ModelRunner, scheduler: LookaheadScheduler):
        self.runner = runner
        self.blocks = scheduler.blocks
        self.proposer = scheduler.proposer
        self.verifier = Verifier()
        self.counts = SpeculationCounts()
        self.drafts: dict[EngineSequence, Draft] = {}
        self.verified: dict[EngineSequence, Verified] = {}
        self.in_step: dict[int, tuple[int, int]] = {}
        self.states: DraftedStates | None = None  # of a model that keeps them

    def draft(self, step: Step) -> None:
        """Fill the places of the step with drafted tokens; places for which there are none go."""
        for pool in self.proposer.pools:
            copy_blocks(pool, step.copies)
        self.drafts, self.verified = {}, {}
        waiting = [chunk.sequence for chunk in step.chunks if chunk.sequence.num_drafted]
        if not waiting:
            return
        counts = [sequence.num_drafted for sequence in waiting]
        found = self.proposer.propose(waiting, counts, self.blocks.tables)
        self.drafts = {
            sequence: allowed(sequence, draft) for sequence, draft in zip(waiting, found)
        }
        for sequence, draft in self.drafts.items():
            # Where nothing was drawn any token will do: what follows it is not asked for.
            look_ahead(sequence, [max(token, 0) for token in draft.tokens], draft.tree)
        step.chunks[:] = [
            Chunk(sequence, sequence.to_compute if sequence in self.drafts else count)
            for sequence, count in step.chunks
        ]
        if self.states is not None:
            self.states.set_aside([s for s, draft in self.drafts.items() if draft.tokens])

    def verify(self, logits: Tensor, sequences: list[EngineSequence]) -> list[Verified]:
        """What each sequence emits. logits: [R, V], which are changed: a row for its newest token
        and for each drafted one, one sequence after the other.
        """
        proposed = [self.drafts.get(sequence, NO_DRAFT) for sequence in sequences]
        return self.note(sequences, self.verifier(logits, sequences, proposed))

    def note(self, sequences: list[EngineSequence], found: list[Verified]) -> list[Verified]:
        """What each sequence emits is known now. Returns it."""
        for sequence in sequences:
            look_ahead(sequence, [])  # because what it emits follows its output
        self.verified = dict(zip(sequences, found))
        return found

    def keep(self, step: Step) -> None:
        """Cut the step down to the tokens that stay, as if no others had been drafted. The path
        that stays of a tree moves together in the cache. What does not stay keeps its slots, and
        the next step writes over it.
        """
        self.tell()
        ran, moves, outcomes = [], [], []
        for at, (last, (sequence, count)) in enumerate(ends(step)):
            first_row, held = last + 1 - count, sequence.computed
            rows = range(first_row, last + 1)
            if sequence in self.drafts:
                if self.drafts[sequence].tokens:
                    outcomes.append((sequence, count, self.got(sequence)))
                count = self.got(sequence)
                path = list(self.verified[sequence].path[:count])
                rows = [first_row + node for node in path]
                step.chunks[at] = Chunk(sequence, count)
                table, size = self.blocks.tables[sequence.row], self.blocks.block_size
                for pages in getattr(table, "groups", [table]):  # of each group of layers
                    moves += path_moves(path, held, pages, size)
            ran.append(Ran(sequence, held, count, rows))
        if moves:
            compact(self.runner.pool, moves)
        if self.states is not None:
            self.states.restore(outcomes)
        # Before the scheduler tells the prefix cache of full blocks: they are full of the
        # proposer's K and V, too, or of none.
        self.proposer.observe(ran, self.runner.features, self.blocks.tables)

    def got(self, sequence: EngineSequence) -> int:
        """How many tokens a sequence with a draft has taken in this step. As many have run and
        stay: its former newest, and all that it took but the last.
        """
        return sequence.to_compute - 1

    def tell(self) -> None:
        """For the metrics, and for the trace."""
        self.in_step = {}
        for sequence, (tokens, *_) in self.verified.items():
            got = self.got(sequence) if sequence in self.drafts else 1
            # Nodes of a tree for which nothing could be drawn are none.
            drafted = sum(token >= 0 for token in self.drafts.get(sequence, NO_DRAFT).tokens)
            accepted = min(got, len(tokens) - 1)
            metrics = sequence.request.metrics
            metrics.speculation = metrics.speculation or SpeculationCounts()
            for counts in (self.counts, metrics.speculation):
                counts.add(drafted, accepted, got)
            if drafted:
                self.in_step[sequence.row] = drafted, accepted


def allowed(sequence: EngineSequence, draft: Draft) -> Draft:
    """A chain that is not drawn, cut in front of the first token that the sequence's structure
    forbids: such a token is never kept. n-grams, which follow the text alone, have them.
    """
    if sequence.constraint is None or draft.tree is not None or draft.q is not None:
        return draft
    return Draft(draft.tokens[: sequence.constraint.count_fitting(draft.tokens)])
