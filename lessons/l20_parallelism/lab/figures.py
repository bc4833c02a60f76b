"""The diagrams of this lesson's pictures: ranks in a box, pieces on a ring. pictures.py writes
them.
"""

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from lessons.l20_parallelism.processes.mesh import Mesh
from lessons.toolbox.draw.figure import (
    GREY,
    HALO,
    PALETTE,
    SMALL,
    ClassFigure,
    frame,
    style,
)

INK, PALE = "#222222", "#E8E8E8"
SIXTEEN = Mesh(tp=4, pp=2, dp=2)


def box(ax: Axes, x: float, y: float, w: float, h: float, text: str = "", **look) -> None:
    """A rectangle with letters in its middle. look: of the rectangle; size: of the letters."""
    size = look.pop("size", SMALL)
    ax.add_patch(Rectangle((x, y), w, h, **{"edgecolor": INK, "lw": 1.2, "fc": "white", **look}))
    words = {"ha": "center", "va": "center", "size": size, "path_effects": HALO}
    ax.text(x + w / 2, y + h / 2, text, **words)


def arrow(ax: Axes, start: tuple, end: tuple, **look) -> None:
    """From one point to another, in the axes' coordinates."""
    shape = {"arrowstyle": "-|>", "mutation_scale": 14, "lw": 1.8, "color": GREY, **look}
    ax.add_patch(FancyArrowPatch(start, end, **shape))


def words(ax: Axes, x: float, y: float, text: str, **look) -> None:
    """Letters around a point."""
    ax.text(x, y, text, **{"ha": "center", "va": "center", "size": SMALL, **look})


# ---------------------------------------------------------------- the mesh


@style()
def draw_mesh(mesh: Mesh = SIXTEEN) -> ClassFigure:
    """The ranks at their places, and the groups that talk."""
    fig, ax = frame(
        f"{mesh.size} ranks: those that talk most are neighbours",
        f"rank = (replica · {mesh.pp} + stage) · {mesh.tp} + shard · Mesh(tp={mesh.tp}, "
        f"pp={mesh.pp}, dp={mesh.dp})",
        (11.5, 5.4),
    )
    wide = mesh.tp * 1.2 + 1.4
    for replica in range(mesh.dp):
        left = replica * wide + 1.6
        words(ax, left + 0.6 * mesh.tp, -0.75, f"replica {replica}", fontweight="bold")
        for stage in range(mesh.pp):
            top = stage * 2.2
            if replica == 0:
                words(ax, 0.0, top + 0.5, f"stage {stage}", ha="left", fontweight="bold")
            ring = Rectangle((left - 0.1, top - 0.15), mesh.tp * 1.2, 1.3, ec=PALETTE[0], lw=2.4)
            ax.add_patch(ring)
            ring.set_facecolor("none")
            for shard in range(mesh.tp):
                rank = mesh.rank(replica, stage, shard)
                box(ax, left + shard * 1.2, top, 1.0, 1.0, str(rank), fc=PALE, size=14)
                if stage < mesh.pp - 1:
                    middle = left + shard * 1.2 + 0.5
                    arrow(ax, (middle, top + 1.2), (middle, top + 2.0), color=PALETTE[5])
    right = mesh.dp * wide + 1.3
    words(ax, right, 0.5, "shards: two sums\na layer", ha="left", color=PALETTE[0])
    words(ax, right, 1.6, "stages: one message\na pass", ha="left", color=PALETTE[5])
    words(ax, right, 2.7, "replicas: nothing", ha="left", color=GREY)
    ax.set(xlim=(-0.1, right + 3.2), ylim=(mesh.pp * 2.2 - 0.7, -1.1))
    ax.set_axis_off()
    return fig


# ---------------------------------------------------------------- a ring


def ring_counts(size: int) -> list[list[list[int]]]:
    """How many ranks' values are in each piece: [step][rank][piece], as collectives.ring adds
    them.
    """
    held = [[1] * size for _ in range(size)]
    steps = [[list(row) for row in held]]
    for step in range(1, 2 * size - 1):
        before = [list(row) for row in held]
        for rank in range(size):
            piece = (rank - 1 - step) % size
            came = before[(rank - 1) % size][piece]
            held[rank][piece] = came + 1 if step < size else came
        steps.append([list(row) for row in held])
    return steps


@style()
def draw_ring(size: int = 4) -> ClassFigure:
    """What every rank holds after each step of a ring all-reduce."""
    steps = ring_counts(size)
    fig, ax = frame(
        f"A ring of {size}: after {size - 1} rounds each rank has one whole sum, after "
        f"{2 * size - 2} all of them",
        f"columns: pieces of the tensor · numbers: ranks whose values are in it · each round sends "
        f"1/{size} of the tensor to the next rank",
        (13, 5.2),
    )
    wide = size * 0.62 + 0.5
    for step, ranks in enumerate(steps):
        left = step * wide + 1.3
        words(
            ax,
            left + size * 0.31,
            -0.35,
            "start" if step == 0 else f"round {step}",
            fontweight="bold",
        )
        for rank, pieces in enumerate(ranks):
            for piece, count in enumerate(pieces):
                is_new = step and pieces != steps[step - 1][rank]
                changed = is_new and count != steps[step - 1][rank][piece]
                look = dict(fc=PALETTE[0], alpha=0.15 + 0.75 * (count - 1) / (size - 1))
                box(ax, left + piece * 0.62, rank * 0.9, 0.58, 0.74, "", **look)
                words(
                    ax, left + piece * 0.62 + 0.29, rank * 0.9 + 0.37, str(count),
                    fontweight="bold" if changed else "normal", path_effects=HALO,
                )  # fmt: skip
    for rank in range(size):
        words(ax, 0.0, rank * 0.9 + 0.37, f"rank {rank}", ha="left", fontweight="bold")
    first, second = 1.3 + wide, 1.3 + size * wide
    bottom = size * 0.9 + 0.25
    for start, text in ((first, "reduce-scatter"), (second, "all-gather")):
        end = start + (size - 1) * wide - 0.5
        ax.plot([start, end], [bottom, bottom], color=GREY, lw=1.5)
        words(ax, (start + end) / 2, bottom + 0.35, text, color=GREY)
    ax.set(xlim=(-0.1, len(steps) * wide + 1.0), ylim=(bottom + 0.7, -0.7))
    ax.set_axis_off()
    return fig
