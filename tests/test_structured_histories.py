"""Structured outputs in the engine: whatever the scheduler does, whatever is drafted and whichever
requests share the batch, an answer is that of trying every token at every place.
"""

from dataclasses import replace

import pytest
import torch

from lessons.l24_structured_outputs import naive
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import Matcher
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from reference import SamplingParams, StructuredOutputsParams
from reference.engine.engine import Engine
from reference.features.structured import Constraint
from tests.engine_histories import VOCAB, Asked, History, House, hashes
from tests.speculative_histories import DraftedHistory, Drafting
from tests.structured_cases import END, TOKENS, wish

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import given

from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories
from tests.test_speculative_histories import DRAFTING


def mask_after(sequence, output: list[int]) -> torch.Tensor | None:
    """Which tokens may follow, by trying each: [VOCAB] bool. None: any may."""
    wanted = sequence.params.structure
    if wanted is None or END in output:
        return None
    matcher = matchers(wanted)
    state = matcher.read(b"".join(TOKENS[token] for token in output))
    if state is None:  # drafted, and not allowed
        return None
    allowed = naive.unpacked(naive.token_mask(matcher, state, TOKENS), VOCAB)
    allowed[END] = state.may_end
    return allowed


def matchers(wanted: StructuredOutputsParams, known: dict = {}) -> Matcher:  # noqa: B006
    if wanted.key not in known:
        automaton = compile_structure(wanted.kind, getattr(wanted, wanted.kind), wanted.layout)
        known[wanted.key] = Matcher(automaton)
    return known[wanted.key]


class Structured:
    """A history in which four of five requests ask for a structure."""

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.engine.structures.vocabulary = Vocabulary(TOKENS)

    def params(self, index: int) -> SamplingParams:
        return replace(super().params(index), structured_outputs=wish(index))

    def logits_after(self, table, sequence, output: list[int], read=None) -> torch.Tensor:
        logits = super().logits_after(table, sequence, output, read)
        allowed = mask_after(sequence, output)
        if allowed is None:
            return logits
        if not allowed[:END].any():  # nothing but the end may follow, however early
            text = output if read is None else read
            logits = table[hashes(sequence.prompt + text)[-1] % len(table)][None]
        return logits.masked_fill(~allowed, -torch.inf)


class StructuredHistory(Structured, History):
    pass


class StructuredDraftedHistory(Structured, DraftedHistory):
    pass


def test_random_histories(request):
    @histories(2000 if request.config.getoption("--all") else 25)
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        StructuredHistory(house, requests, faults).run()

    check()


def test_random_histories_with_drafts(request):
    """Each drafted position is masked by the text before it."""

    @histories(2000 if request.config.getoption("--all") else 25)
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        StructuredDraftedHistory(house, requests, faults, drafting).run()

    check()


class ForgetsWhatItRead(Engine):
    """A preempted answer begins its text anew."""

    def run(self, step):
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.constraint and sequence.preemptions and not sequence.computed:
                sequence.constraint.state = sequence.constraint.masks.start
        return super().run(step)


class SharesAConstraint(Engine):
    """All answers of a request follow one state."""

    def new_sequences(self, request, priority):
        sequences = super().new_sequences(request, priority)
        for sequence in sequences:
            sequence.constraint = sequences[0].constraint
        return sequences


class ShiftsTheMasks(Engine):
    """Each row has the constraint of its neighbour."""

    def sample(self, step, hidden):
        sampled = [chunk.sequence for chunk in step.chunks if chunk.is_sampled]
        if len(sampled) > 1:
            constraints = [sequence.constraint for sequence in sampled]
            for at, sequence in enumerate(sampled):
                sequence.constraint = constraints[at - 1]
            found = super().sample(step, hidden)
            for sequence, own in zip(sampled, constraints):
                sequence.constraint = own
            return found
        return super().sample(step, hidden)


@pytest.mark.parametrize("kind", [ForgetsWhatItRead, SharesAConstraint, ShiftsTheMasks])
def test_a_planted_slip_is_seen(kind):
    house = House(7, 3, 4, 8)
    requests = [Asked(0, 5, 10, answers=3 if index == 2 else 1) for index in range(6)]
    StructuredHistory(house, requests, {}).run()
    with pytest.raises(AssertionError):
        StructuredHistory(house, requests, {}, kind).run()


def test_a_draft_that_is_masked_by_its_first_place_is_seen(monkeypatch):
    """The slip: all rows of a draft have the mask of the answer in front of it."""
    row = Constraint.row
    requests = [Asked(0, 5, 12) for _ in range(5)]
    arguments = House(40, 3, 4, 40), requests, {}, Drafting("drawn", 3)
    StructuredDraftedHistory(*arguments).run()
    monkeypatch.setattr(Constraint, "row", lambda self, ahead=(): row(self))
    with pytest.raises((AssertionError, ValueError)):
        StructuredDraftedHistory(*arguments).run()
