"""The lesson's pictures, all computed on a virtual clock: users who share, a door that closes, the
knee, and what a client hides that waits for its answers.

    python -m lessons.l22_serving.lab.pictures

writes users.svg, overload.svg, knee.svg and omission.svg beside this file.
"""

import sys
from pathlib import Path

from lessons.l22_serving.lab.experiments import (
    ANSWERS,
    COUNT,
    EVERY_S,
    FIRST_TOKEN,
    KNEE_LOADS,
    KNEE_REQUESTS,
    LOADS,
    OBJECTIVES,
    PLACES,
    PROMPT,
    STALL_S,
    capacity_per_s,
    knee_curves,
    knees,
    omission,
    overload,
    two_users,
)
from lessons.l22_serving.load import percentile
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    GREY,
    ROLES,
    ClassFigure,
    draw_lines,
    frame,
    label_column,
    log_axis,
    number,
    style,
)

HERE = Path(__file__).parent
MODEL = (
    f"predicted, not measured · Llama-3-8B on an H100, {PLACES} places · prompts of {PROMPT}, "
    f"answers of {ANSWERS[0]} to {ANSWERS[1]} tokens"
)
IN_TIME = f"in time: the whole answer within {OBJECTIVES.e2el_s:g} s"


def draw_named(ax, series: dict[str, tuple[list[float], list[float]]], roles: list[str]) -> None:
    """`draw_lines`, with a grid, and each line named beside its end."""
    labels = draw_lines(ax, series, roles)
    ax.grid(True, axis="y")
    label_column(ax, labels)


@style()
def draw_users(many: int = 300) -> ClassFigure:
    """The time to the first token of a user who asks now and then, after a user who has asked
    for three hundred answers at once.
    """
    found = two_users(many)
    worst = {name: max(one.ttft_s for one in history) for name, history in found.items()}
    first, fair = worst.values()
    fig, ax = frame(
        f"After another user's {many} requests a small user's request waits up to {first:.1f} s; "
        f"where users take turns, up to {fair:.2f} s",
        f"{MODEL} · one user sends {many} at once, the small one sends one every 0.5 s",
        (10, 5.2),
    )
    series = {
        name: ([one.arrival_s for one in history], [one.ttft_s for one in history])
        for name, history in found.items()
    }
    every = [one.ttft_s for history in found.values() for one in history]
    log_axis(ax.yaxis, min(every) / 1.6, max(every) * 1.6)
    ax.set_xlabel("when the small user's request arrives, s")
    ax.set_ylabel("its time to first token, s\n(lower is better)")
    draw_named(ax, series, ["naive", "optimized"])
    ax.set_xlim(left=0)
    return fig


@style()
def draw_overload(loads=LOADS, seconds: float = 25.0) -> ClassFigure:
    """Requests a second that are answered in time, over those that arrive."""
    points = overload(loads, seconds)
    offered = [point.offered_per_s for point in points]
    last = points[-1].goodput_per_s
    fig, ax = frame(
        f"At {points[-1].load:g} times its capacity a server that takes all requests answers "
        f"{last['takes all']:.1f} requests/s in time, one that turns some away "
        f"{last['turns some away']:.1f}",
        f"{MODEL} · {IN_TIME}; clients hang up after 10 s",
        (10, 5.4),
    )
    series = {
        name: (offered, [point.goodput_per_s[name] for point in points])
        for name in points[0].goodput_per_s
    }
    look, top = ROLES["floor"], capacity_per_s()
    ax.plot([0, top, offered[-1]], [0, top, top], color=look.colour, ls=look.dash, lw=1.6)
    ax.text(top / 2, top / 2, "what arrives ", color=look.colour, ha="right", fontweight="bold")
    ax.text(offered[-1], top * 1.03, "capacity", color=look.colour, ha="right", fontweight="bold")
    ax.set_ylim(0, top * 1.25)
    ax.set_xlabel("requests/s that arrive")
    ax.set_ylabel("requests/s answered in time\n(higher is better)")
    draw_named(ax, series, ["naive", "library", "optimized"])
    ax.set_xlim(left=0)
    return fig


