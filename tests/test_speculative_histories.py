"""Random histories of the speculative engine: its tokens are those of a request that runs alone,
and no block leaks, whatever is drafted, and whichever request comes, goes or is preempted.
"""

from collections import Counter

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l17_tree_speculation.trees.tree import Tree
from reference.speculation.lookahead import PLACE, LookaheadScheduler, look_ahead
from reference.speculation.speculation import Speculation
from reference.speculation.verification import Verifier
from tests.speculative_histories import DraftedHistory, Drafting, VirtualDraft

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories


@st.composite
def trees(draw):
    """A few nodes anywhere."""
    parents = [-1]
    for node in range(1, draw(st.integers(2, 8))):
        parents.append(draw(st.integers(0, node - 1)))
    return Tree(tuple(parents))


KINDS = ["ngram", "suffix", "sure", "drawn", "drawn at once", "sure tree", "drawn tree"]
DRAFTING = st.builds(
    Drafting,
    kind=st.sampled_from(KINDS),
    tree=trees(),
    num_speculative_tokens=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 1.0, 1.0]),
    context=st.sampled_from([40, 40, 17]),
    min_tokens=st.sampled_from([0, 0, 3]),
)


def test_random_histories(request):
    seen, ends = Counter(), Counter()

    @histories(5_000 if request.config.getoption("--all") else 100)
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        history = DraftedHistory(house, requests, faults, drafting)
        history.run()
        seen.update({name: count > 0 for name, count in history.seen.items()})
        ends.update(history.ended.values())

    check()
    print(seen, ends)
    # Only of the long form, because a hundred random histories may miss what is rare.
    if request.config.getoption("--all"):
        for name in (
            "preempted",
            "swapped",
            "cached",
            "accepted",
            "rejected",
            "stopped_inside",
            "moved",
        ):
            assert seen[name], f"no history was {name}"
        assert set(ends) == {"finished", "aborted", "failed", "refused"}


# ---------------------------------------------------------------- planted slips


class NeverRewinds(Speculation):
    """Rejected tokens count as computed."""

    def keep(self, step):
        counts = {chunk.sequence: chunk.count for chunk in step.chunks}
        super().keep(step)
        step.chunks[:] = [chunk._replace(count=counts[chunk.sequence]) for chunk in step.chunks]


class CachesDrafts(Speculation):
    """The prefix cache is told of tokens that are rejected afterwards."""

    def verify(self, logits, sequences):
        for sequence in self.drafts:
            if hasattr(self.blocks, "remember"):
                self.blocks.remember(sequence.row, list(sequence.tokens))
        return super().verify(logits, sequences)


class BonusFromTheDraft(Speculation):
    """What follows the accepted tokens is the draft's next one where there is one."""

    def verify(self, logits, sequences):
        found = super().verify(logits, sequences)
        for sequence, (tokens, *_) in zip(sequences, found):
            if (draft := self.drafts.get(sequence)) and len(tokens) <= len(draft.tokens):
                tokens[-1] = draft.tokens[len(tokens) - 1]
        return found


class IgnoresStops(Speculation):
    """A stop token inside an accepted run is taken for any other."""

    def verify(self, logits, sequences):
        found = super().verify(logits, sequences)
        for sequence, (tokens, *_) in zip(sequences, found):
            inside, all_stops = set(tokens[:-1]), sequence.stop_token_ids
            sequence.stop_token_ids = all_stops - inside
        return found


class DraftsTooMuch(LookaheadScheduler):
    """A step may emit more than a request has asked for."""

    def count_for(self, sequence):
        return min(self.num_speculative_tokens, self.proposer.most(sequence))


