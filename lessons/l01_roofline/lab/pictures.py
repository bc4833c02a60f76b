"""The lesson's pictures: a model under the roofline, three chips' ridges, the memories of a GPU,
and from how many tokens on rented hardware is cheaper than an API.

    python -m lessons.l01_roofline.lab.pictures      writes the SVG files beside this file

What they show is predicted from data sheets.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from lessons.l01_roofline.calculators import (
    Floor,
    break_even_tokens_per_day,
    decode_floor,
    prefill_floor,
)
from lessons.l01_roofline.hierarchy import levels
from lessons.l01_roofline.naive import QueueDevice
from lessons.l01_roofline.planner.models import find_model
from lessons.l01_roofline.planner.plan import Plan, make_plan, peak_flops
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    GREY,
    ClassFigure,
    frame,
    log_axis,
    marks,
    number,
    style,
)
from lessons.toolbox.draw.plotting import class_plot, gantt, roofline
from lessons.toolbox.measure.hardware import attainable_flops, lookup, ridge_point

MODEL, GPU, CONTEXT, BATCHES = "llama-3-8b", "h200", 2048, (1, 8, 64, 256)
RIDGES = {"a100": "naive", "h100": "library", "h200": "optimized"}
DAYS = 365 / 12  # of a month
ALT = (
    "Roofline of an H200 from its data sheet. Decode steps of Llama-3-8B are far left on the "
    "memory slope, those of larger batches further right; the prefill of 2048 tokens is at "
    "the flat compute roof, right of the ridge."
)


def floors(batches: tuple[int, ...] = BATCHES, context: int = CONTEXT) -> dict[str, Floor]:
    """The work that the roofline shows, by label."""
    model, chip = find_model(MODEL), lookup(GPU)
    machine = chip.memory_bytes_per_s, peak_flops(chip)
    found = {}
    for batch in batches:
        found[f"decode, batch {batch}"] = decode_floor(model, batch, context, *machine)
    found[f"prefill, {context} tokens"] = prefill_floor(model, context, *machine)
    return found


def draw(batches: tuple[int, ...] = BATCHES, context: int = CONTEXT) -> ClassFigure:
    """Every dot stands on the roof: it is what the roofline allows, not what was measured."""
    chip, work = lookup(GPU), floors(batches, context)
    points = {}
    for label, floor in work.items():
        role = "naive" if "decode" in label else "optimized"
        points[label] = (role, floor.intensity, floor.flops / floor.seconds)
    first = work[f"decode, batch {batches[0]}"]
    share = first.flops / first.seconds / peak_flops(chip)
    who = "one sequence" if batches[0] == 1 else f"{batches[0]} sequences"
    return roofline(
        points,
        bandwidths={"memory": chip.memory_bytes_per_s},
        peaks={"16-bit matrix units": peak_flops(chip)},
        title=f"Decoding {who} can use {share:.1%} of the GPU's arithmetic",
        caption=f"Predicted, not measured · {MODEL}, 16 bits, context {context} · {chip.name} by "
        "its data sheet",
    )


def draw_ridges() -> ClassFigure:
    """The rooflines of three chips in 16 bits, each ridge marked."""
    intensities = [2.0**n for n in range(3, 12)]
    series, ridges = {}, {}
    for name, role in RIDGES.items():
        chip = lookup(name)
        machine = peak_flops(chip), chip.memory_bytes_per_s
        ridges[chip.name] = ridge_point(*machine)
        reached = [attainable_flops(x, *machine) / 1e12 for x in intensities]
        series[f"{chip.name}: ridge {ridges[chip.name]:.0f}"] = (role, [(y,) * 3 for y in reached])
    figure = class_plot(
        intensities,
        series,
        title="More arithmetic moves the ridge right, more bandwidth moves it back: "
        + ", ".join(f"{ridge:.0f}" for ridge in ridges.values()),
        xlabel="arithmetic intensity (FLOP per byte moved)",
        ylabel="TFLOP/s that the roofline allows",
        caption="From data sheets, dense 16-bit matrix rates",
        better="higher",
    )
    for ridge in ridges.values():
        figure.axes[0].axvline(ridge, color=GREY, ls=":", lw=1.2)
    return figure


@style()
def draw_hierarchy(names: tuple[str, ...] = ("a100", "h200")) -> ClassFigure:
    """Bandwidth over size of every memory of the chips; both axes logarithmic."""
    chips = [lookup(name) for name in names]
    slow, fast = levels(chips[0])[-1], levels(chips[0])[0]
    ratio = fast.bytes_per_s / slow.bytes_per_s
    fig, ax = frame(
        f"Of an {chips[0].name.split()[0]}'s memories the registers are {ratio:.0f}x as fast as "
        f"HBM, and {slow.num_bytes / fast.num_bytes:,.0f}x smaller",
        "Computed from data sheets (hierarchy.py); NVIDIA publishes no L2 bandwidth of an H200",
        (10, 5.8),
    )
    looks = marks({chip.name: (role, None) for chip, role in zip(chips, ("naive", "optimized"))})
    for chip, look in zip(chips, looks.values()):
        known = [level for level in levels(chip) if level.bytes_per_s is not None]
        for level in known:
            size, rate = level.num_bytes / 1e6, level.bytes_per_s / 1e12
            ax.plot(size, rate, ms=11, **look)
            text = f"{chip.name.split()[0]} {level.name}: {size:,.0f} MB, {number(rate)} TB/s"
            side = ("right", -12) if level.name == "HBM" else ("left", 12)
            place = {"textcoords": "offset points", "va": "center", "ha": side[0]}
            ink = {"color": look["color"], "fontweight": "bold"}
            ax.annotate(text, (size, rate), (side[1], 0), **place, **ink)
    log_axis(ax.xaxis, 8, 2e6)
    log_axis(ax.yaxis, 1, 1000)
    ax.grid(True)
    ax.set_xlabel("size of the memory, whole chip (MB, log scale)")
    ax.set_ylabel("bandwidth (TB/s, log scale)")
    return fig


def rented() -> Plan:
    """Four H100s for Llama-3-70B: what the figure of the break-even and the museum talk about."""
    return make_plan(find_model("llama-3-70b"), lookup("h100"), batch=64, context=4096, gpus=4)


def draw_break_even(
    dollars_per_gpu_hour: float = 4.5,
    api_dollars: tuple[float, ...] = (0.3, 0.9, 3.0),
    plan: Plan | None = None,
) -> ClassFigure:
    """Dollars a month over tokens a month: rented GPUs in whole machines, and an API at some
    prices.
    """
    plan = plan or rented()
    hourly = plan.gpus * dollars_per_gpu_hour
    monthly = hourly * 24 * DAYS
    capacity = plan.tokens_per_s * 86400 * DAYS
    billions = [2.0**n for n in range(-3, 8)]
    own = [monthly * np.ceil(max(1.0, x * 1e9 / capacity)) for x in billions]
    name = f"{plan.gpus} x {plan.chip.name}, full at {number(capacity / 1e9)}·10⁹ tokens"
    series = {name: ("optimized", [(y,) * 3 for y in own])}
    for price in api_dollars:
        series[f"API, ${price:g} for 10⁶"] = ("naive", [(1e3 * price * x,) * 3 for x in billions])
    return class_plot(
        billions,
        series,
        title=f"${monthly:,.0f} a month buy at most {capacity / 1e9:.1f}·10⁹ tokens: below "
        f"${monthly / capacity * 1e6:.2f} for 10⁶ an API always wins",
        xlabel="tokens a month, in 10⁹",
        ylabel="dollars a month",
        caption=f"Predicted ceiling, busy day and night · {plan.model.name}, 16 bits, "
        f"{plan.running} sequences of {plan.context} tokens · ${dollars_per_gpu_hour:.2f} a GPU "
        "hour, an assumption",
    )


def break_even_tokens_per_month(dollars_per_hour: float, api_dollars: float) -> float:
    """Tokens a month from which the hardware is cheaper, if it can serve so many."""
    return DAYS * break_even_tokens_per_day(dollars_per_hour, api_dollars)


def draw_queue(setup_s: float = 0.12, work_s: float = 0.03, calls: int = 4) -> ClassFigure:
    """The first calls of a `QueueDevice`, as they happen: what the host does, and what the device
    does meanwhile. Measured while it is drawn.
    """
    device, zero = QueueDevice(setup=lambda: time.sleep(setup_s)), time.perf_counter()
    host, worker = [], []

    def timed(rows: list, kind: str, action: Callable[[], object], *text: str) -> None:
        start = time.perf_counter()
        action()
        rows.append(((start - zero) * 1e3, (time.perf_counter() - zero) * 1e3, kind, *text))

    def work() -> None:
        timed(worker, "work", lambda: time.sleep(work_s), f"call {len(worker) + 1}")

    for _ in range(calls):
        timed(host, "launch", lambda: device.launch(work))
        timed(host, "wait", device.synchronize)
    launches = [end - start for start, end, kind, *_ in host if kind == "launch"]
    works = [end - start for start, end, *_ in worker]
    return gantt(
        {"host": host, "device": worker},
        xlabel="time (ms)",
        kinds=["launch", "wait", "work"],
        title=f"The stopwatch sees the launch, {median(launches):.3f} ms; the work takes "
        f"{median(works):.0f} ms",
        caption=f"A thread plays the device; its first call pays {setup_s * 1e3:.0f} ms of set-up, "
        "which warm-up keeps out of the median",
    )


# file name -> what draws it, and what a blind reader is told
PICTURES: dict[str, Picture] = {
    "roofline": (draw, ALT),
    "ridges": (
        draw_ridges,
        "Rooflines of A100, H100 and H200 over arithmetic intensity. All rise along their "
        "bandwidth; the A100 becomes flat at 153, the H200 at 206, the H100 at 295 FLOP per byte.",
    ),
    "hierarchy": (
        draw_hierarchy,
        "Bandwidth over size of the memories of an A100 and an H200, both axes logarithmic. "
        "Registers and shared memory are top left, small and fast; HBM bottom right, large and "
        "slow; L2 between them.",
    ),
    "break_even": (
        draw_break_even,
        "Dollars a month over tokens a month. Rented GPUs cost the same up to their "
        "capacity and double beyond it; three lines of API prices climb steadily. The two cheaper "
        "APIs stay below the GPUs everywhere.",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
