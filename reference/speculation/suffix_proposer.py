"""A proposer that counts: the sequence's own text, and the answers that other requests got."""

from torch import Tensor

from lessons.l16_speculative_sampling.more.suffixes import LIMITS, Limits, SuffixCache
from reference.engine.request import EngineSequence
from reference.speculation.protocol import Draft, Proposer, Ran, Tables


class SuffixProposer(Proposer):
    """What followed most often where a text ended like this one follows again.

    Lesson 16's `SuffixCache` has a tree for each sequence, and one for answers that have ended.
    What others were answered changes what is drafted, never what a request gets: a draft without a
    q only saves passes. Source: Oliaro et al. 2025, SuffixDecoding (arXiv 2411.04975).
    """

    taps, pools = None, ()

    def __init__(self, limits: Limits = LIMITS):
        self.cache = SuffixCache(limits)
        # Of matches that allow as many tokens as the tree has room for. By default 12 of 24.
        matched = int(limits.max_tree_depth / (1 + limits.max_spec_factor))
        self.longest = max(limits.room(matched), limits.room(matched + 1))

    def most(self, sequence: EngineSequence) -> int:
        """The longest draft that any match may have."""
        return self.longest

    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """The draft of which most tokens should stay; nothing if nothing was ever like it."""
        return [Draft(self.lookup(s, count)) for s, count in zip(sequences, counts)]

    def lookup(self, sequence: EngineSequence, count: int) -> list[int]:
        """At most `count` tokens."""
        end = sequence.computed + 1  # places for the draft follow, which are no text
        return self.cache.draft(sequence.row, sequence.all_tokens[:end], count)

    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """The text itself tells everything. features: [T, F]."""

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """The child reads the text for itself."""

    def forget(self, sequence: EngineSequence) -> None:
        """Drop its tree. Its answer stays if it has ended by itself: what was preempted comes back,
        and what was aborted is half an answer.
        """
        if sequence.finish_reason in ("stop", "length"):
            self.cache.end(sequence.row, sequence.output)
        else:
            self.cache.forget(sequence.row)
