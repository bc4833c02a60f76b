"""The lesson's five pictures. All are computed, predicted or simulated, none is measured.

    python -m lessons.l26_kv_transfer.lab.pictures

writes pauses.svg, links.svg, pages.svg, gather.svg and apart.svg beside this file. The last two
read results/counted/l26_gather.json and results/simulated/l26_apart.json.
"""

import json
import sys
from pathlib import Path

from matplotlib.patches import Rectangle

from lessons.l26_kv_transfer.costs import (
    CONTEXT,
    GPU_HOUR,
    LINKS,
    MODELS,
    cheapest,
    in_words,
    token_of,
    ways,
)
from lessons.l26_kv_transfer.lab.predicted import RECORD
from lessons.l26_kv_transfer.lab.simulated import draw_apart
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    GREY,
    HALO,
    PALETTE,
    ROLES,
    ClassFigure,
    draw_lines,
    frame,
    label_column,
    log_axis,
    number,
    style,
)

MODEL = "Llama-3-8B, GQA"
SHOWN = ("Llama-2-7B, MHA", MODEL, "Llama-3-8B, FP8 cache", "DeepSeek-V3, MLA")
WAYS = {
    "HBM": ("keep it in HBM", PALETTE[5], "-."),
    "host": ("host memory", PALETTE[0], "-"),
    "disk": ("disk", PALETTE[2], ":"),
    "compute": ("compute it again", ROLES["floor"].colour, "--"),
}


@style()
def draw_pauses(model: str = MODEL, waiting: float = 1.0) -> ClassFigure:
    """Dollars for a million tokens over the pause: four lines, and where they cross. waiting: the
    share of the copies for which the GPU waits.
    """
    lines = ways(token_of(*MODELS[model]), waiting=waiting)
    found = cheapest(lines)
    places = ", ".join(
        f"{WAYS[name][0]} from {in_words(since)} on" for name, since in found if since
    )
    fig, ax = frame(
        f"Cheapest after a pause: {places}",
        f"predicted · {model}, contexts of {CONTEXT}, one H100 at {GPU_HOUR.dollars:.2f} dollars "
        f"an hour that waits for {waiting:.0%} of the copies · prices: costs.py",
        (11, 5.4),
    )
    low, high = 0.2, 1e5
    pauses = [low * (high / low) ** (n / 200) for n in range(201)]
    labels = []
    for line in lines:
        text, colour, dash = WAYS[line.name]
        dollars = [1e6 * line.dollars(pause) for pause in pauses]
        ax.plot(pauses, dollars, color=colour, ls=dash)
        inside = min(len(pauses) - 1, max(i for i, y in enumerate(dollars) if y < 1))
        labels.append((pauses[inside], dollars[inside], text, colour))
    for name, since in found[1:]:
        line = next(each for each in lines if each.name == name)
        y = 1e6 * line.dollars(since)
        ax.plot([since], [y], "o", color=WAYS[name][1], zorder=5)
        ax.annotate(
            in_words(since), (since, y), (0, -20), textcoords="offset points", ha="center",
            color=WAYS[name][1], fontweight="bold", path_effects=HALO,
        )  # fmt: skip
    log_axis(ax.xaxis, low, high)
    log_axis(ax.yaxis, 1e-4, 1)
    ax.grid(True)
    ax.set_xlabel("pause until the tokens are needed again, seconds")
    ax.set_ylabel("dollars for a million tokens\n(lower is better)")
    label_column(ax, labels)
    return fig


@style()
def draw_links(models: tuple[str, ...] = SHOWN) -> ClassFigure:
    """A panel for each model: a token's time over each link, and computing it again."""
    tokens = {name: token_of(*MODELS[name]) for name in models}
    wins = {
        name: sum(token.move_s(rate) < token.compute_s for rate in LINKS.values())
        for name, token in tokens.items()
    }
    least = min(wins, key=wins.get)
    fig, axes = frame(
        f"The fewer bytes a token keeps, the slower a link may be: {wins[least]} of {len(LINKS)} "
        f"links beat computing for {least}, all of them for {max(wins, key=wins.get)}",
        f"predicted · data sheets' bandwidths; computing: one H100 at 60 % of its FLOP/s, contexts "
        f"of {CONTEXT}",
        (13, 4.6),
        (1,) * len(models),
    )
    rows = range(len(LINKS))
    for ax, (name, token) in zip(axes, tokens.items()):
        times = [1e6 * token.move_s(rate) for rate in LINKS.values()]
        again = 1e6 * token.compute_s
        ax.axvline(again, color=ROLES["floor"].colour, ls="--")
        for row, time in zip(rows, times):
            role = ROLES["optimized" if time < again else "naive"]
            ax.plot([time], [row], role.markers[0], color=role.colour, ms=9)
        ax.text(again, -0.75, "compute", ha="center", color=GREY)
        ax.set_title(name, loc="left", fontsize=12)
        log_axis(ax.xaxis, 0.5, 500)
        ax.set(ylim=(len(LINKS) - 0.5, -1.1), yticks=list(rows), yticklabels=[])
        ax.grid(True)
        ax.set_xlabel("µs a token")
    axes[0].set_yticks(list(rows), list(LINKS))
    return fig


