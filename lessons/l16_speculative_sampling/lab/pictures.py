"""The lesson's three pictures: what is accepted and what is left, the speed-up by the formula, and
the batch at which it loses. All of it is computed, nothing is timed.

    python -m lessons.l16_speculative_sampling.lab.pictures

writes rule.svg, speed.svg and batches.svg beside this file.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.ticker import FuncFormatter

from lessons.l16_speculative_sampling.lab.experiments import (
    BATCHES,
    COUNT,
    predicted_cost_ratio,
    predicted_speedup,
)
from lessons.l16_speculative_sampling.more.speed import acceptance, speedup
from lessons.l16_speculative_sampling.naive import residual
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ClassFigure,
    frame,
    key,
    label_column,
    save_svg,
    size_number,
    style,
)

HERE = Path(__file__).parent
WORDS = ("cat", "dog", "bird", "fish", "ant")
P, Q = (0.4, 0.3, 0.2, 0.1, 0.0), (0.2, 0.5, 0.1, 0.1, 0.1)
COST_RATIO = 0.1
ACCEPTED, REST, LOST = PALETTE[0], PALETTE[1], "white"


@style()
def draw_rule(p=P, q=Q) -> ClassFigure:
    """Which share of each word is accepted, rejected or drawn afterwards. p, q: of each word."""
    p, q = torch.tensor(p), torch.tensor(q)
    shared, rest = torch.minimum(p, q), (p - q).clamp(min=0)
    surplus = (q - p).clamp(min=0)
    drawn = residual(p, q) / residual(p, q).sum()
    alpha = float(acceptance(p, q))
    fig, ax = frame(
        f"What target and draft share is accepted: {alpha:.1f} of all drafts. The rest of the "
        "target comes from the residual",
        "blue and hatched together are the target's probabilities, blue and dotted the draft's",
        (10, 4.8),
    )
    x = np.arange(len(p))
    shares = (
        (shared, 0 * shared, ACCEPTED, "", "min(p, q): accepted"),
        (rest, shared, REST, "//", "max(0, p - q): the residual"),
        (surplus, shared + rest, LOST, "..", "q above p: rejected"),
    )
    handles = [
        ax.bar(
            x,
            height.tolist(),
            0.6,
            bottom.tolist(),
            color=colour,
            hatch=hatch,
            ec=GREY,
            label=label,
        )
        for height, bottom, colour, hatch, label in shares
    ]
    top = torch.maximum(p, q)
    for index, share in enumerate(drawn.tolist()):
        if share:
            ax.text(index, top[index] + 0.01, f"drawn with {share:.2f}", ha="center")
    ax.set_xticks(x, WORDS[: len(p)])
    ax.set_ylim(0, float(top.max()) * 1.15)
    ax.set_ylabel("probability")
    key(ax, handles)
    return fig


@style()
def draw_speed(cost_ratio: float = COST_RATIO) -> ClassFigure:
    """The formula over alpha, one line for each K."""
    alphas = np.linspace(0, 0.99, 100)
    best = speedup(0.8, COUNT, cost_ratio)
    better = [a for a in alphas if speedup(a, 8, cost_ratio) > speedup(a, COUNT, cost_ratio)]
    begins = f"only from α = {better[0]:.2f} on" if better else "for no α"
    fig, ax = frame(
        f"At c = {cost_ratio:g} and α = 0.8, K = {COUNT} gives {best:.1f}x; K = 8 gives more than "
        f"K = {COUNT} {begins if not better or better[0] > alphas[1] else 'for every α'}",
        "computed: (1 + α + … + α^K) / (K c + 1), more/speed.py",
        (10, 4.8),
    )
    labels = []
    for count, colour, dash in zip((2, 4, 8), PALETTE, ("--", "-", "-.")):
        gains = [speedup(alpha, count, cost_ratio) for alpha in alphas]
        ax.plot(alphas, gains, color=colour, ls=dash)
        labels.append((alphas[-1], gains[-1], f"K = {count}", colour))
    ax.axhline(1, color=GREY, lw=1, ls=":")
    labels.append((alphas[-1], 1, "plain decoding", GREY))
    ax.set_xlabel("α, the probability that a drafted token stays if all before it have stayed")
    ax.set_ylabel("speed-up (higher is better)")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, None)
    ax.grid(True)
    label_column(ax, labels)
    return fig


@style()
def draw_batches(count: int = COUNT) -> ClassFigure:
    """Predicted: an 8B draft beside a 70B target, over the batch."""
    gains = {a: [predicted_speedup(a, batch, count) for batch in BATCHES] for a in (0.6, 0.8, 0.9)}
    first_loss = next((b for b, gain in zip(BATCHES, gains[0.8]) if gain < 1), None)
    loses = f"loses from a batch of {first_loss} on" if first_loss else "never loses here"
    fig, ax = frame(
        f"K = {count} with α = 0.8: {gains[0.8][0]:.1f}x alone, and it {loses}",
        f"predicted, not measured: Llama-3 8B drafts for 70B on H100s, context 2048, "
        f"c = {predicted_cost_ratio():.2f}, no overhead",
        (10, 4.8),
    )
    labels = []
    for (alpha, line), colour, marker in zip(gains.items(), PALETTE, "osD"):
        ax.plot(BATCHES, line, color=colour, marker=marker)
        labels.append((BATCHES[-1], line[-1], f"α = {alpha}", colour))
    ax.axhline(1, color=GREY, lw=1, ls=":")
    labels.append((BATCHES[-1], 1, "plain decoding", GREY))
    ax.set_xscale("log", base=2)
    ax.set_xticks(BATCHES[::2])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_number(value)))
    ax.set_xlabel("sequences of a batch")
    ax.set_ylabel("speed-up (higher is better)")
    ax.set_ylim(0, None)
    ax.grid(True)
    label_column(ax, labels)
    return fig


if __name__ == "__main__":
    save_svg(draw_rule(), HERE / "rule.svg")
    save_svg(draw_speed(), HERE / "speed.svg")
    save_svg(draw_batches(), HERE / "batches.svg")
