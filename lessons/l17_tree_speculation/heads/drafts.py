"""Who fills a tree: Medusa's heads, or the layer of EAGLE or MTP with its own small cache.

Both go down the tree level by level. `level_logits` says what may follow each node of a
level, and a `Choice` (guesses.py) makes the children of it.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import Request
from lessons.l03_kv_cache.batch import Batch
from lessons.l12_paged_kv.runner import new_pool
from lessons.l17_tree_speculation.heads.heads import FeatureDraft, Heads, MedusaHeads
from lessons.l17_tree_speculation.heads.small_head import SmallHead
from lessons.l17_tree_speculation.runner import TREES, TreeRunner
from lessons.l17_tree_speculation.trees.guesses import Choice, Filled, Parent
from lessons.l17_tree_speculation.trees.tree import MOST_NODES, Tree

# ---------------------------------------------------------------- level by level


class HeadDrafter:
    """What both drafters share. taps: where they want the target to be read. lm_head: what their
    guesses come from, if it is not the target's last matrix.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, target: Decoder, choice: Choice, lm_head: SmallHead | None = None):
        self.target = target
        self.choice = choice
        self.logits = lm_head or target.logits

    def propose(self, requests: list[Request], trees: dict[int, Tree]) -> Filled:
        """Fill the tree of each request; trees: by the request's row."""
        starts, total = {}, 0
        for request in requests:
            starts[request.row] = total
            total += len(trees[request.row])
        tokens = {r.row: [r.tokens[-1]] + [0] * (len(trees[r.row]) - 1) for r in requests}
        self.choice.begin(total, self.target.config.vocab_size, self.target.device)
        deepest = max((trees[request.row].depth for request in requests), default=0)
        for depth in range(deepest):
            level = parents_at(depth, requests, trees, tokens, starts)
            logits = self.level_logits(depth, level, trees, tokens)
            for parent, found in zip(level, self.choice.children(logits, level)):
                row = parent.request.row
                for child, token in zip(trees[row].children[parent.node], found):
                    tokens[row][child] = token
        self.end(requests)
        return Filled([tokens[request.row] for request in requests], self.choice.q)

    def level_logits(
        self, depth: int, level: list[Parent], trees: dict[int, Tree], tokens: dict[int, list[int]]
    ) -> Tensor:
        """What may follow each node of a level: [P, V]."""
        raise NotImplementedError

    def end(self, requests: list[Request]) -> None:
        """The trees of this step are full."""

    def observe(self, request: Request, features: Tensor) -> None:
        """The target has computed further tokens that stay. features: [N, F], theirs, in order."""
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        """The request has finished."""
        raise NotImplementedError


def parents_at(
    depth: int,
    requests: list[Request],
    trees: dict[int, Tree],
    tokens: dict[int, list[int]],
    starts: dict[int, int],
) -> list[Parent]:
    """The nodes of this depth that have children, of all requests."""
    level = []
    for request in requests:
        tree, filled = trees[request.row], tokens[request.row]
        for node, children in enumerate(tree.children):
            if children and tree.depths[node] == depth:
                behind = [max(filled[n], 0) for n in tree.path_to(node)[1:]]
                row = starts[request.row] + node
                level.append(Parent(request, node, row, behind, len(children)))
    return level


class MedusaDrafter(HeadDrafter):
    """Head i fills depth i + 1, whatever is at the depths before it."""

    def __init__(self, target: Decoder, heads: MedusaHeads, choice: Choice):
        super().__init__(target, choice, heads.lm_head)
        self.heads = heads
        self.newest: dict[int, Tensor] = {}  # of each request: its newest hidden state

    @property
    def depth(self) -> int:
        """How deep a tree these heads can fill."""
        return len(self.heads.heads)

    def level_logits(self, depth, level, trees, tokens) -> Tensor:
        """One row a request; its nodes share it, because a head does not know the guesses: [P,
        V].
        """
        rows = list(dict.fromkeys(parent.request.row for parent in level))
        hidden = torch.stack([self.newest[row] for row in rows])
        logits = self.logits(self.heads.heads[depth](hidden))
        where = [rows.index(parent.request.row) for parent in level]
        return logits[torch.tensor(where, device=logits.device)]

    def observe(self, request: Request, features: Tensor) -> None:
        self.newest[request.row] = features[-1]

    def forget(self, request: Request) -> None:
        self.newest.pop(request.row, None)


