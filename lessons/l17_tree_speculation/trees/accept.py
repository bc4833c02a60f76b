"""Which path of a tree stays: three rules, and only two of them keep the target's distribution.

- `Chosen`: the nodes are the draft's likeliest tokens. The target samples a token after each node,
  with the random number of its place in the answer. Where a child has this token, the path goes
  on. So the tokens are those of plain decoding, to the last one, also where they are sampled.
- `FromDraft`: the nodes were drawn from q. naive.verify_tree, for all sequences at once.
- `Typical`: a node stays if the target finds it likely enough. More tokens a pass, but a different
  distribution.

Sources: Miao et al. 2024, SpecInfer, section 4.3; Cai et al. 2024, Medusa, section 2.3.1.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import read_tokens, sample_batch
from lessons.l02_naive_attention.batched.requests import sampling_batch
from lessons.l02_naive_attention.request import Request
from lessons.l16_speculative_sampling.drafts import distributions, numbers
from lessons.l16_speculative_sampling.naive import ACCEPTS, DRAWS
from lessons.l16_speculative_sampling.stand_ins import draw_rows
from lessons.l17_tree_speculation.naive import follow
from lessons.l17_tree_speculation.trees.guesses import node_index
from lessons.l17_tree_speculation.trees.tree import Tree
from lessons.toolbox.model.arguments import check_positive


class Asked(NamedTuple):
    """A request with its tree and the tokens at its nodes."""

    request: Request
    tree: Tree
    tokens: list[int]

    def behind(self, node: int) -> list[int]:
        """The guesses on the path to a node. Where nothing was drawn any token will do, because
        that node is never reached.
        """
        return [max(self.tokens[n], 0) for n in self.tree.path_to(node)[1:]]


class Rule(Protocol):
    """Who decides."""

    def paths(self, logits: Tensor, asked: list[Asked], q: Tensor | None) -> list[list[int]]:
        """Of each request the nodes that stay, from the root on, and then the token after them.
        logits, q: [R, V], the nodes of all trees. Raises ValueError for logits that are not finite.
        """


def behind_each_node(asked: list[Asked]) -> tuple[list[Request], list[list[int]]]:
    """For the rows of all trees: whose they are, and the guesses on their paths."""
    owners, behind = [], []
    for one in asked:
        owners += [one.request] * len(one.tree)
        behind += [one.behind(node) for node in range(len(one.tree))]
    return owners, behind


def starts_of(asked: list[Asked]) -> list[int]:
    """Where each tree's rows begin, and the end."""
    starts = [0]
    for one in asked:
        starts.append(starts[-1] + len(one.tree))
    return starts


# ---------------------------------------------------------------- chosen nodes


class Chosen:
    """For trees whose nodes were chosen without chance. Exact, token for token."""

    def paths(self, logits: Tensor, asked: list[Asked], q: Tensor | None) -> list[list[int]]:
        """Sample after every node as plain decoding would, then follow what was sampled. logits:
        [R, V].
        """
        owners, behind = behind_each_node(asked)
        extended = [
            Request(
                r.row,
                r.prompt,
                r.max_new_tokens,
                r.sampling,
                r.stop_token_ids,
                r.output + tokens,
            )
            for r, tokens in zip(owners, behind)
        ]
        drawn = read_tokens(sample_batch(logits, sampling_batch(extended, logits.device)))
        starts = starts_of(asked)
        return [
            follow(one.tree, one.tokens, drawn[begin : begin + len(one.tree)])
            for one, begin in zip(asked, starts)
        ]


# ---------------------------------------------------------------- drawn nodes


class FromDraft:
    """For trees whose siblings were drawn from q without replacement. Exact in distribution."""

    def paths(self, logits: Tensor, asked: list[Asked], q: Tensor | None) -> list[list[int]]:
        """naive.verify_tree for all requests together. logits, q: [R, V]."""
        owners, behind = behind_each_node(asked)
        p = distributions(logits, owners, behind)
        indices = [node_index(one.request, node) for one in asked for node in range(len(one.tree))]
        device = logits.device
        u = torch.stack([numbers(owners, indices, kind, device) for kind in (ACCEPTS, DRAWS)], 1)
        nodes, tokens = verify_trees(p, q, asked, u)
        if min(tokens) < 0:
            raise ValueError(f"logits: those of request {tokens.index(min(tokens))} are not finite")
        return [[*path, token] for path, token in zip(nodes, tokens)]


