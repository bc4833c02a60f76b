"""What every figure of the course shares: style, frame, direct labels, files and their checks.

Colours are Okabe and Ito's, safe for colour-blind readers (jfly.uni-koeln.de/color). Markers,
dashes and hatches differ as well, so a figure survives greyscale.
"""

import contextlib
import io
import itertools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator

from lessons.toolbox.proof.pages import pages


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
FLAG, GREY, SMALL = "#CC79A7", "#555555", 11
HALO = [withStroke(linewidth=3, foreground="white")]  # letters stay legible on a line
STYLE = Path(__file__).with_name("class.mplstyle")
_taker: ContextVar[Callable[[Figure, Path], None] | None] = ContextVar("taker", default=None)


class ClassFigure(Figure):
    """A figure that Jupyter shows even where pyplot was never imported."""

    def _repr_png_(self):
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def style():
    """Our settings only: a student's dark theme must not leak into a figure, nor ours out of it."""
    return matplotlib.style.context(STYLE, after_reset=True)


def frame(title, text, size, widths=(1,)):
    """A figure of `size` inches, the title on top and the caption `text` at the bottom.

    Returns (figure, axes): one axes, or an array of axes beside each other, one for each of the
    relative `widths`.
    """
    fig = ClassFigure(figsize=size)
    FigureCanvasAgg(fig)
    fig.suptitle(title, x=0.015, ha="left", wrap=True)
    foot(fig, text)
    return fig, fig.subplots(1, len(widths), width_ratios=widths)


def foot(fig, text):
    """Set the line under the figure, also in the place of an earlier one."""
    fig.supxlabel(text, x=0.015, ha="left", color=GREY, wrap=True)


def number(value: float, _: int | None = None) -> str:
    """At most three digits from 10,000 on, with a prefix: 0.05, 20, 4096, 15k, 1.5M. The second
    argument is a tick's index.
    """
    if abs(value) >= 10_000:
        return EngFormatter(sep="")(float(f"{value:.3g}"))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def size_number(value: float) -> str:
    """A size on a log2 axis, as the field writes it: 4096, 8k, 128k, 1M stand for multiples of
    1024.
    """
    for scale, prefix in ((2**20, "M"), (2**10, "k")):
        if value >= max(scale, 8192) and value % scale == 0:
            return f"{value // scale:g}{prefix}"
    return number(value)