class EagleRunner(TreeRunner):
    """A draft's own cache: one layer, one place fewer than the target's, because place i belongs
    to the feature of token i *and* to token i + 1.
    """

    draft: FeatureDraft
    embed: torch.nn.Module
    inputs: Tensor  # [T, hidden_size], the features of the tokens that run next

    @classmethod
    def for_draft(
        cls,
        draft: FeatureDraft,
        target: Decoder,
        num_blocks: int,
        block_size: int,
        max_context_len: int,
    ) -> "EagleRunner":
        """A runner over a new pool of one layer."""
        shape = OneLayer(draft, target)
        runner = cls(target, new_pool(shape, num_blocks, block_size, max_context_len, TREES))
        runner.draft, runner.embed = draft, target.embed_tokens
        return runner

    def compute(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(for the target's head, for the next level) of a step: [T, hidden_size] each."""
        attend = self.pool.attending(batch)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(0, q, k, v)

        out = self.draft(self.embed(batch.tokens), self.inputs, layer)
        return self.draft.hidden(out), out


class OneLayer:
    """What `new_pool` asks of a model, of a draft that is none."""

    stage_layers = range(1)

    def __init__(self, draft: FeatureDraft, target: Decoder):
        self.config, self.device, self.dtype = draft.config, target.device, target.dtype
        # EAGLE-3's parts are in none, and only a pool of latents asks for it
        self.layers = [getattr(draft, "layer", None)]


class EagleDrafter(HeadDrafter):
    """A layer that goes on from the target's features, level by level, with each node's token."""

    depth = MOST_NODES

    def __init__(self, target: Decoder, draft: FeatureDraft, choice: Choice, runner: EagleRunner):
        super().__init__(target, choice, draft.lm_head)
        self.draft = draft
        self.taps = draft.taps
        self.runner = runner
        self.waiting: dict[int, Tensor] = {}  # features that have not run yet: [N, hidden_size]
        self.roots: dict[int, Tensor] = {}  # of this step: the feature of the root
        self.made: dict[int, Tensor] = {}  # of this step: the feature of each node, [n, hidden]

    def observe(self, request: Request, features: Tensor) -> None:
        new = self.draft.features(features)
        old = self.waiting.get(request.row)
        self.waiting[request.row] = new if old is None else torch.cat([old, new])

    def level_logits(self, depth, level, trees, tokens) -> Tensor:
        """The layer runs over all nodes down to this depth, the root's pair first: [P, V]."""
        requests = list({parent.request.row: parent.request for parent in level}.values())
        hidden = (
            self.catch_up(requests)
            if depth == 0
            else self.go_deeper(depth, requests, trees, tokens)
        )
        rows = [hidden[parent.request.row][self.place(depth, parent, trees)] for parent in level]
        return self.logits(torch.stack(rows))

    @staticmethod
    def place(depth: int, parent: Parent, trees: dict[int, Tree]) -> int:
        """Where a parent is among the nodes down to its depth; -1 for the root, which runs as
        the last of a text.
        """
        if depth == 0:
            return -1
        depths = trees[parent.request.row].depths
        return sum(at <= depth for at in depths[: parent.node])

    def catch_up(self, requests: list[Request]) -> dict[int, Tensor]:
        """Run the pairs that the target has made since: its features, each with the next token. Of
        each request: [pairs, hidden_size].
        """
        new = {}
        for request in requests:
            held = self.runner.held.get(request.row, 0)
            new[request.row] = request.tokens[held + 1 :]
        self.runner.inputs = torch.cat([self.waiting.pop(row) for row in new])
        last = {row: len(tokens) for row, tokens in new.items()}
        features = self.split_last(self.runner.inputs, last)
        run = self.runner.run_trees(new, {})
        for row, rows in run.rows.items():
            self.roots[row] = features[row]
            self.made[row] = run.features[rows][-1:]
        return {row: run.hidden[rows] for row, rows in run.rows.items()}

    @staticmethod
    def split_last(inputs: Tensor, counts: dict[int, int]) -> dict[int, Tensor]:
        """The last row of each request's: [1, hidden_size]."""
        parts = inputs.split(list(counts.values()))
        return {row: part[-1:] for row, part in zip(counts, parts)}

    def go_deeper(self, depth, requests, trees, tokens) -> dict[int, Tensor]:
        """Run the tree down to `depth`, whose tokens are known. Nodes that ran before run again: it
        is one small layer, and so a level is one pass whatever the tree looks like. Of each
        request: [nodes, hidden_size].
        """
        new, shapes, inputs = {}, {}, []
        for request in requests:
            row, tree = request.row, trees[request.row]
            shape = tree.cut(depth)
            nodes = [node for node in range(len(tree)) if tree.depths[node] <= depth]
            # The feature that a node starts from was made at its parent's place one level above.
            above = [node for node in range(len(tree)) if tree.depths[node] < depth]
            made = self.made[row]
            parents = [above.index(tree.parents[node]) for node in nodes[1:]]
            inputs.append(torch.cat([self.roots[row], made[parents]]))
            new[row] = [max(tokens[row][node], 0) for node in nodes]
            shapes[row] = shape
            self.runner.rewind(row, len(request.tokens) - 2)
        self.runner.inputs = torch.cat(inputs)
        run = self.runner.run_trees(new, shapes)
        for row, rows in run.rows.items():
            self.made[row] = run.features[rows]
        return {row: run.hidden[rows] for row, rows in run.rows.items()}

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            # The guesses go. The root's pair was made of the target's feature, and stays.
            pairs = len(request.tokens) - 1
            if self.runner.held.get(request.row, 0) > pairs:
                self.runner.rewind(request.row, pairs)

    def forget(self, request: Request) -> None:
        for kept in (self.waiting, self.roots, self.made):
            kept.pop(request.row, None)
        if request.row in self.runner.held:
            self.runner.free(request.row)


def new_drafter(
    target: Decoder, heads: Heads, choice: Choice, num_blocks: int, block_size: int, longest: int
) -> HeadDrafter:
    """The drafter for these heads. num_blocks, block_size: of its own cache, if it has one."""
    if isinstance(heads, MedusaHeads):
        return MedusaDrafter(target, heads, choice)
    runner = EagleRunner.for_draft(heads, target, num_blocks, block_size, longest)
    return EagleDrafter(target, heads, choice, runner)
