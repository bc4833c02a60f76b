"""The lesson's two pictures: what each chain moves, and what a layer's launches leave of the GPU's
time.

    python -m lessons.l07_kernel_fusion.lab.pictures
        writes passes.svg (counted) and launches.svg (predicted) beside this file
"""

from pathlib import Path

from lessons.l07_kernel_fusion.lab.launches import LAUNCH_S, MODELS, SHORTEST_S, STEPS, schedule
from lessons.l07_kernel_fusion.lab.traffic import chains
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.plotting import class_plot, gantt
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.measure.passes import Pass, total_bytes

ROWS, SIZE = 4096, 4096
PASSES_SVG, LAUNCHES_SVG = (Path(__file__).parent / name for name in ("passes.svg", "launches.svg"))
KINDS = {
    "_to_copy": "cast",
    "pow": "square, mean",
    "mean": "square, mean",
    "amax": "max, sum",
    "sum": "max, sum",
    "silu": "silu",
    "sub": "arithmetic",
    "exp": "arithmetic",
    "div": "arithmetic",
    "mul": "arithmetic",
    "add_": "arithmetic",
}
KIND_ORDER = ["arithmetic", "cast", "square, mean", "max, sum", "silu", "one kernel"]


def pieces(passes: list[Pass], per: float) -> list[tuple]:
    """(start, end, kind) of each pass on an axis of bytes per value; `per`: how many values the
    operation has.
    """
    found, end = [], 0.0
    for one in passes:
        start, end = end, end + (one.read_bytes + one.written_bytes) / per
        found.append((start, end, KINDS.get(one.name, "one kernel")))
    # a value for each row is no bar
    return [piece for piece in found if piece[1] - piece[0] > 0.05]


def paired(passes: list[Pass]) -> list[Pass]:
    """QK-norm's passes over q and its passes over k, the same ones, as passes over both."""
    half = len(passes) // 2
    return [
        Pass(q.name, q.read_bytes + k.read_bytes, q.written_bytes + k.written_bytes)
        for q, k in zip(passes[:half], passes[half:])
    ] or passes


def draw_passes() -> ClassFigure:
    """Each bar is as long as the bytes that its passes read and write, for each value of the
    operation's output.
    """
    rows, totals, found = {}, [0, 0], chains(ROWS, SIZE)
    for name, (passes, kernel) in found.items():
        per = ROWS * (40 * 128 if name == "QK-norm" else SIZE)
        for side, (label, chain) in enumerate((("eager", passes), ("fused", [kernel]))):
            totals[side] += total_bytes(chain)
            shown = paired(chain) if name == "QK-norm" else chain
            rows[f"{name}, {label}: {total_bytes(chain) / per:.0f} B"] = pieces(shown, per)
    eager, fused = totals
    return gantt(
        rows,
        kinds=KIND_ORDER,
        title=f"One kernel each: the five chains move {eager / fused:.1f} times fewer bytes",
        xlabel="bytes read and written for each value (bfloat16)",
        caption=f"Counted, not measured: lessons/l07_kernel_fusion/lab/traffic.py · {ROWS} rows of "
        f"{SIZE} values; QK-norm: "
        f"32 + 8 heads of 128",
    )


def layer_of(passes: list[Pass], layers: int) -> list[Pass]:
    """The launches of the second layer of a step: from one attention's end to the next one's."""
    ends = [index for index, one in enumerate(passes) if one.name == "attention"]
    return passes[ends[0] + 1 : ends[1] + 1] if layers > 1 else passes


def kinds_of(passes: list[Pass]) -> list[str]:
    """How the timeline colours the kernels of a layer. What stands between the last product and the
    cache rotates q and k.
    """
    rotates = max(index for index, one in enumerate(passes) if one.name == "mm")
    return [
        "matrix product"
        if one.name == "mm"
        else "attention, cache"
        if one.name in ("attention", "append")
        else "RoPE: lesson 4"
        if index > rotates
        else "norm, addition, SwiGLU"
        for index, one in enumerate(passes)
    ]


def draw_launches(
    model: str = "Llama-3.2-1B", gpu: str = "h200", launch_s: float = LAUNCH_S
) -> ClassFigure:
    """One layer of a decode step as CPU and GPU see it, eager and fused, by the model of
    `launches.schedule`.
    """
    config, chip, rows, ends_us = MODELS[model], lookup(gpu), {}, []
    for label in ("eager", "fused"):
        passes = layer_of(STEPS[label](config), config.num_hidden_layers)
        spans = schedule(passes, launch_s, chip.memory_bytes_per_s)
        rows[f"{label}, CPU issues {len(passes)}"] = [
            (1e6 * span.issue_s, 1e6 * (span.issue_s + 0.9 * launch_s), kind)
            for span, kind in zip(spans, kinds_of(passes))
        ]
        rows[f"{label}, GPU runs"] = [
            (1e6 * span.start_s, 1e6 * span.end_s, kind)
            for span, kind in zip(spans, kinds_of(passes))
        ]
        ends_us.append(1e6 * spans[-1].end_s)
    return gantt(
        rows,
        kinds=["norm, addition, SwiGLU", "matrix product", "attention, cache", "RoPE: lesson 4"],
        title=f"A layer of {model}: {ends_us[0]:.0f} µs eager, {ends_us[1]:.0f} µs fused; the GPU "
        f"still waits",
        xlabel="µs",
        caption=f"PREDICTED, not measured · {chip.name} · one token, context 4096, bfloat16 · "
        f"{launch_s * 1e6:g} µs a launch, {SHORTEST_S * 1e6:g} µs for the shortest kernel",
    )


def draw_fusing(
    launch_us: float = 5.0, size: int = 4096, chain: str = "add + RMSNorm", gpu: str = "h200"
) -> ClassFigure:
    """Time of a chain, eager and fused, over the rows: t ≈ max(launches · t_launch, bytes / W).

    launch_us: µs that a launch takes; size: values in a row. Predicted for a GPU's data sheet.
    """
    chip, counts = lookup(gpu), [2**n for n in range(15)]
    found = {rows: chains(rows, size)[chain] for rows in counts}

    def time_us(passes: list[Pass]) -> float:
        bytes_us = 1e6 * total_bytes(passes) / chip.memory_bytes_per_s
        return max(len(passes) * launch_us, bytes_us)

    eager = [time_us(passes) for passes, _ in found.values()]
    fused = [time_us([kernel]) for _, kernel in found.values()]
    floor = [1e6 * total_bytes([kernel]) / chip.memory_bytes_per_s for _, kernel in found.values()]
    launches = len(found[1][0])
    turn = next((n for n, f in zip(counts, floor) if f > launch_us), None)
    where = (
        f"the kernel's bytes count from {turn} rows on" if turn else "launches decide everywhere"
    )
    return class_plot(
        counts,
        {
            f"eager, {launches} launches": ("naive", [(us,) * 3 for us in eager]),
            "one kernel": ("optimized", [(us,) * 3 for us in fused]),
        },
        floor=floor,
        floor_label="bytes of the kernel",
        title=f"{chain}: {eager[0] / fused[0]:.0f}x at one row, {eager[-1] / fused[-1]:.1f}x at "
        f"{counts[-1]}; {where}",
        xlabel=f"rows of {size} values",
        ylabel="µs",
        caption=f"PREDICTED: {launch_us:g} µs a launch, bytes at {chip.name}'s data-sheet "
        "bandwidth, bfloat16",
    )


if __name__ == "__main__":
    save_svg(draw_passes(), PASSES_SVG)
    save_svg(draw_launches(), LAUNCHES_SVG)
