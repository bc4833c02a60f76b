"""The lesson's four pictures. All are computed or counted, none is measured.

    python -m lessons.l28_sparse_attention.lab.pictures

writes choice.svg, pages.svg, crossing.svg and quality.svg beside this file. The last reads
results/counted/l28_quality.json.
"""

import json
import sys
from pathlib import Path

from matplotlib.patches import Rectangle

from lessons.l07_kernel_fusion.lab.launches import LAUNCH_S
from lessons.l28_sparse_attention.costs import crossing, full, sparse_s
from lessons.l28_sparse_attention.lab.quality import OUT
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    HALO,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    size_number,
    style,
)

TOY = (5, 0, 2, 8, 0, 2)  # the index scores of the lesson's toy
CHOSEN, UNREAD = PALETTE[0], "#DDDDDD"
CHOICES = {
    "oracle": ("best possible choice", ROLES["floor"]),
    "indexer": ("indexer", ROLES["optimized"]),
    "first four and last": ("first four and last", ROLES["library"]),
    "last": ("last", ROLES["naive"]),
}


def top(scores: tuple[int, ...], k: int) -> set[int]:
    """The places of the k highest scores; of equal ones the first."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


@style()
def draw_choice(k: int = 2, scores: tuple[int, ...] = TOY) -> ClassFigure:
    """Three rows: small index keys that are all read, their scores, and the rows that are read."""
    taken = top(scores, k)
    fig, ax = frame(
        f"All {len(scores)} index keys are read, and {len(taken)} of {len(scores)} rows",
        f"the toy of the derivation · the {k} highest scores are chosen, of equal ones the first",
        (11, 4.6),
    )
    for i, score in enumerate(scores):
        colour = CHOSEN if i in taken else UNREAD
        box(ax, i + 0.25, 2.6, 0.4, 0.5, PALETTE[2], f"{i}")
        ax.add_patch(Rectangle((i + 0.2, 1.35), 0.5, 0.1 + 0.11 * score, color=colour))
        ax.text(i + 0.45, 1.2, f"{score}", ha="center", va="top")
        box(ax, i, 0, 0.9, 0.7, colour, f"{i}")
    for y, text in ((2.85, "index keys, small"), (1.5, "scores"), (0.35, "keys and values")):
        ax.text(-0.25, y, text, ha="right", va="center")
    ax.set(xlim=(-2.4, len(scores) + 0.2), ylim=(-0.2, 3.4))
    ax.set_axis_off()
    return fig


def box(ax, x: float, y: float, width: float, height: float, colour: str, text: str) -> None:
    """A rectangle, with what is written in it."""
    ax.add_patch(Rectangle((x, y), width, height, color=colour, alpha=0.75))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center")


@style()
def draw_pages(table: tuple[int, ...] = (3, 0, 2), chosen: tuple[int, ...] = (1, 6, 7, 9)):
    """A list of keys, the block table, and the rows of a pool that are read."""
    size, blocks = 4, 4
    fig, ax = frame(
        f"A list of {len(chosen)} keys is {len(chosen)} rows of the pool, found through the table",
        f"blocks of {size} tokens · key i is row i mod {size} of block table[i // {size}]",
        (11, 4.4),
    )
    for place, key in enumerate(chosen):
        box(ax, place, 2.4, 0.9, 0.7, CHOSEN, f"{key}")
    for place, block in enumerate(table):
        box(ax, 7 + place, 2.4, 0.9, 0.7, PALETTE[1], f"{block}")
    for block in range(blocks):
        for row in range(size):
            owner = table.index(block) * size + row if block in table else None
            colour = CHOSEN if owner in chosen else UNREAD
            text = "" if owner is None else f"{owner}"
            box(ax, block * (size + 0.4) + row, 0.3, 0.9, 0.7, colour, text)
        ax.text(block * (size + 0.4) + 1.9, 0.05, f"block {block}", ha="center", va="top")
    ax.text(-0.2, 2.75, "list", ha="right", va="center")
    ax.text(6.8, 2.75, "table", ha="right", va="center")
    ax.text(-0.2, 0.65, "pool", ha="right", va="center")
    ax.set(xlim=(-1.4, blocks * (size + 0.4)), ylim=(-0.5, 3.4))
    ax.set_axis_off()
    return fig


@style()
def draw_crossing(batch: int = 1, launch_us: float = 1e6 * LAUNCH_S) -> ClassFigure:
    """Time of a layer over the context: full attention, and choosing with and without what launches
    and a top k on one SM a row cost.
    """
    real = dict(launch_s=launch_us / 1e6, one_sm_a_row=True)
    late, early = crossing(batch, **real), crossing(batch)
    many = "1 sequence" if batch == 1 else f"{batch} sequences"
    fig, ax = frame(
        f"{many}: choosing pays from {early:,.0f} keys on by its bytes, and from {late:,.0f} with "
        "its launches and its top k",
        "predicted lower bounds · a layer of DeepSeek-V3.2, one new token a sequence, H100 · "
        f"{launch_us:g} µs a launch, one SM a row of scores",
        (11, 5.4),
    )
    low, high = 1024, 2**18
    contexts = [low * (high / low) ** (n / 60) for n in range(61)]
    lines = {
        "full attention": (ROLES["naive"], lambda n: full(n, batch).seconds()),
        "choosing, bytes alone": (ROLES["optimized"], lambda n: sparse_s(n, batch)),
        "choosing, with launches and one SM a row": (
            ROLES["library"],
            lambda n: sparse_s(n, batch, **real),
        ),
    }
    labels = []
    for text, (role, seconds) in lines.items():
        times = [1e6 * seconds(n) for n in contexts]
        ax.plot(contexts, times, color=role.colour, ls=role.dash)
        labels.append((contexts[-1], times[-1], text, role.colour))
    for at in (early, late):
        if at < high:
            y = 1e6 * full(at, batch).seconds()
            ax.plot([at], [y], "o", color="black", zorder=5)
            ax.annotate(f"{at:,.0f}", (at, y), (6, -16), textcoords="offset points",
                        path_effects=HALO)  # fmt: skip
    ticks = [2**n for n in range(10, 19, 2)]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [size_number(tick) for tick in ticks])
    ax.set_xlim(low, high)
    bottom = 1e6 * min(full(low, batch).seconds(), sparse_s(low, batch))
    log_axis(ax.yaxis, bottom / 2, 2e6 * max(full(high, batch).seconds(), 5e-5))
    ax.grid(True)
    ax.set_xlabel("keys in the context")
    ax.set_ylabel("µs a layer (lower is better)")
    label_column(ax, labels)
    return fig


@style()
def draw_quality(record: Path = OUT) -> ClassFigure:
    """Added loss over the number of keys, a line for each way to choose."""
    data = json.loads(record.read_text(encoding="utf-8"))
    rows = {name: [r for r in data["rows"] if r["choice"] == name] for name in CHOICES}
    at = 64
    added = {name: next(r["added"] for r in rows[name] if r["keys"] == at) for name in rows}
    fig, ax = frame(
        f"{at} keys of up to {data['window']}: the loss grows by {added['oracle']:.2f} with the "
        f"best choice, {added['indexer']:.2f} with the indexer, {added['last']:.2f} with the last",
        f"counted on models/tiny, {data['windows']} windows of held-out code, second halves · the "
        f"indexer was trained for {data['steps']} steps",
        (11, 5.4),
    )
    labels = []
    for name, (text, role) in CHOICES.items():
        keys = [row["keys"] for row in rows[name]]
        losses = [row["added"] for row in rows[name]]
        ax.plot(keys, losses, color=role.colour, ls=role.dash, marker=role.markers[0])
        labels.append((keys[-1], losses[-1], text, role.colour))
    ax.set_xscale("log", base=2)
    ax.set_xticks(keys, [size_number(k) for k in keys])
    ax.set_ylabel("added loss, nats a token\n(lower is better)")
    ax.set_xlabel("keys that a query may choose")
    log_axis(ax.yaxis, 5e-4, 5)
    ax.grid(True)
    label_column(ax, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "choice": (draw_choice, None),
    "pages": (draw_pages, None),
    "crossing": (draw_crossing, None),
    "quality": (draw_quality, None),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
