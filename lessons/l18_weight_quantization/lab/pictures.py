"""The lesson's pictures: one matrix in every format, the numbers that 4 and 8 bits can name, why
GPTQ's second weight moves, what a step costs at least, and loss over bits for every method.

    python -m lessons.l18_weight_quantization.lab.pictures

writes formats.svg, grids.svg, feedback.svg, floor.svg and pareto.svg beside this file. Nothing is
timed. The last one reads results/counted/l18_quality.json.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import TwoSlopeNorm
from torch import Tensor

from lessons.l18_weight_quantization.lab.examples import (
    WEIGHT_NAME,
    formats_of,
    rounded_with_feedback,
    weight_with_an_outlier,
)
from lessons.l18_weight_quantization.lab.floors import floor_s
from lessons.l18_weight_quantization.lab.pareto import PARETO_ALT, draw_pareto
from lessons.l18_weight_quantization.weights import E2M1_VALUES, NF4_VALUES
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    save_svg,
    style,
)
from lessons.toolbox.measure.hardware import CHIPS

HERE = Path(__file__).parent
PATCH = (10, 96)  # rows and columns of the matrix that are drawn
MAGNIFIED, GAP = 4, 3
DRAWN = ("BF16", "FP8", "INT4")
FORMATS_ALT = (
    "A piece of one weight matrix in thirteen formats, with what rounding changed, the bits of a "
    "weight and the error: one scale for the whole matrix is wrong by half at 4 bits."
)
GRIDS_ALT = (
    "The numbers that INT4, NF4, E2M1, INT8, E4M3 and E5M2 can name between -1 and 1, below the "
    "histogram of a group of weights: whole numbers at even steps, floating ones closer near 0."
)
FEEDBACK_ALT = (
    "The error of an output over two weights is a long, tilted valley. Rounding both weights to "
    "the nearest leaves it; after the first is rounded, the second moves along it before it is "
    "rounded."
)
FLOOR_ALT = (
    "The least time of a decode step's matrix products over the batch on an H200: 4 bits win while "
    "the batch is small, 8-bit floats win where arithmetic is the limit."
)

# ---------------------------------------------------------------- one matrix in every format


@style()
def draw_formats(weight: Tensor | None = None) -> ClassFigure:
    """Each format is a row: a piece of the matrix, what rounding changed there, bits and error of
    the whole matrix. weight: [N, K], default a matrix of the embedded model.
    """
    weight = weight_with_an_outlier() if weight is None else weight
    rows = formats_of(weight)
    by_name = {row.name: row for row in rows}
    coarse, fine = by_name["INT4, one scale in all"], by_name["INT4, groups of 32"]
    fig, ax = frame(
        f"INT4 with one scale for the matrix is wrong by {coarse.error:.0%}, with one for each 32 "
        f"weights by {fine.error:.0%}",
        f"{PATCH[0]} × {PATCH[1]} of {weight.shape[0]} × {weight.shape[1]} weights around the "
        f"largest one, {WEIGHT_NAME} of models/tiny; error: ‖Ŵ − W‖ / ‖W‖ of the whole matrix",
        (11, 8),
    )
    part = _around_the_largest(weight)
    high, wide = PATCH
    # One image: a strip a format, its values, a gap, what rounding changed; NaN stays white.
    image = np.full((len(rows) * (high + GAP), 2 * wide + 2 * GAP), np.nan)
    for index, row in enumerate(rows):
        strip = image[index * (high + GAP) :][:high]
        strip[:, :wide] = row.values[part]
        strip[:, -wide:] = MAGNIFIED * (row.values - weight)[part]
    reach = 3 * float(weight.std())
    ax.imshow(image, cmap="RdBu_r", norm=TwoSlopeNorm(0, -reach, reach), aspect="auto")
    middles = [index * (high + GAP) + high / 2 for index in range(len(rows))]
    ax.set_yticks(middles, [row.name for row in rows])
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    columns = {0: "what is stored", wide + 2 * GAP: f"what rounding changed, × {MAGNIFIED}"}
    for x, text in columns.items():
        ax.text(x, -3, text, color=GREY)
    ends = {1.09: "bits", 1.2: "error"}
    across = ax.get_yaxis_transform()  # x as a share of the axes, y in rows
    for x, text in ends.items():
        ax.text(x, -3, text, color=GREY, ha="right", transform=across)
    for row, y in zip(rows, middles):
        error = f"{row.error:.1%}" if row.error else "–"
        for x, text in zip(ends, (f"{row.bits + 1e-9:.2f}", error)):
            look = {"ha": "right", "va": "center", "fontweight": "bold"}
            ax.text(x, y, text, transform=across, **look)
    return fig


def _around_the_largest(weight: Tensor) -> tuple[slice, slice]:
    """PATCH's rows and columns around the largest weight."""
    at = np.unravel_index(int(weight.abs().argmax()), weight.shape)
    starts = [
        int(np.clip(place - size // 2, 0, whole - size))
        for place, size, whole in zip(at, PATCH, weight.shape)
    ]
    return tuple(slice(start, start + size) for start, size in zip(starts, PATCH))


# ---------------------------------------------------------------- the numbers that a code can name


def grids() -> dict[str, np.ndarray]:
    """{format: its numbers, scaled so that the largest is 1}."""
    found = {
        "INT4": np.arange(-7, 8) / 7,
        "NF4": np.array(NF4_VALUES),
        "E2M1 (MXFP4)": np.array(E2M1_VALUES) / 6,
        "INT8": np.arange(-127, 128) / 127,
    }
    for name, dtype in (("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2)):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        codes = codes[codes.isfinite()]
        found[name] = (codes / codes.max()).numpy()
    return found


@style()
def draw_grids(weight: Tensor | None = None) -> ClassFigure:
    """Every number of each format as a stroke, under the weights of groups of 64, each divided by
    its largest magnitude. weight: [N, K], default a matrix of the embedded model.
    """
    weight = weight_with_an_outlier() if weight is None else weight
    groups = weight.unflatten(1, (-1, 64))
    ratios = (groups / groups.abs().amax(-1, keepdim=True)).flatten()
    inside = float((ratios.abs() < 0.5).float().mean())
    fig, (above, ax) = _stacked(
        f"{inside:.0%} of weights are below half of their group's largest, where NF4 is dense",
        f"groups of 64 weights of {WEIGHT_NAME}, models/tiny; each has one at ±1; each format "
        "scaled to ±1",
    )
    above.hist(ratios.numpy(), bins=81, range=(-1, 1), color=PALETTE[0])
    above.set_yticks([])
    above.set_ylabel("weights")
    found = grids()
    for row, (name, values) in enumerate(found.items()):
        colour = PALETTE[0] if name.startswith("INT") else PALETTE[5]
        ax.vlines(values, row - 0.36, row + 0.36, color=colour, lw=1.4 if len(values) < 20 else 0.6)
    ax.set_yticks(range(len(found)), list(found))
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_xlim(-1.02, 1.02)
    ax.set_xlabel("weight / largest of its group")
    ax.tick_params(axis="y", length=0)
    return fig


def _stacked(title: str, caption: str) -> tuple[ClassFigure, list[plt.Axes]]:
    """A figure with a low axes over a high one, which share x."""
    fig, ax = frame(title, caption, (10.5, 6))
    ax.remove()
    above, below = fig.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    above.tick_params(axis="x", length=0, labelbottom=False)
    return fig, [above, below]


# ---------------------------------------------------------------- why the second weight moves


@style()
def draw_feedback(correlation: float = 0.8) -> ClassFigure:
    """The output's error over two weights, for two inputs of variance 1 with this correlation; the
    grid of whole numbers; both weights to the nearest, and the second one moved first.
    """
    case = rounded_with_feedback((2.4, 1.35), correlation)
    fig, ax = frame(
        f"The second weight moves to {case.moved[1]:.2f}, and the error goes from "
        f"{case.nearest_error:.2f} to {case.feedback_error:.2f}",
        f"lines of equal error, the mean square of the output's change; inputs of variance 1 and "
        f"correlation {correlation:.2f}; crosses: codes",
        (10, 5.6),
    )
    x, y = np.meshgrid(np.linspace(0.4, 4.2, 200), np.linspace(-0.3, 3.3, 200))
    dx, dy = x - case.weight[0], y - case.weight[1]
    error = dx**2 + 2 * correlation * dx * dy + dy**2
    levels = [0.03, 0.1, 0.2, 0.4, 0.7, 1.1, 1.6]
    ax.contour(x, y, error, levels, colors=GREY, linewidths=0.9)
    grid = np.array([(a, b) for a in range(1, 5) for b in range(4)])
    ax.plot(*grid.T, "+", color=GREY, ms=9)
    ax.plot(*case.weight, "o", color="black", ms=8)
    ax.plot(*case.nearest, "X", color=PALETTE[5], ms=12)
    ax.plot(*case.feedback, "s", color=PALETTE[0], ms=11)
    ax.annotate("", case.moved, case.weight, arrowprops={"arrowstyle": "->", "lw": 2})
    label_column(
        ax,
        [
            (*case.weight, "the weights", "black"),
            (*case.nearest, f"both to the nearest: {case.nearest_error:.2f}", PALETTE[5]),
            (*case.feedback, f"with feedback: {case.feedback_error:.2f}", PALETTE[0]),
        ],
    )
    ax.set_xlabel("first weight")
    ax.set_ylabel("second weight")
    ax.set_aspect("equal")
    return fig


# ---------------------------------------------------------------- what a step costs at least

BATCHES = [2**n for n in range(11)]


@style()
def draw_floor(chip: str = "h200") -> ClassFigure:
    """The least time of Llama-3-8B's matrix products over the batch, format by format."""
    found = {name: [floor_s(name, batch, chip) for batch in BATCHES] for name in DRAWN}
    gains = [found["BF16"][n] / found["INT4"][n] for n in range(len(BATCHES))]
    same = next(b for b, gain in zip(BATCHES, gains) if gain < 1.01)
    data_sheet = CHIPS[chip]
    by = "FP8" if data_sheet.fp8_flops_per_s else "BF16, because it has no units for FP8"
    fig, ax = frame(
        f"INT4 can be {gains[0]:.1f}x as fast as BF16 at batch 1, no faster from batch {same} on",
        f"lower bounds from the data sheet of the {data_sheet.name}, predicted, not measured: "
        f"Llama-3-8B's layers, INT4 of 4.16 bits multiplied in BF16, FP8 in {by}",
        (10, 5.6),
    )
    labels = []
    for (name, seconds), colour, marker in zip(found.items(), PALETTE, "osD"):
        ax.plot(BATCHES, np.array(seconds) * 1e3, color=colour, marker=marker)
        labels.append((BATCHES[-1], seconds[-1] * 1e3, name, colour))
    ax.set_xscale("log", base=2)
    ax.set_xticks(BATCHES, [f"{batch}" for batch in BATCHES])
    times = [1e3 * s for seconds in found.values() for s in seconds]
    log_axis(ax.yaxis, min(times) / 1.3, max(times) * 1.3)
    ax.set_xlabel("sequences in the batch")
    ax.set_ylabel("lower bound of a step, ms (lower is better)")
    ax.grid(True, axis="y")
    label_column(ax, labels)
    return fig


def write_all() -> None:
    """Every picture of the README."""
    save_svg(draw_formats(), HERE / "formats.svg", alt=FORMATS_ALT)
    save_svg(draw_grids(), HERE / "grids.svg", alt=GRIDS_ALT)
    save_svg(draw_feedback(), HERE / "feedback.svg", alt=FEEDBACK_ALT)
    save_svg(draw_floor(), HERE / "floor.svg", alt=FLOOR_ALT)
    save_svg(draw_pareto(), HERE / "pareto.svg", alt=PARETO_ALT)


if __name__ == "__main__":
    write_all()
