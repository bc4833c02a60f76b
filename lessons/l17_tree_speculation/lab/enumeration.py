"""The distribution of what a tree emits, by enumeration: no random number is drawn.

As in lesson 16: the code under test is constant between some boundaries, so it runs once in the
middle of each cell, and the cell's size is its probability. What is new are siblings: every way to
draw them without replacement is tried, and each of them has a boundary of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations, product

import torch
from torch import Tensor

from lessons.l16_speculative_sampling.lab.enumeration import Prefix, Table, middles
from lessons.l17_tree_speculation.trees.guesses import NOT_DRAWN
from lessons.l17_tree_speculation.trees.tree import Tree

ROOT = -7  # stands for the root's token, which is never asked for


def fills(tree: Tree, draft: Table, vocab_size: int) -> Iterator[tuple[list[int], float]]:
    """Every way to draw the nodes' tokens, and its probability."""
    inner = [node for node, children in enumerate(tree.children) if children]

    def go_on(place: int, tokens: list[int], chance: float) -> Iterator[tuple[list[int], float]]:
        if place == len(inner):
            yield tokens, chance
            return
        node = inner[place]
        children = tree.children[node]
        q = draft[text_to(tree, tokens, node)].tolist()
        possible = [token for token in range(vocab_size) if q[token] > 0]
        for drawn in permutations(possible, min(len(possible), len(children))):
            share, left = chance, 1.0
            for token in drawn:
                share, left = share * q[token] / left, left - q[token]
            filled = list(tokens)
            for child, token in zip(children, [*drawn, *[NOT_DRAWN] * len(children)]):
                filled[child] = token
            yield from go_on(place + 1, filled, share)

    yield from go_on(0, [ROOT] * len(tree), 1.0)


def text_to(tree: Tree, tokens: list[int], node: int) -> Prefix:
    """The guesses on the way to a node. Behind what was never drawn any text will do."""
    return tuple(max(tokens[n], 0) for n in tree.path_to(node)[1:])


def boundaries_at(p: Tensor, q: Tensor, guesses: list[int]) -> tuple[list[Tensor], Tensor]:
    """Where the rule changes its mind behind one node: (for each guess, for the draw afterwards).
    p, q: [V].
    """
    ratios, rest, share = [], p, q
    for token in guesses:
        if token < 0:
            ratios.append(torch.ones(1, dtype=p.dtype))  # never asked
            continue
        ratios.append((rest[token] / share[token]).clamp(max=1)[None])
        over = (rest - share).clamp(min=0)
        rest = over / over.sum() if over.sum() > 1e-15 else rest
        share = torch.where(torch.arange(len(q)) == token, 0, share)
        share = share / share.sum() if share.sum() > 1e-15 else share
    return ratios, rest.cumsum(0) / rest.sum()


def cells(tree: Tree, target: Table, draft: Table, tokens: list[int]):
    """Every cell for one filled tree: (p, q: [N, V], u: [N, 2], probability of the cell)."""
    texts = [text_to(tree, tokens, node) for node in range(len(tree))]
    p, q = (torch.stack([table[text] for text in texts]) for table in (target, draft))
    accepts, draws = [[(0.5, 1.0)]] * len(tree), []
    for node, children in enumerate(tree.children):
        guesses = [tokens[child] for child in children]
        ratios, drawn = boundaries_at(p[node], q[node], guesses)
        draws.append(drawn)
        for child, ratio in zip(children, ratios):
            accepts[child] = list(zip(*middles(ratio)))
        if not children:
            q[node] = torch.nan  # what follows a leaf is never read
    for *chosen, (number, size) in product(*accepts, list(zip(*middles(torch.cat(draws))))):
        u = torch.full((len(tree), 2), float(number), dtype=torch.float64)
        for node, (accept, share) in enumerate(chosen):
            u[node, 0] = accept
            size = size * share
        yield p, q, u, float(size)


def emitted(
    verify: Callable, target: Table, draft: Table, tree: Tree, vocab_size: int
) -> dict[Prefix, float]:
    """The probability of each sequence that a pass emits.

    verify(p, q, tree, tokens, u) -> nodes that stay, then a token, as naive.verify_tree.
    """
    found = defaultdict(float)
    for tokens, chance in fills(tree, draft, vocab_size):
        for p, q, u, size in cells(tree, target, draft, tokens):
            *path, last = verify(p, q, tree, tokens, u)
            found[(*text_to(tree, tokens, path[-1]), last)] += chance * size
    return dict(found)


def emitted_together(
    verify: Callable, target: Table, draft: Table, tree: Tree, vocab_size: int
) -> dict[Prefix, float]:
    """`emitted` for a verification of a whole batch, given all cells as one.

    verify(p, q: [R, V], tokens of each tree, u: [R, 2]) -> nodes that stay of each, tokens behind.
    """
    p, q, u, filled, weights = [], [], [], [], []
    for tokens, chance in fills(tree, draft, vocab_size):
        for *rows, size in cells(tree, target, draft, tokens):
            for parts, part in zip((p, q, u), rows):
                parts.append(part)
            filled.append(tokens)
            weights.append(chance * size)
    paths, behind = verify(torch.cat(p), torch.cat(q), filled, torch.cat(u))
    found = defaultdict(float)
    for tokens, path, last, weight in zip(filled, paths, behind, weights):
        found[(*text_to(tree, tokens, path[-1]), last)] += weight
    return dict(found)
