"""The lesson's picture: rows on their way to experts of other GPUs, and how much each GPU then has.

    python -m lessons.l23_experts.lab.pictures

writes an SVG file beside this file.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from lessons.l20_parallelism.lab.figures import box, words
from lessons.toolbox.draw.figure import (
    HALO,
    HATCHES,
    PALETTE,
    ROLES,
    SMALL,
    ClassFigure,
    frame,
    save_svg,
    style,
)

HERE = Path(__file__).parent


def routed(tokens: int = 64, gpus: int = 4, experts: int = 8, top: int = 2) -> torch.Tensor:
    """Tokens that each GPU sends to each: [gpus, gpus], of `tokens` on each GPU. Logits are drawn
    at random, and some experts are liked more, as real routers do.
    """
    generator = torch.Generator().manual_seed(20)
    liked = 0.6 * torch.randn(experts, generator=generator)
    logits = torch.randn(gpus, tokens, experts, generator=generator) + liked
    chosen = logits.topk(top).indices.flatten(1) // (experts // gpus)  # the GPU of each expert
    return torch.stack([row.bincount(minlength=gpus) for row in chosen])


@style()
def draw_experts(gpus: int = 4) -> ClassFigure:
    """Who sends how many tokens to whom, and how much each GPU then has to do."""
    sent = routed(gpus=gpus)
    work = sent.sum(0)
    most, mean = int(work.max()), float(work.float().mean())
    fig, (left, right) = frame(
        f"Mixtral's 8 experts on {gpus} GPUs: the fullest has {most / mean:.2f}× the mean, and all "
        "wait for it",
        "64 tokens on each GPU, two experts each · router logits drawn at random, some experts "
        "liked more",
        (12, 5.4),
        (1.1, 1),
    )
    for source in range(gpus):
        words(left, -0.15, source + 0.5, f"GPU {source}", ha="right", fontweight="bold")
        words(left, source + 0.5, -0.25, f"GPU {source}", fontweight="bold")
        for target in range(gpus):
            count = int(sent[source, target])
            look = dict(fc=PALETTE[target], alpha=0.15 + 0.75 * count / int(sent.max()))
            box(left, target + 0.03, source + 0.03, 0.94, 0.94, "", **look)
            words(left, target + 0.5, source + 0.5, str(count), size=14, path_effects=HALO)
    words(left, gpus / 2, -0.65, "rows received by")
    left.text(-0.95, gpus / 2, "rows sent by", rotation=90, ha="center", va="center", size=SMALL)
    left.set(xlim=(-1.1, gpus + 0.05), ylim=(gpus + 0.05, -0.9))
    left.set_axis_off()
    for target in range(gpus):
        look = dict(color=PALETTE[target], hatch=HATCHES[target], edgecolor="white")
        right.bar(target, int(work[target]), 0.7, **look)
        words(right, target, int(work[target]) + 4, str(int(work[target])), fontweight="bold")
    right.axhline(mean, color=ROLES["floor"].colour, ls="--", lw=1.6)
    words(right, gpus - 0.45, mean + 6, f"mean {mean:.0f}", ha="left", color=ROLES["floor"].colour)
    right.set_xticks(
        range(gpus), [f"GPU {gpu}\nexperts\n{2 * gpu}, {2 * gpu + 1}" for gpu in range(gpus)]
    )
    right.set_ylabel("rows to compute (lower is better)")
    right.set(xlim=(-0.5, gpus + 0.4), ylim=(0, 1.15 * most))
    return fig


PICTURES: dict[str, tuple[Callable[[], ClassFigure], str]] = {
    "experts": (
        draw_experts,
        "Left, a table of how many rows each of four GPUs sends to each. Right, a bar for each "
        "GPU: how many rows it has to compute, with a dashed line at the mean that the highest "
        "exceeds.",
    ),
}


def main() -> None:
    """Write it."""
    for name, (draw, alt) in PICTURES.items():
        save_svg(draw(), HERE / f"{name}.svg", alt=alt)


if __name__ == "__main__":
    main()
