"""Pictures of what the engine does: schedules, block tables, attention masks. Use them through
`toolbox.draw.plotting`.
"""

import math

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from lessons.toolbox.draw.figure import (
    HALO,
    HATCHES,
    PALETTE,
    ROLES,
    SMALL,
    frame,
    key,
    number,
    style,
)

PALE = "#BBBBBB"
NARROW = 8  # pixels: a white edge and a hatch would leave nothing of a narrower bar


def _fill(colour, hatch):
    """The look of the area number `colour` of a figure, with hatch number `hatch`."""
    return {"facecolor": PALETTE[colour % 7], "hatch": HATCHES[hatch % 7], "edgecolor": "white"}


def _write(ax, x, y, text, **look):
    """Letters around (x, y), with a halo that keeps them legible on any colour and hatch."""
    place = {"ha": "center", "va": "center", "size": SMALL, "path_effects": HALO}
    return ax.text(x, y, text, **place, **look)


@style()
def gantt(
    rows: dict[str, list[tuple]],
    *,
    title: str,
    xlabel: str,
    caption: str,
    kinds: list[str] | None = None,
) -> Figure:
    """A schedule: one row per lane (request, device), one bar per piece of work; the first row on
    top.

    rows: {row: [(start, end, kind) or (start, end, kind, text)]}, times in the unit of `xlabel`;
    text shows where it fits; kinds: [kind] fixes colours across figures (default: in order of
    appearance).
    """
    pieces = [(row, *piece) for row, lane in rows.items() for piece in lane]
    kinds = list(kinds or dict.fromkeys(kind for _, _, _, kind, *_ in pieces))
    names = list(rows)
    fig, ax = frame(title, caption, (10, 2.5 + 0.42 * len(rows)))
    drawn = []
    for row, start, end, kind, *texts in pieces:
        if end < start or kind not in kinds:
            raise ValueError(
                f"piece {(start, end, kind)} of row {row!r}; accepted: end >= start and a kind of "
                f"{kinds}"
            )
        y, n = names.index(row), kinds.index(kind)
        bar = ax.barh(y, end - start, left=start, height=0.78, **_fill(n, n))[0]
        notes = [_write(ax, (start + end) / 2, y, text) for text in texts]
        drawn.append((bar, notes))
    ax.set_yticks(range(len(rows)), names)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.xaxis.set_major_formatter(FuncFormatter(number))
    ax.set_xlim(left=min((start for _, start, *_ in pieces), default=0))
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x")
    ax.set_axisbelow(True)
    ax.set_xlabel(xlabel)
    key(ax, [Patch(**_fill(n, n), label=kind) for n, kind in enumerate(kinds)])
    for bar, notes in drawn:
        room = bar.get_window_extent().width
        if room < NARROW:
            bar.set(hatch=None, edgecolor=bar.get_facecolor())
        for note in notes:
            if Text.get_window_extent(note).width > room - 4:
                note.remove()
    return fig


