"""The ladder in one picture: each rung in the common run, and beside it in the regime where its
idea pays.
"""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from matplotlib.transforms import blended_transform_factory

from lessons.toolbox.draw.figure import (
    GREY,
    HALO,
    ROLES,
    ClassFigure,
    frame,
    log_axis,
    number,
    style,
)

RUNGS, PEERS = 24, 8  # what fits a page at 11 pt
LETTER = 0.075  # inches: the mean width of a letter of 11 pt
LEVEL = 0.9  # rows from one peer's label to the next
FLAT = 1.1  # a step of less is noise
HEADS = ("rung, lesson", "tokens/s, ✓ identical", "in its own regime", "gain there")
NAIVE, OPTIMIZED, LIBRARY = (ROLES[role].colour for role in ("naive", "optimized", "library"))


@style()
def ladder_plot(
    rungs: Sequence[Mapping],
    peers: Sequence[Mapping] = (),
    *,
    title: str,
    caption: str,
    predicted_for: str = "a GPU",
) -> ClassFigure:
    """One row a rung, the first at the bottom: left its tokens/s in the common run, right the gain
    in its own regime.

    rungs: [{"name", "lesson", "tokens_per_s": float or None, "identical": bool or None, "stand_in":
    bool or the reason, "not_run": the reason or None, "step": over the rung below, or left out,
    "regime": {"label", "gain", "measured", "device"} or None}]. A rung whose step shows nothing
    says that its idea pays in its regime. "device", which may be left out, is where the gain was
    measured or for which it is predicted. "stand_in" marks a rung that exists for its tokens' sake
    on this device: its bar is hollow and says "tokens only". A rung that did not run has no bar but
    its reason. peers: [{"name", "tokens_per_s": float or None, "not_run"}], vertical lines; those
    that did not run are named in the caption. predicted_for: the device of predictions that name
    none.

    Raises ValueError for no rungs, for more than 24 rungs or 8 peers, and for a rung that has
    neither a speed nor a reason.
    """
    if not 0 < len(rungs) <= RUNGS or len(peers) > PEERS:
        raise ValueError(
            f"{len(rungs)} rungs, {len(peers)} peers; accepted: 1 to {RUNGS} rungs, up to {PEERS} "
            f"peers"
        )
    cells = [*(_cells(rung, predicted_for) for rung in rungs), HEADS]
    letters = sum(max(map(len, column)) for column in zip(*cells))
    run = [peer for peer in peers if peer["tokens_per_s"]]
    caption = " · ".join([caption, *_footnotes(rungs, peers)])
    size = 6.0 + LETTER * letters, 2.3 + 0.27 * len(cells) + 0.24 * len(run)
    fig, (left, right) = frame(title, caption, size, widths=(5, 3))
    names, results, regimes, gains = zip(*cells)
    _texts_beside(left, names, results, LEVEL * len(run))
    _texts_beside(right, regimes, gains, LEVEL * len(run))
    # A pale band behind every second row, across the figure, leads the eye along the row.
    across = blended_transform_factory(fig.transFigure, left.transData)
    for row in range(0, len(rungs), 2):
        look = {"facecolor": "#F1F1F1", "zorder": -1, "transform": across}
        fig.add_artist(Rectangle((0, row - 0.5), 1, 1, **look))
    _draw_speeds(left, rungs, run)
    _draw_gains(right, rungs)
    return fig


def _cells(rung, predicted_for):
    """The four texts of a row: name, result, regime, gain."""
    speed, regime, result, gain = rung["tokens_per_s"], rung.get("regime"), "", ""
    if speed is None and not rung.get("not_run"):
        raise ValueError(
            f"rung {rung['name']!r} has neither tokens_per_s nor not_run; accepted: a speed, or "
            f"the reason why there is none"
        )
    if speed is not None:
        same = "✓ tokens only" if rung.get("stand_in") else "✓"
        ticks = {True: same, False: "✗ tokens differ", None: "tokens not checked"}
        result = f"{number(speed)} {ticks[rung.get('identical')]}"
        is_flat = (rung.get("step") or FLAT) < FLAT and not rung.get("stand_in")
        if is_flat and regime and rung.get("identical"):
            result += " pays there →"
    if regime:
        device = regime.get("device")
        measured = f"measured, {device}" if device else "measured here"
        source = measured if regime["measured"] else f"predicted, {device or predicted_for}"
        gain = f"{number(regime['gain'])}× {source}"
    return f"{rung['name']}  {rung['lesson']}", result, regime["label"] if regime else "", gain


