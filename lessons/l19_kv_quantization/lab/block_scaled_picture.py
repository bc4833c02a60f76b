"""Where the scales of 128 rows are: in a plain matrix, in an atom, and in tensor memory.

    python -m lessons.l19_kv_quantization.lab.block_scaled_picture      # writes atoms.svg

Nothing is measured. The atom is what `in_atoms` makes, and tensor memory what one copy makes of it.
"""

from pathlib import Path

import numpy as np
import torch

from lessons.l19_kv_quantization.activations.block_scaled.operands import in_atoms
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, save_svg, style

PICTURE = Path(__file__).with_name("atoms.svg")
ALT = (
    "Three maps, coloured by groups of 32 rows. In a matrix of 128 rows by 4 scales the groups lie "
    "below each other. In an atom of 32 lines by 16 bytes each group has 4 bytes of every line. "
    "In tensor memory each group has one of 4 columns, and all 128 lanes hold four copies. A "
    "cross marks the scales of row 70 in each."
)
ROW = 70  # which is marked


def places() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The row that each scale belongs to: of the matrix [128, 4], of the atom [32, 16], and of
    tensor memory [128, 4], a column of 32 bits each.
    """
    matrix = torch.arange(128, dtype=torch.uint8)[:, None].repeat(1, 4)
    atom = in_atoms(matrix)[0, 0].view(32, 16)
    columns = atom.view(32, 4, 4)[:, :, 0].repeat(4, 1)  # the four bytes of a column are one row's
    return matrix.numpy(), atom.numpy(), columns.numpy()


@style()
def draw_atoms() -> ClassFigure:
    """The same scales in three orders."""
    from matplotlib.colors import ListedColormap

    fig, axes = frame(
        "Scales of rows that are 32 apart lie side by side, as tensor memory wants them",
        "NVFP4 · 128 rows, 4 scales each · colours: groups of 32 rows · × marks row 70",
        (11, 4.6),
        (1, 1.6, 1),
    )
    titles = "a matrix", "an atom, 512 bytes", "tensor memory"
    labels = ("scale", "row"), ("byte of a line", "line of 16 bytes"), ("column of 32 bits", "lane")
    for ax, rows, title, (x, y) in zip(axes, places(), titles, labels):
        colours = dict(cmap=ListedColormap(PALETTE[:4]), vmin=0, vmax=3)
        ax.imshow(rows // 32, aspect="auto", interpolation="nearest", **colours)
        line, column = np.nonzero(rows == ROW)
        ax.plot(column, line, "x", color="black", ms=6)
        ax.set_title(title, loc="left")
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        ax.set_xticks(range(0, rows.shape[1], max(1, rows.shape[1] // 4)))
        ax.set_yticks(range(0, len(rows), len(rows) // 4))
    return fig


if __name__ == "__main__":
    save_svg(draw_atoms(), PICTURE, alt=ALT)
