"""Figures that a class can read from the back row: one message as the title, direct labels, the
physical limit always drawn.

Every function returns a `ClassFigure` built without pyplot: no global state, safe on any backend,
shown inline by Jupyter.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from lessons.toolbox.draw.diagrams import block_map, gantt, mask_image
from lessons.toolbox.draw.figure import (
    FLAG,
    GREY,
    HALO,
    ROLES,
    ClassFigure,
    caption,
    foot,
    frame,
    label_column,
    log_axis,
    marks,
    number,
    overlapping_texts,
    save,
    size_number,
    style,
    texts_outside,
)
from lessons.toolbox.draw.ladder import ladder_plot

__all__ = [
    "ROLES",
    "ClassFigure",
    "bars",
    "block_map",
    "caption",
    "class_plot",
    "gantt",
    "ladder_plot",
    "mask_image",
    "overlapping_texts",
    "roofline",
    "save",
    "size_number",
    "texts_outside",
]
SLACK = 0.05  # a median this far beyond the physical limit is flagged: clock noise stays below it
WIDE = 30  # values that span more than this need a log axis
MOST_LABELS = 10  # of 11 pt, which fit the width
LIMIT = ROLES["floor"].colour


def _flag(ax, points, places):
    """Ring the points [(x, y)] that lie beyond a physical limit, and return the caption's words."""
    if not points:
        return ""
    ax.plot(*zip(*points), "o", ms=20, mfc="none", mec=FLAG, mew=3)
    return f" · CHECK (ringed): {places}: cached data or a wrong limit, not a win"


def _label(ax, x, y, text, colour, offset, **look):
    """A bold label, `offset` points from (x, y)."""
    look = {"color": colour, "fontweight": "bold", "annotation_clip": False} | look
    return ax.annotate(text, (x, y), offset, textcoords="offset points", **look)


@style()
def class_plot(
    x: Sequence[float],
    series: dict[str, tuple[str, Sequence]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    caption: str,
    floor: Sequence[float] | None = None,
    floor_label: str = "memory floor",
    better: str = "lower",
) -> ClassFigure:
    """Medians with their 20-80 % band over `x`, labelled at the line's end, against the physical
    floor (or roof).

    x: [N] the quantity that hurts; series: {label: (role, [N] of (median, p20, p80), or None where
    nothing was measured)}; floor: [N], same unit as the medians: nothing can be below it
    (better="lower") or above it (better="higher"). A median beyond it by over 5 % is ringed and
    named in the caption. Raises ValueError for a wrong role, length or `better`.
    """
    if better not in ("lower", "higher"):
        raise ValueError(f"better={better!r}; accepted: 'lower', 'higher'")
    fig, ax = frame(title, caption, (10, 5.8))
    looks, labels = marks(series), []
    limit = np.full(len(x), np.nan) if floor is None else np.asarray(floor)
    for label, (role, points) in series.items():
        if len(points) != len(x):
            raise ValueError(
                f"series {label!r} has {len(points)} points; accepted: one per x, {len(x)}"
            )
        median, p20, p80 = np.array([(np.nan,) * 3 if p is None else p for p in points], float).T
        colour = looks[label]["color"]
        ax.plot(x, median, ls=ROLES[role].dash, **looks[label])
        ax.fill_between(x, p20, p80, color=colour, alpha=0.18, lw=0)
        measured = np.flatnonzero(np.isfinite(median))
        if len(measured):
            last = measured[-1]
            labels.append((x[last], median[last], label, colour))
        if better == "lower":
            beyond = np.flatnonzero(median < limit * (1 - SLACK))
        else:
            beyond = np.flatnonzero(median > limit * (1 + SLACK))
        places = f"{label!r} beyond the {floor_label} at "
        places += ", ".join(size_number(x[i]) for i in beyond)
        caption += _flag(ax, [(x[i], median[i]) for i in beyond], places)
    foot(fig, caption)
    if floor is not None:
        ax.plot(x, limit, color=LIMIT, ls="--", lw=1.6)
        labels.append((x[-1], limit[-1], floor_label, LIMIT))
    if not labels:
        raise ValueError("series hold no measured point; accepted: at least one")

    _scales(ax, x)
    ax.grid(True, axis="y")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel if f"{better} is better" in ylabel else f"{ylabel}\n({better} is better)")
    label_column(ax, labels)
    return fig