def _footnotes(rungs, peers):
    """What the caption adds: why bars are hollow, by reason, and which peers did not run."""
    reasons = {}
    for rung in rungs:
        if isinstance(rung.get("stand_in"), str):
            reasons.setdefault(rung["stand_in"], []).append(rung["lesson"])
    for reason, lessons in reasons.items():
        yield f"tokens only, because {reason}: lesson {', '.join(dict.fromkeys(lessons))}"
    for peer in peers:
        if not peer["tokens_per_s"]:
            yield f"not run: {peer['name']} ({peer['not_run']})"


def _texts_beside(ax, before, after, room):
    """Texts left and right of each row, as tick labels, so that the layout makes room for them; the
    last of each is the head of its column, with `room` rows above it.
    """
    ax.set_ylim(-0.6, len(before) - 0.5 + room)
    for axis, texts in ((ax, before), (ax.secondary_yaxis("right"), after)):
        axis.set_yticks(range(len(texts)), texts)
        axis.tick_params(axis="y", length=0)
        axis.spines[["left", "right"]].set_visible(False)
        *labels, head = axis.get_yticklabels()
        head.set(color=GREY, fontweight="bold")
        for label in labels:
            if "✗" in label.get_text():
                label.set(color=NAIVE, fontweight="bold")
    ax.patch.set_visible(False)


def _draw_speeds(ax, rungs, peers):
    """Bars from zero, hollow where they stand in for another device, and a line for each peer."""
    for row, rung in enumerate(rungs):
        colour = OPTIMIZED if row else NAIVE
        if rung["tokens_per_s"] is None:
            look = {"color": GREY, "style": "italic", "path_effects": HALO, "zorder": 4}
            ax.text(0, row, f" not run: {rung['not_run']}", va="center", **look)
        else:
            face = "white" if rung.get("stand_in") else colour
            ax.barh(row, rung["tokens_per_s"], 0.7, facecolor=face, edgecolor=colour, lw=1.6)
    # The fastest peer's label is lowest: each label runs to the right, above every line that it
    # passes.
    for level, peer in enumerate(sorted(peers, key=lambda peer: -peer["tokens_per_s"])):
        speed, top = peer["tokens_per_s"], len(rungs) + 0.85 + LEVEL * level
        line = {"color": LIBRARY, "ls": ":", "path_effects": HALO, "zorder": 3}
        ax.plot([speed, speed], [-0.6, top + 0.4], **line)
        text, look = f" {peer['name']}: {number(speed)}", {"color": LIBRARY, "fontweight": "bold"}
        # The label may run over the columns beside, where nothing else stands at its height.
        ax.text(speed, top, text, va="center", in_layout=False, **look)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(number))
    ax.set_xlabel("the common run: tokens/s (higher is better)")


def _draw_gains(ax, rungs):
    """Filled squares for measured gains, hollow circles for predicted ones, on a log axis."""
    found = [(row, rung["regime"]) for row, rung in enumerate(rungs) if rung.get("regime")]
    gains = [1, 2, *(regime["gain"] for _, regime in found)]
    log_axis(ax.xaxis, min(gains) / 1.3, max(gains) * 1.3)
    if max(gains) > 20 * min(gains):  # the axis is narrow: more labels would run together
        ax.xaxis.set_major_locator(LogLocator(numticks=4))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda gain, _: f"{number(gain)}×"))
    ax.set_xlabel("gain (log scale)")
    ax.plot([1, 1], [-0.6, len(rungs) - 0.4], color=GREY, lw=1.2)
    for row, regime in found:
        look = {"marker": "s"} if regime["measured"] else {"marker": "o", "mfc": "white"}
        ax.plot(regime["gain"], row, ms=9, color=OPTIMIZED, **look)