def log_axis(axis, low, high):
    """Log scale with few, labelled ticks: 1-2-5 over a short span, else decades, thinned."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    steps = (1, 2, 5) if high < 200 * low else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=9))
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_ticks([], minor=True)


def marks(series: Mapping[str, Sequence]) -> dict[str, dict]:
    """{label: colour and marker for `ax.plot`} from {label: (role, ...)}: a role's first series is
    filled, later ones are hollow. Raises ValueError for an unknown role.
    """
    found, seen = {}, Counter()
    for label, (role, *_) in series.items():
        if role not in ROLES:
            raise ValueError(f"role of {label!r} is {role!r}; accepted: {', '.join(ROLES)}")
        colour, markers = ROLES[role][:2]
        fill = "white" if seen[role] else colour
        found[label] = {"color": colour, "marker": markers[seen[role] % 3], "mfc": fill}
        seen[role] += 1
    return found


# ---- direct labels


def _spread(centres, sizes, low, high):
    """New centres (pixels, sorted) so that no label overlaps: the least-squares move.

    Labels that touch form a stack, and where a stack starts must not fall from label to label.
    That is isotonic regression, solved by its max-min formula (Robertson, Wright and Dykstra 1988,
    section 1.4).
    """
    offsets = np.cumsum(sizes) - np.asarray(sizes) / 2
    wanted, count = np.asarray(centres) - offsets, len(sizes)
    starts = []
    for i in range(count):
        ends = range(i + 1, count + 1)
        lowest = [min(wanted[a:b].mean() for b in ends) for a in range(i + 1)]
        starts.append(max(lowest))
    return np.clip(starts, low, max(low, high - sum(sizes))) + offsets


def draw_lines(ax, series: Mapping[str, tuple[Sequence, Sequence]], roles: Iterable[str]) -> list:
    """A line for each of {name: (x values, y values)}; roles: how each looks. Returns their labels
    for `label_column`, which comes last, because it needs the axes' limits.
    """
    labels = []
    for (name, (xs, ys)), role in zip(series.items(), roles):
        look = ROLES[role]
        ax.plot(xs, ys, color=look.colour, marker=look.markers[0], ls=look.dash)
        labels.append((xs[-1], ys[-1], name, look.colour))
    return labels


def label_column(ax, labels):
    """Direct labels (x, y, text, colour) in a column right of the axes, at their lines' ends,
    pushed apart, with leaders.
    """
    look = {"va": "center", "fontweight": "bold", "annotation_clip": False}
    notes = []
    for x, y, text, colour in sorted(labels, key=lambda label: label[1]):
        note = ax.annotate(
            textwrap.fill(text, 20),
            (x, y),
            (1.02, 0.5),
            textcoords="axes fraction",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.8, "relpos": (0, 0.5)},
            **look,
        )
        notes.append(note)
    ax.figure.draw_without_rendering()  # lays the figure out: only now are pixels known
    box = ax.get_window_extent()
    ends = [ax.transData.transform(note.xy)[1] for note in notes]
    heights = [Text.get_window_extent(note).height + 4 for note in notes]
    for note, middle in zip(notes, _spread(ends, heights, box.y0, box.y1)):
        note.set_position((1.02, (middle - box.y0) / box.height))


def key(ax, handles):
    """One row of swatches above the axes (more rows when they do not fit): for areas, which cannot
    be labelled at an end.
    """
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    for columns in range(len(handles), 0, -1):
        legend = ax.legend(handles=handles, ncols=columns, **above)
        # While it may be too wide: the layout would shrink the axes for it, to nothing.
        legend.set_in_layout(False)
        ax.figure.draw_without_rendering()
        if legend.get_window_extent().x1 < ax.get_window_extent().x1 + 4:
            break
    legend.set_in_layout(True)


# ---- caption, files, and the two checks that tests run on every figure


def caption(fingerprint: Mapping, **facts) -> str:
    """One line under the figure: device, then `facts` (dtype, shape, repetitions, ...), then the
    date. Versions belong into the JSON beside the figure.

    fingerprint: `device.fingerprint()`. A fact that is None is left out.
    """
    named = [f"{name.replace('_', ' ')} {fact}" for name, fact in facts.items() if fact is not None]
    device, date = fingerprint.get("device", "unknown device"), fingerprint.get("date")
    return " · ".join([device, *named, *([date] if date else [])])


def save(fig: Figure, path_without_suffix: str | os.PathLike, *, alt: str) -> tuple[Path, Path]:
    """Write PNG and SVG of one figure and return both paths. alt: what a blind reader is told."""
    return tuple(_write(fig, Path(f"{path_without_suffix}.{kind}"), alt) for kind in ("png", "svg"))


def save_svg(fig: Figure, path: Path, *, alt: str | None = None) -> None:
    """Write a lesson's own picture, an SVG that its README shows, and say so. Within
    `pictures_to(take)` it is handed to take(fig, path) instead. alt: where it says more than the
    page has room for; None: what the page says.
    """
    if take := _taker.get():
        take(fig, path)
    else:
        print(_write(fig, path, alt or alt_of(path)).name)


def alt_of(path: Path) -> str:
    """The alt text under which README.md or MORE.md shows a picture of the lesson's lab/. Raises
    ValueError where neither does.
    """
    shown = rf"!\[([^\]]+)\]\(lab/{re.escape(path.name)}\)"
    if found := re.search(shown, pages(path.parents[1])):
        return found[1]
    raise ValueError(f"alt of {path.name} is None; accepted: a text, as no page shows the picture")


@contextlib.contextmanager
def pictures_to(take: Callable[[Figure, Path], None]):
    """Hand every picture that is saved as an SVG within the block to `take` instead of the disk."""
    token = _taker.set(take)
    try:
        yield
    finally:
        _taker.reset(token)


def _write(fig: Figure, path: Path, alt: str) -> Path:
    if not alt.strip():
        raise ValueError("alt is empty; accepted: one sentence that says what the figure shows")
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"Title": alt, "Date": None} if path.suffix == ".svg" else {"Title": alt}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with style():
            fig.savefig(partial, format=path.suffix[1:], metadata=facts)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # after an error, a full disk or Ctrl-C
    return path


def _texts(fig):
    """Every drawn text with its box in pixels. Ticks beyond an axis' limits exist but are not
    drawn.
    """
    fig.draw_without_rendering()
    hidden = set()
    axes = [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)]
    for axis in axes:
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                hidden |= {tick.label1, tick.label2}
    drawn = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible()]
    return [(t.get_text(), Text.get_window_extent(t)) for t in drawn if t not in hidden]


def texts_outside(fig: Figure) -> list[str]:
    """Texts that the figure's edge cuts off: a test asserts that there are none."""
    edge = fig.bbox.padded(1)
    return [
        text
        for text, box in _texts(fig)
        if not (edge.contains(*box.min) and edge.contains(*box.max))
    ]


def overlapping_texts(fig: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other by over a pixel: a test asserts that there are none."""
    boxes = [(text, box.padded(-0.5)) for text, box in _texts(fig)]
    pairs = itertools.combinations(boxes, 2)
    return [(s, t) for (s, a), (t, b) in pairs if a.overlaps(b)]
