"""The lesson's pictures: how a token's row becomes attention in both forms, bytes a token beside
GQA, and FLOPs where they cross.

    python -m lessons.l06_mla.lab.pictures
        writes flow.svg, bytes.svg, crossover.svg beside this file (counted, not measured)
"""

import sys
from pathlib import Path

from matplotlib.patches import FancyBboxPatch

from lessons.l06_mla.lab.counts import (
    COMPARED,
    V3,
    absorbed_flops,
    cached_kib_per_token,
    decode_bytes,
    decode_flops,
    expanded_flops,
    expanded_kib_per_token,
    pairs,
)
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import GREY, PALETTE, ROLES, ClassFigure, frame, style
from lessons.toolbox.draw.plotting import bars, class_plot, roofline
from lessons.toolbox.measure.hardware import CHIPS

HERE, HEADS, CONTEXT = Path(__file__).parent, 128, 8192
FLOW_ALT = (
    "Two ways from the same cached row of 512 + 64 values. Expanded: W_UK and W_UV make k, 128 "
    "heads of 192, and v, 128 heads of 128, for every cached token. Absorbed: W_UK goes into the "
    "query, attention has one KV head, W_UV comes after it."
)
BYTES_ALT = (
    "KiB per token at 16 bits: DeepSeek-V2-Lite keeps 30.4, V2 67.5, V3 68.6; Llama-3 8B keeps "
    "128, 70B 320, 405B 504; all heads of V3 would take 4880."
)
CROSSOVER_ALT = (
    "FLOPs over new tokens after 8192 cached ones: the expanded form starts high and flat, the "
    "absorbed low and linear; they cross at 169 new tokens."
)
ROOFLINE_ALT = (
    "H200's roofline: absorbed decode with 16 heads is at 30 FLOP per byte on the memory roof, "
    "with 128 heads at 242, just beyond the ridge."
)


def box(
    ax, x: float, y: float, text: str, colour: str, width: float = 2.2, height: float = 0.85
) -> None:
    """A labelled box whose middle is (x, y), in the axes' units."""
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(
        FancyBboxPatch(
            corner,
            width,
            height,
            boxstyle="round,pad=0.03",
            facecolor=colour,
            edgecolor="black",
            alpha=0.3,
        )
    )
    ax.text(x, y, text, ha="center", va="center")


def arrow(ax, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    """An arrow, in the axes' units."""
    ax.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
    )


@style()
def draw_flow() -> ClassFigure:
    """Both forms from the same row of the cache, with DeepSeek-V3's widths."""
    row, heads = V3.latent_dim, HEADS * (V3.qk_head_dim + V3.v_head_dim)
    fig, ax = frame(
        f"A token keeps {row} values; k and v of {HEADS} heads, {heads} values, are made from them "
        f"or never made",
        "DeepSeek-V3, one layer · widths in numbers, Hq = 128 heads · W_UK and W_UV are the two "
        "halves of kv_b_proj, head by head",
        (13, 6.6),
    )
    naive, fast, kept, plain = (
        ROLES["naive"].colour,
        ROLES["optimized"].colour,
        PALETTE[2],
        "#999999",
    )
    box(ax, 1.1, 4.0, "token x\n7168", plain, 1.5)
    box(ax, 4.0, 4.9, "q_nope Hq × 128\nq_pe Hq × 64, rotated", plain, 2.9, 1.0)
    box(ax, 4.0, 2.7, "c_kv 512, normed\nk_pe 64, rotated", kept, 2.9, 1.0)
    arrow(ax, (1.9, 4.2), (2.5, 4.8))
    arrow(ax, (1.9, 3.8), (2.5, 2.9))
    bold = dict(va="center", fontweight="bold")
    ax.text(
        4.0,
        1.85,
        f"the cache: one row of {row}\na token, for all heads",
        ha="center",
        color=kept,
        **bold,
    )

    ax.text(6.3, 6.55, "absorbed: the query comes to the latents", color=fast, **bold)
    box(ax, 7.9, 5.7, "q · W_UK ‖ q_pe\nHq × 576", fast, 2.4, 1.0)
    box(ax, 11.3, 5.7, "attention, 1 KV head\nk 576, v = its first 512", fast, 3.0, 1.0)
    box(ax, 14.9, 5.7, "out · W_UV\nHq × 128", fast, 2.2, 1.0)
    arrow(ax, (5.5, 5.1), (6.65, 5.6), colour=fast)
    arrow(ax, (9.15, 5.7), (9.75, 5.7), colour=fast)
    arrow(ax, (5.5, 3.0), (11.1, 5.15), colour=fast)
    ax.text(9.35, 3.75, "rows as they are stored: 576", ha="center", color=fast, **bold)
    arrow(ax, (12.85, 5.7), (13.75, 5.7), colour=fast)
    ax.text(13.3, 6.4, "Hq × 512", ha="center", color=fast, **bold)

    ax.text(6.3, 0.35, "expanded: the latents come to the query", color=naive, **bold)
    box(ax, 7.9, 1.4, "every cached row\n· W_UK, · W_UV", naive, 2.4, 1.0)
    box(ax, 11.3, 1.4, "attention, Hq KV heads\nk Hq × 192, v Hq × 128", naive, 3.0, 1.0)
    box(ax, 14.9, 1.4, "out\nHq × 128", naive, 2.2, 1.0)
    arrow(ax, (5.5, 2.4), (6.65, 1.6), colour=naive)
    arrow(ax, (9.15, 1.4), (9.75, 1.4), colour=naive)
    arrow(ax, (12.85, 1.4), (13.75, 1.4), colour=naive)
    arrow(ax, (4.9, 4.35), (10.9, 1.95), colour=naive)
    box(ax, 17.2, 3.55, "W_O\n7168", plain, 1.4)
    arrow(ax, (16.05, 5.4), (16.9, 4.05))
    arrow(ax, (16.05, 1.7), (16.9, 3.05))
    ax.set_xlim(0.2, 18.0)
    ax.set_ylim(0, 6.9)
    ax.axis("off")
    return fig


