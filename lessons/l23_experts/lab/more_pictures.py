"""The pictures of MORE.md: what copies of experts do for the balance, two halves in turns, and a
step over the number of GPUs.

    python -m lessons.l23_experts.lab.more_pictures

writes them as SVG files beside this file, from the records of balance.py and large.py.
"""

import json
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lessons.l23_experts.lab import balance, large, stream
from lessons.l23_experts.ranks.large import H800, Wide, decode_core_s, direct, layer_parts
from lessons.l23_experts.ranks.overlap import COMPUTE, NETWORK, Piece, end_of, schedule
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.diagrams import gantt
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    style,
)

HERE = Path(__file__).parent
MARKERS = "sXo^Dv"
SHOWN = {
    ("balance", "zipf"): "liked as 1 / r",
    ("balance", "modules"): "texts",
    ("stale", "placed for modules, serving lessons"): "texts, old statistics",
}
WAYS = {"in order": "in order", "0": "packed", "32": "32\ncopies", "64": "64", "128": "128"}


@style()
def draw_balance() -> ClassFigure:
    """The busiest rank over the mean, by how the experts are placed."""
    record = json.loads(balance.RECORD.read_text(encoding="utf-8"))
    before, after = (record["balance"]["zipf"][way] for way in ("in order", "32"))
    fig, ax = frame(
        f"32 copies of 256 experts: the busiest of {record['ranks']} ranks falls from "
        f"{before:.1f} to {after:.2f} times the mean",
        f"counted on {balance.STEP} tokens, 8 experts each · random routers · r: an expert's place "
        "in a drawn order · texts: hidden values of models/tiny",
        (10, 5),
    )
    labels = []
    for number, ((part, name), label) in enumerate(SHOWN.items()):
        values = [record[part][name][way] for way in WAYS]
        look = dict(color=PALETTE[number], marker=MARKERS[number], ls=("-", "--", ":")[number])
        ax.plot(range(len(WAYS)), values, **look)
        labels.append((len(WAYS) - 1, values[-1], label, PALETTE[number]))
    ax.axhline(1, color=ROLES["floor"].colour, ls="--", lw=1.6)
    ax.text(-0.15, 0.97, "even", color=ROLES["floor"].colour, va="top")
    ax.set_xticks(range(len(WAYS)), WAYS.values())
    ax.set_xlabel("where the experts are")
    ax.set_ylabel("busiest rank / mean (lower is better)")
    ax.set_ylim(bottom=0.8)
    ax.grid(True, axis="y")
    label_column(ax, labels)
    return fig


@style()
def draw_stream() -> ClassFigure:
    """The same, step by step while subjects change."""
    rules = json.loads(stream.RECORD.read_text(encoding="utf-8"))["rules"]
    anew, few = "anew, 8 steps", f"{stream.MOVES} moves, 8 steps"
    fig, ax = frame(
        f"Placed anew every {stream.INTERVAL} steps: even within a subject, uneven after each "
        "change",
        f"counted · {stream.STEP_TOKENS} tokens a step, 256 experts and 32 copies on 32 ranks, "
        "random router over models/tiny",
        (12, 5),
    )
    labels = []
    for number, (name, label) in enumerate(
        {"never": "never", anew: "anew", few: f"{stream.MOVES} moves"}.items()
    ):
        values = rules[name]["steps"]
        label = f"{label}: {rules[name]['moved']} moved"
        look = dict(color=(GREY, PALETTE[0], PALETTE[5])[number], lw=1.8)
        ax.plot(range(len(values)), values, ls=(":", "-", "--")[number], **look)
        labels.append((len(values) - 1, values[-1], label, look["color"]))
    for number, subject in enumerate(stream.SUBJECTS):
        first = number * stream.STEPS
        ax.axvline(first, color=ROLES["floor"].colour, lw=0.8)
        ax.text(first + 0.5, 2.1, subject, va="top", fontweight="bold")
    ax.set_ylim(1, 2.15)
    ax.set_xlim(0, len(stream.SUBJECTS) * stream.STEPS - 1)
    ax.set_xlabel("steps")
    ax.set_ylabel("busiest rank / mean (lower is better)")
    ax.grid(True, axis="y")
    label_column(ax, labels)
    return fig


# ---------------------------------------------------------------- two halves

LETTERS = {
    "projections": "p",
    "attention": "att.",
    "experts": "exp.",
    "shared": "s",
    "dispatch": "disp.",
    "combine": "comb.",
}


def bars(pieces: list[Piece], lane: str, kinds: list[str]) -> list[tuple]:
    """A lane's pieces for `gantt`, in µs. kinds: a name for each batch."""
    return [
        (1e6 * piece.start_s, 1e6 * piece.end_s, kinds[piece.batch], LETTERS[piece.name])
        for piece in pieces
        if piece.lane == lane
    ]


