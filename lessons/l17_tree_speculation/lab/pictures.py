"""The lesson's three pictures: a tree with its mask, what typical acceptance makes of a
distribution, and how many tokens the best tree of so many nodes gives.

    python -m lessons.l17_tree_speculation.lab.pictures

writes mask.svg, typical.svg and nodes.svg beside this file. Nothing is timed. The third reads
results/counted/l17_trees.json.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from lessons.l17_tree_speculation.lab.experiments import recorded
from lessons.l17_tree_speculation.trees.accept import threshold
from lessons.l17_tree_speculation.trees.tree import Tree, best_tree
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ClassFigure,
    frame,
    key,
    label_column,
    save_svg,
    style,
)

HERE = Path(__file__).parent

# After "for i in": three guesses, and what may follow two of them.
EXAMPLE = Tree((-1, 0, 0, 0, 1, 1, 2))
WORDS = ("in", "range", "self", "enum", "(", "s", ".")
MASK_ALT = (
    "A tree of seven nodes: the root in, its children range, self and enum; after range an "
    "opening bracket and s, after self a point. Beside it the mask: each node sees the text before "
    "it, the nodes on its path from the root, and itself."
)
ANIMALS = ("cat", "dog", "bird", "fish", "ant")
P = (0.4, 0.3, 0.15, 0.1, 0.05)
GUESSES = (1, 2)  # dog first, then bird
NODES_ALT = (
    "Expected tokens a pass over the nodes of the best tree, at most 4 guesses deep, for Medusa, "
    "EAGLE, MTP and EAGLE-3 heads on the embedded model: all rise, and flatten from about 16 nodes "
    "on."
)
NAMES = {"medusa": "Medusa", "eagle": "EAGLE", "mtp": "MTP", "eagle3": "EAGLE-3"}


def places_of(tree: Tree) -> list[tuple[float, float]]:
    """Where each node is drawn: leaves side by side, parents above the middle of their children."""
    across = {}

    def place(node: int, free: int) -> int:
        for child in tree.children[node]:
            free = place(child, free)
        below = [across[child] for child in tree.children[node]]
        across[node] = sum(below) / len(below) if below else free
        return free if below else free + 1

    place(0, 0)
    return [(across[node], -tree.depths[node]) for node in range(len(tree))]


@style()
def draw_mask(tree: Tree = EXAMPLE, words: tuple[str, ...] = WORDS) -> ClassFigure:
    """The tree, and which key each node sees: the text in front is one column."""
    entries = int((tree.table > 0).sum())
    fig, ax = frame(
        f"{len(tree)} nodes in one pass: each sees its own path and no sibling, {entries} of "
        f"{len(tree) ** 2} pairs",
        "left: the guesses after “for i in”; right: rows are queries, columns keys, "
        "grey the cached text",
        (10, 4.8),
    )
    ax.set_axis_off()
    left = fig.add_axes((0.04, 0.1, 0.4, 0.68))
    right = fig.add_axes((0.56, 0.1, 0.4, 0.68))
    draw_tree(left, tree, words)
    draw_pairs(right, tree, words)
    return fig


def draw_tree(ax: plt.Axes, tree: Tree, words: tuple[str, ...]) -> None:
    """Nodes with their numbers and words, one line a parent."""
    places = places_of(tree)
    for node, parent in enumerate(tree.parents):
        if node:
            (x, y), (px, py) = places[node], places[parent]
            ax.plot([x, px], [y, py], color=GREY, lw=1.5, zorder=1)
    for node, (x, y) in enumerate(places):
        ax.scatter([x], [y], s=2400, color="white", ec=PALETTE[0], lw=2, zorder=2)
        ax.text(x, y + 0.06, words[node], ha="center", va="center", zorder=3)
        ax.text(x, y - 0.16, f"{node}", ha="center", va="center", zorder=3, color=GREY, fontsize=9)
    ax.set_xlim(min(x for x, _ in places) - 0.6, max(x for x, _ in places) + 0.6)
    ax.set_ylim(-tree.depth - 0.5, 0.5)
    ax.set_axis_off()


def draw_pairs(ax: plt.Axes, tree: Tree, words: tuple[str, ...]) -> None:
    """A square where a node sees a key; the first column is the text that the cache holds."""
    sees = np.concatenate([np.ones((len(tree), 1)), (tree.table > 0).numpy()], axis=1)
    for row, column in np.argwhere(sees):
        colour = GREY if column == 0 else PALETTE[0]
        ax.add_patch(plt.Rectangle((column - 0.45, row - 0.45), 0.9, 0.9, color=colour))
    ax.set_xlim(-0.6, len(tree) + 0.6)
    ax.set_ylim(len(tree) - 0.4, -0.6)
    ax.set_xticks(range(len(tree) + 1), ["text", *map(str, range(len(tree)))])
    depths = [f"{node}  {words[node]}" for node in range(len(tree))]
    ax.set_yticks(range(len(tree)), depths)
    ax.xaxis.tick_top()
    ax.set_aspect("equal")


def emitted_typically(p: torch.Tensor, guesses: tuple[int, ...]) -> torch.Tensor:
    """The distribution of the next token if a guess that passes is taken. p: [V] -> [V]."""
    bound = float(threshold(p, 0.09, 0.3))
    for guess in guesses:
        if p[guess] > bound:
            return torch.nn.functional.one_hot(torch.tensor(guess), len(p)).to(p.dtype)
    return p


@style()
def draw_typical(p=P, guesses=GUESSES) -> ClassFigure:
    """The target's distribution beside what each rule emits."""
    p = torch.tensor(p)
    typical = emitted_typically(p, guesses)
    distance = float((p - typical).abs().sum()) / 2
    fig, ax = frame(
        f"Typical acceptance moves {distance:.1f} of the probability, exact acceptance none",
        f"a head guesses {' and '.join(ANIMALS[guess] for guess in guesses)}; "
        f"threshold {float(threshold(p, 0.09, 0.3)):.3f}",
        (10, 4.8),
    )
    x = np.arange(len(p))
    handles = [
        ax.bar(x - 0.2, p.tolist(), 0.36, color=PALETTE[0], label="the target, and exact"),
        ax.bar(
            x + 0.2, typical.tolist(), 0.36, color=PALETTE[1], hatch="//", ec=GREY, label="typical"
        ),
    ]
    ax.set_xticks(x, ANIMALS[: len(p)])
    ax.set_ylim(0, 1.15)
    ax.set_ylabel("probability of the next word")
    key(ax, handles)
    return fig


