"""The lesson's pictures: the bytes of an adapter and how many fit, a batch whose rows are sorted
into segments and tiles, and what adapters add to a decode step.

    python -m lessons.l21_multi_lora.lab.pictures

writes bytes.svg, batch.svg and loses.svg beside this file. Nothing is timed: bytes are computed,
and the batch is what `AdapterBatch.of` makes of its rows.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from lessons.l01_roofline.planner.models import find_model
from lessons.l21_multi_lora.batch import BLOCK_M, NO_ADAPTER, AdapterBatch
from lessons.l21_multi_lora.lab.sizes import (
    ALL_LINEAR,
    ATTENTION,
    RANKS,
    adapter_bytes,
    adapters_that_fit,
    base_bytes,
    step_factor,
)
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    save_svg,
    style,
)
from lessons.toolbox.measure.hardware import CHIPS

HERE = Path(__file__).parent
BYTES_ALT = (
    "Left: bytes of an adapter over its rank for three choices of matrices, rising lines far below "
    "the base model. Right: how many adapters fit beside the base, a falling line, and how many "
    "merged models fit, a low flat line."
)
BATCH_ALT = (
    "Eleven rows of a batch in four colours and grey. In the middle the same rows sorted by "
    "adapter into four segments, without the grey ones. On the right tiles of at most three rows, "
    "each with the slot that it reads."
)
LOSES_ALT = (
    "What adapters add to the bytes of a decode step, over the number of different adapters in the "
    "batch, for ranks 8, 16 and 64: lines that rise from under one percent."
)
GROUPS = {"all seven": ALL_LINEAR, "attention": ATTENTION, "q and v": ("q_proj", "v_proj")}


@style()
def draw_bytes(model: str = "llama-3-8b", gpu: str = "h100", marked: int = 16) -> ClassFigure:
    """Bytes by rank, and how many fit."""
    shape, memory = find_model(model), CHIPS[gpu].memory_bytes
    base, here = base_bytes(shape), adapter_bytes(shape, marked)
    fit = adapters_that_fit(shape, marked, memory)
    fig, (left, right) = frame(
        f"Rank {marked} on all seven matrices is {here / 1e6:.0f} MB: {fit} adapters fit beside "
        f"the base, or {memory // base} merged models",
        f"computed · {model}, 16 bits, a GPU of {memory / 1e9:.0f} GB, no cache",
        (12, 5),
        (1, 1),
    )
    labels = []
    for (name, matrices), colour, marker in zip(GROUPS.items(), PALETTE, "osD"):
        sizes = [adapter_bytes(shape, rank, matrices) / 1e6 for rank in RANKS]
        left.plot(RANKS, sizes, color=colour, marker=marker)
        labels.append((RANKS[-1], sizes[-1], name, colour))
    floor = ROLES["floor"].colour
    left.axhline(base / 1e6, color=floor, ls="--", lw=1.5)
    labels.append((RANKS[-1], base / 1e6, "the base", floor))
    log_axis(left.yaxis, 1, 50_000)
    left.set_ylabel("MB of an adapter (lower is better)")
    counts = [adapters_that_fit(shape, rank, memory) for rank in RANKS]
    right.plot(RANKS, counts, color=ROLES["optimized"].colour, marker="s")
    naive = ROLES["naive"].colour
    right.axhline(memory // base, color=naive, ls=ROLES["naive"].dash)
    log_axis(right.yaxis, 1, 5000)
    right.set_ylabel(f"how many fit in {memory / 1e9:.0f} GB (higher is better)")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(RANKS, [str(rank) for rank in RANKS])
        ax.set_xlabel("rank")
        ax.axvline(marked, color=GREY, lw=1, ls=":")
        ax.grid(True)
    label_column(left, labels)
    blue = ROLES["optimized"].colour
    ends = [(RANKS[-1], counts[-1], "adapters", blue)]
    label_column(right, [*ends, (RANKS[-1], memory // base, "merged models", naive)])
    return fig


ROWS = (2, 0, NO_ADAPTER, 3, 0, 1, 2, 0, NO_ADAPTER, 3, 0)
NAMES = ("sql", "docs", "tests", "chat")


@style()
def draw_batch(row_slots: Sequence[int] = ROWS, names=NAMES, block_m: int = 3) -> ClassFigure:
    """The rows as they come, sorted into segments, and cut into tiles."""
    batch = AdapterBatch.of(row_slots, block_m=block_m)
    tiles = [tuple(tile) for tile in batch.tiles.tolist() if tile[2]]
    num_sorted = batch.num_rows_with_adapter
    fig, ax = frame(
        f"{num_sorted} rows of {len(batch.segments)} adapters are one launch of {len(tiles)} "
        f"tiles; {len(row_slots) - num_sorted} rows have no adapter and no tile",
        f"rows sorted by AdapterBatch.of; tiles of {block_m} rows here, {BLOCK_M} in the kernels",
        (11, 6.2),
    )
    ax.set_axis_off()
    for row, slot in enumerate(row_slots):
        _box(ax, 0, row, f"row {row}" + ", none" * (slot == NO_ADAPTER), _colour(slot))
    for place, row in enumerate(batch.order.tolist()[:num_sorted]):
        slot = row_slots[row]
        _box(ax, 3, place, f"row {row}", _colour(slot))
        ax.plot([1.5, 3], [row + 0.45, place + 0.45], color=_colour(slot), lw=1.2)
    for slot, first, count in tiles:
        middle = first + count / 2 - 0.05
        last = first + count - 0.1
        ax.plot([4.65, 4.75, 4.75, 4.65], [first, first, last, last], color=_colour(slot))
        words = f"tile: slot {slot} ({names[slot % len(names)]}), first {first}, count {count}"
        ax.text(4.95, middle, words, va="center", color=_colour(slot), fontweight="bold")
    for x, title in ((0, "the batch"), (3, "order"), (4.95, "tiles")):
        ax.text(x, -0.5, title, fontweight="bold", va="center")
    ax.set_xlim(-0.1, 9.2)
    ax.set_ylim(len(row_slots) + 0.2, -1)
    return fig


def _colour(slot: int) -> str:
    return GREY if slot == NO_ADAPTER else (*PALETTE[:4], *PALETTE[5:])[slot % 6]


def _box(ax: plt.Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.add_patch(plt.Rectangle((x, y), 1.5, 0.9, color=colour, alpha=0.25))
    ax.text(x + 0.75, y + 0.45, text, ha="center", va="center")


@style()
def draw_loses(model: str = "llama-3-8b", batch: int = 64) -> ClassFigure:
    """What different adapters add to the bytes of a step, as many as there are rows at most."""
    shape = find_model(model)
    counts = [2**n for n in range(batch.bit_length())]
    most = {rank: 100 * (step_factor(shape, rank, batch) - 1) for rank in (8, 16, 64)}
    fig, ax = frame(
        f"{batch} adapters in a batch add {most[16]:.0f}% to the bytes of a step at rank 16, "
        f"{most[64]:.0f}% at rank 64",
        f"predicted from bytes · {model}, 16 bits, all seven matrices, weights only, no cache",
        (10, 5),
    )
    labels = []
    for rank, colour, marker in zip(most, PALETTE, "osD"):
        added = [100 * (step_factor(shape, rank, count) - 1) for count in counts]
        ax.plot(counts, added, color=colour, marker=marker)
        labels.append((counts[-1], added[-1], f"rank {rank}", colour))
    ax.axhline(100, color=ROLES["floor"].colour, ls="--", lw=1.5)
    ax.annotate("as much as the base", (1, 100), (0, 5), textcoords="offset points", color=GREY)
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.set_xlabel("different adapters in the batch")
    log_axis(ax.yaxis, 0.2, 300)
    ax.set_ylabel("% more bytes a step (lower is better)")
    ax.grid(True)
    label_column(ax, labels)
    return fig


if __name__ == "__main__":
    save_svg(draw_bytes(), HERE / "bytes.svg", alt=BYTES_ALT)
    save_svg(draw_batch(), HERE / "batch.svg", alt=BATCH_ALT)
    save_svg(draw_loses(), HERE / "loses.svg", alt=LOSES_ALT)