def draw_bytes() -> ClassFigure:
    """KiB a token at 16 bits: what each model keeps, and what k and v of all its query heads would
    take.
    """
    kept = [cached_kib_per_token(model) for model in COMPARED]
    every = [expanded_kib_per_token(model) for model in COMPARED]
    v3, llama = COMPARED[2:4]
    return bars(
        [model.name for model in COMPARED],
        {"every head's k and v": ("naive", every), "kept": ("optimized", kept)},
        title=f"DeepSeek-V3 keeps {kept[2]:.0f} KiB a token; Llama-3-8B, "
        f"{v3.params / llama.params:.0f} times smaller, keeps {kept[3]:.0f}",
        ylabel="KiB per token, all layers, 16 bits",
        caption="Counted by lab/counts.py from the shapes of the published config.json files",
    )


def draw_crossover() -> ClassFigure:
    """GFLOPs of one layer's attention after 8192 tokens, in both forms, over the number of new
    tokens.
    """
    new = [2**n for n in range(12)]
    flops = {
        name: [(form(n, CONTEXT + n, HEADS) / 1e9,) * 3 for n in new]
        for name, form in (("expanded", expanded_flops), ("absorbed", absorbed_flops))
    }
    crossing = next(
        n
        for n in range(1, 999)
        if absorbed_flops(n, CONTEXT + n, 1) > expanded_flops(n, CONTEXT + n, 1)
    )
    return class_plot(
        new,
        {"expanded": ("naive", flops["expanded"]), "absorbed": ("optimized", flops["absorbed"])},
        title=f"Absorbing one new token takes a "
        f"{flops['expanded'][0][0] / flops['absorbed'][0][0]:.0f}th of the "
        f"FLOPs; from {crossing} tokens on it takes more",
        xlabel=f"new tokens after {CONTEXT} cached ones",
        ylabel="GFLOP of one layer's attention",
        caption=f"Counted: lessons/l06_mla/lab/counts.py · DeepSeek-V3, {HEADS} heads · the "
        f"crossing does not depend "
        "on the number of heads",
    )


@style()
def draw_choice(new_tokens: int = 1, context: int = 8192, heads: int = HEADS) -> ClassFigure:
    """GFLOPs of one layer's attention for new_tokens after `context` cached ones, in both forms,
    each cut into what makes or moves rows and what the pairs cost.
    """
    total = context + new_tokens
    rows = {
        "expanded": (expanded_flops(new_tokens, total, heads), 192 + 128, "naive"),
        "absorbed": (absorbed_flops(new_tokens, total, heads), 576 + 512, "optimized"),
    }
    cheaper, dearer = sorted(rows, key=lambda form: rows[form][0])
    fig, ax = frame(
        f"{new_tokens} new after {context}: {cheaper} takes "
        f"{rows[dearer][0] / rows[cheaper][0]:.3g} times fewer FLOPs",
        f"DeepSeek-V3, one layer, {heads} heads · light: products with W_UK and W_UV, expanded for "
        f"all {total} tokens, absorbed for the new ones · dark: attention · computed",
        (10, 3.6),
    )
    for y, (flops, products, role) in enumerate(rows.values()):
        attention = 2 * heads * pairs(new_tokens, total) * products
        look = ROLES[role]
        ax.barh(y, (flops - attention) / 1e9, 0.7, facecolor=look.colour, alpha=0.35)
        ax.barh(y, attention / 1e9, 0.7, left=(flops - attention) / 1e9, facecolor=look.colour)
        ax.annotate(
            f"{flops / 1e9:.3g} GFLOP",
            (flops / 1e9, y),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=look.colour,
            fontweight="bold",
        )
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(1.6, -0.6)
    ax.set_xlim(0, 1.3 * rows[dearer][0] / 1e9)
    ax.set_xlabel("GFLOP, lower is better")
    return fig


def draw_roofline() -> ClassFigure:
    """Where absorbed decode is under H200's data sheet: a prediction, no measurement."""
    chip = CHIPS["h200"]
    points = {}
    for heads, role in ((16, "optimized"), (128, "naive")):
        intensity = decode_flops(1, 1, heads) / decode_bytes(1, 1)
        ceiling = min(chip.bf16_flops_per_s, intensity * chip.memory_bytes_per_s)
        points[f"{heads} heads: at most {ceiling / 1e12:.0f} TFLOP/s"] = (role, intensity, ceiling)
    return roofline(
        points,
        bandwidths={"HBM": chip.memory_bytes_per_s},
        peaks={"bfloat16": chip.bf16_flops_per_s},
        title="A row read once serves all heads: 16 of them wait for memory, 128 for the matrix "
        "units",
        caption=f"Predicted, not measured · absorbed decode attention, bfloat16 · {chip.name} by "
        "its data sheet",
    )


PICTURES: dict[str, Picture] = {
    "flow": (draw_flow, FLOW_ALT),
    "bytes": (draw_bytes, BYTES_ALT),
    "crossover": (draw_crossover, CROSSOVER_ALT),
    "roofline": (draw_roofline, ROOFLINE_ALT),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
