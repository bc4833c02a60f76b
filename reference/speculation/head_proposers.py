"""Two proposers that read the target's hidden states: Medusa's heads, and the one layer of EAGLE
or MTP.

Lesson 17 explains both. Its drafters go down a tree level by level, and a `Choice` says which
tokens stand at the nodes. The likeliest ones are sure drafts, so the verifier's rule for these
keeps every answer as it is, token for token. Drawn ones are accepted more often, and keep the
distribution.

A chain is a tree, too. It has no rows that have to run again, and it needs no mask.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l12_paged_kv.runner import new_pool, step_batch
from lessons.l17_tree_speculation.heads.drafts import HeadDrafter, MedusaDrafter, OneLayer
from lessons.l17_tree_speculation.heads.heads import FeatureDraft, MedusaHeads
from lessons.l17_tree_speculation.runner import with_trees
from lessons.l17_tree_speculation.trees.guesses import Choice, Parent
from lessons.l17_tree_speculation.trees.tree import Tree, chain
from reference.engine.model_runner import rung_of
from reference.engine.request import EngineSequence
from reference.speculation.protocol import Draft, Proposer, Ran, Tables


class HeadProposer(Proposer):
    """What both share: a drafter of lesson 17, which knows sequences by their numbers."""

    drafter: HeadDrafter

    @torch.inference_mode()
    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """The tree of each sequence, or a chain."""
        trees = {s.row: s.tree or chain(count) for s, count in zip(sequences, counts)}
        tokens, q = self.drafter.propose(sequences, trees)
        drafts, first = [], 0
        for sequence, (_, *guesses) in zip(sequences, tokens):
            tree = trees[sequence.row]
            rows = slice(first, first + len(tree))
            first = rows.stop
            if q is None or sequence.sampling.temperature == 0:
                drafts.append(Draft(guesses, None, sequence.tree))
            else:
                drafts.append(Draft(guesses, q[rows], tree))
        return drafts


class MedusaProposer(HeadProposer):
    """Head i guesses the token that stands i + 1 places behind the newest.

    All of them read one hidden state: that of the token in front of the newest, from which the
    newest was sampled.
    """

    taps, pools = (), ()

    def __init__(self, heads: MedusaHeads, target: Decoder, choice: Choice):
        self.drafter = MedusaDrafter(target, heads, choice)
        self.states = self.drafter.newest  # of each sequence: [hidden_size]

    def most(self, sequence: EngineSequence) -> int:
        """A token for each head. None where the prefix cache spared the target the hidden state."""
        return self.drafter.depth if sequence.row in self.states else 0

    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """Keep the last hidden state of each. features: [T, hidden_size]."""
        # Copied, because the next replayed step writes over `features`, and a sequence that waits
        # on the host does not take part in it.
        last = torch.stack([features[one.rows[-1]] for one in ran])
        for one, state in zip(ran, last):
            self.states[one.sequence.row] = state

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Both go on from one hidden state."""
        self.states[child.row] = self.states[parent.row]

    def forget(self, sequence: EngineSequence) -> None:
        """Drop its hidden state."""
        self.states.pop(sequence.row, None)


class EagleProposer(HeadProposer):
    """One layer that goes on from the target's features, over the target's block tables.

    Place i of its pool belongs to the feature of token i and to token i + 1. So the last place of a
    block that the prefix cache hands on may hold the pair of another continuation. That can cost an
    accepted token, but never makes an answer wrong.
    """

    def __init__(
        self,
        draft: FeatureDraft,
        target: Decoder,
        choice: Choice,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        kv_cache_dtype: str = "auto",
    ):
        self.taps = draft.taps
        if draft.config.mla is not None:
            from lessons.l06_mla.deepseek import latent  # here, because few drafts need it

            draft = latent(draft)
        layer = OneLayer(draft, target)
        rung = rung_of(layer, kv_cache_dtype, runs_trees=True)
        pool = new_pool(layer, num_blocks, block_size, max_model_len, rung)
        self.pools = (pool,)
        self.drafter = BlockDrafter(target, draft, choice, pool)

    def most(self, sequence: EngineSequence) -> int:
        """No limit of its own, once it has seen a feature of the sequence."""
        return 2**31 if sequence.row in self.drafter.made else 0

    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """Level after level, for all sequences together."""
        self.drafter.tables = tables
        return super().propose(sequences, counts, tables)

    @torch.inference_mode()
    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """Run the pairs that the target has made. features: [T, F]."""
        drafter, rows = self.drafter, [at for one in ran for at in one.rows]
        inputs = drafter.draft.features(features[rows])
        chunks = [
            (s.all_tokens[first + 1 : first + count + 1], first) for s, first, count, _ in ran
        ]
        made = drafter.run(chunks, inputs, [tables[one.sequence.row] for one in ran])
        last = [end - 1 for end in accumulate(one.count for one in ran)]
        # Copies, because a row of a long prompt's tensor would keep all of it.
        for one, root, feature in zip(ran, inputs[last].split(1), made[last].split(1)):
            drafter.roots[one.sequence.row] = root
            drafter.made[one.sequence.row] = feature

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Both go on from one feature, although the parent's first token is in it. This is a worse
        guess for the child's first draft, but never a wrong answer.
        """
        for kept in (self.drafter.roots, self.drafter.made):
            kept[child.row] = kept[parent.row]

    def forget(self, sequence: EngineSequence) -> None:
        """Drop its features; its blocks are another sequence's now."""
        for kept in (self.drafter.roots, self.drafter.made):
            kept.pop(sequence.row, None)


