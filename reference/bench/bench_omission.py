"""Coordinated omission, on a real server: the same requests counted twice, from when the client
came to sending each, and from when each was meant to be sent.

Read `counted_twice`. Source: Tene 2013, How NOT to Measure Latency.
"""

import numpy as np

from lessons.l22_serving.load import percentile
from lessons.toolbox.draw.figure import (
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    number,
    style,
)
from lessons.toolbox.model.arguments import refuse
from reference.bench.bench_load import LoadRun

MS = 1000.0
SENT, MEANT = "from the sending", "from the intended time"


def counted_twice(run: LoadRun, limit_s: float) -> dict:
    """What both ways of counting say of the answered requests of a run. limit_s: a first token that
    takes longer is late. Raises ValueError if none was answered.
    """
    waits_s = np.array([one.ttft_s for one in run.history if not one.why_not])
    held_s = np.array([late for late, one in zip(run.late_s, run.history) if not one.why_not])
    if not len(waits_s):
        refuse("answered requests", 0, "one or more, to count their waits")
    return {
        "requests": len(run.history),
        "failed": len(run.history) - len(waits_s),
        "limit_ms": MS * limit_s,
        "counted": {
            name: {
                "share_late": float(np.mean(values_s > limit_s)),
                "p99_ttft_ms": MS * percentile(values_s, 99),
                "distribution_ttft_ms": [MS * percentile(values_s, at) for at in range(101)],
            }
            for name, values_s in ((SENT, waits_s - held_s), (MEANT, waits_s))
        },
    }


@style()
def draw_omission(record: dict, foot: str) -> ClassFigure:
    """Time to the first token over the percentile, counted both ways. foot: the line under it."""
    stall = record["stall"]
    counted = stall["counted"]
    hidden, seen = (100 * counted[name]["share_late"] for name in (SENT, MEANT))
    fig, ax = frame(
        f"A server stopped for {number(stall['stall_s'])} s: {number(hidden)} % of the first "
        f"tokens are late if time counts from the sending, {number(seen)} % for the users",
        f"{foot} · {number(stall['request_rate'])} requests/s meant to arrive, at most "
        f"{stall['max_concurrency']} at once from this client",
        (10, 5.4),
    )
    labels, every = [], []
    for name, role in ((SENT, "naive"), (MEANT, "optimized")):
        look, values = ROLES[role], counted[name]["distribution_ttft_ms"]
        ax.plot(range(101), values, color=look.colour, ls=look.dash)
        # labelled before the end, where both are the stall
        labels.append((95, values[95], f"counted {name}", look.colour))
        every += [max(value, 0.1) for value in values]
    look = ROLES["floor"]
    ax.axhline(stall["limit_ms"], color=look.colour, ls=look.dash, lw=1.4)
    labels.append((100, stall["limit_ms"], "late above this", look.colour))
    log_axis(ax.yaxis, min(every) / 1.5, max(every) * 1.5)
    ax.set_xlim(0, 100)
    ax.grid(True, axis="y")
    ax.set_xlabel("percentile of the requests")
    ax.set_ylabel("time to first token, ms\n(lower is better)")
    label_column(ax, labels)
    return fig
