# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=17
# Generated from solutions/l17_tree_speculation.py, checksum 2b12a6a564cf. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 17: a tree in numbers, Medusa's heads trained, a verification with bugs, one
path kept.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import draw
from lessons.toolbox.exercises.exercise import exercise


@exercise("17.1", "Predict: a tree in numbers", minutes=15, difficulty=1)
def predict_tree(parents: list[int], held: int) -> tuple[list[int], list[int], int, int]:
    """What one pass over a tree looks like: (the position of each node, the slot of each node, how
    many entries of the mask are True, how many tokens the pass emits at most).

    parents: [N], parents[0] = -1 is the root, the newest token of a text; a parent comes
    before its children. held: tokens of the text before the root, which are in the cache. The
    cache has no pages here, so the first token of a text has position 0 and slot 0. The mask: [N,
    held + N] says which node sees which key. A node sees what the cache held, its path from the
    root, and itself. Slots are given in the order of the nodes. Errors: none to raise.

    Example: parents [-1, 0, 0, 1], held 10
        node 3 follows node 1, which follows the root; node 2 follows the root
        positions [10, 11, 11, 12], slots [10, 11, 12, 13]
        mask: 4 · 10 old keys, and 1 + 2 + 2 + 3 new ones: 48
        at most 3 tokens: nodes 1 and 3, and one after them
        -> ([10, 11, 11, 12], [10, 11, 12, 13], 48, 3)
    """
    raise NotImplementedError("Exercise 17.1: Predict: a tree in numbers")


@exercise("17.2", "Medusa's heads: guess and learn", minutes=30, difficulty=2)
def medusa(
    hidden: Tensor, weights: Tensor, biases: Tensor, lm_head: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """What K heads guess at each position, and how wrong each of them is: (guesses: [K, T] int64,
    losses: [K]).

    hidden: [T, d] float64, the target's hidden state at each position of a text; tokens: [T], the
    text. The target's own head, lm_head: [V, d], predicts token t + 1 from hidden state t. Head i
    (weights[i]: [d, d], biases[i]: [d]) first makes x + SiLU(W x + b) of a hidden state x, and then
    multiplies it by lm_head; it predicts i + 1 tokens beyond the target's own head. losses[i]: the
    mean cross-entropy in nats over all positions for which the text has the token that head i
    predicts. K is at most T - 2. Errors: none to raise. The arguments are not changed.

    Example: T = 3, d = 2, V = 2, K = 1, weights and biases 0, lm_head the identity,
        hidden [[1, 0], [0, 1], [0, 1]], tokens [0, 1, 1]
        head 0 says token 0 after position 0, then 1, 1; only position 0 has a token two places on
        (tokens[2] = 1), so the loss is -log(1 / (1 + e)) = 1.3133
        -> ([[0, 1, 1]], [1.3133])
    """
    raise NotImplementedError("Exercise 17.2: Medusa's heads: guess and learn")


@exercise("17.3", "Find the bugs: a tree verified", minutes=35, difficulty=3)
def verify_drawn(
    p: Tensor, q: Tensor, parents: list[int], tokens: list[int], u: Tensor
) -> list[int]:
    """The tokens that a pass emits, for a tree whose siblings were drawn from q without
    replacement.

    p, q: [N, V] float64, the distributions of target and draft after each node; rows of q at leaves
    hold anything. parents: [N] as in 17.1, tokens: [N], the root's was emitted before. u: [N, 2] in
    [0, 1): u[i, 0] decides whether node i stays, u[i, 1] draws the token after node i.

    After a node its children are tested in their order. The first is tested with p and q of the
    node: it stays if u · q < p. If not, the next child is tested with the residual max(0, p - q),
    divided by its sum, and with q without the first child, divided by its sum again, because that
    is what it was drawn from. And so on. If a child stays, the walk goes on there. If none does,
    a token is drawn from what p has become, and the pass ends. `draw(weights: [V], u: [1])` draws
    by inverse CDF; the weights need not sum to 1. Errors: none to raise. The arguments are not
    changed.

    Example: V = 3, parents [-1, 0, 0], tokens [9, 0, 1], after the root p = [0.2, 0.2, 0.6] and
        q = [0.5, 0.25, 0.25]; node 0 is the root, u[1, 0] = 0.9, u[2, 0] = 0.9, u[0, 1] = 0.5
        node 1: 0.9 · 0.5 is not below 0.2: rejected; the residual is [0, 0, 0.35] / 0.35, and q is
        now [0, 0.5, 0.5]
        node 2: 0.9 · 0.5 is not below 0: rejected, too; token 2 is drawn            -> [2]

    The code below is right for chains and for the greedy case. It has four bugs. Delete the first
    line and find them.
    """
    raise NotImplementedError("Exercise 17.3: Find the bugs: a tree verified")
    emitted, node = [], 0
    while True:
        rest, share = p[node], q[node]
        children = [i for i, parent in enumerate(parents) if parent == node]
        stays = None
        for child in children:
            token = tokens[child]
            if u[child, 0] * share[token] < rest[token]:
                stays = child
            rest = (rest - share).clamp(min=0)
        if stays is None:
            weights = p[node] if len(children) > 1 else rest
            return [*emitted, int(draw(weights, u[node, 1:]))]
        emitted.append(tokens[stays])
        node = stays


@exercise(
    "17.4",
    "One path stays",
    minutes=35,
    difficulty=3,
    replaces="lessons.l17_tree_speculation.runner:path_moves",
    through="reference.ladder.yours.speculation:path_moves",
)
def keep_path(
    cache: Tensor,
    block_table: list[int],
    block_size: int,
    held: int,
    path: list[int],
    tokens: list[int],
    last: int,
    left: int,
    stop: set[int],
) -> tuple[Tensor, int, list[int]]:
    """What follows a pass over a tree: (the cache with the path in one piece, how many tokens the
    sequence holds now, the tokens that the pass emits).

    cache: [slots, D], the K of all sequences; place i of this sequence is in slot
    block_table[i // block_size] · block_size + i % block_size. The tree's nodes are at the places
    held, held + 1, … in the order of their numbers, the root's first. path: the nodes that stay,
    path[0] = 0 is the root; tokens: [N], of all nodes; last: the token that was sampled after the
    path, which the target has not read.

    All rows of the path move to the places from `held` on, in its order. Nothing else in the
    returned cache differs from `cache`, which is not changed. The root was emitted by an earlier
    pass. A pass emits at most `left` tokens (1 or more), and nothing after one of them that is in
    `stop`. The sequence then holds all tokens of its text but the newest, also where `left` or
    `stop` cut something off. Aim: no loop that moves the rows one by one, or over the dimensions.

    Example: block_size 2, block_table [3, 0, 1], held 1, path [0, 2], tokens [7, 8, 9], last 5,
        left 9, stop {}
        places 1, 2, 3 are slots 7, 0, 1; node 2's row moves from slot 1 to slot 0
        -> the sequence holds 3 tokens, and the pass emits [9, 5]
        with stop {9} it emits [9] and holds 2; with left 1 the same
    """
    raise NotImplementedError("Exercise 17.4: One path stays")
