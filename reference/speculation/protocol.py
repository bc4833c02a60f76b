"""What the engine asks of a drafter: a draft model, n-grams, suffixes, Medusa heads, a layer
of EAGLE or MTP.

A step of a speculative engine has six parts, and a proposer is called in two of them:

    schedule   each sequence that decodes gets room for its newest token and for K drafted ones
               behind it
    propose    the proposer fills that room                                     Proposer.propose
    run        the target runs newest and drafted tokens in one pass
    verify     the drafted tokens that stay, and one more that is the target's own
    keep       the rest goes; of a tree, K and V of the path that stays move together
    observe    the proposer hears what stayed, and gets the hidden states       Proposer.observe

Two rules make this work for every proposer.

A proposer that keeps K and V of its own keeps them in the target's blocks: block 7 of a sequence is
block 7 in the target's pool and in the proposer's. So there is one block table, one prefix cache,
one copy on write and one swap for both, and neither can leak a block alone.
For this the proposer must run every token that the target runs, prompts included: that is what
`observe` is for.

How many tokens are drafted for a sequence depends on that sequence alone, never on who else is
there or on how much memory is left. So a seeded request gets the same tokens alone and in any
batch. A draft without a q may hold what it likes, answers of others too, because it changes no
token. One case is left out: guesses that heads have drawn (draft_sample_method="probabilistic").
Heads read what the target computed, and the prefix cache, a fork or a preemption may spare it that.
Then other guesses are drawn, and only the distribution is the same.

Source of the parts and of their order: vLLM, vllm/v1/spec_decode.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lessons.l03_kv_cache.cache import KVPool
from lessons.l17_tree_speculation.trees.tree import Tree
from reference.engine.request import EngineSequence

Tables = dict[int, list[int]]  # the blocks of each sequence, by its number `row`


class Draft(NamedTuple):
    """Tokens that may follow a sequence's newest. q: [len(tokens), V] float32, the distributions
    that they were drawn from. None: the proposer is sure of them (greedy requests, n-grams), that
    is, q is 1 at each token.

    tree: its root is the newest token, the other nodes are `tokens`; -1 where q had none left. Then
    q has a row for each node, from which its children were drawn: [len(tree), V]. None: a chain.
    """

    tokens: list[int]
    q: Tensor | None = None
    tree: Tree | None = None


NO_DRAFT = Draft([])


class Ran(NamedTuple):
    """Tokens of a sequence that the target has run in a step, and that stay.

    They are sequence.tokens[first : first + count], and these rows of the step's hidden states
    belong to them: neighbours, or of a tree those on the path that stays. The token behind them is
    in sequence.tokens too: the next one of the prompt, or the newest of the answer, which was
    sampled from the last of these rows.
    """

    sequence: EngineSequence
    first: int
    count: int
    rows: Sequence[int]


class Proposer(Protocol):
    """Who drafts. One object serves all sequences of an engine.

    taps: where it wants the target to be read for `observe`, as in lesson 17: behind how many
    layers, or () for the final hidden state, which the last matrix gets. None: it reads nothing.
    pools: where it keeps K and V, each with as many blocks as the target's, of the same size.
    """

    taps: tuple[int, ...] | None
    pools: Sequence[KVPool]

    def most(self, sequence: EngineSequence) -> int:
        """How many tokens it could draft for this sequence now one behind the other, at most. 0:
        the sequence decodes plainly in this step. Where drafts have a q, a function of the sequence
        alone.
        """

    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """At most counts[b] tokens that may follow sequences[b]; an empty draft says "no idea".
        Where sequences[b].tree asks for a tree, all of its nodes.

        counts: 1 or more each. sequences[b].computed tokens of it have run, all but the newest; its
        table has room for counts[b] behind that. Block copies of the step have been made in
        `pools`.
        """

    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """The step has run: prompts, chunks of prompts, newest tokens with what stayed of a draft.

        features: [T, F], what `taps` ask for, side by side. A sequence that has ended may be among
        them; its blocks are still its own.
        """

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """`child` goes on from where `parent` stands, behind the prompt, on the same blocks."""

    def forget(self, sequence: EngineSequence) -> None:
        """The sequence has ended, or gave up its blocks and will run its tokens again. Also called
        for one that was never seen. Blocks that wait on the host are not given up.
        """
