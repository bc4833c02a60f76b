"""The lesson's pictures, all from the model in occupancy.py: which slots of a GPU have work, and
what that costs.

    python -m lessons.l10_flash_decoding.lab.pictures
        writes occupancy.svg and predicted.svg beside this file
"""

from functools import cache
from pathlib import Path

from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from lessons.l10_flash_decoding.lab.occupancy import (
    BLOCK_N,
    Decode,
    busy_share,
    predicted_s,
    slots,
    split_pieces,
)
from lessons.l10_flash_decoding.splits import cdiv, wave_efficiency
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, key, save_svg, style
from lessons.toolbox.draw.plotting import class_plot
from lessons.toolbox.measure.hardware import CHIPS

CHIP = CHIPS["h200"]
WORK = Decode(context=65536)
SHOWN = (1, 4, 32, 36)  # splits
SHOWN_US = 130  # microseconds of each panel
CONTEXTS = [2**n for n in range(10, 18)]
SPLIT_SIZE = 512  # keys
MOST_SPLITS = 48  # of the slider
IDLE = "#F4F4F4"
HERE = Path(__file__).parent


@style()
def draw() -> ClassFigure:
    """Which slots are busy when, for a growing number of splits."""
    waves = {"first wave": PALETTE[0], "second wave": PALETTE[1]}
    pieces = {splits: split_pieces(WORK, splits, chip=CHIP) for splits in SHOWN}
    end_us = {splits: 1e6 * max(piece.end_s for piece in ran) for splits, ran in pieces.items()}
    height, gap = slots(CHIP), 14
    fig, ax = frame(
        f"Predicted: one program per KV head leaves {1 - busy_share(pieces[1], height):.0%} of an "
        f"H200 idle: {end_us[1]:.0f} µs, in 32 splits {end_us[32]:.0f} µs",
        f"predicted by occupancy.py, not measured · batch 1, context {WORK.context // 1024}k, "
        f"heads {WORK.num_heads}/{WORK.num_kv_heads}, head_dim {WORK.head_dim}, 16 bits · "
        f"{CHIP.sm_count} SMs with 2 slots each",
        (11, 5.2),
    )
    for n, (splits, ran) in enumerate(pieces.items()):
        left = n * (SHOWN_US + gap)
        panel(ax, left, ran, SHOWN_US, lambda piece: PALETTE[1 if piece.start_s else 0])
        title = f"{splits} split{'s' if splits > 1 else ''}: {len(ran)} programs"
        ax.text(left, -32, title, fontweight="bold", va="bottom")
        end = f"ends at {end_us[splits]:.0f} µs" + (" →" if end_us[splits] > SHOWN_US else "")
        ax.text(left, -6, f"{end}, busy {busy_share(ran, height):.0%}", va="bottom")
    ax.set_xlim(-2, len(SHOWN) * (SHOWN_US + gap))
    ax.set_ylim(height + 2, -56)
    ax.set_yticks([0.5, height - 0.5], ["slot 1", f"slot {height}"])
    ticks = [0, 50, 100]
    ax.set_xticks(
        [n * (SHOWN_US + gap) + t for n in range(len(SHOWN)) for t in ticks], ticks * len(SHOWN)
    )
    ax.set_xlabel("time (µs), the same scale in each panel")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    key(
        ax,
        [Patch(facecolor=colour, label=name) for name, colour in waves.items()]
        + [Patch(facecolor=IDLE, edgecolor="#BBBBBB", label="idle")],
    )
    return fig


def panel(ax, left, ran, shown_us, colour_of) -> None:
    """One row a slot, a bar for each program that ran, from `left` on."""
    look = {"facecolor": IDLE, "edgecolor": "#BBBBBB", "lw": 1}
    ax.add_patch(Rectangle((left, 0), shown_us, slots(CHIP), **look))
    bars = []
    for piece in ran:
        start, end = (left + min(1e6 * s, shown_us) for s in (piece.start_s, piece.end_s))
        top, bottom = piece.slot, piece.slot + 1
        bars.append([(start, top), (end, top), (end, bottom), (start, bottom)])
    ax.add_collection(PolyCollection(bars, facecolors=[colour_of(piece) for piece in ran], lw=0))


