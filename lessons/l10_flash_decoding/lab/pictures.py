"""The lesson's two pictures, both from the model in occupancy.py: which slots of a GPU have work,
and what that costs.

    python -m lessons.l10_flash_decoding.lab.pictures
        writes occupancy.svg and predicted.svg beside this file
"""

from pathlib import Path

from matplotlib.patches import Patch, Rectangle

from lessons.l10_flash_decoding.lab.occupancy import (
    BLOCK_N,
    Decode,
    busy_share,
    predicted_s,
    slots,
    split_pieces,
)
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, key, save_svg, style
from lessons.toolbox.draw.plotting import class_plot
from lessons.toolbox.measure.hardware import CHIPS

CHIP = CHIPS["h200"]
WORK = Decode(context=65536)
SHOWN = (1, 4, 32, 36)  # splits
SHOWN_US = 130  # microseconds of each panel
CONTEXTS = [2**n for n in range(10, 18)]
SPLIT_SIZE = 512  # keys
HERE = Path(__file__).parent
SVG, PREDICTED_SVG = HERE / "occupancy.svg", HERE / "predicted.svg"
ALT = (
    "Four panels, one row per slot of an H200, time to the right. One split: 8 of 264 slots are "
    "busy, for 512 microseconds. "
    "4 splits: 32 slots. 32 splits: 256 slots, all done after 56. 36 splits: 264 slots, then 24 "
    "programs in a second wave."
)
PREDICTED_ALT = (
    "Predicted time of batch-1 decode attention over the context: one program per KV head stays "
    "far above the "
    "floor, splits come close to it from 16k on."
)


@style()
def draw() -> ClassFigure:
    """Which slots are busy when, for a growing number of splits."""
    waves = {"first wave": PALETTE[0], "second wave": PALETTE[1]}
    pieces = {splits: split_pieces(WORK, splits, chip=CHIP) for splits in SHOWN}
    end_us = {splits: 1e6 * max(piece.end_s for piece in ran) for splits, ran in pieces.items()}
    height, gap = slots(CHIP), 14
    fig, ax = frame(
        f"Predicted: one program per KV head leaves {1 - busy_share(pieces[1], height):.0%} of an "
        f"H200 idle: "
        f"{end_us[1]:.0f} µs, in 32 splits {end_us[32]:.0f} µs",
        f"predicted by occupancy.py, not measured · batch 1, context {WORK.context // 1024}k, "
        f"heads {WORK.num_heads}/"
        f"{WORK.num_kv_heads}, head_dim {WORK.head_dim}, 16 bits · {CHIP.sm_count} SMs with 2 "
        f"slots each",
        (11, 5.2),
    )
    for n, (splits, ran) in enumerate(pieces.items()):
        left = n * (SHOWN_US + gap)
        ax.add_patch(
            Rectangle((left, 0), SHOWN_US, height, facecolor="#F4F4F4", edgecolor="#BBBBBB", lw=1)
        )
        for piece in ran:
            start_us, width_us = 1e6 * piece.start_s, 1e6 * (piece.end_s - piece.start_s)
            colour = waves["second wave" if piece.start_s else "first wave"]
            ax.add_patch(
                Rectangle(
                    (left + start_us, piece.slot),
                    min(width_us, SHOWN_US - start_us),
                    1,
                    facecolor=colour,
                    lw=0,
                )
            )
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
        + [Patch(facecolor="#F4F4F4", edgecolor="#BBBBBB", label="idle")],
    )
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
    save_svg(draw(), SVG, alt=ALT)
    save_svg(draw_predicted(), PREDICTED_SVG, alt=PREDICTED_ALT)
