"""Slips of trees in the engine, planted one at a time: random histories find each of them."""

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from reference.speculation import speculation
from reference.speculation.lookahead import LookaheadScheduler, part_of
from reference.speculation.speculation import Speculation
from reference.speculation.verification import Verifier
from tests.speculative_histories import DraftedHistory, TreeRunner

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given

from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories
from tests.test_speculative_histories import DRAFTING

compact, path_moves = speculation.compact, speculation.path_moves


def moves_nothing(pool, moves):
    """The path stays where its nodes were."""


def moves_one_too_far(path, begin, table, size):
    """The places after the right ones."""
    return path_moves(path, begin + 1, [*table, table[-1]], size)


def moves_places(path, begin, table, size):
    """Places of the sequence are taken for slots of the pool."""
    return [(begin + node, begin + place) for place, node in enumerate(path) if node != place]


def moves_one_after_the_other(pool, moves):
    """Reads what it has just written: right only where no target is a later source."""
    for move in reversed(moves):
        compact(pool, [move])


class TellsTheCacheFirst(Speculation):
    """Full blocks are remembered as the tokens are there before the path is in one piece."""

    def verify(self, logits, sequences):
        self.lying = {sequence: list(sequence.tokens) for sequence in self.drafts}
        return super().verify(logits, sequences)

    def keep(self, step):
        for sequence, tokens in self.lying.items():
            if hasattr(self.blocks, "remember"):
                self.blocks.remember(sequence.row, tokens)
        super().keep(step)


class BonusOfTheLastNode(Verifier):
    """The token after the path is the one after the tree's last node."""

    def compare(self, logits, rows, drafts):
        found, first = super().compare(logits, rows, drafts), 0
        for (tokens, _), draft in zip(found, drafts):
            last = slice(first + len(draft.tokens), first + len(draft.tokens) + 1)
            first = last.stop
            if draft.tree is not None:
                none = draft._replace(tokens=[], tree=None)
                ((own, _),) = super().compare(logits[last], rows[last], [none])
                tokens[-1] = own[0]
        return found


class OtherVerifier(Speculation):
    """With that verifier."""

    def __init__(self, runner, scheduler):
        super().__init__(runner, scheduler)
        self.verifier = BonusOfTheLastNode()


class IgnoresStops(Speculation):
    """A stop token inside an accepted path is taken for any other."""

    def verify(self, logits, sequences):
        found = super().verify(logits, sequences)
        for sequence, (tokens, *_) in zip(sequences, found):
            sequence.stop_token_ids = sequence.stop_token_ids - set(tokens[:-1])
        return found


class WholeTrees(LookaheadScheduler):
    """Trees of any depth, however few tokens are left."""

    def count_for(self, sequence):
        return len(part_of(self.tree, 99, 99)) - 1 if self.tree else super().count_for(sequence)


class Overshoots(Speculation):
    """All of an accepted path is handed out, whatever was asked for."""

    def __init__(self, runner, scheduler):
        super().__init__(runner, scheduler)
        scheduler.count_for = lambda s: WholeTrees.count_for(scheduler, s)

    def verify(self, logits, sequences):
        self.limits = {sequence: sequence.max_new_tokens for sequence in sequences}
        for sequence in sequences:
            sequence.max_new_tokens += 99
        return super().verify(logits, sequences)

    def keep(self, step):
        for sequence in self.verified:
            sequence.max_new_tokens = limit = self.limits[sequence]
            if not sequence.finished and len(sequence.output) >= limit:
                sequence.finish_reason = "length"
        super().keep(step)


class OneAfterAnother(TreeRunner):
    """Positions by order: each node comes after the one before it."""

    def write_positions(self, table, held, tree):
        pass


PATCHES = dict(compact=[moves_nothing, moves_one_after_the_other])
PATCHES |= dict(path_moves=[moves_one_too_far, moves_places])
SLIPS = [(name, slip) for name, slips in PATCHES.items() for slip in slips]
SLIPS += [(None, kind) for kind in (OtherVerifier, IgnoresStops, Overshoots, TellsTheCacheFirst)]
SLIPS += [("TreeRunner", OneAfterAnother)]
FOUND = (AssertionError, KeyError, ValueError, IndexError, RuntimeError)


@pytest.mark.parametrize("name, slip", SLIPS)
@pytest.mark.sample(3)
def test_a_planted_slip_is_found(name, slip, monkeypatch):
    kind = Speculation
    if name is None:
        kind = slip
    elif name == "TreeRunner":
        monkeypatch.setattr("tests.speculative_histories.TreeRunner", slip)
    else:
        monkeypatch.setattr(speculation, name, slip)

    @histories(1000, database=None, derandomize=True, phases=[Phase.generate])
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        if slip is TellsTheCacheFirst:
            house = house._replace(cache=HashBlocks)
        drafting = drafting._replace(kind="sure tree")
        DraftedHistory(house, requests, faults, drafting, kind).run()

    with pytest.raises(FOUND):
        check()
