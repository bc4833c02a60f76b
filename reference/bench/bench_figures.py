"""Figures of a sweep of bench_serving, drawn from its record: the knee, the latencies, the cost."""

from pathlib import Path

from matplotlib.ticker import FuncFormatter

from lessons.l22_serving.load import knee
from lessons.toolbox.draw.figure import (
    GREY,
    ROLES,
    ClassFigure,
    caption,
    draw_lines,
    frame,
    label_column,
    log_axis,
    number,
    save,
    style,
)
from reference.bench.bench_omission import draw_omission

LEAST_MS = 0.5
TARGET = 0.9  # of the requests, which must meet the objectives
LATENCIES = {"ttft": ("optimized", "TTFT"), "itl": ("library", "ITL"), "e2el": ("naive", "E2EL")}


def load_of(point: dict) -> float:
    """What a sweep turns up: requests/s, or requests at once."""
    rate = point["request_rate"]
    return point["max_concurrency"] if rate is None else rate


def load_name(points: list[dict]) -> str:
    """The name of the x axis."""
    return "requests at once" if points[0]["request_rate"] is None else "requests/s that arrive"


def knee_of(points: list[dict]) -> float | None:
    """The largest load up to which 90 % of the requests meet the objectives; None: not even the
    first, or no objectives were given.
    """
    if any("slo_attainment" not in point for point in points):
        return None
    return knee([(load_of(point), point["slo_attainment"]) for point in points], TARGET)


def cost_at(points: list[dict], load: float | None) -> float | None:
    """Dollars for a million tokens at the largest load that was tried and is not beyond `load`."""
    reached = [point for point in points if load is not None and load_of(point) <= load]
    return reached[-1].get("cost_per_million_output_tokens") if reached else None


@style()
def draw_knee(record: dict) -> ClassFigure:
    """Requests that meet the objectives, and all that were answered, over the load."""
    points = record["points"]
    at, loads = knee_of(points), [load_of(point) for point in points]
    if at is None:
        title = "Nine of ten requests meet the objectives at no load that was tried"
    elif at == loads[-1]:
        title = "Nine of ten requests meet the objectives at every load that was tried"
    else:
        title = f"Up to {number(at)} {load_name(points)} nine of ten requests meet the objectives"
    fig, ax = frame(title, foot(record), (10, 5.4))
    series = {
        "answered": (loads, [point["request_throughput"] for point in points]),
        "answered in time": (loads, [point["request_goodput"] for point in points]),
    }
    labels = draw_lines(ax, series, ("naive", "optimized"))
    if points[0]["request_rate"] is not None:
        look = ROLES["floor"]
        ax.plot([0, loads[-1]], [0, loads[-1]], color=look.colour, ls=look.dash, lw=1.4)
        labels.append((loads[-1], loads[-1], "what arrives", look.colour))
    mark_knee(ax, at, loads)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.grid(True, axis="y")
    ax.set_xlabel(load_name(points))
    ax.set_ylabel("requests/s\n(higher is better)")
    label_column(ax, labels)
    return fig


@style()
def draw_latencies(record: dict, at: int = -1) -> ClassFigure:
    """Latency over the percentile, of one point of a record."""
    point = record["points"][at]
    curves = {name: point[f"distribution_{name}_ms"] for name in LATENCIES}
    curves = {name: values for name, values in curves.items() if values}
    first = curves["ttft"]
    fig, ax = frame(
        f"Half of the first tokens come within {number(first[50])} ms, the slowest hundredth takes "
        f"{number(first[99])} ms or more",
        f"{foot(record)} · {number(load_of(point) or point['completed'])} {load_name([point])}",
        (10, 5.4),
    )
    labels = []
    for name, values in curves.items():
        role, label = LATENCIES[name]
        look = ROLES[role]
        ax.plot(range(101), values, color=look.colour, ls=look.dash)
        labels.append((100, values[-1], label, look.colour))
    every = [max(value, 0.01) for values in curves.values() for value in values]
    log_axis(ax.yaxis, min(every) / 1.5, max(every) * 1.5)
    ax.set_xlim(0, 100)
    ax.grid(True, axis="y")
    ax.set_xlabel("percentile")
    ax.set_ylabel("ms\n(lower is better)")
    label_column(ax, labels)
    return fig