def verify_trees(
    p: Tensor, q: Tensor | None, asked: list[Asked], u: Tensor
) -> tuple[list[list[int]], list[int]]:
    """verify_tree for B trees at once: the nodes that stay of each, and the token after them.

    p, q: [R, V], u: [R, 2], the nodes of all trees one after the other. All trees go down a level
    at a time, and ask their children in turn. -1 for a tree whose p holds NaN.
    """
    device, starts = p.device, starts_of(asked)
    children, tokens = child_table(asked).to(device), [t for one in asked for t in one.tokens]
    tokens = torch.tensor(tokens, device=device)
    node = torch.tensor(starts[:-1], device=device)
    goes_on = torch.ones(len(asked), dtype=torch.bool, device=device)
    went, deepest = [node], max(one.tree.depth for one in asked)
    weights = p[node]
    for _ in range(deepest + 1):
        rest = p[node]
        share = torch.zeros_like(rest) if q is None else q[node].float()
        chosen = torch.full_like(node, -1)
        for place in range(children.shape[1]):
            child = children[node, place]
            token = tokens[child.clamp(min=0)]
            asks = goes_on & (chosen < 0) & (child >= 0) & (token >= 0)
            there = token.clamp(min=0)[:, None]
            bound = u[child.clamp(min=0), 0] * share.gather(1, there)[:, 0] * rest.sum(1)
            stays = bound < rest.gather(1, there)[:, 0] * share.sum(1)
            chosen = torch.where(asks & stays, child, chosen)
            is_rejected = (asks & ~stays)[:, None]
            rest = torch.where(is_rejected, residual_rows(rest, share), rest)
            share = torch.where(is_rejected, share.scatter(1, there, 0), share)
        ends = goes_on & (chosen < 0)
        weights = torch.where(ends[:, None], rest, weights)
        goes_on = goes_on & (chosen >= 0)
        node = torch.where(goes_on, chosen, node)
        went.append(torch.where(goes_on, node, -1))
    drawn = draw_rows(weights, u[node, 1])
    drawn = torch.where(weights.sum(1).isnan(), -1, drawn).tolist()
    paths = [
        [row - start for row in path if row >= 0]
        for path, start in zip(torch.stack(went, 1).tolist(), starts)
    ]
    return paths, drawn


def residual_rows(p: Tensor, q: Tensor) -> Tensor:
    """Lesson 16's residual of each row, as a distribution. p, q: [B, V], any positive sums -> [B,
    V]. A row without a residual keeps p.
    """
    p = p / p.sum(1, keepdim=True)
    # A q without mass has no tokens left, and takes none away.
    q = q / q.sum(1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    rest = (p - q).clamp(min=0)
    total = rest.sum(1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def child_table(asked: list[Asked]) -> Tensor:
    """The children of each node of all trees, as rows of the batch: [R, most children], -1 after
    the last.
    """
    most = max(1, *(len(c) for one in asked for c in one.tree.children))
    rows = []
    for one, start in zip(asked, starts_of(asked)):
        for children in one.tree.children:
            row = [start + child for child in children]
            rows.append(row + [-1] * (most - len(row)))
    return torch.tensor(rows)


# ---------------------------------------------------------------- typical acceptance


class Typical:
    """Medusa's rule: a guess stays if p(guess) > min(epsilon, delta · exp(-entropy of p)).

    The longest path whose nodes all stay is taken. What is emitted does not follow the target's
    distribution: unlikely tokens come too rarely, and the draft's favourites too often.
    """

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3):
        check_positive(epsilon=epsilon, delta=delta)
        self.epsilon, self.delta = epsilon, delta

    def paths(self, logits: Tensor, asked: list[Asked], q: Tensor | None) -> list[list[int]]:
        """The longest path of typical tokens, then one that is sampled. logits: [R, V]."""
        owners, behind = behind_each_node(asked)
        p = distributions(logits, owners, behind)
        indices = [len(r.output) + len(tokens) for r, tokens in zip(owners, behind)]
        drawn = draw_rows(p, numbers(owners, indices, DRAWS, p.device)).tolist()
        if p.isnan().any():
            raise ValueError("logits: got some that are not finite; accepted: finite")
        bound = threshold(p, self.epsilon, self.delta)
        starts, found = starts_of(asked), []
        for one, begin in zip(asked, starts):
            path = longest_typical(one, p[begin : begin + len(one.tree)], bound[begin:])
            found.append([*path, drawn[begin + path[-1]]])
        return found


def threshold(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """What a guess must exceed: min(epsilon, delta · exp(-H(p))). p: [..., V] -> [...]."""
    entropy = torch.special.entr(p).sum(-1)
    return torch.minimum(torch.full_like(entropy, epsilon), delta * torch.exp(-entropy))


def longest_typical(one: Asked, p: Tensor, bound: Tensor) -> list[int]:
    """The longest path whose guesses are all above the bound of their parent; the first of several.
    p: [N, V], bound: [N].
    """
    best = (0,)
    stays = [True]
    for node in range(1, len(one.tree)):
        parent, token = one.tree.parents[node], one.tokens[node]
        stays.append(stays[parent] and token >= 0 and bool(p[parent, token] > bound[parent]))
        if stays[node] and one.tree.depths[node] > one.tree.depths[best[-1]]:
            best = one.tree.path_to(node)
    return list(best)
