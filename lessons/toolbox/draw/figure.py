"""What every figure of the course shares: style, frame, direct labels that make room for each
other, files, and their checks.

Colours are Okabe and Ito's, safe for colour-blind readers (jfly.uni-koeln.de/color); markers,
dashes and hatches differ as well.
"""

import contextlib
import io
import math
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


class Role(NamedTuple):
    colour: str
    markers: str  # the second series of a role takes the second marker, hollow
    dash: str
    hatch: str


ROLES = {
    "naive": Role("#D55E00", "oXP", "-.", ""),
    "optimized": Role("#0072B2", "sDp", "-", "//"),
    "library": Role("#009E73", "^v<", ":", ".."),
    "floor": Role("#444444", "___", "--", "xx"),
}
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")
FLAG, GREY, SMALL, BODY, BIG = "#CC79A7", "#555555", 11, 12, 14  # no text below 11 pt
RC = {
    "font.family": "DejaVu Sans",
    "font.size": BODY,
    "axes.labelsize": BODY,
    "xtick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 110,
    "hatch.linewidth": 0.7,
    # "$0.20" is money, not a formula; equal data, equal SVG
    "text.parse_math": False,
    "svg.hashsalt": "ladder",
}


class ClassFigure(Figure):
    """A figure that Jupyter shows even where pyplot was never imported."""

    def _repr_png_(self):
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


@contextlib.contextmanager
def style():
    """Our settings only: a student's dark theme must not leak into a figure, nor ours out of it."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def frame(title, text, size):
    """A figure of `size` inches and its axes, the title on top and the caption `text` at the
    bottom.
    """
    fig = ClassFigure(figsize=size, layout="constrained")
    FigureCanvasAgg(fig)
    fig.get_layout_engine().set(w_pad=0.12, h_pad=0.10)
    fig.suptitle(
        _wrap(fig, title, BIG, "bold"), x=0.015, ha="left", fontsize=BIG, fontweight="bold"
    )
    # lines break between facts
    text = " · ".join(f.replace(" ", "\u00a0") if len(f) < 40 else f for f in text.split(" · "))
    fig.supxlabel(_wrap(fig, text, SMALL), x=0.015, ha="left", fontsize=SMALL, color=GREY)
    return fig, fig.add_subplot()


def _wrap(fig, text, size, weight="normal"):
    """Lines of `text` that all fit into the figure, as measured, because letters differ in width."""

    def width(line):
        probe = fig.text(0, 0, line, fontsize=size, fontweight=weight)
        extent = probe.get_window_extent().width
        probe.remove()
        return extent

    room = 0.96 * fig.bbox.width
    columns = max(12, int(len(text) * min(1, room / width(text)))) if text else 12
    lines = textwrap.wrap(text, columns)
    while columns > 12 and any(width(line) > room for line in lines):
        columns -= 2
        lines = textwrap.wrap(text, columns)
    return "\n".join(lines)


def number(value: float, _: int | None = None) -> str:
    """At most three digits from 10,000 on, with a prefix: 0.05, 20, 4096, 15k, 1.5M. The second
    argument is a tick's index.
    """
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{prefix}"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size_number(value: float) -> str:
    """A size on a log2 axis, as the field writes it: 4096, 8k, 128k, 1M stand for multiples of
    1024.
    """
    for scale, prefix in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if value >= max(scale, 8192) and value % scale == 0:
            return f"{value // scale:g}{prefix}"
    return number(value)


def log_axis(axis, low, high):
    """Log scale with few, labelled ticks: 1-2-5 over a short span, else decades, thinned."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    if len(ticks) > 7:
        ticks = [10.0**d for d in decades if low <= 10.0**d <= high]
    ticks = ticks[:: max(1, math.ceil(len(ticks) / 8))]
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_ticks(ticks, [number(t) for t in ticks])
    axis.set_ticks([], minor=True)
    getattr(axis.axes, f"set_{axis.axis_name}lim")(low, high)