@style()
def block_map(
    block_tables: dict[str, list[int]],
    *,
    num_blocks: int,
    title: str,
    caption: str,
    block_size: int | None = None,
    context_lens: dict[str, int] | None = None,
    columns: int = 16,
) -> Figure:
    """Physical KV blocks coloured by owner; a shared block is split between its owners; "B3" is
    owner B's logical block 3.

    block_tables: {owner: [physical block ids in logical order]}; with block_size and context_lens
    {owner: tokens}, the unused tail of each last block stays pale: internal fragmentation. A
    block's id is its row label plus its column label.
    """
    holders = {}  # block -> [(owner's number, logical block, filled share)]
    for n, (owner, blocks) in enumerate(block_tables.items()):
        for logical, block in enumerate(blocks):
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block {block} of owner {owner!r}; accepted: 0 to num_blocks-1 = "
                    f"{num_blocks - 1}"
                )
            filled = 1
            if block_size and context_lens:
                filled = context_lens[owner] / block_size - logical
            piece = n, logical, min(1, max(0, filled))
            holders.setdefault(block, []).append(piece)

    columns = min(columns, num_blocks)
    lines = math.ceil(num_blocks / columns)
    height = 2.4 + 0.6 * lines + 0.25 * math.ceil(len(block_tables) / 3)
    fig, ax = frame(title, caption, (max(7.5, 1.0 + 0.6 * columns), height))
    for block in range(num_blocks):
        row, column = divmod(block, columns)
        _cell(ax, row, column, holders.get(block, []))
    ax.set_xlim(-0.04, columns + 0.04)
    ax.set_ylim(lines + 0.04, -0.04)
    ax.set_aspect("equal")
    ax.set_xticks(np.arange(columns) + 0.5, [f"+{c}" for c in range(columns)])
    ax.set_yticks(np.arange(lines) + 0.5, range(0, lines * columns, columns))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("block's number = row + column; A2: block 2 of A's table, counted from 0")
    free = f"free: {num_blocks - len(holders)} of {num_blocks}"
    named = [
        Patch(**_fill(n, n // 7), label=f"{_letter(n)}: {owner}")
        for n, owner in enumerate(block_tables)
    ]
    key(ax, [*named, Patch(facecolor="white", edgecolor=PALE, label=free)])
    return fig


def _cell(ax, row, column, owners):
    """One physical block: a band for each owner, its filled part in full colour."""
    share = 1 / max(1, len(owners))
    for k, (n, logical, filled) in enumerate(owners):
        y, look = row + (k + 0.5) * share, _fill(n, n // 7)
        ax.barh(y, 1, share, column, facecolor=look["facecolor"], alpha=0.22)
        ax.barh(y, filled, share, column, lw=0, **look)
        if len(owners) <= 2:
            _write(ax, column + 0.5, y, f"{_letter(n)}{logical}", fontweight="bold")
    if len(owners) > 2:
        _write(ax, column + 0.5, row + 0.5, f"{len(owners)}×", fontweight="bold")
    edge = {"edgecolor": "#222222", "zorder": 3} if owners else {"edgecolor": PALE}
    ax.barh(row + 0.5, 1, 1, column, facecolor="none", lw=1.2, **edge)


def _letter(n):
    return chr(ord("A") + n % 26) + (str(n // 26) if n >= 26 else "")


@style()
def mask_image(
    mask,
    *,
    title: str,
    caption: str,
    row_labels=None,
    col_labels=None,
    row_title: str = "query",
    col_title: str = "key",
) -> Figure:
    """An attention mask (bool) or weights (0..1) as an image: dark = may look; the share of visible
    pairs stands in the key.

    mask: [Tq, Tk]; row_labels: [Tq]; col_labels: [Tk], tokens or positions (default: positions),
    thinned to what fits.
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or 0 in mask.shape:
        raise ValueError(f"mask has shape {mask.shape}; accepted: [Tq, Tk], neither empty")
    cell = min(0.34, 9.0 / max(mask.shape))  # inches
    size = max(7.5, 2 + cell * mask.shape[1]), 2.8 + cell * mask.shape[0]
    fig, ax = frame(title, caption, size)
    dark = ROLES["optimized"].colour
    blues = LinearSegmentedColormap.from_list("", ["white", dark])
    lines = {"edgecolors": PALE, "linewidth": 0.6} if max(mask.shape) <= 48 else {}
    # not clipped, because half of the outermost lines lies outside the axes
    ax.pcolormesh(mask.astype(float), cmap=blues, vmin=0, clip_on=False, **lines)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    step = math.ceil(0.26 / cell)  # 11 pt take a quarter of an inch
    sides = ((ax.yaxis, row_labels, row_title), (ax.xaxis, col_labels, col_title))
    for axis, names, place in sides:
        n = mask.shape[axis is ax.xaxis]
        names = [str(name) for name in (range(n) if names is None else names)]
        if len(names) != n:
            raise ValueError(f"{place} labels: {len(names)}; accepted: one per {place}, {n}")
        turn = 90 if axis is ax.xaxis and max(map(len, names)) > 2 else 0
        axis.set_ticks(np.arange(0, n, step) + 0.5, names[::step], rotation=turn)
        axis.set_label_text(place)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    visible = np.count_nonzero(mask)
    shown = f"visible: {visible} of {mask.size} ({visible / mask.size:.0%})"
    white = Patch(facecolor="white", edgecolor=PALE, label="masked")
    key(ax, [Patch(facecolor=dark, label=shown), white])
    return fig
