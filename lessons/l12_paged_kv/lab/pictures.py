"""The lesson's four pictures: tables over one pool, where the memory goes, what a block costs, and
a step whose sequences have different lengths.

    python -m lessons.l12_paged_kv.lab.pictures
        writes tables.svg, waste.svg, block_size.svg and ragged.svg beside this file

All of it is counted, simulated (lab/workload.py) or predicted (lab/ragged.py), nothing is timed.
"""

from pathlib import Path

from matplotlib.patches import Patch

from lessons.l10_flash_decoding.lab.occupancy import slots
from lessons.l10_flash_decoding.lab.pictures import IDLE, panel
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l12_paged_kv.lab.ragged import (
    BATCHES,
    DECODE,
    equal_bounds,
    listed_bounds,
    pieces_of,
    predicted_s,
)
from lessons.l12_paged_kv.lab.workload import ALPACA, MAX_TOKENS, MEMORY_TOKENS, SHAREGPT, reports
from lessons.l12_paged_kv.more.waste import Lengths, expected_empty_share, waste_of_blocks
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, foot, frame, key, save_svg, style
from lessons.toolbox.draw.plotting import block_map, class_plot
from lessons.toolbox.measure.hardware import CHIPS

HERE = Path(__file__).parent
BLOCK_SIZES = [2**n for n in range(9)]


def example_tables() -> tuple[BlockManager, dict[str, int]]:
    """Three requests and a fork in a pool of 32 blocks of 4: the manager, and tokens by name."""
    manager = BlockManager(32, 4)
    held = [10, 7, 11]
    # A token a step for each sequence, so that blocks interleave.
    for step in range(max(held)):
        for sequence, tokens in enumerate(held):
            if step < tokens:
                manager.grow(sequence, step, step + 1)
    manager.fork(2, 3)
    manager.grow(3, 11, 12)  # the copy
    manager.grow(2, 11, 14)  # its own block, and a new one
    return manager, {"a request": 10, "another": 7, "sample 1": 14, "sample 2": 12}


def draw_tables() -> ClassFigure:
    """Three tables over one pool, and a fourth that shares."""
    manager, tokens = example_tables()
    tables = {name: manager.tables[n] for n, name in enumerate(tokens)}
    shared = len(set(tables["sample 1"]) & set(tables["sample 2"]))
    return block_map(
        tables,
        num_blocks=manager.num_blocks,
        title=f"Each table names its blocks in order; two samples share {shared} blocks of their "
        "prompt",
        caption="blocks of 4 tokens; pale: not filled; drawn from a BlockManager's tables",
        block_size=manager.block_size,
        context_lens=tokens,
        columns=8,
    )


@style()
def draw_waste(steps: int = 1500) -> ClassFigure:
    """Where one memory goes, for two mixes and four ways to hand it out."""
    parts = {
        "holds tokens": ("used", PALETTE[0]),
        "reserved for later": ("reserved", PALETTE[1]),
        "never used (internal)": ("internal", PALETTE[3]),
        "holes too small (external)": ("external", "#666666"),
        "free": ("free", "#F0F0F0"),
    }
    found = {mix: reports(mix, steps) for mix in (ALPACA, SHAREGPT)}
    chat = found[SHAREGPT]
    best, worst = chat["blocks of 16"], chat["reserve 2048"]
    fig, ax = frame(
        f"The same memory holds {best.at_once / worst.at_once:.1f} times as many chats in blocks: "
        f"{best.waste['used']:.0%} of it holds tokens instead of {worst.waste['used']:.0%}",
        "",
        (10.5, 5.6),
    )
    row, ticks = 0.0, []
    for mix, by_policy in found.items():
        for policy, report in by_policy.items():
            left = 0.0
            for name, colour in parts.values():
                width = report.waste[name]
                ax.barh(row, width, 0.8, left, facecolor=colour, edgecolor="#888888", lw=0.5)
                left += width
            ax.text(1.01, row, f"{report.at_once:.0f} at once", va="center")
            short = mix.name.split(" ")[0]
            ticks.append((row, f"{short}: {policy}"))
            row += 1
        row += 0.5
    ax.set_yticks(*zip(*ticks))
    ax.set_xlim(0, 1.16)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    ax.set_ylim(row, -0.7)
    ax.set_xlabel("share of the memory, mean over time")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    key(ax, [Patch(facecolor=colour, label=label) for label, (_, colour) in parts.items()])
    foot(
        fig,
        f"simulated: {MEMORY_TOKENS} tokens of memory, at most {MAX_TOKENS} a request, lengths "
        "exponential with the means of the PagedAttention paper's figure 11",
    )
    return fig