def curve_of(entry: dict) -> list[tuple[int, float]]:
    """(nodes, expected tokens a pass) of the best trees of one kind of heads. A tree ends where no
    counted guess is left, so it may have fewer nodes than were allowed.
    """
    curve = {}
    for allowed, tokens in entry["expected"].items():
        curve[len(best_tree(entry["acceptance"], int(allowed)))] = tokens
    return sorted(curve.items())


@style()
def draw_nodes(found: dict | None = None) -> ClassFigure:
    """Expected tokens a pass over the number of nodes, from the counted acceptances."""
    found = found or recorded()
    curves = {kind: curve_of(entry) for kind, entry in found["kinds"].items()}
    best = max(curves, key=lambda kind: curves[kind][-1][1])
    few, (most, many) = dict(curves[best])[16], curves[best][-1]
    fig, ax = frame(
        f"{NAMES[best]}: 16 nodes give {few:.1f} tokens a pass, {most} nodes only {many:.1f}",
        f"at most {len(found['kinds'][best]['acceptance'])} guesses deep · computed from counted "
        "acceptances, greedy, held-out code, models/tiny",
        (10, 4.8),
    )
    labels = []
    for (kind, curve), colour, marker in zip(curves.items(), PALETTE, "osD^"):
        nodes, tokens = zip(*curve)
        ax.plot(nodes, tokens, color=colour, marker=marker)
        labels.append((nodes[-1], tokens[-1], NAMES[kind], colour))
    ax.axhline(1, color=GREY, lw=1, ls=":")
    labels.append((most, 1, "plain decoding", GREY))
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    ax.set_xlabel("nodes of the tree, the root among them")
    ax.set_ylabel("tokens a pass (higher is better)")
    ax.set_ylim(0, None)
    ax.grid(True)
    label_column(ax, labels)
    return fig


if __name__ == "__main__":
    save_svg(draw_mask(), HERE / "mask.svg", alt=MASK_ALT)
    save_svg(draw_typical(), HERE / "typical.svg")
    save_svg(draw_nodes(), HERE / "nodes.svg", alt=NODES_ALT)
