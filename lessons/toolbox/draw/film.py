"""A film strip of what chosen programs of a kernel load and store, access by access.

    film(lambda: copy[(4,)](x, out, 50, BLOCK=16), {"x": x, "out": out}, programs=[0, 3])
    film(lambda: rms_norm(x, weight, 1e-5), {"x": x, "weight": weight})      # and what it returns
    film(launch)                                                            # every tensor argument
    film_slider(launch, {"x": x})                                           # a program at a time
    print(film_text(launch, {"x": x, "out": out}, programs=[3]))            # in a terminal

Each panel is one access and shows one tensor: what is touched now, what the program has touched
before, and what would lie outside. The addresses are those of the kernel's compiled code, run on a
CPU; of a kernel that does not compile, or that leaves its tensors, Triton's interpreter gives them.
On a GPU there are none: then the launch runs, one line says so, and the figure is None.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from lessons.toolbox.draw.figure import ClassFigure, foot, style
from lessons.toolbox.draw.film_panels import (
    ATOMIC,
    BEFORE,
    EMPTY,
    LOAD,
    OUTSIDE,
    STORE,
    UNTOUCHED,
    Launch,
    Panel,
    as_rows,
    chosen,
    name_of,
    panels,
    record,
)
from lessons.toolbox.draw.slider import slider
from lessons.toolbox.kernels.film import Film

MAX_LINES = 24  # with more rows or columns, lines between cells would be all that one sees
WIDTH = 11  # inches
WRONG, LOADED, STORED = "#A0307A", "#005A94", "#A04000"  # letters, dark enough on white
# state of an element -> how it is drawn, its letter in a terminal, its name in the key
LOOKS = {
    BEFORE: ({"facecolor": "#C9C9C9"}, "+", "touched before"),
    LOAD: ({"facecolor": "#0072B2"}, "R", "loaded now"),
    STORE: ({"facecolor": "#F3B37A", "hatch": "////"}, "W", "stored now"),
    ATOMIC: ({"facecolor": "#E5C8DA", "hatch": "xxxx"}, "A", "changed in place now"),
    OUTSIDE: ({"facecolor": "white", "hatch": "..", "edgecolor": WRONG}, "!", "outside the tensor"),
}


# ---- the figure


@style()
def film(
    launch: Launch,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    programs: Iterable[int | tuple] | None = None,
    kernel: str | None = None,
    title: str | None = None,
    columns: int | None = None,
    most: int = 15,
) -> Figure | None:
    """Draw what the programs (default: the first and the last) load and store, one panel an access.

    tensors: {name: [...]}, default: all arguments of the kernels; more than two dimensions are
    drawn as rows of the last one. kernel: only the accesses of this one. columns: panels beside
    each other, as many as fit by default. most: of a longer strip the first ones and the last two
    are drawn, and the caption says so. Returns None where nothing can be recorded.
    """
    recorded = record(launch, tensors)
    if recorded is None:
        return None
    recording, named = recorded
    strips = {p: panels(recording, named, p, kernel) for p in chosen(recording, programs, kernel)}
    if not any(strips.values()):
        raise ValueError("the programs touch none of the tensors; accepted: tensors of the launch")
    total = sum(map(len, strips.values()))
    strips = {
        p: strip if len(strip) <= most else strip[: most - 2] + strip[-2:]
        for p, strip in strips.items()
    }
    drawn = [panel for strip in strips.values() for panel in strip]
    words = _caption(recording, named, kernel) + _units(drawn)
    if len(drawn) < total:
        words += f" · {len(drawn)} of {total} accesses drawn"
    strips = {name_of(p, recording.dimensions()): strip for p, strip in strips.items()}
    return _draw(strips, title or "What each program loads and stores", words, columns)


def _caption(recording: Film, named: Mapping[str, Tensor], kernel: str | None) -> str:
    kernels = [kernel] if kernel else recording.kernels()
    shapes = []
    for name, x in named.items():
        rows, columns = as_rows(x).shape
        wrapped = f" in rows of {columns}" if x.dim() <= 1 and rows > 1 else ""
        # spaces at which no line ends, so that a shape stays whole
        shape = ",\N{NO-BREAK SPACE}".join(map(str, x.shape))
        shapes.append(f"{name}\N{NO-BREAK SPACE}[{shape}]{wrapped}")
    count = len(recording.programs(kernel))
    words = [
        recording.source,
        f"{', '.join(kernels)}, {count} program{'s' * (count != 1)}",
        ", ".join(shapes),
    ]
    return " · ".join(words)


def _units(drawn: list[Panel]) -> str:
    """What the numbers above the panels mean."""
    words = ""
    if any(panel.access.sectors != panel.access.needed for panel in drawn):
        words += " · sectors of 32 bytes: asked for/needed"
    if any(panel.access.together > 1 for panel in drawn):
        words += " · a lane: elements that it takes in one instruction"
    return words


def _draw(
    strips: Mapping[str, list[Panel]], title: str, words: str, columns: int | None
) -> ClassFigure:
    every = [panel for strip in strips.values() for panel in strip]
    # a title's longest line: 16/4 sectors
    narrow = 1.45 if any(panel.access.sectors for panel in every) else 1.25
    width = min(1.8, max(narrow, *(0.11 * panel.cells.shape[1] for panel in every)))
    columns = min(columns or int(WIDTH / width), max(map(len, strips.values())))
    width = max(width, min(3.4, 7.5 / columns))  # few panels have room
    height = min(1.6, max(0.45, *(width * _tallness(panel) for panel in every)))
    height += 0.25 + 0.2 * max(panel.title.count("\n") + 1 for panel in every)
    lines = [-(-len(strip) // columns) for strip in strips.values()]
    sizes = [0.4, *(0.4 + height * count for count in lines)]
    fig = ClassFigure(figsize=(max(7.5, width * columns), sum(sizes) + 1.0))
    FigureCanvasAgg(fig)
    fig.suptitle(title, x=0.015, ha="left", wrap=True)
    foot(fig, words)
    head, *boxes = fig.subfigures(1 + len(strips), 1, height_ratios=sizes)
    used = {int(state) for panel in every for state in np.unique(panel.cells)}
    handles = [Patch(**_look(state), label=LOOKS[state][2]) for state in LOOKS if state in used]
    head.legend(handles=handles, loc="center left", ncols=len(handles))
    for (program, strip), box, count in zip(strips.items(), boxes, lines):
        box.suptitle(f"program {program}", x=0.015, ha="left", fontsize=13)
        axes = box.subplots(count, columns, squeeze=False).flatten()
        for axis in axes:
            axis.set(xticks=[], yticks=[])
            axis.set_axis_off()
        for axis, panel in zip(axes, strip):
            _panel(axis, panel)
    return fig


def _tallness(panel: Panel) -> float:
    rows, columns = panel.cells.shape
    return min(rows / columns, 2)


def _look(state: int, lined: bool = True) -> dict:
    return {"edgecolor": "#222222", "linewidth": 0.4 if lined else 0} | LOOKS[state][0]


def _panel(axis, panel: Panel) -> None:
    rows, columns = panel.cells.shape
    lined = max(rows, columns) <= MAX_LINES
    ground = {"facecolor": "#FAFAFA", "edgecolor": "#BBBBBB", "linewidth": 0.5}
    if lined:
        axis.add_collection(PolyCollection(_boxes(panel.cells != EMPTY, True), **ground))
    else:
        axis.add_patch(Rectangle((0, 0), columns, rows, **ground))
    for state in LOOKS:
        if (panel.cells == state).any():
            axis.add_collection(
                PolyCollection(_boxes(panel.cells == state, lined), **_look(state, lined))
            )
    room = 0.02 * max(rows, columns)  # for the outer lines
    axis.set(xlim=(-room, columns + room), ylim=(rows + room, -room))
    axis.set_aspect("equal" if 0.05 < rows / columns < 3 else "auto")
    colour = WRONG if panel.outside else LOADED if panel.access.kind == "load" else STORED
    axis.set_title(panel.title, fontsize=11, color=colour, fontweight="bold")


def _boxes(hit: np.ndarray, lined: bool) -> list[np.ndarray]:
    """Corners of the rectangles that cover the true cells: one a cell, or as few as equal rows
    below each other allow.
    """
    found, open_runs = [], {}  # (left, right) -> the row in which it began
    for y, row in enumerate([*hit, np.zeros(hit.shape[1], bool)]):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        runs = set(zip(edges[::2].tolist(), edges[1::2].tolist()))
        if lined:
            runs = {(x, x + 1) for left, right in runs for x in range(left, right)}
        for run in [run for run in open_runs if run not in runs or lined]:
            (left, right), top = run, open_runs.pop(run)
            found.append(np.array([(left, top), (right, top), (right, y), (left, y)]))
        for run in runs:
            open_runs.setdefault(run, y)
    return found


def film_slider(launch: Launch, tensors: Mapping[str, Tensor] | None = None, **options):
    """The film with a slider over the programs. tensors: {name: [...]}; options:
    those of `film`, without `programs`.

    Where no front end runs, the strip of the first program.
    """
    recorded = record(launch, tensors)
    if recorded is None:
        return
    recording, named = recorded
    known = recording.programs(options.get("kernel"))

    def draw(program: int):
        return film(recording, named, programs=[known[program]], **options)

    slider(draw, program=(0, len(known) - 1, 1, 0))


# ---- in a terminal


def film_text(
    launch: Launch,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    programs: Iterable[int | tuple] | None = None,
    kernel: str | None = None,
    most: int = 8,
    max_rows: int = 18,
) -> str:
    """The same in letters: R is loaded, W stored, A changed in place, + was touched before, ! lies
    outside the tensor, · is untouched. Below each access stands its line of the kernel.

    tensors: {name: [...]}, default: all arguments of the kernels.
    """
    recorded = record(launch, tensors)
    if recorded is None:
        return ""
    recording, named = recorded
    lines = []
    for program in chosen(recording, programs, kernel):
        lines.append(f"program {name_of(program, recording.dimensions())}")
        lines += _masked_away(recording, program, kernel)
        strip = panels(recording, named, program, kernel)
        # the last access, and what is wrong, are worth more than the middle of a loop
        first = most if len(strip) <= most else most - 1
        shown = [p for p in strip if p.number <= first or p.outside or p is strip[-1]]
        for before, panel in zip([None, *shown], shown):
            if before and (left_out := panel.number - before.number - 1):
                lines.append(f"  ... {left_out} more")
            facts = [f"{panel.number}. {panel.access.kind} {panel.name}"]
            facts += [f"{panel.outside} OUTSIDE"] if panel.outside else []
            facts += [panel.sectors] if panel.access.sectors else []
            lines.append(f"  {', '.join(facts)}")
            if panel.access.line:
                lines.append(f"     {panel.access.line}")
            lines += [f"     {row}" for row in _letters(panel.cells, max_rows)]
    return "\n".join(lines)


def _masked_away(recording: Film, program: tuple[int, int, int], kernel: str | None) -> list[str]:
    """A line for each place of a kernel where this program touches nothing, however often."""
    counts: dict[tuple[str, str], int] = {}
    for access in recording.accesses:
        if access.program == program and kernel in (None, access.kernel):
            key = access.kind, access.line
            counts[key] = counts.get(key, 0) + len(access.addresses) + len(access.outside)
    return [
        f"  a {kind} of no element, because its mask is False everywhere\n     {line}"
        for (kind, line), count in counts.items()
        if not count
    ]


def _letters(cells: np.ndarray, max_rows: int) -> list[str]:
    """A line for each row; equal rows below each other are one line with their number."""
    letters = {state: look[1] for state, look in LOOKS.items()} | {EMPTY: " ", UNTOUCHED: "·"}
    step = -(-cells.shape[1] // 64)
    rows = ["".join(letters[int(cell)] for cell in row[::step]).rstrip() for row in cells]
    lines = []
    for row, equal in groupby(rows):
        count = len(list(equal))
        lines += [row] * count if count < 3 else [f"{row}  ({count} rows)"]
    if len(lines) > max_rows:
        lines = [*lines[:max_rows], f"... {len(lines) - max_rows} more lines"]
    return lines
