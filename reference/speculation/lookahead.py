"""Room for drafted tokens in a scheduler's steps.

A sequence that decodes gets a chunk of 1 + K tokens: its newest, and places behind it that a
proposer will fill. While the step runs, places and drafted tokens stand in the sequence's list of
tokens, so schedulers, block tables and the runner see nothing unusual. After the pass only what
stays remains.

Where a proposer fills trees, the places are the nodes of one, in the order of their numbers. A tree
takes no more places than the answer may still have tokens, so nothing else has to know how large
trees are: not the pool, not the longest context, not who admits requests.

Two decisions keep a seeded answer the same in any batch. K is a function of the sequence, unless a
`chooser` sets it anew for each step. And the newest token of an answer always runs together with
its draft: a sequence that was preempted computes everything in front of that token again, then goes
on as before.
"""

from functools import lru_cache

from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l17_tree_speculation.trees.tree import Tree
from reference.engine.request import EngineSequence
from reference.speculation.batch_schedule import Chooser
from reference.speculation.protocol import Proposer

PLACE = 0  # a token until the proposer has drafted one


def look_ahead(sequence: EngineSequence, tokens: list[int], tree: Tree | None = None) -> None:
    """Let these tokens follow the output of a sequence, and no others. tree: their shape."""
    sequence.all_tokens[len(sequence.all_tokens) - sequence.num_drafted :] = tokens
    sequence.num_drafted = len(tokens)
    # A chain needs no mask: each of its tokens sees all in front of it.
    sequence.tree = None if tree is None or tree.is_chain else tree


@lru_cache(maxsize=4096)
def part_of(tree: Tree, depth: int, count: int) -> Tree:
    """At most `count` nodes behind the root, and none deeper than `depth`."""
    return tree.cut(depth).first(count + 1)


class LookaheadScheduler(ChunkedScheduler):
    """A ChunkedScheduler that gives sequences that decode room for a draft.

    proposer: how many tokens it could draft at all, and who has to forget. num_speculative_tokens:
    K, or the largest that `chooser` may choose. tree: of as many nodes and the root; None: a chain.
    Other arguments are ChunkedScheduler's.
    """

    def __init__(
        self,
        *args,
        proposer: Proposer,
        num_speculative_tokens: int,
        tree: Tree | None = None,
        chooser: Chooser | None = None,
        **arguments,
    ):
        super().__init__(*args, **arguments)
        self.proposer = proposer
        self.num_speculative_tokens = num_speculative_tokens
        self.count = num_speculative_tokens  # of the step under way
        self.chooser = chooser
        self.tree = tree
        least = self.max_num_seqs * (1 + num_speculative_tokens)
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}; accepted: {least} or "
                f"more, {1 + num_speculative_tokens} tokens for each of max_num_seqs"
            )

    def schedule(self) -> Step:
        """As in lesson 15. K is chosen first, once for the whole step."""
        if self.chooser is not None:
            self.count = self.chooser.count_for(sum(one.is_decoding for one in self.running))
        return super().schedule()

    def count_for(self, sequence: EngineSequence) -> int:
        """How many tokens are drafted for a sequence that decodes."""
        # - 1, because a step emits one token more than it drafts, and that must not be too many.
        left = sequence.max_new_tokens - len(sequence.output) - 1
        if left < 1:
            return 0
        most = self.proposer.most(sequence)
        if self.tree is None:
            return min(self.count, left, most)
        return len(part_of(self.tree, most, left)) - 1

    def give_places(self, sequence: EngineSequence) -> None:
        """Let places for its draft stand behind a sequence that decodes."""
        count = self.count_for(sequence)
        tree = None
        if count and self.tree is not None:
            tree = part_of(self.tree, self.proposer.most(sequence), count)
        look_ahead(sequence, [PLACE] * count, tree)

    def run(self, sequence: EngineSequence, most: int, step: Step) -> None:
        """As in lesson 15, with places for a draft. The budget has them for every sequence."""
        if sequence.is_decoding:
            self.give_places(sequence)
            most = sequence.to_compute
        super().run(sequence, most, step)

    def take_blocks(self, sequence: EngineSequence) -> bool:
        """As in lesson 15, with blocks for the draft of who comes back, or it would soon be sent
        away again.
        """
        ahead = self.count_for(sequence) if sequence.output else 0
        tokens = len(sequence.tokens) + ahead
        if self.host.has(sequence) and self.blocks.blocks_for(tokens) > self.blocks.num_free:
            return False
        if not super().take_blocks(sequence):
            return False
        if self.blocks.needs(sequence.row, sequence.computed, tokens) <= self.blocks.num_free:
            return True
        self.give_back(sequence)
        self.refused = (sequence, self.blocks.num_free)
        return False

    def put(self, sequence: EngineSequence, count: int, step: Step) -> None:
        """As in lesson 15, but the newest token of an answer waits for a step that has room for its
        draft, too.
        """
        if sequence.is_decoding and not sequence.num_drafted:  # it may have just come in
            self.give_places(sequence)
            count, held = sequence.to_compute, sequence.computed
            has_blocks = self.blocks.can_grow(sequence.row, held, held + count)
            if count > self.room(step) or not has_blocks:
                look_ahead(sequence, [])
                return
        elif sequence.output and not sequence.is_decoding:
            count = min(count, sequence.to_compute - 1)
        super().put(sequence, count, step)

    def preempt(self, sequence: EngineSequence, step: Step) -> None:
        """As in lesson 15. What a proposer has computed is lost with the blocks."""
        look_ahead(sequence, [])
        super().preempt(sequence, step)
        if not self.host.has(sequence):
            self.proposer.forget(sequence)

    # ------------------------------------------------------------ the proposer goes along

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """As in lesson 15."""
        super().fork(parent, child)
        self.proposer.fork(parent, child)

    def abort(self, sequence: EngineSequence) -> None:
        """As in lesson 15."""
        super().abort(sequence)
        self.proposer.forget(sequence)

    def leave(self) -> list[EngineSequence]:
        """As in lesson 15."""
        done = super().leave()
        for sequence in done:
            self.proposer.forget(sequence)
        return done
