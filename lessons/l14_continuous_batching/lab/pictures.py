"""The lesson's pictures, all counted or simulated: which request is on which place, what the
variance of lengths is worth, and what happens when requests arrive faster.

    python -m lessons.l14_continuous_batching.lab.pictures

writes slots.svg, gain.svg and load.svg beside this file.
"""

import sys
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median

import numpy as np
from matplotlib.ticker import FuncFormatter

from lessons.l14_continuous_batching.clock import Arrival
from lessons.l14_continuous_batching.lab.cost import StepCost, fit, recorded_samples
from lessons.l14_continuous_batching.lab.occupancy import (
    gain,
    gantt_rows,
    occupancy,
    offline,
    simulate,
)
from lessons.l14_continuous_batching.lab.workload import (
    FIGURE,
    NEXT_IN_FIGURE,
    Lengths,
    bimodal,
    draw,
    geometric,
    new_trace,
    poisson,
    uniform,
    variation,
)
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    GREY,
    ROLES,
    SMALL,
    ClassFigure,
    foot,
    frame,
    label_column,
    log_axis,
    marks,
    number,
    style,
)
from lessons.toolbox.draw.plotting import gantt

HERE = Path(__file__).parent
FIGURE_PLACES = 4
PLACES, REQUESTS = 32, 6400  # of the gain: 200 waves, so that the end of the job hardly counts
# Most answers are short and one in `1 / share` is long: ever rarer, and ever longer beside them.
MIXES = [(6, 12, 0.3), (4, 24, 0.2), (2, 48, 0.1), (1, 80, 0.05), (1, 160, 0.02), (1, 400, 0.02)]
CLAIMS = {"2-5×": (2, 5), "5-23×": (5, 23), "10-20×": (10, 20)}
LOAD_PLACES, LOAD_REQUESTS, WINDOW_S = 16, 160, 0.5
LOADS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)  # of what full places could answer
PROMPT_LENS, OUTPUT_LENS = uniform(16, 128), geometric(48)
WAYS = {
    "static": ("naive", "static, padded"),
    "dynamic": ("naive", f"dynamic, {WINDOW_S:g} s wait"),
    "continuous": ("optimized", "continuous"),
}


# ---------------------------------------------------------------- which request is where


def draw_slots() -> ClassFigure:
    """The seven requests of the well-known figure on four places, static and continuous."""
    lengths = [*FIGURE, *NEXT_IN_FIGURE]
    static, continuous = (
        offline(name, lengths, FIGURE_PLACES) for name in ("static", "continuous")
    )
    steps = len(static.passes)
    rows = gantt_rows(static, FIGURE_PLACES, "static", steps)
    rows |= gantt_rows(continuous, FIGURE_PLACES, "continuous", steps)
    shares = [occupancy(log, FIGURE_PLACES).busy_share for log in (static, continuous)]
    return gantt(
        rows,
        kinds=["a token", "idle"],
        xlabel="step",
        title=f"The same seven answers: {steps} steps in waves with {shares[0]:.0%} of the places "
        f"busy, {len(continuous.passes)} steps with {shares[1]:.0%} when each place is filled "
        "again at once",
        caption=f"counted · {FIGURE_PLACES} places · answers of "
        f"{', '.join(map(str, lengths))} tokens, numbered in the order of arrival",
    )


# ---------------------------------------------------------------- what the variance is worth


def families() -> dict[str, tuple[str, list[Lengths]]]:
    """{name: (role, distributions of answer lengths, of growing variance)}."""
    spread = [uniform(20 - half, 20 + half) for half in (0, 8, 14, 19)]
    return {
        "uniform": ("library", spread),
        "geometric": ("naive", [geometric(20)]),
        "few long among short": ("optimized", [bimodal(*mix) for mix in MIXES]),
    }


@lru_cache
def gains(seed: int = 14) -> dict:
    """{family: (role, [(coefficient of variation, gain in steps)])}."""
    found = {}
    for name, (role, distributions) in families().items():
        drawn = [draw(lengths, REQUESTS, seed) for lengths in distributions]
        found[name] = role, [(variation(lens), gain(lens, PLACES)) for lens in drawn]
    return found


@style()
def draw_gain() -> ClassFigure:
    """Steps saved over the variance of lengths, with what guides claim as marks on the right."""
    found = gains()
    highest = max(value for _, points in found.values() for _, value in points)
    (_, exponential), *_ = found["geometric"][1]
    fig, ax = frame(
        f"Continuous batching gains by the variance of lengths: {exponential:.1f}× for geometric "
        f"answers, {highest:.0f}× where one in fifty is 400 times as long",
        f"counted, not timed · {PLACES} places, {REQUESTS} answers, all there at the beginning",
        (10, 5.8),
    )
    looks, labels = marks(found), []
    for name, (role, points) in found.items():
        x, y = zip(*points)
        ax.plot(x, y, ls=ROLES[role].dash, **looks[name])
        labels.append((x[-1], y[-1], name, looks[name]["color"]))
    limit = ROLES["floor"].colour
    right = max(x for _, points in found.values() for x, _ in points) * 1.25
    ax.axhline(PLACES, color=limit, ls="--", lw=1.6)
    labels.append((right, PLACES, f"{PLACES} places: no mix gains more", limit))
    for index, (claim, (low, high)) in enumerate(CLAIMS.items()):
        at = right * (0.86 + 0.05 * index)
        ax.plot([at, at], [low, high], color=GREY, lw=5, solid_capstyle="butt")
        # left of its bar, where no line to a label passes
        beside = at - 0.022 * right, 1.3 * low
        ax.text(*beside, claim, ha="center", va="center", size=SMALL, color=GREY, rotation=90)
    log_axis(ax.yaxis, 0.8, PLACES * 1.5)
    ax.set_xlim(-0.1, right)
    ax.grid(True, axis="y")
    ax.set_xlabel("coefficient of variation of the answers' lengths (grey bars: claims of guides)")
    ax.set_ylabel("gain in steps\n(higher is better)")
    label_column(ax, labels)
    return fig