def counted_share(lengths: list[int], block_size: int) -> float:
    """The empty share of the blocks of sequences that hold `lengths` tokens."""
    held = [Lengths(n, n) for n in lengths]
    blocks = sum(-(-n // block_size) for n in lengths)
    return waste_of_blocks(held, blocks, block_size).empty_share


def draw_block_size() -> ClassFigure:
    """What a larger block leaves empty, counted and by the formula."""
    short, long = ALPACA.lengths(4000), SHAREGPT.lengths(4000)

    def counted(lengths):
        return [(100 * counted_share(lengths, size),) * 3 for size in BLOCK_SIZES]

    def formula(lengths):
        mean = sum(lengths) / len(lengths)
        return [(100 * expected_empty_share(mean, size),) * 3 for size in BLOCK_SIZES]

    at_16 = counted_share(short, 16), counted_share(long, 16)
    return class_plot(
        BLOCK_SIZES,
        {
            "short, counted": ("naive", counted(short)),
            "short, formula": ("library", formula(short)),
            "chat, counted": ("optimized", counted(long)),
            "chat, formula": ("library", formula(long)),
        },
        title=f"Blocks of 16 leave {at_16[0]:.1%} empty for short requests, {at_16[1]:.1%} for "
        "chats",
        xlabel="tokens in a block",
        ylabel="% of the owned slots that stay empty",
        caption=f"counted over 4000 requests at their ends · {ALPACA.name}, mean "
        f"{sum(short) / len(short):.0f} tokens · {SHAREGPT.name}, mean "
        f"{sum(long) / len(long):.0f} tokens",
    )


@style()
def draw_ragged() -> ClassFigure:
    """Which slots of a GPU are busy in a step of one long sequence among many short ones."""
    chip, lengths = CHIPS["h200"], BATCHES["1 of 32k, 63 of 512"]
    equal, listed = equal_bounds(lengths, chip), listed_bounds(lengths, chip)
    equal_us = 1e6 * predicted_s(equal, chip, False)
    listed_us = 1e6 * predicted_s(listed, chip, True)
    # The long sequence is the first, and its splits are the first of the list.
    kv_heads, cut = DECODE.num_programs, len(listed[0])
    panels = {
        f"one split each: {equal_us:.0f} µs": (equal, False, kv_heads),
        f"by length, the long one in {cut} splits: {listed_us:.0f} µs": (
            listed,
            True,
            kv_heads * cut,
        ),
    }
    height, shown_us, gap = slots(chip), 290, 30
    fig, ax = frame(
        f"Predicted: split by length, one 32k context among 63 short ones takes {listed_us:.0f} µs "
        f"instead of {equal_us:.0f}",
        f"predicted by lab/ragged.py, not measured · one layer, {DECODE.shape}, 16 bits · "
        f"{chip.name}, {chip.sm_count} SMs with 2 slots each",
        (11, 5.2),
    )
    for n, (title, (bounds, longest_first, of_the_long)) in enumerate(panels.items()):
        left, ran = n * (shown_us + gap), pieces_of(bounds, chip, longest_first)
        panel(ax, left, ran, shown_us, lambda p, m=of_the_long: PALETTE[int(p.program < m)])
        ax.text(left, -10, title, fontweight="bold", va="bottom")
    ax.set_xlim(-3, 2 * (shown_us + gap))
    ax.set_ylim(height + 2, -40)
    ax.set_yticks([0.5, height - 0.5], ["slot 1", f"slot {height}"])
    ticks = [0, 100, 200]
    ax.set_xticks([n * (shown_us + gap) + t for n in range(2) for t in ticks], ticks * 2)
    ax.set_xlabel("time (µs), the same scale in both panels")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    colours = {"the 32k sequence": PALETTE[1], "the others": PALETTE[0], "idle": IDLE}
    key(ax, [Patch(facecolor=colour, label=name) for name, colour in colours.items()])
    return fig


if __name__ == "__main__":
    save_svg(draw_tables(), HERE / "tables.svg")
    save_svg(draw_waste(), HERE / "waste.svg")
    save_svg(draw_block_size(), HERE / "block_size.svg")
    save_svg(draw_ragged(), HERE / "ragged.svg")
