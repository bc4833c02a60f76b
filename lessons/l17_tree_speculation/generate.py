"""This lesson's rung: heads fill a tree for each request, one pass of the target verifies it.

    heads = load_heads("models/tiny-medusa", model)
    generate(model, prompts, max_new_tokens, heads=heads, tree=full_tree([4, 2, 1]))

Read `TreeSpeculation.step`. A request's first pass reads its prompt and emits a token; only then is
there a hidden state that heads can read.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.request import (
    OnToken,
    Request,
    check_call,
    hand_out,
    read_requests,
)
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l11_cuda_graphs.naive import unfinished
from lessons.l14_continuous_batching.loop import BLOCK_SIZE, MAX_NUM_SEQS, blocks_of
from lessons.l17_tree_speculation.arguments import check_model
from lessons.l17_tree_speculation.heads.drafts import HeadDrafter, MedusaDrafter, new_drafter
from lessons.l17_tree_speculation.heads.heads import Heads
from lessons.l17_tree_speculation.runner import TreeRunner
from lessons.l17_tree_speculation.trees.accept import Asked, Chosen, FromDraft, Rule, Typical
from lessons.l17_tree_speculation.trees.guesses import Drawn, Filled, Ranked
from lessons.l17_tree_speculation.trees.tree import Tree, chain
from lessons.toolbox.model.arguments import check_kind, check_whole, refuse

PROMPT = chain(0)  # a prompt's newest token is a root without guesses


@dataclass
class Counts:
    """What a run has done. A pass counts once for each request that it serves; the pass that reads
    a prompt is not counted, because nothing was guessed for it.
    """

    passes: int = 0
    nodes: int = 0  # guesses
    kept: int = 0
    # Of each (depth, place among siblings): how often its node was asked and how often it was
    # right.
    asked: Counter = field(default_factory=Counter)
    right: Counter = field(default_factory=Counter)

    @property
    def tokens_a_pass(self) -> float:
        """Each pass emits what stays and one token more."""
        return (self.kept + self.passes) / max(1, self.passes)

    def acceptance(self, depth: int, ranks: int) -> list[list[float]]:
        """How often the guess of each rank was right, at each depth: what `best_tree` wants."""
        return [
            [
                self.right[level, rank] / max(1, self.asked[level, rank])
                for rank in range(ranks)
                if self.asked[level, rank]
            ]
            for level in range(1, depth + 1)
        ]

    def note(self, tree: Tree, path: list[int]) -> None:
        """One request's pass. Any node under one that stays was asked."""
        self.passes += 1
        self.nodes += len(tree) - 1
        self.kept += len(path) - 1
        for node in path:
            for rank, child in enumerate(tree.children[node]):
                place = tree.depths[child], rank
                self.asked[place] += 1
                self.right[place] += child in path