# ---------------------------------------------------------------- requests that arrive


def capacity_per_s(cost: StepCost, places: int = LOAD_PLACES) -> float:
    """Requests that full places can answer a second, by the means of the workload: an upper bound,
    because places are never all full all the time.
    """
    prompt = fmean(draw(PROMPT_LENS, 4000, 1))
    output = fmean(draw(OUTPUT_LENS, 4000, 2))
    steps_per_request = output / places
    context = output * (prompt + output / 2)
    return 1 / (
        cost.fixed_s * steps_per_request
        + cost.token_s * (prompt + output - 1)
        + cost.context_s * context
    )


def load_trace(rate_per_s: float, count: int, seed: int = 14) -> list[Arrival]:
    """Poisson arrivals with the workload's lengths."""
    prompts, outputs = draw(PROMPT_LENS, count, seed), draw(OUTPUT_LENS, count, seed + 1)
    return new_trace(poisson(rate_per_s, count, seed + 2), prompts, outputs)


def offered_tokens_per_s(trace: list[Arrival]) -> float:
    """Tokens that a trace asks for, over the time in which its requests arrive: no schedule can
    generate faster than that for long.
    """
    return sum(arrival.output_len for arrival in trace) / trace[-1].arrival_s


def load_curves(cost: StepCost) -> tuple[list[float], list[float], dict]:
    """(requests/s that arrive, tokens/s that they ask for, {way: (tokens/s, median latencies in
    seconds)}).
    """
    rates = [load * capacity_per_s(cost) for load in LOADS]
    traces = [load_trace(rate, LOAD_REQUESTS) for rate in rates]
    found = {}
    for name in WAYS:
        logs = [simulate(name, trace, LOAD_PLACES, cost, WINDOW_S) for trace in traces]
        found[name] = (
            [log.tokens_per_s for log in logs],
            [median(log.latencies_s()) for log in logs],
        )
    return rates, [offered_tokens_per_s(trace) for trace in traces], found


@style()
def draw_load(cost: StepCost | None = None, source: str = "") -> ClassFigure:
    """Throughput and latency over the arrival rate, by the cost of a step that was measured."""
    if cost is None:
        samples, machine = recorded_samples()
        cost, source = fit(samples), f"{machine['device']}, {machine['date']}"
    rates, offered, found = load_curves(cost)
    best, worst = found["continuous"][1], found["static"][1]
    at = LOADS.index(0.6)
    fig, axes = frame(
        f"At 60 % of what full places could answer, an answer takes {best[at]:.1f} s instead of "
        f"{worst[at]:.1f} s in the median",
        "",
        (12, 5.8),
        (1, 1),
    )
    foot(
        fig,
        f"simulated · {LOAD_PLACES} places · Poisson arrivals of {LOAD_REQUESTS} requests, prompts "
        f"16-128 tokens, answers geometric, mean 48 · a step takes {cost.fixed_s * 1e3:.3g} ms + "
        f"{cost.token_s * 1e6:.3g} µs a token + {cost.context_s * 1e6:.2g} µs a token of context, "
        f"fitted to steps of models/tiny ({source})",
    )
    looks = marks({label: (role,) for role, label in WAYS.values()})
    left, right = axes
    labels = []
    for name, (role, label) in WAYS.items():
        for ax, values in zip(axes, found[name]):
            ax.plot(rates, values, ls=ROLES[role].dash, **looks[label])
        labels.append((rates[-1], found[name][1][-1], label, looks[label]["color"]))
    left.plot(rates, offered, color=ROLES["floor"].colour, ls="--", lw=1.6)
    left.annotate("what arrives", (rates[3], offered[3]), (-8, 8), textcoords="offset points",
                  ha="right", color=ROLES["floor"].colour, fontweight="bold")  # fmt: skip
    left.set_ylabel("generated tokens/s\n(higher is better)")
    right.set_ylabel("median latency, s\n(lower is better)")
    left.set_ylim(0, max(offered) * 1.05)
    left.yaxis.set_major_formatter(FuncFormatter(number))
    every = np.concatenate([values for _, values in found.values()])
    log_axis(right.yaxis, min(every) / 1.5, max(every) * 1.5)
    for ax in axes:
        ax.set_xlim(left=0)
        ax.grid(True, axis="y")
        ax.set_xlabel("requests/s that arrive")
    label_column(right, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "slots": (
        draw_slots,
        "Eight rows over steps. Four static rows: short answers leave their place idle until the "
        "longest of the wave ends, then three more start. Four continuous rows: each place gets "
        "the next answer in the step after the last one ended, and none is idle.",
    ),
    "gain": (
        draw_gain,
        "Gain in steps over the coefficient of variation of answer lengths: one without variance, "
        "under two for uniform lengths, four for geometric ones, above ten for few very long among "
        "many short. Claims of 2 to 5, 5 to 23 and 10 to 20 times are beside it.",
    ),
    "load": (
        draw_load,
        "Two panels over the arrival rate. Throughput: continuous batching follows what arrives "
        "for longer than dynamic and static waves. Latency: static waves are slow at every rate, "
        "dynamic ones grow early, continuous batching stays low until the places are full.",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
