"""The lesson's pictures: three prompts over one set of blocks, what traffic has in common, and what
cascade attention saves. All are counted, none is measured.

    python -m lessons.l13_prefix_caching.lab.pictures
        writes blocks.svg, rates.svg and cascade.svg beside this file
"""

import random
import sys

from matplotlib.patches import Patch, Rectangle

from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.lab.cascade_traffic import Shared, cascade_bytes, separate_bytes
from lessons.l13_prefix_caching.lab.traffic import TRACES, replay
from lessons.l13_prefix_caching.optimized import Node, RadixTree
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, key, style
from lessons.toolbox.draw.plotting import bars, class_plot

SIZE = 4  # tokens of a block
COMPUTED, KNOWN, PARTIAL = PALETTE[1], PALETTE[0], "#DDDDDD"
BLOCKS_ALT = (
    "Left, three prompts as rows of blocks: the first computes all of them, the second finds its "
    "first two known, the third its first three. The last, partly filled block of each is its own. "
    "Right, the radix tree of the three: an edge of two shared blocks, from which two edges branch."
)
RATES_ALT = (
    "Bars for five kinds of traffic: nearly every request of four of them has a hit; the share of "
    "tokens saved is 89 percent for agents, but 7 percent for documents after a short instruction."
)
CASCADE_ALT = (
    "Counted megabytes of decode attention over the batch: read apart they grow with the batch, "
    "read together they stay near those of the shared prefix until many suffixes join it."
)
EXAMPLE = ("AAAABBBBCCCCDD", "AAAABBBBEEEEFFFFG", "AAAABBBBEEEEHH")  # one letter, one token


def served(prompts: tuple[str, ...]) -> tuple[RadixTree, list[tuple[list[int], int]]]:
    """The tree after these prompts, all still running, and each one's blocks and known ones."""
    manager = CachingBlockManager(16, SIZE, RadixTree(SIZE))
    rows = []
    for sequence, prompt in enumerate(prompts):
        tokens = [ord(letter) for letter in prompt]
        held = manager.reuse(sequence, tokens)
        manager.grow(sequence, held, len(tokens))
        manager.remember(sequence, tokens)
        rows.append((manager.tables[sequence], held // SIZE))
    return manager.cache, rows


@style()
def draw() -> ClassFigure:
    """Three prompts and the tree of their blocks."""
    tree, rows = served(EXAMPLE)
    computed = sum(len(prompt) - SIZE * known for prompt, (_, known) in zip(EXAMPLE, rows))
    total = sum(map(len, EXAMPLE))
    fig, ax = frame(
        f"Of {total} tokens in three prompts {computed} are computed, {total - computed} were "
        "known",
        f"blocks of {SIZE} tokens; the number in a block is its place in the pool · counted",
        (11, 4.2),
    )
    for row, (prompt, (blocks, known)) in enumerate(zip(EXAMPLE, rows)):
        ax.text(-0.15, row + 0.4, f"prompt {row + 1}", ha="right", va="center")
        for index, block in enumerate(blocks):
            letters = prompt[index * SIZE : (index + 1) * SIZE]
            whole = len(letters) == SIZE
            colour = KNOWN if index < known else COMPUTED if whole else PARTIAL
            box(ax, index * 1.1, row, f"{letters}\n{block}", colour)
    ax.text(6.6, -0.35, "the radix tree", ha="left", va="center", fontweight="bold")
    draw_tree(ax, tree.root, 5.7, iter(range(9)))
    ax.set_xlim(-1.2, 12.2)
    ax.set_ylim(3.1, -0.7)
    ax.axis("off")
    looks = {"known": KNOWN, "computed": COMPUTED, "computed, not full: not shared": PARTIAL}
    key(ax, [Patch(facecolor=colour, label=name) for name, colour in looks.items()])
    return fig


def draw_tree(ax, node: Node, left: float, rows) -> float:
    """The edges below a node, each beside its blocks. Returns the height of the first."""
    heights = []
    for child in node.children.values():
        right = left + 0.9 + 1.1 * len(child.blocks)
        at = draw_tree(ax, child, right, rows) if child.children else next(rows)
        for index, (tokens, block) in enumerate(zip(child.keys, child.blocks)):
            text = "".join(map(chr, tokens)) + f"\n{block}"
            box(ax, left + 0.9 + 1.1 * index, at, text, COMPUTED)
        heights.append(at)
    for at in heights:
        ax.plot([left, left + 0.4, left + 0.9], [heights[0] + 0.4, at + 0.4, at + 0.4], color="k")
    return heights[0]


def box(ax, x: float, y: float, text: str, colour: str) -> None:
    """A block."""
    ax.add_patch(Rectangle((x, y), 1, 0.8, facecolor=colour, edgecolor="white", alpha=0.75))
    ax.text(x + 0.5, y + 0.4, text, ha="center", va="center", family="monospace")


def draw_rates() -> ClassFigure:
    """The two rates of hits for each kind of traffic."""
    hits = {name: replay(trace(random.Random(13))) for name, trace in TRACES.items()}
    by_request = [100 * h.rate_per_request for h in hits.values()]
    by_token = [100 * h.rate_per_token for h in hits.values()]
    at = list(hits).index("documents")
    return bars(
        list(hits),
        {
            "requests with a hit": ("library", by_request),
            "prompt tokens not computed": ("optimized", by_token),
        },
        title=f"{by_request[at]:.0f} % of the requests about documents have a hit, and "
        f"{by_token[at]:.0f} % of their tokens are saved",
        ylabel="%",
        better="higher",
        caption="counted by lab/traffic.py, without a model · blocks of 16, no eviction",
    )


def draw_cascade() -> ClassFigure:
    """Megabytes of one layer's decode attention, apart and together."""
    batches = [1, 2, 4, 8, 16, 32, 64, 128]
    shapes = [Shared(batch, 8192, 256) for batch in batches]
    ways = {"each reads the prefix": separate_bytes, "read together": cascade_bytes}
    series = {
        label: (role, [(way(shape).total / 1e6,) * 3 for shape in shapes])
        for (label, way), role in zip(ways.items(), ("naive", "optimized"))
    }
    once = [(8192 + 256 * batch) * shapes[0].row_bytes / 1e6 for batch in batches]
    ratio = separate_bytes(shapes[5]).total / cascade_bytes(shapes[5]).total
    return class_plot(
        batches,
        series,
        floor=once,
        floor_label="prefix and suffixes once",
        title=f"Counted: {batches[5]} sequences after 8192 shared tokens move {ratio:.0f}x fewer "
        "bytes together",
        xlabel="sequences that share the prefix",
        ylabel="MB of one layer's decode attention",
        caption="counted by lab/cascade_traffic.py, not measured · heads 32/8, head_dim 128, 16 "
        "bits, 256 own tokens each",
    )


PICTURES: dict[str, Picture] = {
    "blocks": (draw, BLOCKS_ALT),
    "rates": (draw_rates, RATES_ALT),
    "cascade": (draw_cascade, CASCADE_ALT),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
