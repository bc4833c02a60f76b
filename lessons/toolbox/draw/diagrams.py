"""Pictures of what the engine does: schedules, block tables, attention masks. Use them through
`toolbox.draw.plotting`.
"""

import math

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from lessons.toolbox.draw.figure import HATCHES, PALETTE, ROLES, SMALL, frame, key, number, style


def _ink(colour):
    return (
        "black" if np.dot(matplotlib.colors.to_rgb(colour), (0.3, 0.59, 0.11)) > 0.42 else "white"
    )


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
    kinds = list(kinds or dict.fromkeys(piece[2] for pieces in rows.values() for piece in pieces))
    fig, ax = frame(title, caption, (10, 2.5 + 0.42 * len(rows)))
    texts = []
    for y, (row, pieces) in enumerate(rows.items()):
        for start, end, kind, *text in pieces:
            if end < start or kind not in kinds:
                raise ValueError(
                    f"piece {(start, end, kind)} of row {row!r}; accepted: end >= start and a kind "
                    f"of {kinds}"
                )
            n = kinds.index(kind)
            colour = PALETTE[n % len(PALETTE)]
            ax.barh(
                y,
                end - start,
                left=start,
                height=0.78,
                color=colour,
                hatch=HATCHES[n % len(HATCHES)],
                edgecolor="white",
            )
            if text:
                # hides the hatch behind the letters
                box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
                note = ax.text(
                    (start + end) / 2,
                    y,
                    text[0],
                    ha="center",
                    va="center",
                    color=_ink(colour),
                    fontsize=SMALL,
                    bbox=box,
                )
                texts.append((note, start, end))
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.xaxis.set_major_formatter(FuncFormatter(number))
    ax.set_xlim(left=min((p[0] for pieces in rows.values() for p in pieces), default=0))
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    ax.set_xlabel(xlabel)
    key(
        ax,
        [
            Patch(
                facecolor=PALETTE[n % len(PALETTE)],
                hatch=HATCHES[n % len(HATCHES)],
                edgecolor="white",
                label=kind,
            )
            for n, kind in enumerate(kinds)
        ],
    )
    fig.draw_without_rendering()
    for note, start, end in texts:
        room = np.diff(ax.transData.transform([(start, 0), (end, 0)])[:, 0])[0]
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
    holders = {}
    for n, (owner, blocks) in enumerate(block_tables.items()):
        for logical, block in enumerate(blocks):
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block {block} of owner {owner!r}; accepted: 0 to num_blocks-1 = "
                    f"{num_blocks - 1}"
                )
            filled = 1.0
            if block_size and context_lens:
                filled = min(1.0, max(0.0, context_lens[owner] / block_size - logical))
            holders.setdefault(block, []).append((n, logical, filled))
    columns = min(columns, num_blocks)
    lines = math.ceil(num_blocks / columns)
    fig, ax = frame(
        title,
        caption,
        (
            max(7.5, 1.0 + 0.6 * columns),
            2.4 + 0.6 * lines + 0.25 * math.ceil(len(block_tables) / 3),
        ),
    )
    for block in range(num_blocks):
        row, column = divmod(block, columns)
        owners = holders.get(block, [])
        for k, (n, logical, filled) in enumerate(owners):
            height = 1 / len(owners)
            colour, hatch = PALETTE[n % len(PALETTE)], HATCHES[(n // len(PALETTE)) % len(HATCHES)]
            corner = (column, row + k * height)
            ax.add_patch(Rectangle(corner, 1, height, facecolor=colour, alpha=0.22, lw=0))
            ax.add_patch(
                Rectangle(
                    corner, filled, height, facecolor=colour, hatch=hatch, edgecolor="white", lw=0
                )
            )
            if len(owners) <= 2:
                # what the letters stand on; a box hides the hatch there
                behind = colour if filled > 0.6 else "white"
                ax.text(
                    column + (filled / 2 if filled > 0.6 else 0.5),
                    row + (k + 0.5) * height,
                    f"{_letter(n)}{logical}",
                    ha="center",
                    va="center",
                    fontsize=SMALL,
                    fontweight="bold",
                    color=_ink(behind),
                    bbox={"facecolor": behind, "edgecolor": "none", "pad": 0.6} if hatch else None,
                )
        if len(owners) > 2:
            ax.text(
                column + 0.5,
                row + 0.5,
                f"{len(owners)}×",
                ha="center",
                va="center",
                fontsize=SMALL,
                fontweight="bold",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
        ax.add_patch(
            Rectangle(
                (column, row),
                1,
                1,
                facecolor="none",
                edgecolor="#222222" if owners else "#BBBBBB",
                lw=1.2,
                zorder=3 if owners else 2,
            )
        )
    ax.set_xlim(-0.04, columns + 0.04)
    ax.set_ylim(lines + 0.04, -0.04)
    ax.set_aspect("equal")
    ax.set_xticks(np.arange(columns) + 0.5, [f"+{c}" for c in range(columns)])
    ax.set_yticks(np.arange(lines) + 0.5, [str(r * columns) for r in range(lines)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("physical block = row + column; numbers in the cells: owner and logical block")
    key(
        ax,
        [
            Patch(
                facecolor=PALETTE[n % len(PALETTE)],
                hatch=HATCHES[(n // len(PALETTE)) % len(HATCHES)],
                edgecolor="white",
                label=f"{_letter(n)}: {owner}",
            )
            for n, owner in enumerate(block_tables)
        ]
        + [
            Patch(
                facecolor="white",
                edgecolor="#BBBBBB",
                label=f"free: {num_blocks - len(holders)} of {num_blocks}",
            )
        ],
    )
    return fig


def _letter(n):
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[n % 26] + ("" if n < 26 else str(n // 26))


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

    mask: [Tq, Tk]; row_labels: [Tq]; col_labels: [Tk], tokens or positions (default: positions);
    thinned beyond 32.
    """
    mask = np.asarray(mask)
    if mask.ndim != 2 or 0 in mask.shape:
        raise ValueError(f"mask has shape {mask.shape}; accepted: [Tq, Tk], neither empty")
    rows, columns = mask.shape
    cell = min(0.34, 9.0 / max(rows, columns))
    fig, ax = frame(title, caption, (max(7.5, 2 + cell * columns), 2.8 + cell * rows))
    blue = matplotlib.colors.LinearSegmentedColormap.from_list(
        "", ["white", ROLES["optimized"].colour]
    )
    ax.imshow(
        mask.astype(float),
        cmap=blue,
        vmin=0,
        vmax=1 if mask.dtype == bool else max(1e-9, float(mask.max())),
        interpolation="nearest",
        extent=(0, columns, rows, 0),
    )
    if max(rows, columns) <= 48:
        ax.hlines(range(rows + 1), 0, columns, color="#BBBBBB", lw=0.6)
        ax.vlines(range(columns + 1), 0, rows, color="#BBBBBB", lw=0.6)
    for axis, n, names, place in (
        (ax.yaxis, rows, row_labels, row_title),
        (ax.xaxis, columns, col_labels, col_title),
    ):
        names = [str(name) for name in (names if names is not None else range(n))]
        if len(names) != n:
            raise ValueError(f"{place} labels: {len(names)}; accepted: one per {place}, {n}")
        # 11 pt take a quarter of an inch
        step = next(s for s in (1, 2, 5, 10, 20, 50, 100, n) if s * cell >= 0.26 or s >= n)
        turn = 90 if axis is ax.xaxis and max(map(len, names[::step])) > 2 else 0
        axis.set_ticks(np.arange(n)[::step] + 0.5, names[::step], rotation=turn)
        axis.set_label_text(place)
    ax.tick_params(length=0)
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    ax.spines[:].set_visible(False)
    visible = np.count_nonzero(mask)
    handles = [
        Patch(
            facecolor=ROLES["optimized"].colour,
            label=f"visible: {visible} of {mask.size} ({visible / mask.size:.0%})",
        ),
        Patch(facecolor="white", edgecolor="#BBBBBB", label="masked"),
    ]
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=2,
        frameon=False,
        borderaxespad=0.4,
    )
    return fig