class Level(NamedTuple):
    """What runs so that the nodes of one depth have guesses behind them.

    nodes: the root, and all nodes down to that depth that have children; a chain runs its last one
    alone, because all keys in front are those of its way. Others see a tree's nodes by a mask,
    which reaches no further back than a step's first token: so they run again. above: where the
    feature that each but the root begins with was made, among the level before.
    """

    nodes: tuple[int, ...]
    above: tuple[int, ...]
    shape: Tree | None


@lru_cache(maxsize=1024)
def level_of(tree: Tree, depth: int) -> Level:
    """depth: 1 or more."""
    if tree.is_chain:
        return Level((depth,), (0,), None)
    nodes, before = (
        [n for n in range(len(tree)) if tree.depths[n] <= most and (n == 0 or tree.children[n])]
        for most in (depth, depth - 1)
    )
    parents = [nodes.index(tree.parents[node]) for node in nodes[1:]]
    above = tuple(before.index(tree.parents[node]) for node in nodes[1:])
    return Level(tuple(nodes), above, Tree((-1, *parents)))


class BlockDrafter(HeadDrafter):
    """EAGLE's layer in blocks that other code hands out. The pairs of what the target has run are
    there; this adds those of guesses behind them, which the next step writes over.

    roots, made: of each sequence, the feature of the token in front of the newest, and what the
    layer made of both: [1, hidden_size]. tables: of this step.
    """

    def __init__(self, target: Decoder, draft: FeatureDraft, choice: Choice, pool):
        super().__init__(target, choice, draft.lm_head)
        self.draft = draft
        self.pool = pool
        self.roots: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}
        self.tables: Tables = {}
        self.guessed: dict[
            int, Tensor
        ] = {}  # of this step: what was made last, [nodes, hidden_size]

    def level_logits(
        self, depth: int, level: list[Parent], trees: dict[int, Tree], tokens: dict[int, list[int]]
    ) -> Tensor:
        """What may stand behind each node of a level: [P, V]."""
        sequences = list({parent.request.row: parent.request for parent in level}.values())
        if depth == 0:
            self.guessed = {sequence.row: self.made[sequence.row] for sequence in sequences}
            places = [0] * len(level)
        else:
            self.go_deeper(depth, sequences, trees, tokens)
            places = [
                level_of(trees[parent.request.row], depth).nodes.index(parent.node)
                for parent in level
            ]
        rows = [self.guessed[parent.request.row][at] for parent, at in zip(level, places)]
        return self.logits(self.draft.hidden(torch.stack(rows)))

    def go_deeper(
        self, depth: int, sequences: Iterable[EngineSequence], trees: dict, tokens: dict
    ) -> None:
        """Run the nodes of this level, whose tokens are known."""
        chunks, inputs, shapes = [], [], []
        for sequence in sequences:
            row, newest = sequence.row, sequence.computed
            nodes, above, shape = level_of(trees[row], depth)
            features = self.guessed[row][list(above)]
            if shape is None:
                held = newest + depth - 1
                new = [max(tokens[row][depth], 0)]
            else:
                held = newest - 1
                new = [sequence.all_tokens[newest], *(max(tokens[row][n], 0) for n in nodes[1:])]
                features = torch.cat([self.roots[row], features])
            chunks.append((new, held))
            inputs.append(features)
            shapes.append(shape)
        owned = [self.tables[sequence.row] for sequence in sequences]
        made = self.run(chunks, torch.cat(inputs), owned, shapes)
        parts = made.split([len(new) for new, _ in chunks])
        self.guessed = {sequence.row: part for sequence, part in zip(sequences, parts)}

    def run(
        self,
        chunks: list[tuple[list[int], int]],
        inputs: Tensor,
        tables: list[list[int]],
        shapes: list[Tree | None] | None = None,
    ) -> Tensor:
        """The layer over pairs of features and tokens. inputs: [T, hidden_size] -> the features
        that follow, [T, hidden_size]. shapes: the trees that the tokens of a chunk are.
        """
        batch = step_batch(self.pool, chunks, tables)
        if shapes is not None:
            batch = with_trees(batch, shapes, self.pool)
        attend = self.pool.attending(batch)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(0, q, k, v)

        return self.draft(self.target.embed_tokens(batch.tokens), inputs, layer)
