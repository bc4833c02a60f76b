"""A tree of guesses: which node follows which, which sees which, and which tree is worth its nodes.

    tree = Tree((-1, 0, 0, 1))        # 0: the newest token; 1 and 2 may follow it; 3 may follow 1
    tree.depths                       # (0, 1, 1, 2)
    tree.paths                        # ((0, 1, 3), (0, 2))

Node 0 is the root: the newest token, which is certain. All others are drafted. A tree is a shape
only; the tokens of its nodes are chosen in each step.

Sources: Miao et al. 2024, SpecInfer, section 4.2 (tree attention); Cai et al. 2024, Medusa,
sections 2.1.2 and 2.3.3 (which tree).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lessons.toolbox.model.arguments import refuse

MOST_NODES = 64  # of a tree; a distance within it fits into int8


@dataclass(frozen=True)
class Tree:
    """parents: of each node, the number of the one that it follows; -1 for the root.

    A parent's number is smaller than its children's. Children of one node are its guesses, best
    first. Raises ValueError.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        parents = self.parents
        fits = isinstance(parents, tuple) and 1 <= len(parents) <= MOST_NODES and parents[0] == -1
        if not fits or not all(0 <= p < node for node, p in enumerate(parents) if node):
            refuse(
                "parents",
                parents,
                f"(-1, 0, …), at most {MOST_NODES} nodes, each parent before its children",
            )

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many tokens after the root each node is."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most guesses that can be accepted."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that follow each node, best guess first."""
        found = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if node:
                found[parent].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The path from the root to each leaf, both included."""
        leaves = [node for node, children in enumerate(self.children) if not children]
        return tuple(self.path_to(leaf) for leaf in leaves)

    def path_to(self, node: int) -> tuple[int, ...]:
        """The path from the root to a node, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    @cached_property
    def table(self) -> Tensor:
        """[N, N] int8: at [i, j] how many tokens there are from j to i, both counted, if j is on
        the path to i; otherwise 0. A node sees what is not 0. The first column holds depth + 1.
        """
        table = torch.zeros(len(self), len(self), dtype=torch.int8)
        for node in range(len(self)):
            for distance, ancestor in enumerate(reversed(self.path_to(node)), 1):
                table[node, ancestor] = distance
        return table

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling: lesson 16's shape, for which no mask is needed."""
        return self.depth == len(self) - 1

    def first(self, nodes: int) -> "Tree":
        """The first nodes, the root at least. Parents come first, so these are a tree, too; and of
        `best_tree`'s the best one of so many nodes.
        """
        return self if nodes >= len(self) else Tree(self.parents[:nodes])

    def cut(self, depth: int) -> "Tree":
        """The nodes down to this depth, 0 or more. Of a request that may emit few tokens more."""
        if depth >= self.depth:
            return self
        kept = [node for node in range(len(self)) if self.depths[node] <= depth]
        number = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return Tree(tuple(number[self.parents[node]] for node in kept))


@cache
def chain(count: int) -> Tree:
    """Lesson 16's shape: `count` tokens, one after the other."""
    return Tree(tuple(range(-1, count)))


def full_tree(widths: Sequence[int]) -> Tree:
    """Every node of depth d has widths[d] children."""
    parents, level = [-1], [0]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return Tree(tuple(parents))


def tree_of_ranks(ranks: Sequence[tuple[int, ...]]) -> Tree:
    """Medusa's notation: each node but the root as the path to it, a rank for each depth. (0, 2) is
    the third best guess after the best first one. Nodes get numbers by depth, then by rank.

    Raises ValueError unless all ways differ, and each node's parent and better siblings are there.
    """
    given, number, parents = sorted(ranks, key=lambda way: (len(way), way)), {(): 0}, [-1]
    for way in given:
        if not way or way in number:
            refuse("ranks", way, "each node but the root, once")
        *front, rank = way
        needed = [tuple(front)] + ([(*front, rank - 1)] if rank else [])
        for other in needed:
            if other not in number:
                refuse("ranks", way, f"a tree, so {other} must be in it, too")
        number[way] = len(parents)
        parents.append(number[tuple(front)])
    return Tree(tuple(parents))


def ranks_of(tree: Tree) -> list[tuple[int, ...]]:
    """The same notation of a tree, in the order of its nodes."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        found.append((*found[parent], tree.children[parent].index(node)))
    return found[1:]


# ---------------------------------------------------------------- which tree


def chances(tree: Tree, acceptance: Sequence[Sequence[float]]) -> list[float]:
    """The probability that each node is accepted: the product along its path.

    acceptance[d][r]: how often guess number r at depth d + 1 is right, if all before it were.
    A node beyond the table is never accepted.
    """
    found = [1.0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        depth, rank = tree.depths[parent], tree.children[parent].index(node)
        known = depth < len(acceptance) and rank < len(acceptance[depth])
        found.append(found[parent] * acceptance[depth][rank] if known else 0.0)
    return found


def expected_tokens(tree: Tree, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens that a pass emits on average: the chances of its nodes, the root's 1 included."""
    return sum(chances(tree, acceptance))


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of at most `nodes` nodes, the root among them, that emits most tokens on average.

    Greedy, and best all the same: a node is worth the product along its path, which is never more
    than its parent's or its better sibling's. So the most valuable nodes always form a tree.
    acceptance: as in `chances`, each row falling. Raises ValueError.
    """
    check_acceptance(acceptance, nodes)
    parents, ready = [-1], []  # ready: (-value, depth, rank, parent)
    heapq.heappush(ready, (-acceptance[0][0], 0, 0, 0))
    while ready and len(parents) < nodes:
        worth, depth, rank, parent = heapq.heappop(ready)
        if worth == 0:
            break
        node = len(parents)
        parents.append(parent)
        row = acceptance[depth]
        if rank + 1 < len(row):  # its next sibling
            value = worth / row[rank] * row[rank + 1]
            heapq.heappush(ready, (value, depth, rank + 1, parent))
        if depth + 1 < len(acceptance):  # its first child
            heapq.heappush(ready, (worth * acceptance[depth + 1][0], depth + 1, 0, node))
    return Tree(tuple(parents))


def check_acceptance(acceptance: Sequence[Sequence[float]], nodes: int) -> None:
    """Raise ValueError unless each row falls, is not empty and sums to 1 at most."""
    if not isinstance(nodes, int) or not 1 <= nodes <= MOST_NODES:
        refuse("nodes", nodes, f"1 to {MOST_NODES}")
    if not acceptance:
        refuse("acceptance", acceptance, "a row for each depth, one at least")
    for depth, row in enumerate(acceptance):
        falls = all(a >= b for a, b in pairwise(row))
        if not len(row) or not falls or min(row) < 0 or sum(row) > 1 + 1e-9:
            refuse(f"acceptance[{depth}]", row, "shares that fall, from 0 on, with a sum up to 1")
