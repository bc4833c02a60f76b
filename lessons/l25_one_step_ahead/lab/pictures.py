"""The lesson's picture: what host and device do, in turns and one step ahead, as recorded on a
virtual clock.

    python -m lessons.l25_one_step_ahead.lab.pictures

writes timeline.svg beside this file.
"""

import sys

from matplotlib.axes import Axes

from lessons.l25_one_step_ahead.lab.timeline import HOST_MS, Recorded, Span, recorded
from lessons.l25_one_step_ahead.naive import Serial
from lessons.l25_one_step_ahead.optimized import OneStepAhead
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import GREY, PALETTE, ClassFigure, frame, style

DEVICE_MS = 5.0
SHOWN_MS = 29.0
LOOPS = {"in turns": Serial, "one step ahead": OneStepAhead}
LETTERS = {"schedule": "s", "launch": "l", "sample": "p", "tell": "t", "pass": ""}
COLOURS = PALETTE[:3]  # of steps, in turn


@style()
def draw_timeline(device_ms: float = DEVICE_MS) -> ClassFigure:
    """Both time lines from the start; a colour for each step, its number on the device's bar."""
    runs = {label: recorded(loop, device_ms) for label, loop in LOOPS.items()}
    serial, ahead = (run.step_ms for run in runs.values())
    host_ms = sum(HOST_MS.values())
    fig, ax = frame(
        f"A host of {host_ms:g} ms and a device of {device_ms:g} ms: a step takes {serial:.0f} ms "
        f"in turns, {ahead:.0f} ms one step ahead",
        "virtual clock · s schedules, l launches, t tells the tokens of the step of its colour · "
        "hatched: sampling",
        (12, 4.6),
    )
    for place, (label, run) in enumerate(runs.items()):
        draw_run(ax, run, 3.2 - 2.4 * place, label)
    ax.set(xlim=(0, SHOWN_MS), ylim=(-0.5, 4.6), yticks=[], xlabel="milliseconds")
    ax.spines["left"].set_visible(False)
    return fig


def draw_run(ax: Axes, run: Recorded, top: float, label: str) -> None:
    """Two rows of bars: the host's at the height `top`, and the device's below it."""
    ax.text(0, top + 0.62, label, fontweight="bold")
    for y, lane in ((top, "host"), (top - 1, "device")):
        ax.text(-0.3, y, lane, ha="right", va="center")
        ax.plot([0, SHOWN_MS], [y - 0.36, y - 0.36], color=GREY, lw=0.8)
    for span in run.spans:
        if span.start_s * 1e3 < SHOWN_MS:
            draw_bar(ax, span, top if span.lane == "host" else top - 1)


def draw_bar(ax: Axes, span: Span, y: float) -> None:
    """One bar, and what it is."""
    start, end = span.start_s * 1e3, min(span.end_s * 1e3, SHOWN_MS)
    colour = COLOURS[span.number % len(COLOURS)]
    hatch = "//" if span.what == "sample" else ""
    box = dict(height=0.7, left=start, color=colour, edgecolor="white", hatch=hatch, alpha=0.75)
    ax.barh(y, end - start, **box)
    text = LETTERS[span.what] if span.lane == "host" else str(span.number)
    if span.what != "sample" and end - start > 0.4:
        ax.text((start + end) / 2, y, text, ha="center", va="center")


PICTURES: dict[str, Picture] = {
    "timeline": (draw_timeline, None),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