class TreeSpeculation:
    """One pass of the target over a batch of trees, and of prompts that have just come."""

    def __init__(
        self,
        runner: TreeRunner,
        drafter: HeadDrafter,
        rule: Rule,
        tree: Tree,
        on_token: OnToken | None = None,
    ):
        self.runner = runner
        self.drafter = drafter
        self.rule = rule
        self.tree = tree
        self.on_token = on_token
        self.counts = Counts()

    @torch.inference_mode()
    def step(self, requests: list[Request]) -> None:
        """Emit one token or more of each request. Raises ValueError for logits that are not
        finite.
        """
        begins = {request.row: self.runner.held.get(request.row, 0) for request in requests}
        running = [request for request in requests if begins[request.row]]
        trees = {request.row: self.tree_for(request) for request in running}
        filled = self.drafter.propose(running, trees) if running else Filled([], None)
        tokens = {request.row: guesses for request, guesses in zip(running, filled.tokens)}

        new = {r.row: node_tokens(tokens[r.row]) if begins[r.row] else r.prompt for r in requests}
        run = self.runner.run_trees(new, trees)
        fresh = [request for request in requests if not begins[request.row]]
        # In the order of q: the trees, then a row for each prompt.
        asked = [Asked(r, trees[r.row], tokens[r.row]) for r in running]
        asked += [Asked(r, PROMPT, r.prompt[-1:]) for r in fresh]
        rows = [run.hidden[run.rows[r.row]] for r in running]
        rows += [run.hidden[run.rows[r.row]][-1:] for r in fresh]
        logits = self.runner.model.logits(torch.cat(rows))
        q = filled.q
        if q is not None and fresh:
            q = torch.cat([q, q.new_zeros(len(fresh), q.shape[1])])
        for one, (*path, last) in zip(asked, self.rule.paths(logits, asked, q)):
            row = one.request.row
            features = run.features[run.rows[row]]
            if begins[row]:
                self.counts.note(one.tree, path)
                self.runner.keep(row, begins[row], path)
                features = features[path]
            self.drafter.observe(one.request, features)
            self.take(one.request, [*(one.tokens[node] for node in path[1:]), last])

    def tree_for(self, request: Request) -> Tree:
        """The tree, cut to what the request may still emit: a pass emits one token more."""
        left = request.max_new_tokens - len(request.output)
        return self.tree.cut(left - 1)

    def take(self, request: Request, emitted: list[int]) -> None:
        """Hand out what a request emits, up to a stop token."""
        for token in emitted:
            if not request.finished:
                hand_out([token], [request], self.on_token)

    def run(self, waiting: deque[Request], max_num_seqs: int) -> None:
        """Serve all who wait. Who finishes makes room after each step (lesson 14)."""
        running: list[Request] = []
        while waiting or running:
            while waiting and len(running) < max_num_seqs:
                running.append(waiting.popleft())
            self.step(running)
            for request in running:
                if request.finished:
                    self.runner.free(request.row)
                    self.drafter.forget(request)
            running = [request for request in running if not request.finished]


def node_tokens(tokens: list[int]) -> list[int]:
    """What the target runs at each node. Where nothing was drawn any token will do."""
    return [max(token, 0) for token in tokens]


CHOICES = {Chosen: Ranked, FromDraft: Drawn, Typical: Ranked}  # which tokens suit a rule


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
    *,
    heads: Heads,
    tree: Tree,
    rule: Rule | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    block_size: int = BLOCK_SIZE,
    counts: Counts | None = None,
) -> list[list[int]]:
    """Fill a tree, verify it. heads: of this target (load_heads); tree: its shape. rule: Chosen
    (None), FromDraft or Typical. counts: filled in, if given.

    Other arguments, result and errors as in lesson 2's `generate`. With `Chosen` the tokens are the
    same as there, greedy or sampled; with `FromDraft` greedy ones are the same, and sampled ones
    follow the same distribution; with `Typical` neither.
    """
    check_call(model, on_token)
    check_model(model)
    check_kind(Tree, "a Tree", tree=tree)
    check_whole(max_num_seqs=max_num_seqs)
    rule = Chosen() if rule is None else rule
    if type(rule) not in CHOICES:
        refuse("rule", rule, "Chosen(), FromDraft() or Typical()")
    requests = read_requests(model.config, prompts, max_new_tokens, sampling)
    if waiting := unfinished(requests):
        longest = max(request.most_cached for request in waiting)
        # Room for max_num_seqs of them, each with a whole tree after its text.
        num_blocks = blocks_of(waiting, max_num_seqs, block_size)
        num_blocks += min(len(waiting), max_num_seqs) * (-(-len(tree) // block_size) + 1)
        drafter = new_drafter(model, heads, CHOICES[type(rule)](), num_blocks, block_size, longest)
        check_depth(drafter, tree)
        runner = TreeRunner.for_trees(model, num_blocks, block_size, longest, drafter.taps)
        speculation = TreeSpeculation(runner, drafter, rule, tree, on_token)
        if counts is not None:
            speculation.counts = counts
        speculation.run(deque(waiting), max_num_seqs)
    return [request.output for request in requests]


def check_depth(drafter: HeadDrafter, tree: Tree) -> None:
    """Raise ValueError for a tree that is deeper than there are heads."""
    if isinstance(drafter, MedusaDrafter) and tree.depth > drafter.depth:
        raise ValueError(
            f"tree: got one of depth {tree.depth}; accepted: at most {drafter.depth}, a head for "
            "each"
        )
