"""The lesson's pictures, computed and not measured: the order in which tiles are visited, memory
over the context, and what five versions in CUDA C++ ask of a chip, from the record of worklog.py.

    python -m lessons.l09_flash_attention.lab.pictures
        writes tiles.svg and memory.svg beside this file, and worklog/versions.svg
"""

from pathlib import Path

from matplotlib.patches import Patch, Rectangle

from lessons.l09_flash_attention.lab import worklog
from lessons.l09_flash_attention.lab.traffic import (
    Shape,
    fa2_bytes,
    flash_memory_bytes,
    naive_memory_bytes,
)
from lessons.l09_flash_attention.tiles import SKIPPED, UNMASKED, VISITED, Tiles, tile_map
from lessons.toolbox.draw import plotting
from lessons.toolbox.draw.figure import (
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    key,
    save_svg,
    size_number,
    style,
)
from lessons.toolbox.measure.hardware import lookup

TOKENS, BLOCK, WINDOW = 24, 4, 9
REGISTERS_KIB = 256  # of an SM, on every chip from sm_70 on
ROOM = Path(__file__).parent
LOOK = {VISITED: (PALETTE[1], "//"), UNMASKED: (PALETTE[4], ""), SKIPPED: ("white", "")}


def visits(
    order: str, window: int | None = None
) -> tuple[list[list[str]], dict[tuple[int, int], int]]:
    """tile_map of the example, and {(row, column): when it is visited}, counted from 1. order:
    "FA-1" or "FA-2".
    """
    grid = tile_map(TOKENS, TOKENS, Tiles(BLOCK, BLOCK), window=window)
    visited = [
        (m, n) for m, row in enumerate(grid) for n, what in enumerate(row) if what != SKIPPED
    ]
    if order == "FA-1":  # keys in the outer loop
        visited.sort(key=lambda at: (at[1], at[0]))
    return grid, {at: number for number, at in enumerate(visited, 1)}


@style()
def draw_tiles() -> ClassFigure:
    """Three grids beside each other: FA-1 order, FA-2 order, FA-2 order with a window."""
    panels = [
        ("FA-1 order: keys outside", *visits("FA-1")),
        ("FA-2 order: queries outside", *visits("FA-2")),
        (f"FA-2 order, window of {WINDOW}", *visits("FA-2", WINDOW)),
    ]
    count = TOKENS // BLOCK
    visited, unmasked = len(panels[1][2]), sum(row.count(UNMASKED) for row in panels[1][1])
    fig, ax = frame(
        f"Of {count * count} tiles the causal mask skips {count * count - visited}, and {unmasked} "
        f"of the {visited} left need no mask",
        f"{TOKENS} queries (down) and keys (across), tiles of {BLOCK} × {BLOCK}; numbers: order "
        "of visits · counted, not measured",
        (11, 4.9),
    )
    for panel, (title, grid, order) in enumerate(panels):
        left = panel * (count + 1)
        ax.text(left, -0.25, title, fontweight="bold", va="bottom")
        for m, row in enumerate(grid):
            for n, what in enumerate(row):
                colour, hatch = LOOK[what]
                ax.add_patch(
                    Rectangle(
                        (left + n, m),
                        0.94,
                        0.94,
                        facecolor=colour,
                        hatch=hatch,
                        lw=1,
                        edgecolor="#CCCCCC" if what == SKIPPED else "white",
                    )
                )
                if what != SKIPPED:
                    ax.text(
                        left + n + 0.47,
                        m + 0.5,
                        str(order[m, n]),
                        ha="center",
                        va="center",
                        bbox={"facecolor": colour, "edgecolor": "none", "pad": 1},
                    )
    ax.set_xlim(-0.1, 3 * count + 2)
    ax.set_ylim(count + 0.1, -0.9)
    ax.set_aspect("equal")
    ax.axis("off")
    key(
        ax,
        [
            Patch(
                facecolor=colour,
                hatch=hatch,
                edgecolor="#CCCCCC" if what == SKIPPED else "white",
                label=what,
            )
            for what, (colour, hatch) in LOOK.items()
        ],
    )
    return fig


