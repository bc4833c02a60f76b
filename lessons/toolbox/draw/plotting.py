"""Figures that a class can read from the back row: one message as the title, direct labels, the
physical limit always drawn.

Every function returns a `ClassFigure` built without pyplot: no global state, safe on any backend,
shown inline by Jupyter.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lessons.toolbox.draw.diagrams import block_map, gantt, mask_image
from lessons.toolbox.draw.figure import (
    FLAG,
    GREY,
    ROLES,
    ClassFigure,
    caption,
    frame,
    label_column,
    log_axis,
    number,
    overlapping_texts,
    place_labels,
    role_of,
    save,
    size_number,
    style,
    texts_outside,
)

__all__ = [
    "ROLES",
    "ClassFigure",
    "bars",
    "block_map",
    "caption",
    "class_plot",
    "gantt",
    "mask_image",
    "overlapping_texts",
    "roofline",
    "save",
    "size_number",
    "texts_outside",
    "waterfall",
]
SLACK = 0.05  # a median this far beyond the physical limit is flagged: clock noise stays below it


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
    lines = {}
    for label, (role, points) in series.items():
        if len(points) != len(x):
            raise ValueError(
                f"series {label!r} has {len(points)} points; accepted: one per x, {len(x)}"
            )
        lines[label] = (
            role_of(role, label),
            np.array([(np.nan,) * 3 if p is None else p for p in points], float),
        )
    values = np.concatenate(
        [v.ravel() for _, v in lines.values()]
        + [np.array(floor if floor is not None else [], float)]
    )
    values = values[np.isfinite(values)]
    if not len(values):
        raise ValueError("series hold no measured point; accepted: at least one")
    sign = 1 if better == "lower" else -1
    beyond = {
        label: [
            i
            for i, m in enumerate(v[:, 0])
            if floor is not None and sign * m < sign * floor[i] * (1 - sign * SLACK)
        ]
        for label, (_, v) in lines.items()
    }
    for label, where in beyond.items():
        if where:
            sizes = ", ".join(size_number(x[i]) for i in where)
            caption += f" · CHECK (ringed): {label!r} beyond the {floor_label} at {sizes}: cached data or wrong limit, not a win"
    fig, ax = frame(
        title, caption, (10, max(5.8, 3.0 + 0.3 * sum(1 + len(label) // 20 for label in lines)))
    )
    labels, used = [], {}
    for label, (role, v) in lines.items():
        turn = used[role] = used.get(role, -1) + 1
        ax.plot(
            x,
            v[:, 0],
            color=role.colour,
            marker=role.markers[turn % 3],
            ls=role.dash,
            lw=2.4,
            ms=8,
            mfc=role.colour if turn == 0 else "white",
            mew=1.8,
        )
        ax.fill_between(x, v[:, 1], v[:, 2], color=role.colour, alpha=0.18, lw=0)
        ax.plot(
            [x[i] for i in beyond[label]],
            v[beyond[label], 0],
            "o",
            ms=19,
            mfc="none",
            mec=FLAG,
            mew=3,
        )
        if len(done := np.flatnonzero(np.isfinite(v[:, 0]))):
            labels.append((x[done[-1]], v[done[-1], 0], label, role.colour))
    if floor is not None:
        ax.plot(x, floor, color=ROLES["floor"].colour, ls="--", lw=1.6)
        labels.append((x[-1], floor[-1], floor_label, ROLES["floor"].colour))
    if min(x) > 0:
        ax.set_xscale("log", base=2)
        margin = (max(x) / min(x)) ** 0.03 if max(x) > min(x) else 2
        ax.set_xlim(min(x) / margin, max(x) * margin)
    step = math.ceil(len(x) / 10)  # ten labels of 11 pt fit the width
    ax.set_xticks(x[::-1][::step][::-1], [size_number(v) for v in x[::-1][::step][::-1]])
    ax.set_xticks([], minor=True)
    if values.min() > 0 and values.max() > 30 * values.min():
        log_axis(ax.yaxis, values.min() / 1.5, values.max() * 1.5)
    else:
        ax.set_ylim(min(0, values.min()), values.max() * 1.1)
        ax.yaxis.set_major_formatter(FuncFormatter(number))
    ax.grid(True, axis="y", alpha=0.3)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel if f"{better} is better" in ylabel else f"{ylabel}\n({better} is better)")
    label_column(ax, labels)
    return fig


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
    if above := [
        label for label, (_, i, f) in points.items() if f > (1 + SLACK) * min(i * fastest, highest)
    ]:
        caption += f" · CHECK (ringed): above the roof: {', '.join(above)}: cached data or a wrong ceiling, not a win"
    ridge = highest / fastest
    low = min([i for _, i, _ in points.values()] + [ridge / 8]) / 2
    high = max([i for _, i, _ in points.values()] + [ridge * 4]) * 3
    fig, ax = frame(title, caption, (10, 6.2))
    floor_y = min([f for _, _, f in points.values()] + [low * min(bandwidths.values())]) / 2
    ax.set_xscale("log", base=2)
    ax.set_xlim(low, high)
    log_axis(ax.yaxis, floor_y, highest * 4)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    ticks = [2.0**e for e in range(first, last + 1, max(1, math.ceil((last - first) / 9)))]
    ax.set_xticks(ticks, [number(t) if t >= 1 else f"1/{1 / t:g}" for t in ticks])
    ax.set_xticks([], minor=True)
    grid = np.geomspace(low, high, 400)
    # (name, roof over grid, where its label points at, amount); labels spread along the slope and
    # the flat part
    roofs = []
    for n, (name, b) in enumerate(bandwidths.items()):
        at = low * (ridge / low) ** (0.3 + 0.35 * n / len(bandwidths))
        roofs.append((name, np.minimum(grid * b, highest), (at, at * b), f"{number(b / 1e9)} GB/s"))
    for name, p in peaks.items():
        roofs.append(
            (
                name,
                np.minimum(grid * fastest, p),
                (math.sqrt(ridge * high), p),
                f"{number(p / 1e12)} TFLOP/s",
            )
        )
    labels = []
    for name, roof, at, amount in roofs:
        ax.plot(grid, roof, color=ROLES["floor"].colour, ls="--", lw=1.6)
        labels.append((*at, f"{name}: {amount}", ROLES["floor"].colour))
    ax.axvline(ridge, color=GREY, ls=":", lw=1.2)
    labels.append((ridge, floor_y * 1.5, f"ridge {number(ridge)} FLOP/byte", GREY))
    used = {}
    for label, (role_name, intensity, flops) in points.items():
        role = role_of(role_name, label)
        turn = used[role] = used.get(role, -1) + 1
        ax.plot(
            intensity,
            flops,
            color=role.colour,
            marker=role.markers[turn % 3],
            ms=10,
            mew=1.8,
            zorder=3,
            mfc=role.colour if turn == 0 else "white",
        )
        if label in above:
            ax.plot(intensity, flops, "o", ms=21, mfc="none", mec=FLAG, mew=3)
        labels.insert(0, (intensity, flops, label, role.colour))
    ax.grid(True, axis="y", alpha=0.3)
    ax.set_xlabel("arithmetic intensity (FLOP per byte moved)")
    ax.set_ylabel("FLOP/s (higher is better)")
    fig.draw_without_rendering()
    lines = np.concatenate([ax.transData.transform(np.c_[grid, roof]) for _, roof, *_ in roofs])
    dots = np.array(
        [
            (x + dx, y + dy)
            for x, y in ax.transData.transform([p[1:] for p in points.values()] or np.empty((0, 2)))
            for dx in (-10, 0, 10)
            for dy in (-10, 0, 10)
        ]
    ).reshape(-1, 2)
    post = np.linspace(
        ax.transData.transform((ridge, floor_y)), ax.transData.transform((ridge, highest * 4)), 300
    )
    place_labels(ax, labels, np.concatenate([lines, np.repeat(dots, 20, axis=0), post]))
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
    """Grouped comparison as horizontal bars, each labelled with its series and value.

    groups: [G] names; series: {label: (role, [G] values or None where nothing was measured)}. Log
    scale beyond a 30x span.
    """
    values = [v for _, vs in series.values() for v in vs if v is not None]
    if not values:
        raise ValueError("series hold no value; accepted: at least one")
    fig, ax = frame(title, caption, (10, 2.4 + 0.34 * len(groups) * (len(series) + 0.6)))
    log = min(values) > 0 and max(values) > 30 * min(values)
    ax.set_xlim(0, max(values))
    if log:
        log_axis(ax.xaxis, min(values) / 3, max(values) * 1.05)
    used = {}
    for s, (label, (role_name, vs)) in enumerate(series.items()):
        role = role_of(role_name, label)
        turn = used[role] = used.get(role, -1) + 1
        for g, value in enumerate(vs):
            y = -(g * (len(series) + 0.6) + s)
            ax.barh(
                y,
                value or 0,
                height=0.86,
                color=role.colour,
                alpha=1 / (1 + 0.4 * turn),
                hatch=role.hatch,
                edgecolor="white",
            )
            ax.annotate(
                f"{label}: {'not run' if value is None else number(value)}",
                (value or ax.get_xlim()[0], y),
                (6, 0),
                textcoords="offset points",
                va="center",
                color=role.colour,
                fontweight="bold",
                annotation_clip=False,
            )
    ax.set_yticks(
        [-(g * (len(series) + 0.6) + (len(series) - 1) / 2) for g in range(len(groups))], groups
    )
    ax.tick_params(axis="y", length=0)
    if not log:
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(FuncFormatter(number))
    ax.set_xlabel(
        f"{ylabel}, {better} is better" if f"{better} is better" not in ylabel else ylabel
    )
    return fig


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
    log = max(every) > 30 * min(every)
    low = min(every) / 3 if log else 0
    ax.set_ylim(-0.7, len(rungs) - 0.3)
    ax.set_xlim(low, max(every) * 1.05)
    if log:
        log_axis(ax.xaxis, low, max(every) * 1.3)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6))
        ax.xaxis.set_major_formatter(FuncFormatter(number))
    heads = ("tokens/s", "× rung below", "of roofline", "same tokens")
    offsets = np.cumsum([8, 82, 108, 112])  # points right of the axes
    for i, rung in enumerate(rungs):
        best = i == int(np.argmax(rates))
        role = ROLES["naive" if i == 0 else "optimized"]
        ax.barh(
            i,
            rates[i] - low,
            left=low,
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
