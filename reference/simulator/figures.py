"""The simulator's two figures: latencies over the arrival rate, and goodput over the number of
GPUs.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from lessons.toolbox.draw.figure import (
    GREY,
    HALO,
    ROLES,
    SMALL,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    marks,
    number,
    style,
)
from reference.simulator.served import Served, Slo, percentile

ROLE_OF = {
    "static": "naive",
    "dynamic": "naive",
    "continuous": "library",
    "chunked": "optimized",
    "disaggregated": "optimized",
}
LATENCY_ALT = (
    "Two panels over the arrival rate, a line for each policy: the 99th percentile of the time to "
    "first token and of the inter-token latency, with the limits of the objective as dashed lines."
)
GOODPUT_ALT = (
    "Requests per second that keep the objective over the number of GPUs, a line for each policy, "
    "below the dashed line of the requests that arrive."
)


def looks_of(names: Sequence[str]) -> dict[str, dict]:
    """Colour and marker of each policy, the same in both figures."""
    looks = marks({name: (role,) for name, role in ROLE_OF.items()})
    return {name: looks[name] | {"ls": ROLES[ROLE_OF[name]].dash} for name in names}


@style()
def draw_latencies(
    rates: Sequence[float], found: dict[str, list[Served]], slo: Slo, setting: str
) -> ClassFigure:
    """TTFT and ITL over the arrival rate. found: {policy: a run for each rate}; setting: the
    caption.
    """
    highest = {name: highest_rate(rates, runs, slo) for name, runs in found.items()}
    title = f"The objective holds up to {ranked(highest, -1, '{} requests/s for {}')}"
    fig, axes = frame(title, setting, (12.5, 5.8), (1, 1))
    looks, labels = looks_of(list(found)), []
    values = {
        name: [
            [percentile(run.ttft_s, 99) for run in runs],
            [percentile(run.itl_s, 99) for run in runs],
        ]
        for name, runs in found.items()
    }
    for name, both in values.items():
        for ax, own in zip(axes, both):
            ax.plot(rates, own, **looks[name])
        # answers of one token have no gaps: then the line's name stands at the objective
        end = both[1][-1] if np.isfinite(both[1][-1]) else slo.itl_s
        labels.append((rates[-1], end, name, looks[name]["color"]))
    what = ("time to first token", "inter-token latency")
    for index, (ax, limit) in enumerate(zip(axes, (slo.ttft_s, slo.itl_s))):
        every = [value for both in values.values() for value in both[index]] + [limit]
        ax.axhline(limit, color=ROLES["floor"].colour, ls="--", lw=1.6)
        ax.annotate(f"objective {limit:g} s", (0, limit), (5, 5), size=SMALL,
                    textcoords="offset points", color=ROLES["floor"].colour,
                    path_effects=HALO)  # fmt: skip
        log_axis(ax.yaxis, np.nanmin(every) / 1.6, np.nanmax(every) * 1.6)
        ax.set_ylabel(f"99th percentile of the {what[index]}, s\n(lower is better)")
        ax.set_xlabel("requests/s that arrive")
        ax.set_xticks(rates)
        ax.set_xlim(0, rates[-1] * 1.03)
        ax.grid(True, axis="y")
    label_column(axes[1], labels)
    return fig


def ranked(values: dict[str, float], sign: int, text: str) -> str:
    """ "38 requests/s for chunked, 20 for continuous", the best first; sign: -1 if that is the
    most. Policies without a value are left out.
    """
    names = sorted((name for name in values if values[name]), key=lambda n: sign * values[n])
    if not names:
        return "no load at all"
    first = text.format(number(values[names[0]]), names[0])
    return ", ".join([first, *(f"{number(values[name])} for {name}" for name in names[1:])])


def highest_rate(rates: Sequence[float], runs: Sequence[Served], slo: Slo) -> float:
    """The highest of the rates at which 99 % of the requests keep the objective; 0: at none."""
    return max((rate for rate, run in zip(rates, runs) if run.attained(slo) >= 0.99), default=0.0)


@style()
def draw_goodput(
    gpus: Sequence[int], found: dict[str, list[float | None]], rate: float, setting: str
) -> ClassFigure:
    """Goodput over GPUs. found: {policy: requests/s, or None}; rate: requests/s that arrive."""
    enough = {name: fewest(gpus, own, rate) for name, own in found.items()}
    title = f"{number(rate)} requests/s need {ranked(enough, 1, '{} GPUs for {}')}"
    if not any(enough.values()):
        title = f"{gpus[-1]} GPUs are not enough for {number(rate)} requests/s"
    fig, ax = frame(title, setting, (10, 5.8))
    looks, labels = looks_of(list(found)), []
    for name, own in found.items():
        ax.plot(gpus, [np.nan if value is None else value for value in own], **looks[name])
        labels.append((gpus[-1], own[-1] or 0.0, name, looks[name]["color"]))
    ax.axhline(rate, color=ROLES["floor"].colour, ls="--", lw=1.6)
    ax.annotate("what arrives", (gpus[0], rate), (0, 5), textcoords="offset points", color=GREY,
                size=SMALL)  # fmt: skip
    ax.set_xticks(gpus)
    ax.set_ylim(0, rate * 1.12)
    ax.yaxis.set_major_formatter(FuncFormatter(number))
    ax.grid(True, axis="y")
    ax.set_xlabel("GPUs")
    ax.set_ylabel("requests/s that keep the objective\n(higher is better)")
    label_column(ax, labels)
    return fig


def fewest(gpus: Sequence[int], own: Sequence[float | None], rate: float) -> int:
    """The fewest GPUs on which 99 % of the requests keep the objective; 0: on none."""
    return min((n for n, value in zip(gpus, own) if value and value >= 0.99 * rate), default=0)
