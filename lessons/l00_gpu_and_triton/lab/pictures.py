"""The lesson's pictures: a GPU from the outside in, what is stored where and how fast it is; what a
warp fetches; how a kernel's numbers become addresses; and what single instructions do.

    python -m lessons.l00_gpu_and_triton.lab.pictures

writes gpu.svg, program.svg, gaps.svg, instructions.svg and banks.svg beside this file. Nothing in
them is timed.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lessons.l00_gpu_and_triton import optimized
from lessons.l00_gpu_and_triton.coalescing import (
    LANES,
    SECTOR_BYTES,
    predicted_s,
    sectors_of_stride,
)
from lessons.l00_gpu_and_triton.lab import instructions
from lessons.toolbox.draw import plotting
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import HALO, PALETTE, ClassFigure, frame, style
from lessons.toolbox.draw.film import film
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.hardware import GB, KIB, MIB, REGISTER_BYTES, Chip, lookup

HERE = Path(__file__).parent
CHIPS = ("t4", "a100", "h100", "b200")
COUNT = 2**24


def size_of(num_bytes: float) -> str:
    """A size as people say it: 256 KiB, 50 MiB, 80 GB."""
    if num_bytes >= GB:
        return f"{num_bytes / GB:.0f} GB"
    number, unit = (num_bytes / MIB, "MiB") if num_bytes >= MIB else (num_bytes / KIB, "KiB")
    # two digits, because the 2.5 MiB of a T4 would be rounded to 2
    return f"{number:.2g} {unit}" if number < 10 else f"{number:.0f} {unit}"


def rate_of(bytes_per_s: float) -> str:
    """3.35 TB/s, 320 GB/s."""
    if bytes_per_s >= 1e12:
        return f"{bytes_per_s / 1e12:.3g} TB/s"
    return f"{bytes_per_s / 1e9:.0f} GB/s"


def memory_table(names=CHIPS) -> list[list[str]]:
    """A row for each chip: SMs, registers, shared memory and its rate, L2, HBM and its rate."""
    return [_memory_row(lookup(name)) for name in names]


def _memory_row(chip: Chip) -> list[str]:
    shared = chip.sm_count * chip.shared_memory_bytes
    return [
        chip.name,
        str(chip.sm_count),
        size_of(chip.register_bytes),
        size_of(shared),
        rate_of(chip.shared_bytes_per_s),
        size_of(chip.l2_bytes),
        size_of(chip.memory_bytes),
        rate_of(chip.memory_bytes_per_s),
    ]


# ---------------------------------------------------------------- a GPU


@style()
def draw_gpu(name: str = "h100") -> ClassFigure:
    """One chip from its memory down to a lane, with sizes and rates."""
    chip = lookup(name)
    fig, ax = frame(
        f"Near the lanes memory is fast and small, far from them slow and large ({chip.name})",
        f"{chip.source}; shared memory: 128 bytes a clock and SM at {chip.clock_hz / 1e9:.2f} GHz",
        (11, 6.2),
    )
    ax.set(xlim=(0, 22), ylim=(0, 12.4), xticks=[], yticks=[])
    ax.set_axis_off()
    _box(ax, 0.2, 0.3, 21.6, 1.5, PALETTE[1], f"HBM: {size_of(chip.memory_bytes)}, "
         f"{rate_of(chip.memory_bytes_per_s)}.  Your tensors live here.")  # fmt: skip
    _box(ax, 0.2, 2.3, 21.6, 1.2, PALETTE[4], f"L2 cache: {size_of(chip.l2_bytes)}, for all SMs")
    for index in range(6):
        label = "SM" if index < 5 else "…"
        _box(ax, 0.2 + 1.35 * index, 4.2, 1.15, 7.2, "#EEEEEE", label)
    left, right = 8.6, 21.8
    _box(ax, left, 4.2, right - left, 7.2, "#FAFAFA", "")
    ax.text(left + 0.3, 10.85, "One SM, enlarged. A program of Triton runs in one SM.", va="center")
    shared = size_of(chip.shared_memory_bytes)
    rate = rate_of(chip.shared_bytes_per_s / chip.sm_count)
    _box(ax, left + 0.3, 4.5, right - left - 0.6, 1.1, PALETTE[2],
         f"shared memory: {shared}, {rate}; all threads of a block")  # fmt: skip
    _box(ax, left + 0.3, 6.0, right - left - 0.6, 1.1, PALETTE[6],
         f"registers: {size_of(REGISTER_BYTES)}; each lane has its own, up to 255")  # fmt: skip
    for warp in range(4):
        y = 7.45 + 0.75 * warp
        ax.text(left + 0.35, y + 0.25, f"warp {3 - warp}", va="center")
        for lane in range(LANES):
            x = left + 2.2 + lane * 0.33
            ax.add_patch(Rectangle((x, y), 0.27, 0.5, facecolor=PALETTE[0], edgecolor="white"))
    ax.text(0.2, 11.9, f"{chip.sm_count} SMs, streaming multiprocessors: they do the work")
    return fig


def _box(ax, x, y, width, height, colour, text) -> None:
    ax.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor="#222222", alpha=0.75)
    )
    look = {"ha": "center", "va": "center", "path_effects": HALO}
    ax.text(x + width / 2, y + height / 2, text, **look)


# ---------------------------------------------------------------- programs and gaps


def draw_program() -> Figure | None:
    """The film of `scale_kernel` on 50 elements."""
    x = torch.arange(50.0, device=default_device())
    return film(
        lambda: optimized.scale(x, 2.0, block=16),
        {"x": x},
        programs=[0, 3],
        title="The same kernel, another program number: the mask cuts the last block",
    )


def draw_gaps(chip: str = "h100", itemsize: int = 4) -> ClassFigure:
    """Predicted: a copy of 2^24 elements that are further and further apart."""
    strides = [1, 2, 4, 8, 16, 32]
    found = lookup(chip)
    times = [predicted_s(stride, COUNT, found, itemsize) for stride in strides]
    floor = 2 * COUNT * itemsize / found.memory_bytes_per_s
    most = sectors_of_stride(32, itemsize)
    slowest = times[-1] / times[0]
    return plotting.class_plot(
        strides,
        {"with gaps": ("naive", [(1e3 * t,) * 3 for t in times])},
        floor=[1e3 * floor] * len(strides),
        floor_label="what is asked for",
        title=f"Predicted: gaps make this copy up to {slowest:.1f}x slower, "
        f"because a warp fetches {most} sectors in place of {sectors_of_stride(1, itemsize)}",
        xlabel="distance of two elements that are read",
        ylabel="time (ms)",
        caption=f"predicted, not measured · {found.name} · {COUNT} elements of {itemsize} bytes · "
        f"sectors of {SECTOR_BYTES} bytes",
    )


PICTURES: dict[str, Picture] = {
    "gpu": (draw_gpu, None),
    "program": (draw_program, None),
    "gaps": (draw_gaps, None),
    "instructions": (instructions.draw_recorded_still, None),
    "banks": (instructions.draw_recorded_banks, None),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
