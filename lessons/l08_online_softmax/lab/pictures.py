"""The lesson's figures, counted and computed, nothing measured: passes, a warp's butterfly, trees
of merges, where exp overflows.

    python -m lessons.l08_online_softmax.lab.pictures
        writes passes.svg and butterfly.svg beside this file
"""

import math
from pathlib import Path

import torch
from matplotlib.patches import Patch, Rectangle

from lessons.l08_online_softmax.lab.traffic import PASSES, largest_exponent, smallest_exponent
from lessons.l08_online_softmax.warp import DISTANCES, LANES, heard_of
from lessons.toolbox.draw.figure import ROLES, SMALL, ClassFigure, frame, key, save_svg, style
from lessons.toolbox.draw.plotting import gantt

ROOM = Path(__file__).parent
SCORES = 9  # of the row in the picture
READ, WRITE, VALUES = (
    "reads each score",
    "reads it and writes a probability",
    "reads it and its value",
)
LOOK = {
    READ: (ROLES["naive"].colour, ""),
    WRITE: (ROLES["optimized"].colour, "//"),
    VALUES: (ROLES["library"].colour, ".."),
}
SWEEPS = {  # what each pass is for: (label, what it does)
    "three passes": [("max", READ), ("sum", READ), ("divide", WRITE)],
    "online, two passes": [("max and sum", READ), ("divide", WRITE)],
    "one block": [("all in registers", WRITE)],
    "softmax · V in one pass": [("max, sum, acc", VALUES)],
}


@style()
def draw_passes() -> ClassFigure:
    """A panel for each way, a strip for each pass over the row."""
    reads = [PASSES[way][0] for way in SWEEPS]
    fig, ax = frame(
        f"The same row: read {', '.join(map(str, reads[:3]))} times, and once with its values",
        f"a row of {SCORES} scores; each strip is one pass over memory · counted, not measured",
        (11, 3.7),
    )
    for n, (way, sweeps) in enumerate(SWEEPS.items()):
        left = n * (SCORES + 2)
        for y, (label, what) in enumerate(sweeps):
            colour, hatch = LOOK[what]
            for x in range(SCORES):
                ax.add_patch(
                    Rectangle(
                        (left + x, 1.2 * y + 0.4),
                        0.94,
                        0.62,
                        facecolor=colour,
                        hatch=hatch,
                        edgecolor="white",
                    )
                )
            ax.text(left, 1.2 * y + 0.34, f"pass {y + 1}: {label}", va="bottom")
        ax.text(left, -0.45, way, va="bottom", fontweight="bold")
    ax.set_xlim(-0.2, len(SWEEPS) * (SCORES + 2) - 1.6)
    ax.set_ylim(3.6, -0.9)
    ax.set_axis_off()
    key(
        ax,
        [
            Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=what)
            for what, (colour, hatch) in LOOK.items()
        ],
    )
    return fig


@style()
def draw_butterfly(lane: int = 5) -> ClassFigure:
    """Who trades with whom in each round of warp_merge, and which lanes one of them knows."""
    fig, ax = frame(
        f"{len(DISTANCES)} exchanges, and every lane holds the merge of all {LANES}",
        "a row is a moment, a dot a lane; lines: registers traded · dark: what reaches lane "
        f"{lane} in the end · drawn from warp.py",
        (11, 5.2),
    )
    known = {row: set(_ancestors(lane, row)) for row in range(len(DISTANCES) + 1)}
    for row, distance in enumerate(DISTANCES):
        for here in range(LANES):
            for there in (here, here ^ distance):
                on_path = here in known[row + 1] and there in known[row]
                ax.plot(
                    (there, here),
                    (row, row + 1),
                    color=ROLES["optimized"].colour if on_path else "#CCCCCC",
                    lw=1.8 if on_path else 0.7,
                    zorder=2 if on_path else 1,
                )
    for row in known:
        ax.scatter(
            range(LANES),
            [row] * LANES,
            s=34,
            zorder=3,
            c=[ROLES["optimized"].colour if n in known[row] else "#BBBBBB" for n in range(LANES)],
        )
        ax.text(
            LANES + 0.3, row, f"heard of {len(heard_of(lane, row))}", va="center", fontsize=SMALL
        )
    ax.set_yticks(range(len(known)), ["own", *(f"xor {distance}" for distance in DISTANCES)])
    ax.set_xticks(range(0, LANES, 4))
    ax.set_xlabel("lane of the warp")
    ax.set_ylim(len(DISTANCES) + 0.4, -0.4)
    ax.set_xlim(-0.8, LANES + 5)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return fig