class Overshoots(Speculation):
    """All that is accepted is handed out, whatever was asked for."""

    def __init__(self, runner, scheduler):
        super().__init__(runner, scheduler)
        scheduler.count_for = lambda s: DraftsTooMuch.count_for(scheduler, s)

    def verify(self, logits, sequences):
        found = super().verify(logits, sequences)
        self.limits = {sequence: sequence.max_new_tokens for sequence in sequences}
        for sequence, (tokens, *_) in zip(sequences, found):
            if len(sequence.output) + len(tokens) > sequence.max_new_tokens:
                sequence.max_new_tokens = len(sequence.output) + len(tokens)
        return found

    def keep(self, step):
        for sequence in self.verified:
            sequence.max_new_tokens = self.limits[sequence]
        super().keep(step)


class VerifiesAtTheLastRow(Verifier):
    """The token after a rejection is taken from the row after the whole draft."""

    def compare(self, logits, rows, drafts):
        found, first = super().compare(logits, rows, drafts), 0
        for (tokens, _), draft in zip(found, drafts):
            first += len(draft.tokens) + 1
            at, none = slice(first - 1, first), draft._replace(tokens=[])
            ((own, _),) = super().compare(logits[at], rows[at], [none])
            tokens[-1] = own[0]
        return found


class LastRow(Speculation):
    """With that verifier."""

    def __init__(self, runner, scheduler):
        super().__init__(runner, scheduler)
        self.verifier = VerifiesAtTheLastRow()


class DraftsByChance(Speculation):
    """Only as many tokens are drafted as the step has room for beside other requests' tokens."""

    def draft(self, step):
        for chunk in step.chunks[1:]:
            if chunk.sequence.num_drafted:
                look_ahead(chunk.sequence, [PLACE])
        step.chunks[:] = [
            chunk._replace(count=chunk.sequence.to_compute) if chunk.sequence.num_drafted else chunk
            for chunk in step.chunks
        ]
        return super().draft(step)


RARE = "NOT RUN: shows in few histories, so it takes long; try --all"
SLIPS = [
    NeverRewinds,
    BonusFromTheDraft,
    IgnoresStops,
    Overshoots,
    LastRow,
    DraftsByChance,
    CachesDrafts,
]


@pytest.mark.parametrize("kind", SLIPS)
def test_a_planted_slip_is_found(kind, request):
    if kind is CachesDrafts and not request.config.getoption("--all"):
        pytest.skip(RARE)

    @histories(300, database=None, derandomize=True, phases=[Phase.generate])
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        DraftedHistory(house, requests, faults, drafting, kind).run()

    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        check()


class LeavesAHole(VirtualDraft):
    """The last token of a draft that was accepted whole never gets into the draft's cache."""

    def lacking(self, sequence, drafted):
        tokens, held = super().lacking(sequence, drafted)
        return tokens[-1:], held + len(tokens) - 1


class LeavesFullBlocks(VirtualDraft):
    """What a full block lacks waits for the next draft; the prefix cache hands the block out."""

    def observe(self, ran, hidden, tables):
        for sequence, first, count, _ in ran:
            if sequence.output and len(sequence.output) > 1:
                held = self.held_of(sequence, first)
                self.held[sequence.row] = min(held, first + count)
            else:
                super().observe([(sequence, first, count, _)], hidden, tables)


class ForgetsNothing(VirtualDraft):
    """It believes that the blocks of a preempted sequence still hold what they held."""

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("draft", [LeavesAHole, LeavesFullBlocks, ForgetsNothing])
def test_a_slip_of_the_proposer_is_found(draft, request):
    """The draft's own memory is read, too, so a token that it lacks shows."""
    if draft is LeavesFullBlocks and not request.config.getoption("--all"):
        pytest.skip(RARE)

    @histories(600, database=None, derandomize=True, phases=[Phase.generate])
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        house = house._replace(cache=HashBlocks)
        drafting = drafting._replace(kind="drawn")
        DraftedHistory(house, requests, faults, drafting, draft=draft).run()

    with pytest.raises((AssertionError, KeyError, ValueError, IndexError, RuntimeError)):
        check()