@style()
def draw_distributions(record: dict) -> ClassFigure:
    """TTFT and ITL over the percentile at three loads: light, the last within the objectives, and
    the largest.
    """
    points = record["points"]
    at = knee_of(points)
    within = [point for point in points if at is not None and load_of(point) <= at]
    chosen = {"naive": points[-1], "library": points[0]}
    if within and within[-1] not in (points[0], points[-1]):
        chosen["optimized"] = within[-1]
    light, heavy = (points[index]["distribution_ttft_ms"][90] for index in (0, -1))
    fig, axes = frame(
        f"One of ten first tokens takes {number(light)} ms or more at {number(load_of(points[0]))} "
        f"{load_name(points)}, {number(heavy)} ms at {number(load_of(points[-1]))}",
        foot(record),
        (10, 5.4),
        (1, 1),
    )
    for ax, name, label in zip(axes, ("ttft", "itl"), ("first token", "from token to token")):
        labels, every = [], []
        for role, point in chosen.items():
            look = ROLES[role]
            # parts that came together are no time apart, which a log axis cannot show
            values = [max(value, LEAST_MS) for value in point[f"distribution_{name}_ms"]]
            ax.plot(range(101), values, color=look.colour, ls=look.dash)
            labels.append((100, values[-1], f"{number(load_of(point))}/s", look.colour))
            every += values
        log_axis(ax.yaxis, min(every) / 1.5, max(*every, 10 * min(every)) * 1.5)
        ax.set_xlim(0, 100)
        ax.grid(True, axis="y")
        ax.set_title(label)
        ax.set_xlabel("percentile")
        label_column(ax, labels)
    axes[0].set_ylabel("ms\n(lower is better)")
    return fig


@style()
def draw_cost(record: dict) -> ClassFigure:
    """Dollars for a million generated tokens over the load, and where the objectives end it."""
    points = record["points"]
    at, loads = knee_of(points), [load_of(point) for point in points]
    costs, price = (
        [p["cost_per_million_output_tokens"] for p in points],
        points[0]["price_per_hour"],
    )
    paid = cost_at(points, at)
    cheapest = min(costs)
    title = (
        f"Within the objectives a million tokens cost ${number(paid)}; ${number(cheapest)} is "
        "reached only beyond them"
        if paid is not None and paid > cheapest
        else f"A million tokens cost ${number(cheapest)} at the least"
    )
    fig, ax = frame(title, f"{foot(record)} · ${price:g} an hour", (10, 5.4))
    look = ROLES["optimized"]
    ax.plot(loads, costs, color=look.colour, marker=look.markers[0])
    mark_knee(ax, at, loads)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(number))
    ax.grid(True, axis="y")
    ax.set_xlabel(load_name(points))
    ax.set_ylabel("$ for a million generated tokens\n(lower is better)")
    return fig


def mark_knee(ax, at: float | None, loads: list[float]) -> None:
    """A line where the objectives end, if they do within what was tried."""
    if at is not None and at < loads[-1]:
        ax.axvline(at, color=GREY, ls=":", lw=1.4)
        # at the foot, where no line of such a figure ends
        where = (
            ("right", "the objectives end here ")
            if at > loads[-1] / 2
            else ("left", " the objectives end here")
        )
        ax.text(at, 0.03, where[1], color=GREY, ha=where[0], transform=ax.get_xaxis_transform())


def foot(record: dict) -> str:
    """The line under a figure."""
    said = record["setting"]
    return caption(
        record["fingerprint"],
        model=said["model"],
        goodput=said["goodput"] and " ".join(said["goodput"]),
    )


def figures_of(record: dict) -> dict[str, tuple[ClassFigure, str]]:
    """{name: (figure, what a blind reader is told)} of every figure that the record has numbers
    for.
    """
    points = record["points"]
    is_sweep = len(points) > 1 and "slo_attainment" in points[0]
    is_whole = all(point["completed"] for point in points)
    found = {}
    if is_sweep and is_whole and points[0]["request_rate"] is not None:
        alt = "Time to first token and between tokens over the percentile, at three loads."
        found["latencies"] = draw_distributions(record), alt
    else:
        alt = "Latency over the percentile, for the largest load."
        found["latencies"] = draw_latencies(record), alt
    if is_sweep:
        found["knee"] = draw_knee(record), "Answers a second, and those in time, over the load."
    if len(points) > 1 and all(point.get("cost_per_million_output_tokens") for point in points):
        found["cost"] = draw_cost(record), "Dollars for a million generated tokens over the load."
    if "stall" in record:
        alt = "Time to first token over the percentile, counted twice. From the intended time more "
        alt += "of the requests lie above the limit than from the sending."
        found["omission"] = draw_omission(record, foot(record)), alt
    return found


def save_figures(record: dict, path: Path) -> list[Path]:
    """Every figure that the record has the numbers for, beside its file. Returns the paths."""
    saved = []
    for name, (figure, alt) in figures_of(record).items():
        saved += save(figure, path.with_name(f"{path.stem}_{name}"), alt=alt)
    return saved
