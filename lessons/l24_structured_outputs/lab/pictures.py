"""The picture of token masks: one trie of tokens, walked together with an automaton from each of
its states.

    python -m lessons.l24_structured_outputs.lab.pictures

writes masks.svg beside this file. Nothing is timed: states and masks are what the code finds.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import State
from lessons.l24_structured_outputs.optimized import TokenMasks
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from lessons.toolbox.draw.figure import GREY, ROLES, ClassFigure, frame, save_svg, style

HERE = Path(__file__).parent
PATTERN = "[0-9]+(,[0-9]+)*"
TOKENS = ("1", "12", "1,", "1,2", "1,a", "12,", ",", ",2", ",,", "a")
ALIVE, DEAD = ROLES["optimized"].colour, GREY


@style()
def draw_masks(pattern: str = PATTERN, tokens: Sequence[str] = TOKENS) -> ClassFigure:
    """The automaton, and the trie walked from each of its states."""
    vocabulary = Vocabulary([token.encode() for token in tokens])
    digits = [bytes([byte]) for byte in b"0123456789,"]
    masks = TokenMasks(
        compile_structure("regex", pattern), Vocabulary([*vocabulary.tokens, *digits])
    )
    states = reachable(masks)
    allowed = [allowed_from(masks, vocabulary, state) for state in states]
    counts = " and ".join(str(sum(each)) for each in allowed)
    fig, axes = frame(
        f"One trie, {len(states)} states: {counts} of {len(tokens)} tokens may come next",
        f"{pattern} · in a node: the state that its text reaches; ×: it does not fit · "
        "filled: a token that may come next",
        (14, 6.5),
        (0.9, *(1 for _ in states)),
    )
    draw_automaton(axes[0], masks, states)
    for number, state in enumerate(states):
        draw_trie(axes[number + 1], masks, vocabulary, states, state)
        axes[number + 1].set_title(f"from state {number}", loc="left")
    return fig


def reachable(masks: TokenMasks) -> list[State]:
    """All states of a regular expression, the first one first."""
    found = [masks.start]
    for state in found:
        for byte in range(256):
            target = masks.matcher.step(state, byte)
            if target is not None and target not in found:
                found.append(target)
    return found


def allowed_from(masks: TokenMasks, vocabulary: Vocabulary, state: State) -> list[bool]:
    """Which of the drawn tokens may come next; masks has a few more, of one byte each."""
    return masks.allowed(state)[: len(vocabulary)].tolist()


def draw_automaton(ax: plt.Axes, masks: TokenMasks, states: list[State]) -> None:
    """Circles from top to bottom, and what leads from one to the other."""
    ax.set(xticks=[], yticks=[])
    ax.set_axis_off()
    ax.set_title("automaton", loc="left")
    ax.set_xlim(-1.2, 2.4)
    ax.set_ylim(-3.2 * (len(states) - 1) - 1.6, 1.6)
    for number, state in enumerate(states):
        y = -3.2 * number
        width = 3 if state.may_end else 1
        ax.scatter([0], [y], s=3000, facecolors="none", edgecolors=ALIVE, linewidths=width)
        ax.text(0, y, str(number), ha="center", va="center", fontweight="bold", color=ALIVE)
        if state.may_end:
            ax.text(0, y - 0.85, "may end", color=ALIVE, ha="center")
        targets: dict[int, str] = {}
        for byte in b"0,":
            target = masks.matcher.step(state, byte)
            if target is not None:
                targets[states.index(target)] = "a digit" if byte == ord("0") else "a comma"
        for target, label in targets.items():
            draw_edge(ax, y, -3.2 * target, label)


def draw_edge(ax: plt.Axes, y: float, to: float, label: str) -> None:
    """An arrow between two circles, or from one to itself."""
    arrow = dict(arrowstyle="->", color=ALIVE, lw=1.5)
    if y == to:
        arrow["connectionstyle"] = "arc3,rad=-1.6"
        ax.annotate("", (0.3, y - 0.25), (0.3, y + 0.25), arrowprops=arrow)
        ax.text(0.75, y, label, va="center")
        return
    down = to < y
    side = -0.15 if down else 0.15
    arrow["connectionstyle"] = "arc3,rad=0.0"
    ends = (to + 0.5, y - 0.5) if down else (to - 0.5, y + 0.5)
    ax.annotate("", (side, ends[0]), (side, ends[1]), arrowprops=arrow)
    ax.text(side * 2, (y + to) / 2, label, ha="right" if down else "left", va="center")


def draw_trie(
    ax: plt.Axes, masks: TokenMasks, vocabulary: Vocabulary, states: list[State], start: State
) -> None:
    """Each node with the state that it reaches from `start`."""
    parent, byte, levels, node_of = vocabulary.trie
    ends = set(node_of.tolist())
    texts = [b""]
    for node in range(1, len(parent)):
        texts.append(texts[parent[node]] + bytes([byte[node]]))
    order = sorted(range(len(texts)), key=lambda node: texts[node])
    height = {node: -place for place, node in enumerate(order)}
    for node, text in enumerate(texts):
        reached = masks.matcher.read(text, start)
        number = None if reached is None else states.index(reached)
        colour = DEAD if number is None else ALIVE
        x, y = len(text), height[node]
        if node:
            up = parent[node]
            ax.plot([x - 1, x], [height[up], y], color=colour, lw=1.2, zorder=1)
        is_token = node in ends and node > 0
        face = "white" if number is None or not is_token else "#CFE3F1"
        ax.scatter([x], [y], s=330, color=face, edgecolors=colour, zorder=2)
        ax.text(
            x, y, "×" if number is None else str(number), ha="center", va="center", color=colour
        )
        if is_token:
            ax.text(x + 0.22, y, repr(text.decode()), va="center", color=colour)
    ax.set(xticks=[], yticks=[])
    ax.set_axis_off()
    ax.set_xlim(-0.3, len(levels) + 0.4)
    ax.set_ylim(-len(texts) + 0.4, 0.8)


if __name__ == "__main__":
    save_svg(draw_masks(), HERE / "masks.svg")