def _scales(ax, x):
    """log2 over sizes, labelled where they were measured; log y where the data span over 30x."""
    if min(x) > 0:
        ax.set_xscale("log", base=2)
    shown = x
    if len(x) > MOST_LABELS:  # rather powers of two than every other size
        powers = [size for size in x if size > 0 and math.log2(size).is_integer()]
        shown = powers if len(powers) > 2 else x
        shown = shown[:: -math.ceil(len(shown) / MOST_LABELS)][::-1]
    ax.set_xticks(shown, map(size_number, shown))
    ax.minorticks_off()
    low, high = ax.dataLim.intervaly
    if low > 0 and high > WIDE * low:
        log_axis(ax.yaxis, low / 1.5, high * 1.5)
    else:
        ax.set_ylim(min(0, low), high * 1.1)
        ax.yaxis.set_major_formatter(FuncFormatter(number))


def place_labels(ax, labels, avoid, named):
    """Put each label (x, y, text, colour) right below its dot; with adjustText also clear of the
    other labels, of all dots, of the texts `named` and of the points `avoid` ([N, 2]).
    """
    ax.figure.draw_without_rendering()
    points = np.array([label[:2] for label in labels])
    dots, back = ax.transData.transform(points), ax.transData.inverted()
    look = {"va": "center", "fontweight": "bold", "path_effects": HALO}
    notes = []
    for start, (_, _, text, colour) in zip(back.transform(dots + np.array([12, -12])), labels):
        notes.append(ax.text(*start, text, color=colour, **look))
    try:
        from adjustText import adjust_text  # here, because it takes a second to import
    except ImportError:  # a borrowed GPU machine may have nothing but PyTorch and matplotlib
        return
    reach = itertools.product((-8, 8), repeat=2)  # from a dot's middle to its corners
    corners = [back.transform(dots + np.array(step)) for step in reach]
    adjust_text(
        notes,
        *np.concatenate([avoid, *corners]).T,
        named,
        *points.T,
        avoid_self=False,
        only_move={"static": "x+y-"},  # below a roof there is room to the right
        explode_radius=0,
        force_pull=0,
        iter_lim=1000,  # a limit in seconds would draw another figure on a slower machine
        ax=ax,
        arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.8},
    )