@style()
def draw_pages(layers: int = 3, num_blocks: int = 6, chosen: tuple[int, ...] = (4, 1)):
    """K and V of a pool as rows of pages, and the rows into which two blocks are packed."""
    fig, ax = frame(
        f"{len(chosen)} blocks of a pool are {2 * layers * len(chosen)} pages; packed they are "
        f"{len(chosen)} rows",
        f"a model of {layers} layers · each square is a page: what a block holds in one layer of K "
        "or V",
        (11, 4.8),
    )
    for tensor, name in enumerate("KV"):
        for layer in range(layers):
            y = -(tensor * (layers + 0.6) + layer)
            ax.text(-0.3, y + 0.4, f"{name}, layer {layer}", ha="right", va="center")
            for block in range(num_blocks):
                square(ax, block, y, f"{block}", colour_of(block, chosen))
            place = tensor * layers + layer
            for row, block in enumerate(chosen):
                x, at = num_blocks + 2 + place, -1.6 - 1.8 * row
                square(ax, x, at, f"{name}{layer}", colour_of(block, chosen))
    for row, block in enumerate(chosen):
        ax.text(num_blocks + 1.8, -1.2 - 1.8 * row, f"{block}", ha="right", va="center")
    ax.text(num_blocks + 2, 0.2, "packed", fontweight="bold", va="center")
    ax.text(0, 1.3, "the pool, blocks 0 to 5", fontweight="bold", va="center")
    ax.set(xlim=(-2.2, num_blocks + 2.5 + 2 * layers), ylim=(-2 * layers - 0.4, 1.8))
    ax.set_axis_off()
    return fig


def colour_of(block: int, chosen: tuple[int, ...]) -> str:
    """A colour for a block that is packed; grey for the others."""
    return PALETTE[chosen.index(block)] if block in chosen else "#DDDDDD"


def square(ax, x: float, y: float, text: str, colour: str) -> None:
    """A page, with what is written in it."""
    ax.add_patch(Rectangle((x, y), 0.95, 0.85, color=colour, alpha=0.75))
    ax.text(x + 0.47, y + 0.42, text, ha="center", va="center")


@style()
def draw_gather(record: Path = RECORD) -> ClassFigure:
    """Predicted time over the number of blocks: small copies, one launch a tensor, the link."""
    points = json.loads(record.read_text(encoding="utf-8"))
    last = points[-1]
    fig, ax = frame(
        f"{last['blocks']} blocks: {last['copies']} copies take "
        f"{last['copies_s'] / last['kernel_s']:.0f} times as long as {last['launches']} launches, "
        f"and {last['copies_s'] / last['pcie_s']:.0f} times as long as the link",
        "predicted, not measured · Llama-3-8B in bfloat16, blocks of 16 tokens, H100; 5 µs a copy",
        (11, 5.4),
    )
    blocks = [point["blocks"] for point in points]
    series = {
        "small copies": ("naive", "copies_s"),
        "one launch a tensor": ("optimized", "kernel_s"),
        "PCIe 5.0, afterwards": ("library", "pcie_s"),
    }
    times = {
        label: (blocks, [1e6 * point[key] for point in points])
        for label, (_, key) in series.items()
    }
    labels = draw_lines(ax, times, (role for role, _ in series.values()))
    reads = [1e6 * point["floor_s"] / 2 for point in points]
    ax.plot(blocks, reads, color=ROLES["floor"].colour, ls="--")
    labels.append((blocks[-1], reads[-1], "reading the pages once", ROLES["floor"].colour))
    ax.set_xscale("log", base=2)
    ax.set_xticks(blocks, [number(count) for count in blocks])
    log_axis(ax.yaxis, 0.5, 2e5)
    ax.grid(True)
    ax.set_xlabel("blocks that are packed")
    ax.set_ylabel("µs (lower is better)")
    label_column(ax, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "pauses": (draw_pauses, None),
    "links": (draw_links, None),
    "pages": (draw_pages, None),
    "gather": (draw_gather, None),
    "apart": (draw_apart, None),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