def _spread(centres, sizes, low, high):
    """Least-squares move of labels (pixels, sorted) until none overlaps: isotonic regression by
    pooling neighbours.
    """
    offsets = np.cumsum(sizes) - np.asarray(sizes) / 2
    pools = []
    for start in np.asarray(centres) - offsets:
        pools.append((start, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    starts = np.repeat([p[0] for p in pools], [p[1] for p in pools])
    return np.clip(starts, low, max(low, high - sum(sizes))) + offsets


def label_column(ax, labels):
    """Direct labels (x, y, text, colour) in a column right of the axes, at their lines' ends,
    pushed apart, with leaders.
    """
    fig = ax.figure
    notes = [
        ax.annotate(
            "\n".join(textwrap.wrap(text, 20)),
            (x, y),
            (1.02, 0.5),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
            fontsize=BODY,
            linespacing=1.0,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.8,
                "alpha": 0.7,
                "relpos": (0, 0.5),
            },
        )
        for x, y, text, colour in sorted(labels, key=lambda label: label[1])
    ]
    fig.draw_without_rendering()  # lays the figure out: only now are pixels known
    box = ax.get_window_extent()
    boxes = [Text.get_window_extent(n) for n in notes]
    middles = _spread(
        [ax.transData.transform(n.xy)[1] for n in notes],
        [b.height + 6 for b in boxes],
        box.y0,
        box.y1,
    )
    for note, middle in zip(notes, middles):
        note.set_position((1.02, (middle - box.y0) / box.height))


def place_labels(ax, labels, obstacles):
    """Put each label (x, y, text, colour) near its point where it covers neither a label nor an
    obstacle ([N, 2], pixels).
    """
    fig = ax.figure
    fig.draw_without_rendering()
    frame, taken = ax.get_window_extent(), []
    scale = 72 / fig.dpi
    for x, y, text, colour in labels:
        note = ax.annotate(
            text,
            (x, y),
            (0, 0),
            textcoords="offset points",
            color=colour,
            ha="center",
            va="center",
            fontweight="bold",
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.8, "shrinkB": 4},
        )
        size, point = Text.get_window_extent(note), ax.transData.transform((x, y))
        width, height, best = size.width + 8, size.height + 6, None
        for radius in (12, 24, 40, 64, 95, 130, 170):
            for angle in np.radians((0, 180, -30, 30, 210, 150, -60, 60, 240, 120, 270, 90)):
                cx = point[0] + math.cos(angle) * (radius + width / 2)
                cy = point[1] + math.sin(angle) * (radius + height / 2)
                x0, x1, y0, y1 = cx - width / 2, cx + width / 2, cy - height / 2, cy + height / 2
                cost = 1000 * (x0 < frame.x0 or x1 > frame.x1 or y0 < frame.y0 or y1 > frame.y1)
                cost += 100 * sum(
                    x0 < b[1] and b[0] < x1 and y0 < b[3] and b[2] < y1 for b in taken
                )
                inside = (obstacles > (x0, y0)) & (obstacles < (x1, y1))
                cost += int(inside.all(axis=1).sum())
                if best is None or cost < best[0]:
                    best = (cost, (cx - point[0], cy - point[1]), (x0, x1, y0, y1))
        note.set_position((best[1][0] * scale, best[1][1] * scale))
        taken.append(best[2])


def key(ax, handles):
    """One row of swatches above the axes (more rows when they do not fit): for areas, which cannot
    be labelled at an end.
    """
    for columns in range(len(handles), 0, -1):
        legend = ax.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            frameon=False,
            handlelength=1.6,
            columnspacing=1.2,
            borderaxespad=0.2,
        )
        # while it may be too wide: the layout would shrink the axes for it, to nothing
        legend.set_in_layout(False)
        ax.figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().x1 < ax.get_window_extent().x1 + 4:
            legend.set_in_layout(True)
            return


def role_of(role, label):
    """The colour, marker and dash of a role. Raises ValueError, naming the label and the known
    roles.
    """
    if role not in ROLES:
        raise ValueError(f"role of {label!r} is {role!r}; accepted: {', '.join(ROLES)}")
    return ROLES[role]


# ---- caption, files, and the two checks that tests run on every figure


def caption(fingerprint: Mapping, **facts) -> str:
    """One line under the figure: device, versions, then `facts` (dtype, shape, repetitions, ...),
    then the date.

    fingerprint: `device.fingerprint()`. A fact that is None is left out.
    """
    known = dict(fingerprint)
    device, date = known.pop("device", "unknown device"), known.pop("date", None)
    versions = [
        f"{name} {known[name]}"
        for name in ("python", "torch", "triton", "transformers", "cuda")
        if known.get(name)
    ]
    return " · ".join(
        [
            str(device),
            *versions,
            *(f"{k.replace('_', ' ')} {v}" for k, v in facts.items() if v is not None),
        ]
        + ([str(date)] if date else [])
    )


def save(fig: Figure, path_without_suffix: str | os.PathLike, *, alt: str) -> tuple[Path, Path]:
    """Write PNG and SVG of one figure (each whole or not at all) and return both paths. alt: what a
    blind reader is told.
    """
    return tuple(_write(fig, Path(f"{path_without_suffix}.{kind}"), alt) for kind in ("png", "svg"))


def save_svg(fig: Figure, path: Path, *, alt: str) -> None:
    """Write a lesson's own picture, an SVG that its README shows, and say so."""
    print(_write(fig, path, alt).name)


def _write(fig: Figure, path: Path, alt: str) -> Path:
    if not alt.strip():
        raise ValueError("alt is empty; accepted: one sentence that says what the figure shows")
    kind = path.suffix[1:]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with style():
        fig.savefig(
            partial,
            format=kind,
            metadata={"Title": alt} | ({"Date": None} if kind == "svg" else {}),
        )
    os.replace(partial, path)
    return path


def _texts(fig):
    """Every drawn text with its box in pixels. Ticks beyond an axis' limits exist but are not
    drawn.
    """
    fig.draw_without_rendering()
    hidden = set()
    for ax in fig.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            hidden |= {
                label
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                for label in (tick.label1, tick.label2)
                if not low <= tick.get_loc() <= high
            }
    return [
        (t.get_text(), Text.get_window_extent(t))
        for t in fig.findobj(Text)
        if t.get_text().strip() and t.get_visible() and t not in hidden
    ]


def texts_outside(fig: Figure) -> list[str]:
    """Texts that the figure's edge cuts off: a test asserts that there are none."""
    width, height = fig.bbox.width, fig.bbox.height
    return [
        text
        for text, b in _texts(fig)
        if b.x0 < -1 or b.y0 < -1 or b.x1 > width + 1 or b.y1 > height + 1
    ]


def overlapping_texts(fig: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other by over a pixel: a test asserts that there are none."""
    boxes = _texts(fig)
    return [
        (s, t)
        for i, (s, a) in enumerate(boxes)
        for t, b in boxes[i + 1 :]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]
