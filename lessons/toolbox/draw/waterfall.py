"""The ladder's first picture, until the ladder's report draws `ladder.ladder_plot`."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lessons.toolbox.draw.figure import GREY, ROLES, ClassFigure, frame, number, style

SLACK = 0.05


@style()
def waterfall(
    rungs: Sequence[dict], *, title: str, caption: str, references: dict[str, float] | None = None
) -> ClassFigure:
    """The ladder: tokens/s of every rung (the first at the bottom), x over the rung below, share of
    the roofline, same tokens.

    rungs: [{"name", "tokens_per_s", "identical": True | False | None, "roofline_share": 0..1 or
    None}], the slowest first; references: {peer: tokens per second}, drawn as labelled lines. A
    share above 105 % is marked CHECK.
    """
    references = references or {}
    if not rungs:
        raise ValueError("rungs is empty; accepted: at least one {'name', 'tokens_per_s'}")
    rates = [r["tokens_per_s"] for r in rungs]
    fig, ax = frame(title, caption, (11, 2.6 + 0.44 * len(rungs) + 0.25 * len(references)))
    every = [*rates, *references.values()]
    ax.set_ylim(-0.7, len(rungs) - 0.3)
    ax.set_xlim(0, max(every) * 1.05)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(number))
    heads = ("tokens/s", "× rung below", "of roofline", "same tokens")
    offsets = np.cumsum([8, 82, 108, 112])  # points right of the axes
    for i, rung in enumerate(rungs):
        best = i == int(np.argmax(rates))
        role = ROLES["naive" if i == 0 else "optimized"]
        ax.barh(
            i,
            rates[i],
            height=0.72,
            color=role.colour,
            hatch=role.hatch,
            edgecolor="white",
        )
        share, same = rung.get("roofline_share"), rung.get("identical")
        gain = rates[i] / rates[max(i - 1, 0)]
        cells = (
            number(rates[i]),
            "" if i == 0 else f"{gain:.{1 if gain < 9.95 else 0}f}×",
            ""
            if share is None
            else f"{share:.{0 if share > 0.0995 else 1}%}" + " CHECK" * (share > 1 + SLACK),
            {True: "✓", False: "✗ differ", None: "not checked"}[same],
        )
        for text, dx in zip(cells, offsets):
            colour = "#D55E00" if text.startswith("✗") or "CHECK" in text else "black"
            ax.annotate(
                text,
                (1, i),
                (dx, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontweight="bold" if best or colour != "black" else "normal",
                color=colour,
                annotation_clip=False,
            )
    for text, dx in zip(heads, offsets):
        ax.annotate(
            text,
            (1, len(rungs) - 0.3),
            (dx, 4),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=GREY,
            va="bottom",
            annotation_clip=False,
        )
    peer_style = {
        "color": ROLES["library"].colour,
        "textcoords": "offset points",
        "annotation_clip": False,
    }
    for level, (peer, rate) in enumerate(sorted(references.items(), key=lambda item: -item[1])):
        # The fastest peer's label is lowest: each label runs to the right above every line that it
        # passes.
        ax.axvline(rate, color=peer_style["color"], ls=":", lw=2.2, zorder=3)
        top = (rate, len(rungs) - 0.3)
        ax.annotate(
            "",
            top,
            (0, 40 + 18 * level),
            **peer_style,
            arrowprops={
                "arrowstyle": "-",
                "color": peer_style["color"],
                "ls": ":",
                "lw": 2.2,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        ax.annotate(
            f"{peer}: {number(rate)}", top, (6, 28 + 18 * level), **peer_style, fontweight="bold"
        )
    ax.set_yticks(range(len(rungs)), [r["name"] for r in rungs])
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("tokens/s (higher is better)")
    return fig
