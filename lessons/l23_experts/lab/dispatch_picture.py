"""A picture of dispatch: who sends what to whom, once for each expert or once for each rank."""

from matplotlib.axes import Axes

from lessons.l20_parallelism.lab.figures import PALE, arrow, box, words
from lessons.toolbox.draw.figure import GREY, PALETTE, ClassFigure, frame, style

CHOSEN = (1, 4, 6, 7, 9, 11)  # three of them are on one rank, two on another, and one is at home
RANKS, EXPERTS = 4, 16
LEFT, WIDE, HIGH, GAP = 4.6, 1.0, 0.44, 0.25  # of the experts' boxes, and between two ranks
SUM = LEFT - 1.3  # where a rank adds up


@style()
def draw_dispatch(
    chosen: tuple[int, ...] = CHOSEN, num_experts: int = EXPERTS, ranks: int = RANKS
) -> ClassFigure:
    """A token of rank 0 and its experts. Left a row for each expert, right one for each rank."""
    held = num_experts // ranks
    owners = sorted({expert // held for expert in chosen})
    fig, axes = frame(
        f"{len(chosen)} experts on {len(owners)} ranks: {len(chosen)} rows there and back, or "
        f"{len(owners)}",
        f"one token of rank 0, {num_experts} experts on {ranks} ranks · an arrow is a row there "
        "and a row back",
        (12.5, 6.4),
        (1, 1),
    )
    for ax, title, color in zip(axes, ("to each expert", "to each rank"), PALETTE):
        words(ax, LEFT + WIDE / 2, -0.35, title, fontweight="bold")
        draw_ranks(ax, chosen, held, ranks, color)
    start = 1.1, middle_of(num_experts // 2 - 0.5, held)
    for expert in chosen:
        end = LEFT, middle_of(expert, held)
        arrow(axes[0], start, end, arrowstyle="<|-|>", color=PALETTE[0], lw=1.6)
        rank = expert // held
        y = middle_of(rank * held + (held - 1) / 2, held)
        axes[1].plot([SUM + 0.25, LEFT], [y, end[1]], color=GREY, lw=1.2)
    for rank in owners:
        y = middle_of(rank * held + (held - 1) / 2, held)
        box(axes[1], SUM - 0.25, y - 0.25, 0.5, 0.5, "Σ", zorder=3)
        arrow(axes[1], start, (SUM - 0.25, y), arrowstyle="<|-|>", color=PALETTE[1], lw=1.6)
    return fig


def middle_of(expert: float, held: int) -> float:
    """The height of an expert's middle; 5.5 is between the boxes of 5 and 6."""
    return expert * HIGH + int(expert) // held * GAP + HIGH / 2


def draw_ranks(ax: Axes, chosen: tuple[int, ...], held: int, ranks: int, color: str) -> None:
    """The token, and the experts of each rank one below the other."""
    middle = middle_of(ranks * held / 2 - 0.5, held)
    box(ax, 0.0, middle - 0.5, 1.1, 1.0, "token", fc=PALE)
    words(ax, 0.55, middle + 0.8, "on rank 0", color=GREY)
    for expert in range(ranks * held):
        look = dict(fc=color, alpha=0.45) if expert in chosen else {}
        top = middle_of(expert, held) - HIGH / 2
        box(ax, LEFT, top, WIDE, HIGH, str(expert), **look)
    for rank in range(ranks):
        middle = middle_of(rank * held + (held - 1) / 2, held)
        words(ax, LEFT + WIDE + 0.15, middle, f"rank {rank}", ha="left")
    bottom = middle_of(ranks * held - 1, held) + HIGH
    ax.set(xlim=(-0.2, LEFT + WIDE + 1.3), ylim=(bottom, -0.7))
    ax.set_axis_off()
