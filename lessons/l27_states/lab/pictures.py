"""The lesson's four pictures, computed and not measured: a state that fills and forgets, what is
still read right, the bytes that a sequence keeps, and the pages that a window gives back.

    python -m lessons.l27_states.lab.pictures

writes state.svg, needle.svg, kept.svg and pages.svg beside this file.
"""

import math
import sys

import torch
from torch import Tensor

from lessons.l27_states.lab.costs import QWEN3_NEXT, Hybrid, even_memory
from lessons.l27_states.lab.needle import (
    DECAY,
    FEW_KEYS,
    KEY_DIM,
    RULES,
    VALUE_DIM,
    WRITES,
    different_keys,
    same_keys,
)
from lessons.l27_states.lab.windows import draw_pages
from lessons.l27_states.naive import decayed_linear_attention, gated_delta_rule
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    HALO,
    PALETTE,
    ROLES,
    ClassFigure,
    draw_lines,
    frame,
    label_column,
    log_axis,
    number,
    size_number,
    style,
)

SIZE = 6
# What is written: a key in each row of the state, then the first two once more, then nothing new.
WRITTEN = [0, 1, 2, 3, 4, 5, 0, 1]
SHOWN = {"after 3 tokens": 3, "after 6": 6, "keys 0 and 1 again": 8}
RULE_NAMES = {
    "sum": ("adds", 1.0, False),
    "decay": ("adds, old ones fade", 0.8, False),
    "delta": ("replaces", 1.0, True),
    "both": ("replaces, old ones fade", 0.8, True),
}
LOOKS = dict(zip(RULES, ("naive", "library", "optimized", "floor")))


def tokens() -> tuple[Tensor, Tensor]:
    """Keys that are rows of the identity, and a bar as a value, whose place tells the token: [T, 1,
    SIZE] each.
    """
    k = torch.eye(SIZE)[WRITTEN][:, None]
    v = torch.zeros(len(WRITTEN), 1, SIZE)
    for t, row in enumerate(v[:, 0]):
        row[(t + 3 * (t // SIZE)) % SIZE] = 1.0
    return k, v


def states_of(decay: float, replaces: bool) -> list[Tensor]:
    """The state after each of SHOWN: [SIZE, SIZE]."""
    k, v = tokens()
    found = []
    for count in SHOWN.values():
        log_decay = torch.full((count, 1), math.log(decay))
        first = (k[:count], k[:count], v[:count], log_decay)
        if replaces:
            state = gated_delta_rule(*first, torch.ones(count, 1))[1]
        else:
            state = decayed_linear_attention(*first)[1]
        found.append(state[0])
    return found


@style()
def draw_state(decay: float = 0.8) -> ClassFigure:
    """The state of four rules at three times, row i for key i."""
    fig, ax = frame(
        "A state has the same size after 3 tokens and after 8: adding mixes two values of a key, "
        "replacing does not",
        f"computed · a state of {SIZE} x {SIZE}, row i is key i; the newest values are in other "
        f"columns; decay {decay:g}",
        (12, 7.6),
    )
    ax.remove()
    axes = fig.subplots(len(SHOWN), len(RULE_NAMES))
    for column, (title, fades, replaces) in enumerate(RULE_NAMES.values()):
        states = states_of(decay if fades < 1 else 1.0, replaces)
        for row, (when, state) in enumerate(zip(SHOWN, states)):
            ax = axes[row, column]
            ax.imshow(state.numpy(), vmin=0, vmax=2, cmap="Blues")
            for i, j in (state.abs() > 0.005).nonzero().tolist():
                value = float(state[i, j])
                colour = "white" if value > 1.2 else "black"
                ax.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=8, color=colour)
            ax.set_xticks([])
            ax.set_yticks(range(SIZE), [f"{i}" for i in range(SIZE)] if not column else [])
            if not row:
                ax.set_title(title, fontsize=12)
            if not column:
                ax.set_ylabel(when)
    return fig


@style()
def draw_needle(writes: tuple[int, ...] = WRITES) -> ClassFigure:
    """The share of keys that are read right: different keys, and few keys with new values."""
    last = writes[-1]
    adds = float(different_keys(RULES["sum"], last).mean())
    fig, axes = frame(
        f"{last} different keys do not fit into {KEY_DIM} rows: adding reads {100 * adds:.0f} % "
        f"right, the delta rule less. Of {FEW_KEYS} keys with new values it reads all",
        f"counted, nothing is trained · {KEY_DIM} states of {KEY_DIM} x {VALUE_DIM}, random keys "
        f"and codes, decay {DECAY}",
        (13, 5.2),
        (1, 1),
    )
    panels = {
        "all keys are different": lambda rule, n: float(different_keys(rule, n).mean()),
        f"{FEW_KEYS} keys in turns, the newest value counts": same_keys,
    }
    for ax, (title, share) in zip(axes, panels.items()):
        lines = {
            name: (writes, [100 * share(rule, n) for n in writes]) for name, rule in RULES.items()
        }
        labels = draw_lines(ax, lines, (LOOKS[name] for name in lines))
        ax.set_xscale("log", base=2)
        ax.set_xticks(writes, [number(n) for n in writes])
        ax.set(ylim=(-3, 105), xlabel="pairs that were written")
        ax.set_title(title, loc="left", fontsize=12)
        ax.grid(True)
        label_column(ax, labels)
    axes[0].set_ylabel("read right, percent (higher is better)")
    return fig


@style()
def draw_kept(model: Hybrid = QWEN3_NEXT) -> ClassFigure:
    """What a sequence keeps over its context: the hybrid, and the same with caches alone."""
    contexts = [2**n for n in range(6, 19)]
    even = even_memory(model)
    long = 2**17
    share = model.cached_bytes(long) / model.kept_bytes(long)
    fig, ax = frame(
        f"{model.name} keeps less than with caches alone from {even:,.0f} tokens on, and at "
        f"{size_number(long)} a quarter ({1 / share:.2f})",
        f"computed · {model.state_layers} layers with a float32 state, {model.cache_layers} with K "
        "and V in 16 bits",
        (11, 5.4),
    )
    series = {
        f"{model.layers} layers with caches": [model.cached_bytes(n) / 1e6 for n in contexts],
        "as it is": [model.kept_bytes(n) / 1e6 for n in contexts],
    }
    lines = {name: (contexts, values) for name, values in series.items()}
    labels = draw_lines(ax, lines, ("naive", "optimized"))
    states = model.state_layers * model.state.kept_bytes / 1e6
    ax.axhline(states, color=ROLES["floor"].colour, ls="--")
    labels.append((contexts[-1], states, "its states alone", ROLES["floor"].colour))
    at = model.kept_bytes(round(even)) / 1e6
    ax.plot([even], [at], "o", color=PALETTE[3], zorder=5)
    ax.annotate(
        f"{even:,.0f} tokens", (even, at), (6, -34), textcoords="offset points",
        color=PALETTE[3], fontweight="bold", path_effects=HALO,
    )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(contexts[::2], [size_number(n) for n in contexts[::2]])
    log_axis(ax.yaxis, 5, 50_000)
    ax.grid(True)
    ax.set_xlabel("context, tokens")
    ax.set_ylabel("MB of one sequence (lower is better)")
    label_column(ax, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "state": (draw_state, None),
    "needle": (draw_needle, None),
    "kept": (draw_kept, None),
    "pages": (draw_pages, None),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
