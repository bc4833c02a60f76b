"""Which tokens are at the nodes: the likeliest (`Ranked`), or drawn ones (`Drawn`).

Chosen tokens need no probabilities afterwards. Drawn ones hand on q, what they were drawn from.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lessons.l02_naive_attention.request import Request
from lessons.l16_speculative_sampling.drafts import distributions, numbers
from lessons.l16_speculative_sampling.naive import DRAFTS
from lessons.l16_speculative_sampling.stand_ins import draw_rows
from lessons.l17_tree_speculation.trees.tree import MOST_NODES

NOT_DRAWN = -1  # q had no further token: this node stays empty


class Filled(NamedTuple):
    """tokens: of each request's tree, the root's first. q: [R, V] what the children of each node
    were drawn from, all nodes of all trees; None if they were chosen.
    """

    tokens: list[list[int]]
    q: Tensor | None


class Parent(NamedTuple):
    """A node whose children are wanted."""

    request: Request
    node: int
    row: int  # among the nodes of all trees
    behind: list[int]  # the tokens on its way, without the root's
    count: int  # of children


class Ranked:
    """The likeliest tokens. Nothing is drawn, so nothing has to be known about their
    probability.
    """

    q = None

    def begin(self, num_nodes: int, vocab_size: int, device: torch.device) -> None:
        """A new step."""

    def children(self, logits: Tensor, parents: list[Parent]) -> list[list[int]]:
        """logits: [P, V] after each of the parents -> the tokens of their children."""
        most = max(parent.count for parent in parents)
        best = logits.topk(most, dim=-1).indices.tolist()
        return [tokens[: parent.count] for parent, tokens in zip(parents, best)]


class Drawn:
    """Tokens drawn without replacement from what the draft would sample, one after the other.

    The random numbers depend on the seed, the place in the answer and the node alone.
    """

    def begin(self, num_nodes: int, vocab_size: int, device: torch.device) -> None:
        """A new step. Rows of leaves are never read."""
        self.q = torch.zeros(num_nodes, vocab_size, device=device)

    def children(self, logits: Tensor, parents: list[Parent]) -> list[list[int]]:
        """As in Ranked, from logits: [P, V]. NOT_DRAWN where q has fewer tokens than are wanted."""
        left = self.probabilities(logits, parents)
        self.q[torch.tensor([parent.row for parent in parents], device=logits.device)] = left
        found = []
        for place in range(max(parent.count for parent in parents)):
            u = self.random_numbers(parents, place, logits.device)
            tokens = torch.where(left.sum(-1) > 0, draw_rows(left, u), NOT_DRAWN)
            found.append(tokens.tolist())
            left.scatter_(1, tokens.clamp(min=0)[:, None], 0)
        rows = [list(row) for row in zip(*found)]
        return [row[: parent.count] for parent, row in zip(parents, rows)]

    def probabilities(self, logits: Tensor, parents: list[Parent]) -> Tensor:
        """What would be sampled after each parent. logits: [P, V] -> [P, V] float32."""
        requests = [parent.request for parent in parents]
        return distributions(logits, requests, [parent.behind for parent in parents])

    def random_numbers(self, parents: list[Parent], place: int, device: torch.device) -> Tensor:
        """For each parent the one that draws its child number `place`: [P], in [0, 1)."""
        requests = [parent.request for parent in parents]
        indices = [node_index(p.request, p.node) + place * MOST_NODES**2 for p in parents]
        return numbers(requests, indices, DRAFTS, device)


def node_index(request: Request, node: int) -> int:
    """Which random numbers belong to a node: no other node of this answer has the same."""
    return len(request.output) * MOST_NODES**3 + node


class Choice(Protocol):
    """Ranked or Drawn."""

    q: Tensor | None

    def begin(self, num_nodes: int, vocab_size: int, device: torch.device) -> None:
        """A new step, whose trees have so many nodes together."""

    def children(self, logits: Tensor, parents: list[Parent]) -> list[list[int]]:
        """The tokens of the parents' children. logits: [P, V]."""
