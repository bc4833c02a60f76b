"""A picture that a kernel computes: the Mandelbrot set, a tile for each program."""

import matplotlib
import torch
from torch import Tensor

from lessons.toolbox.draw.figure import ClassFigure, frame, style
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import default_device


@triton.jit
def mandelbrot_kernel(
    out_ptr, height, width, left, top, step, most, TILE: tl.constexpr, SHADE: tl.constexpr
):
    """out: [height, width], how many steps z → z² + c stays small. Program (i, j) has a tile. With
    SHADE every second tile is darker, so that one sees the programs.
    """
    i, j = tl.program_id(0), tl.program_id(1)
    row = i * TILE + tl.arange(0, TILE)[:, None]
    column = j * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < height) & (column < width)
    c_real = left + column * step + 0.0 * row
    c_imag = top - row * step + 0.0 * column
    real = tl.zeros([TILE, TILE], tl.float32)
    imag = tl.zeros([TILE, TILE], tl.float32)
    count = tl.zeros([TILE, TILE], tl.float32)
    for _ in range(0, most):
        squared = real * real + imag * imag
        is_small = squared < 4.0
        new_real = real * real - imag * imag + c_real
        imag = tl.where(is_small, 2.0 * real * imag + c_imag, imag)
        real = tl.where(is_small, new_real, real)
        count += tl.where(is_small, 1.0, 0.0)
    if SHADE:
        count = count * tl.where((i + j) % 2 == 0, 1.0, 0.8)
    tl.store(out_ptr + row * width + column, count, mask=inside)


def mandelbrot(
    left: float = -2.1,
    top: float = 1.15,
    width_of_view: float = 3.0,
    most: int = 40,
    tile: int = 32,
    shade: bool = True,
) -> Tensor:
    """[150, 196] counts between 0 and `most`; the tiles at two edges have a tail."""
    height, width = 150, 196
    out = torch.empty(height, width, device=default_device())
    grid = (triton.cdiv(height, tile), triton.cdiv(width, tile))
    step = width_of_view / width
    mandelbrot_kernel[grid](out, height, width, left, top, step, most, TILE=tile, SHADE=shade)
    return out.cpu()


@style()
def draw_mandelbrot(**view) -> ClassFigure:
    """The set, and the tiles in which it was computed."""
    counts = mandelbrot(**view)
    tile = view.get("tile", 32)
    programs = -(-counts.shape[0] // tile) * -(-counts.shape[1] // tile)
    fig, ax = frame(
        f"{programs} programs computed this, in tiles of {tile} × {tile}",
        "each point: how many steps z → z² + c stays small · every second tile darker",
        (8, 6.6),
    )
    ax.imshow(counts, cmap=matplotlib.colormaps["magma"], interpolation="nearest")
    ax.set_axis_off()
    ax.set(xticks=[], yticks=[])
    return fig
