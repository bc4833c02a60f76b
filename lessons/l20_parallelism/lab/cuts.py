"""The lesson's first picture: two matrices that are cut for two ranks, with the numbers of step 1
and 2.

pictures.py writes it. All numbers are computed.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from lessons.toolbox.draw.figure import GREY, PALETTE, ClassFigure, frame, style

CUTS_ALT = (
    "Two rows, one for each rank. Each rank has the whole x, one row of A, one value of h, one "
    "column of B and a part of every output. An arrow from both parts leads to their sum, which "
    "both ranks get."
)
X = torch.tensor([1.0, 2.0])
A = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
B = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
CELL = 0.62


def parts_of(x: Tensor, a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each rank its piece of h = relu(x aᵀ), [1], and its part of y = h bᵀ, [out]. A rank has
    one row of a and the same column of b.
    """
    pieces = [torch.relu(a[rank : rank + 1] @ x) for rank in range(len(a))]
    return [(piece, b[:, rank] * piece) for rank, piece in enumerate(pieces)]


@style()
def draw_cuts(x: Tensor = X, a: Tensor = A, b: Tensor = B) -> ClassFigure:
    """Who has what, and the one place where the ranks talk. x: [in]; a: [ranks, in];
    b: [out, ranks].
    """
    parts = parts_of(x, a, b)
    fig, ax = frame(
        "The first matrix is cut by outputs, the second by inputs: only the parts of y are sent",
        "computed · y = relu(x Aᵀ) Bᵀ, matrices stored [out, in]; coloured cells are the rank's "
        "own",
        (12, 5),
    )
    ax.set_axis_off()
    for rank, (piece, part) in enumerate(parts):
        y, colour = -2.3 * rank, PALETTE[rank]
        ax.text(-1.6, y, f"rank {rank}", va="center", fontweight="bold", color=colour)
        _cells(ax, 0.0, y, x[None], GREY)
        _cells(ax, 2.2, y, a, colour, rows=[rank])
        _cells(ax, 4.4, y, piece[None], colour)
        _cells(ax, 5.9, y, b, colour, columns=[rank])
        _cells(ax, 8.1, y, part[None], colour)
        _cells(ax, 11.5, y, sum(part for _, part in parts)[None], GREY)
        for start, end in ((1.35, 2.1), (3.55, 4.3), (5.12, 5.8), (7.25, 8.0)):
            _arrow(ax, (start, y), (end, y))
        _arrow(ax, (9.45, y), (10.05, -1.15 + 0.3 * (1 - 2 * rank)))
        _arrow(ax, (10.75, -1.15 + 0.3 * (1 - 2 * rank)), (11.4, y))
    ax.text(10.4, -1.15, "+", ha="center", va="center", fontsize=26)
    ax.text(10.4, -3.25, "all-reduce", ha="center", va="center", fontweight="bold")
    heads = {0.6: "x", 2.8: "A", 4.7: "h", 6.5: "B", 8.7: "part of y", 12.1: "y"}
    for where, head in heads.items():
        ax.text(where, 1.15, head, ha="center", fontweight="bold")
    ax.text(3.4, -3.55, "by outputs, column parallel:\nno communication", ha="center", color=GREY)
    ax.text(7.1, -3.55, "by inputs, row parallel:\nparts of a sum", ha="center", color=GREY)
    ax.set_xlim(-1.7, 13.0)
    ax.set_ylim(-3.9, 1.6)
    return fig


def _cells(
    ax: plt.Axes,
    left: float,
    middle: float,
    matrix: Tensor,
    colour: str,
    rows: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
) -> None:
    """A matrix as cells; those outside of `rows` or `columns` are empty, because another rank has
    them.
    """
    height, width = matrix.shape
    for row in range(height):
        for column in range(width):
            is_own = (rows is None or row in rows) and (columns is None or column in columns)
            corner = left + column * CELL, middle + (height / 2 - row - 1) * CELL
            own = dict(facecolor=colour, alpha=0.3) if is_own else dict(facecolor="white")
            ax.add_patch(plt.Rectangle(corner, CELL, CELL, edgecolor=GREY, lw=1, **own))
            if is_own:
                centre = corner[0] + CELL / 2, corner[1] + CELL / 2
                ax.text(*centre, f"{matrix[row, column]:g}", ha="center", va="center")


def _arrow(ax: plt.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=GREY, lw=1.4))