def _ancestors(lane: int, row: int) -> list[int]:
    """The lanes whose registers at this row end up in `lane`: those that it reaches through the
    rounds that are left.
    """
    lanes = {lane}
    for distance in DISTANCES[row:]:
        lanes |= {other ^ distance for other in lanes}
    return sorted(lanes)


@style()
def draw_online(seen: int = 4, scores: tuple[float, ...] = (0, 1, -1, 3, 2, 3.5, 0.5, 2.5)):
    """The first `seen` scores, their running maximum, and below what each one adds to l: it shrinks
    whenever the maximum grows. Returns a ClassFigure.
    """
    row = torch.tensor(scores)
    maxima = row.cummax(0).values.tolist()
    m = maxima[seen - 1]
    alpha = math.exp((maxima[seen - 2] if seen > 1 else -math.inf) - m)
    terms = torch.exp(row[:seen] - m).tolist()
    fig, (above, below) = frame(
        f"After {seen} scores m = {m:g} and l = {sum(terms):.3f}; the last one cost alpha = "
        f"{alpha:.3f}",
        "left: scores, and the largest so far · right: exp(score − m) of each, whose sum is l · "
        "computed",
        (11, 4),
        (1, 1),
    )
    at = range(len(scores))
    new = [n == seen - 1 for n in range(seen)]
    looks = [ROLES["naive"] if last else ROLES["optimized"] for last in new]
    colours, hatches = [look.colour for look in looks], [look.hatch for look in looks]
    above.bar(at, scores, color="#EEEEEE")
    above.bar(at[:seen], scores[:seen], color=colours, hatch=hatches, edgecolor="white")
    above.step(at[:seen], maxima[:seen], where="post", color=ROLES["floor"].colour, ls="--")
    # at the left edge, because a later score beside it could be higher than m and touch it
    above.text(-0.6, m + 0.1, f"m = {m:g}", fontweight="bold", va="bottom")
    below.bar(at[:seen], terms, color=colours, hatch=hatches, edgecolor="white")
    for n, term in enumerate(terms):
        below.text(n, term + 0.02, f"{term:.2f}", ha="center", va="bottom", fontsize=SMALL)
    for ax, label in ((above, "score"), (below, "exp(score − m)")):
        ax.set(xlim=(-0.7, len(scores) + 0.4), xticks=at, xlabel="score number", ylabel=label)
    above.set_ylim(min(scores) - 0.3, max(scores) + 0.8)
    below.set_ylim(0, 1.15)
    return fig


def draw_overflow(limit: float = 130.0) -> ClassFigure:
    """For which x exp(x) is a positive number, by dtype; beyond it rounds to 0 or is inf."""
    rows = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        low, high = smallest_exponent(dtype), largest_exponent(dtype)
        rows[str(dtype).removeprefix("torch.")] = [
            (-limit, low, "0", "0"),
            (low, high, "a number", f"{low:.1f} … {high:.1f}"),
            (high, limit, "inf", "inf"),
        ]
    rows["after − max"] = [
        (-limit, smallest_exponent(torch.float32), "0", "0"),
        (smallest_exponent(torch.float32), 0, "a number", "at most exp(0) = 1"),
    ]
    return gantt(
        rows,
        title="exp(score) is inf beyond 11 in float16, beyond 88 in bfloat16 and float32",
        xlabel="score",
        caption="computed from the largest and smallest number of each dtype; after − max: float32",
        kinds=["a number", "inf", "0"],
    )


if __name__ == "__main__":
    save_svg(draw_passes(), ROOM / "passes.svg")
    save_svg(draw_butterfly(), ROOM / "butterfly.svg")