@style()
def roofline(
    points: dict[str, tuple[str, float, float]],
    *,
    bandwidths: dict[str, float],
    peaks: dict[str, float],
    title: str,
    caption: str,
) -> ClassFigure:
    """Attainable FLOP/s over arithmetic intensity, with dots for kernels (Williams, Waterman and
    Patterson 2009).

    points: {label: (role, FLOP per byte, FLOP per second)}; bandwidths: {name: bytes per second};
    peaks: {name: FLOP per second}: data-sheet or measured ceilings. A point above the highest roof
    by over 5 % is ringed and named in the caption.
    """
    if not bandwidths or not peaks:
        raise ValueError(
            "bandwidths and peaks need one ceiling each; accepted: {name: units per second}"
        )
    fastest, highest = max(bandwidths.values()), max(peaks.values())
    ridge = highest / fastest
    intensities = [intensity for _, intensity, _ in points.values()]
    low = min([ridge / 8, *intensities]) / 2
    high = max([ridge * 4, *intensities]) * 3
    speeds = [flops for *_, flops in points.values()]
    bottom = min([low * min(bandwidths.values()), *speeds]) / 2
    fig, ax = frame(title, caption, (10, 6.2))
    ax.set_xscale("log", base=2)
    ax.set_xlim(low, high)
    ax.xaxis.set_major_formatter(FuncFormatter(number))
    ax.minorticks_off()
    log_axis(ax.yaxis, bottom, highest * 4)

    grid, roofs = np.geomspace(low, high, 100), []
    named = [_label(ax, ridge, bottom, f"ridge {number(ridge)} FLOP/byte", GREY, (6, 12))]
    for n, (name, rate) in enumerate(bandwidths.items()):
        at = low * (ridge / low) ** (0.75 - 0.2 * n)
        text = f"{name}: {number(rate / 1e9)} GB/s"
        named.append(_label(ax, at, at * rate, text, LIMIT, (-8, 6), ha="right"))
        roofs.append(np.minimum(grid * rate, highest))
    for name, rate in peaks.items():
        text = f"{name}: {number(rate / 1e12)} TFLOP/s"
        named.append(_label(ax, high, rate, text, LIMIT, (0, 8), ha="right"))
        roofs.append(np.minimum(grid * fastest, rate))
    ax.plot(grid, np.transpose(roofs), color=LIMIT, ls="--", lw=1.6)
    ax.axvline(ridge, color=GREY, ls=":", lw=1.2)
    avoid = [(ridge, y) for y in np.geomspace(bottom, highest, 100)]
    avoid += [point for roof in roofs for point in zip(grid, roof)]
    looks, labels, above = marks(points), [], {}
    for label, (_, intensity, flops) in points.items():
        ax.plot(intensity, flops, ms=10, zorder=3.5, **looks[label])
        labels.append((intensity, flops, label, looks[label]["color"]))
        if flops > (1 + SLACK) * min(intensity * fastest, highest):
            above[label] = intensity, flops
    foot(fig, caption + _flag(ax, above.values(), f"above the roof: {', '.join(above)}"))
    ax.grid(True, axis="y")
    ax.set_xlabel("arithmetic intensity (FLOP per byte moved)")
    ax.set_ylabel("FLOP/s (higher is better)")
    place_labels(ax, labels, avoid, named)
    return fig


@style()
def bars(
    groups: Sequence[str],
    series: dict[str, tuple[str, Sequence]],
    *,
    title: str,
    ylabel: str,
    caption: str,
    better: str = "lower",
) -> ClassFigure:
    """Grouped comparison: horizontal bars from zero, or dots on a log axis where the values span
    more than 30x, because a bar on a log axis has no true length.

    groups: [G] names; series: {label: (role, [G] values or None where nothing was measured)}. The
    first group names the series.
    """
    values = [v for _, vs in series.values() for v in vs if v is not None]
    if not values:
        raise ValueError("series hold no value; accepted: at least one")
    wide = min(values) > 0 and max(values) > WIDE * min(values)
    looks = marks(series)
    pitch = len(series) + 0.6  # rows from group to group
    fig, ax = frame(title, caption, (10, 2.4 + 0.34 * len(groups) * pitch))
    if wide:
        log_axis(ax.xaxis, min(values) / 2, max(values) * 1.2)
    else:
        ax.set_xlim(0, max(values))
        ax.xaxis.set_major_formatter(FuncFormatter(number))
    for s, (label, (role, vs)) in enumerate(series.items()):
        look, hatch = looks[label], ROLES[role].hatch
        for g, value in enumerate(vs):
            y, text = g * pitch + s, "not run" if value is None else number(value)
            if value is None:
                value = ax.get_xlim()[0]
            elif wide:
                ax.plot(value, y, ms=10, **look)
            else:
                edge = "white" if look["mfc"] == look["color"] else look["color"]
                ax.barh(y, value, 0.86, facecolor=look["mfc"], hatch=hatch, edgecolor=edge)
            text = text if g else f"{label}: {text}"
            _label(ax, value, y, text, look["color"], (10, 0), va="center")
    ax.set_yticks([g * pitch + (len(series) - 1) / 2 for g in range(len(groups))], groups)
    ax.set_ylim(len(groups) * pitch - 0.8, -0.8)
    ax.tick_params(axis="y", length=0)
    ax.grid(wide)
    ax.set_xlabel(ylabel if f"{better} is better" in ylabel else f"{ylabel}, {better} is better")
    return fig