@cache
def predicted_by_splits(batch: int) -> list[float]:
    """Predicted µs of `batch` sequences of 64k keys in 1 to MOST_SPLITS splits."""
    work = Decode(WORK.context, batch)
    return [1e6 * predicted_s(work, splits, chip=CHIP) for splits in range(1, MOST_SPLITS + 1)]


@style()
def draw_waves(splits: int = 36, batch: int = 1) -> ClassFigure:
    """For a slider: which slots have work, and beside it the time over the number of splits."""
    work, height = Decode(WORK.context, batch), slots(CHIP)
    ran = split_pieces(work, splits, chip=CHIP)
    waves, share = cdiv(len(ran), height), wave_efficiency(len(ran), height)
    end_us, times_us = 1e6 * max(piece.end_s for piece in ran), predicted_by_splits(batch)
    fig, (left, right) = frame(
        f"{len(ran)} programs on {height} slots: {waves} wave{'s' * (waves > 1)}, {share:.0%} "
        f"full, {times_us[splits - 1]:.0f} µs",
        f"predicted by occupancy.py, not measured · batch {batch}, context "
        f"{WORK.context // 1024}k, heads {work.num_heads}/{work.num_kv_heads}, head_dim "
        f"{work.head_dim}, 16 bits · {CHIP.name}",
        (11, 4.8),
        (1, 1),
    )
    panel(left, 0, ran, end_us, lambda piece: PALETTE[int(2 * piece.start_s > piece.end_s)])
    left.set(xlim=(0, end_us), ylim=(height + 2, -2), xlabel="time (µs)")
    left.set_yticks([0.5, height - 0.5], ["slot 1", f"slot {height}"])
    left.xaxis.set_major_locator(MaxNLocator(4))
    counts = range(1, MOST_SPLITS + 1)
    right.plot(counts, times_us, color=PALETTE[0])
    right.plot(splits, times_us[splits - 1], "o", ms=12, mfc="none", mec=PALETTE[1], mew=3)
    chosen = work.num_splits(CHIP)
    right.axvline(chosen, color="#444444", ls="--", lw=1.6)
    after = chosen < MOST_SPLITS / 2
    right.annotate(
        f"chosen: {chosen}",
        (chosen, 0),
        (6 if after else -6, 8),
        textcoords="offset points",
        ha="left" if after else "right",
    )
    right.set(xlabel="splits", ylabel="µs of one layer\n(lower is better)")
    right.set_ylim(0, 1.1 * max(times_us))
    right.grid(True, axis="y")
    return fig


def draw_predicted() -> ClassFigure:
    """Predicted microseconds over the context, batch 1: unsplit, split, fixed split size, and the
    floor.
    """
    works = [Decode(context) for context in CONTEXTS]

    def series(**how):
        return [(1e6 * predicted_s(work, **how),) * 3 for work in works]

    longest = works[-2]
    faster = predicted_s(longest, 1) / predicted_s(longest)
    return class_plot(
        CONTEXTS,
        {
            "one program per KV head": ("naive", series(num_splits=1)),
            "split": ("optimized", series()),
            f"split size {SPLIT_SIZE}": ("optimized", series(split_size=SPLIT_SIZE)),
        },
        floor=[1e6 * work.kv_bytes / CHIP.memory_bytes_per_s for work in works],
        floor_label="KV read once",
        title=f"Predicted, not measured: at batch 1 and {longest.context // 1024}k tokens "
        f"splitting is {faster:.0f}x faster",
        xlabel="tokens in the context",
        ylabel="µs per layer",
        caption=f"model of occupancy.py for an {CHIP.name} · batch 1, heads "
        f"{longest.num_heads}/{longest.num_kv_heads}, head_dim "
        f"{longest.head_dim}, 16 bits, tiles of {BLOCK_N} keys · launches not counted",
    )


if __name__ == "__main__":
    save_svg(draw(), HERE / "occupancy.svg")
    save_svg(draw_predicted(), HERE / "predicted.svg")