@style()
def draw_tile_size(block_m: int = 128, block_n: int = 64, tokens: int = 8192) -> ClassFigure:
    """Left: which tiles of 512 causal tokens are visited. Right: bytes of FA-2 order over block_m,
    and what a program keeps in registers.
    """
    chip, shape = lookup("h200"), Shape(tokens, tokens, 32, 8, 128)
    sizes = [16, 32, 64, 128, 256]
    moved = {m: sum(fa2_bytes(shape, Tiles(m, block_n))) / 1e9 for m in {*sizes, block_m}}
    kept_kib = 4 * block_m * (shape.head_dim + block_n) / 1024
    fig, (grid, plot) = frame(
        f"Tiles of {block_m} x {block_n} move {moved[block_m]:.3g} GB, and keep {kept_kib:.0f} KiB "
        "of scores and acc in registers",
        f"left: 512 tokens · right: one layer, {size_number(tokens)} tokens, 32/8 heads of 128, "
        f"bfloat16, causal, no L2 cache · an SM has {REGISTERS_KIB} KiB of registers · computed",
        (11, 4.6),
        (1, 1.3),
    )
    for m, row in enumerate(tile_map(512, 512, Tiles(block_m, block_n))):
        for n, what in enumerate(row):
            colour, hatch = LOOK[what]
            grid.add_patch(
                Rectangle(
                    (n * block_n, m * block_m),
                    block_n,
                    block_m,
                    facecolor=colour,
                    hatch=hatch,
                    edgecolor="#CCCCCC",
                )
            )
    grid.set(xlim=(0, 512), ylim=(512, 0), aspect="equal", xlabel="keys", ylabel="queries")
    grid.set(xticks=[0, 256, 512], yticks=[0, 256, 512])
    look = ROLES["optimized"]
    plot.plot(sizes, [moved[m] for m in sizes], color=look.colour, marker="s")
    plot.plot(block_m, moved[block_m], "o", ms=16, mfc="none", mec=ROLES["naive"].colour, mew=3)
    plot.axhline(shape.least_bytes / 1e9, color=ROLES["floor"].colour, ls="--")
    plot.text(16, 1.15 * shape.least_bytes / 1e9, "q, k, v and output once", va="bottom")
    plot.set(xscale="log", yscale="log", xlabel="block_m, queries a tile")
    plot.set_ylabel(f"GB moved ({1e12 / chip.memory_bytes_per_s:.2g} ms each on {chip.name})")
    plot.set_xticks(sizes, map(str, sizes))
    plot.set_yticks([0.2, 1, 5, 20], ["0.2", "1", "5", "20"])
    plot.minorticks_off()
    return fig


def draw_memory() -> ClassFigure:
    """What attention of one layer needs beside its inputs, in GB, up to the context at which an
    H200 is full.
    """
    chip, contexts = lookup("h200"), [2**n for n in range(10, 19)]
    shapes = [Shape(n, n, 32, 8, 128) for n in contexts]
    naive = [naive_memory_bytes(shape) for shape in shapes]
    full = next(n for n, used in zip(contexts, naive) if used > chip.memory_bytes)
    lines = {
        f"naive (out of memory at {size_number(full)})": (
            "naive",
            [(used / 1e9,) * 3 if used <= chip.memory_bytes else None for used in naive],
        ),
        "flash_attention": (
            "optimized",
            [(flash_memory_bytes(shape) / 1e9,) * 3 for shape in shapes],
        ),
        "all of an H200": ("floor", [(chip.memory_bytes / 1e9,) * 3] * len(contexts)),
    }
    return plotting.class_plot(
        contexts,
        lines,
        title=f"Scores fill an H200 at {size_number(full)} tokens; without them "
        f"{flash_memory_bytes(shapes[-1]) / 1e9:.2g} GB are enough at {size_number(contexts[-1])}",
        xlabel="tokens",
        ylabel="GB beside q, k, v and the output",
        caption="computed: scores and probabilities of one layer, or its log-sum-exp · bfloat16, "
        "32/8 heads of 128",
    )


if __name__ == "__main__":
    save_svg(draw_tiles(), ROOM / "tiles.svg")
    save_svg(draw_memory(), ROOM / "memory.svg")
    save_svg(worklog.draw(), worklog.SVG, alt=worklog.ALT)
