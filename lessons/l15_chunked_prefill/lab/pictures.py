"""The lesson's two pictures, both predicted on a virtual clock: what a long prompt does to eight
running requests, and what the budget trades.

    python -m lessons.l15_chunked_prefill.lab.pictures

writes spike.svg and trade_off.svg beside this file.
"""

import sys
from itertools import pairwise

from matplotlib.ticker import FuncFormatter

from lessons.l14_continuous_batching.clock import Log
from lessons.l15_chunked_prefill.lab.experiments import (
    LONG_AT_S,
    LONG_PROMPT,
    gaps_s,
    long_prompt,
    long_prompt_steps,
    trade_off,
)
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    GREY,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    number,
    style,
)

BUDGET = 2048
MODEL = "predicted, not measured · Llama-3-8B on an H100, 60 % of its rates, 3 ms a step"


def gaps_over_time(log: Log, row: int = 0) -> list[tuple[float, float]]:
    """(when a token came, milliseconds since the token before) of one answer."""
    return [(after, 1e3 * (after - before)) for before, after in pairwise(log.token_s[row])]


@style()
def draw_spike(chunked: int = BUDGET) -> ClassFigure:
    """Inter-token latency of one of the eight while a prompt of 32k tokens comes: prompts first,
    and in chunks with this budget.
    """
    ways = {None: ("naive", "prompts first"), chunked: ("optimized", f"chunks, budget {chunked}")}
    logs = {budget: long_prompt(budget) for budget in ways}
    worst = {budget: 1e3 * max(gaps_s(log, range(8))) for budget, log in logs.items()}
    fig, ax = frame(
        f"A {LONG_PROMPT // 1024}k prompt stops eight answers for {worst[None]:.0f} ms; in "
        f"{long_prompt_steps(logs[chunked])} chunks for {worst[chunked]:.0f} ms at most",
        f"{MODEL} · eight decodes",
        (10, 5.0),
    )
    labels = []
    for budget, log in logs.items():
        role, label = ways[budget]
        colour, markers = ROLES[role][:2]
        times, gaps = zip(*gaps_over_time(log))
        # A step begins at the token before and ends at the token that it is about.
        look = {"drawstyle": "steps-pre", "marker": markers[0], "ms": 4, "lw": 1.2}
        ax.plot(times, gaps, color=colour, ls=ROLES[role].dash, **look)
        labels.append((times[-1], gaps[-1], label, colour))
    ax.axvline(LONG_AT_S, color=GREY, lw=1, ls=":")
    ax.text(LONG_AT_S, worst[None] * 1.25, " the long prompt arrives", color=GREY, va="bottom")
    log_axis(ax.yaxis, 5, worst[None] * 2)
    ax.set_ylim(5, worst[None] * 2.4)
    ax.grid(True, axis="y")
    ax.set_xlabel("seconds since the start")
    ax.set_ylabel("ms between two tokens\n(lower is better)")
    label_column(ax, labels)
    return fig


@style()
def draw_trade_off() -> ClassFigure:
    """A curve of budgets: first tokens against next tokens."""
    points = trade_off()
    (least, *_, (most, first_s, gap_s)) = points
    fig, ax = frame(
        f"Budget {most}, not {least[0]}: median first token {1e3 * (least[1] - first_s):.0f} ms "
        f"earlier, 99th percentile of gaps {gap_s / least[2]:.0f}x",
        f"{MODEL} · 120 requests at 6 a second",
        (10, 5.2),
    )
    colour, markers = ROLES["optimized"][:2]
    gaps, firsts = [1e3 * gap for *_, gap in points], [1e3 * first for _, first, _ in points]
    ax.plot(gaps, firsts, color=colour, marker=markers[0])
    for (budget, *_), x, y in zip(points, gaps, firsts):
        place = (6, 8) if budget < most else (6, -18)
        ax.annotate(str(budget), (x, y), place, textcoords="offset points", color=colour)
    ax.set_xlim(0, max(gaps) * 1.15)
    ax.set_ylim(0, max(firsts) * 1.2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(number))
    ax.grid(True)
    ax.set_xlabel("99th percentile of the inter-token latency, ms (lower is better)")
    ax.set_ylabel("median time to first token, ms\n(lower is better)")
    return fig


PICTURES: dict[str, Picture] = {
    "spike": (draw_spike, None),
    "trade_off": (draw_trade_off, None),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