def draw_halves(num_layers: int = 2, gpus: int = 64, batch: int = large.BATCH) -> Figure:
    """Both time lines of some layers of DeepSeek-V3 while it decodes."""
    wide = Wide(large.MODEL, H800, gpus)
    parts = layer_parts(wide, decode_core_s(wide, large.CONTEXT), direct(wide))
    one = schedule(parts, num_layers, [batch])
    two = schedule(parts, num_layers, [batch - batch // 2, batch // 2])
    whole, halves = ["one batch"], ["first half", "second half"]
    seconds = [1e6 * end_of(pieces) for pieces in (one, two)]
    ratio = seconds[0] / seconds[1]
    what = f"{ratio:.2f}× as fast" if ratio > 1 else f"{1 / ratio:.2f}× as slow"
    return gantt(
        {
            "one batch\ncomputes": bars(one, COMPUTE, whole),
            "network": bars(one, NETWORK, whole),
            "two halves\ncompute": bars(two, COMPUTE, halves),
            "network ": bars(two, NETWORK, halves),
        },
        title=f"Two halves in turns: {num_layers} layers are {what}",
        xlabel="µs",
        caption=f"PREDICTED · {large.MODEL.name} on {gpus} H800s, {batch} sequences of "
        f"{large.CONTEXT} tokens a GPU · p: projections, narrow bars: shared expert",
        kinds=[*whole, *halves],
    )


# ---------------------------------------------------------------- many GPUs


@style()
def draw_large() -> ClassFigure:
    """A decode step over the number of GPUs, and what a GPU gives."""
    record = json.loads(large.RECORD.read_text(encoding="utf-8"))
    found = {int(gpus): step for gpus, step in record["decode"].items() if step["batch"]}
    best = max(found, key=lambda gpus: found[gpus]["two"]["tokens_per_s"])
    fig, panels = frame(
        f"DeepSeek-V3 decodes best on about {best} GPUs: fewer have no room, more fill the network",
        f"PREDICTED bounds, H800s · {large.BATCH} sequences of {large.CONTEXT} tokens a GPU, on 16 "
        f"and 32 GPUs the {found[16]['batch']} and {found[32]['batch']} that fit; on 8 none",
        (12.5, 5),
        (1, 1),
    )
    left = {
        "a step": [step["two"]["ms"] for step in found.values()],
        "computes": [step["two"]["compute_ms"] for step in found.values()],
        "network": [step["two"]["network_ms"] for step in found.values()],
    }
    right = {
        name: [step[way]["tokens_per_s"] for step in found.values()]
        for name, way in (("two halves", "two"), ("one batch", "one"))
    }
    for ax, series, title, unit in (
        (panels[0], left, "two halves in turns", "ms (lower is better)"),
        (panels[1], right, "what a GPU gives", "tokens/s of a GPU (higher is better)"),
    ):
        over_gpus(ax, list(found), series)
        ax.set_title(title)
        ax.set_ylabel(unit)
    return fig


def over_gpus(ax: Axes, gpus: list[int], series: dict[str, list[float]]) -> None:
    """Lines over the number of GPUs, with their names at the right."""
    labels = []
    for number, (name, values) in enumerate(series.items()):
        look = dict(color=PALETTE[number], marker=MARKERS[number], ls=("-", "--", ":")[number])
        ax.plot(gpus, values, **look)
        labels.append((gpus[-1], values[-1], name, PALETTE[number]))
    ax.set_xscale("log", base=2)
    ax.set_xticks(gpus, [str(count) for count in gpus])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("GPUs")
    ax.grid(True, axis="y")
    label_column(ax, labels)


PICTURES: dict[str, Picture] = {
    "balance": (
        draw_balance,
        "The busiest of 32 ranks over the mean, for experts in order, packed, and with 32, 64 and "
        "128 copies. With fresh statistics 32 copies bring all loads close to 1; with those of "
        "other texts 1.3 is left.",
    ),
    "stream": (
        draw_stream,
        "The busiest of 32 ranks over the mean, step by step, while texts change from Python "
        "modules to English and back. Placements that are made anew every 8 steps are even within "
        "a subject and uneven after each change, at the second one worse than none. 16 moves every "
        "8 steps are in between.",
    ),
    "halves": (
        draw_halves,
        "Time lines of two layers of DeepSeek-V3 on 64 GPUs. In one batch the GPU is idle whenever "
        "rows travel. In two halves one half's parts fill the other's gaps, and the end comes "
        "earlier.",
    ),
    "large": (
        draw_large,
        "Left, milliseconds of a decode step over the number of GPUs: computing falls, the network "
        "rises, and they cross between 64 and 144. Right, tokens per second of a GPU: two halves "
        "rise to 64 GPUs and then stay.",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