@style()
def draw_knee(loads=KNEE_LOADS, count: int = KNEE_REQUESTS) -> ClassFigure:
    """The share of requests in time over the rate, for independent and for bursty arrivals."""
    curves = knee_curves(loads, count)
    found, top = knees(curves), capacity_per_s()
    roles = ["optimized", "naive"]
    alone, bursty = found.values()
    fig, ax = frame(
        f"Nine of ten requests are in time up to {alone / top:.0%} of the capacity if they come "
        f"independently, and up to {bursty / top:.0%} if they come in bursts",
        f"{MODEL} · in time: the first token within {FIRST_TOKEN.ttft_s:g} s; bursts: gamma gaps "
        f"with shape 0.2 · {count} requests a point",
        (10, 5.2),
    )
    series = {
        name: ([p.rate_per_s for p in points], [100 * p.attainment for p in points])
        for name, points in curves.items()
    }
    for name, role in zip(curves, roles):
        ax.axvline(found[name], color=ROLES[role].colour, ls=":", lw=1.2)
    ax.axhline(90, color=GREY, ls=":", lw=1.2)
    look = ROLES["floor"]
    ax.axvline(top, color=look.colour, ls=look.dash, lw=1.6)
    ax.text(top, 60, " capacity", color=look.colour, fontweight="bold")
    ax.text(0, 88, " nine of ten", color=GREY, va="top")
    ax.set_ylim(0, 105)
    ax.set_xlabel("requests/s that arrive")
    ax.set_ylabel("% of requests in time\n(higher is better)")
    draw_named(ax, series, roles)
    ax.set_xlim(left=0)
    return fig


@style()
def draw_omission() -> ClassFigure:
    """Latency over the percentile, of one server and two clients."""
    found = omission()
    roles = dict(zip(found, ("naive", "optimized")))
    hidden, seen = (1e3 * percentile(latencies, 99) for latencies in found.values())
    fig, ax = frame(
        f"The same server, stalled for {STALL_S:g} s: its 99th percentile is {hidden:.0f} ms for a "
        f"client that waits for answers, {number(seen)} ms for its users",
        f"computed · {COUNT} requests, one every {1e3 * EVERY_S:g} ms, answered in 10 ms each but "
        "for one stall",
        (10, 5.2),
    )
    percents = [index / 4 for index in range(320, 401)]
    labels = []
    for name, latencies in found.items():
        look = ROLES[roles[name]]
        values = [1e3 * percentile(latencies, percent) for percent in percents]
        ax.plot(percents, values, color=look.colour, ls=look.dash)
        # labelled before the end, where both are the stall
        at = percents.index(98)
        labels.append((percents[at], values[at], name, look.colour))
    log_axis(ax.yaxis, 5, 2e4)
    ax.set_xlim(80, 100)
    ax.set_xticks([80, 85, 90, 95, 99, 100], ["80", "85", "90", "95", "99", ""])
    ax.grid(True, axis="y")
    ax.set_xlabel("percentile of the requests")
    ax.set_ylabel("latency, ms\n(lower is better)")
    label_column(ax, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "users": (
        draw_users,
        "Time to first token of a user with few requests over the time of arrival. In the order of "
        "arrival it is nine to fourteen seconds, after another user's 300 requests. "
        "In a fair order it is below a second for all.",
    ),
    "overload": (
        draw_overload,
        "Requests answered in time over requests that arrive. Up to the capacity all three ways "
        "follow the diagonal. Beyond it a server that takes all requests falls to a quarter of it, "
        "one that drops late requests falls slowly, and one that turns some away stays near the "
        "capacity.",
    ),
    "knee": (
        draw_knee,
        "Share of requests in time over the arrival rate. It stays near 100 percent and then "
        "falls, for bursty arrivals at a clearly lower rate than for independent ones.",
    ),
    "omission": (
        draw_omission,
        "Latency over the percentile from the 80th on. For the client that waits for its answers "
        "it is 10 ms almost to the end. Counted from the intended time it rises from the 90th "
        "percentile on to ten seconds.",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
