"""The lesson's pictures: rows on their way to experts of other GPUs, and how much each GPU then
has; and for the notebook's slider, from when on experts compute longer than they read.

    python -m lessons.l23_experts.lab.pictures

writes the first, and that of dispatch_picture.py, as SVG files beside this file.
"""

import sys
from pathlib import Path

import torch

from lessons.l20_parallelism.lab.figures import box, words
from lessons.l23_experts.lab.dispatch_picture import draw_dispatch
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    HALO,
    HATCHES,
    PALETTE,
    ROLES,
    SMALL,
    ClassFigure,
    frame,
    label_column,
    style,
)
from lessons.toolbox.measure.hardware import CHIPS, Chip

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
        f"Mixtral's 8 experts on {gpus} GPUs: the busiest has {most / mean:.2f}× the mean, and all "
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


# ---------------------------------------------------------------- bytes or arithmetic

TOKENS = [2**power for power in range(14)]
LAYER_WEIGHTS = 8 * 3 * 4096 * 14336  # of Mixtral's experts, however many they are cut into
VALUE_BYTES = 2


def seconds_of(num_tokens: int, num_experts: int, top_k: int, chip: Chip) -> tuple[float, float]:
    """How long an even router's experts are read, and how long they compute."""
    share = top_k / num_experts
    read = LAYER_WEIGHTS * (1 - (1 - share) ** num_tokens)
    flops = 2 * LAYER_WEIGHTS * share * num_tokens
    return VALUE_BYTES * read / chip.memory_bytes_per_s, flops / chip.bf16_flops_per_s


@style()
def draw_reads(num_experts: int = 8, top_k: int = 2, gpu: str = "h100") -> ClassFigure:
    """Both times over the tokens of a step, and where they meet."""
    chip = CHIPS[gpu]
    ridge = round(chip.bf16_flops_per_s / chip.memory_bytes_per_s)  # as the README does
    times = [seconds_of(tokens, num_experts, top_k, chip) for tokens in TOKENS]
    fig, ax = frame(
        f"{num_experts} experts, {top_k} a token: arithmetic takes longer from "
        f"{ridge * num_experts / top_k:.0f} tokens on",
        f"PREDICTED, nothing measured · {LAYER_WEIGHTS / 1e9:.2f} billion weights in 16 bits · "
        f"even router · {chip.name}",
        (9, 4.8),
    )
    labels = []
    for name, role, marker, values in zip(
        ("reads", "computes"), ("optimized", "naive"), "so", zip(*times)
    ):
        look = dict(color=ROLES[role].colour, marker=marker, ls="-" if role == "naive" else "--")
        milliseconds = [1e3 * seconds for seconds in values]
        ax.plot(TOKENS, milliseconds, **look)
        labels.append((TOKENS[-1], milliseconds[-1], name, ROLES[role].colour))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(TOKENS[::2], [f"{tokens:,}" for tokens in TOKENS[::2]])
    ax.set_yticks([1e-3, 1e-2, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    ax.minorticks_off()
    ax.set_xlabel("tokens of a step")
    ax.set_ylabel("ms a layer (lower is better)")
    ax.grid(True, axis="y")
    label_column(ax, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "experts": (
        draw_experts,
        "Left, a table of how many rows each of four GPUs sends to each. Right, a bar for each "
        "GPU: how many rows it has to compute, with a dashed line at the mean that the highest "
        "exceeds.",
    ),
    "dispatch": (
        draw_dispatch,
        "A token and sixteen experts on four ranks, twice. Left, six arrows lead from the token to "
        "the six experts that it chose. Right, three arrows lead to the three ranks that hold "
        "them, where a sum is made.",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
