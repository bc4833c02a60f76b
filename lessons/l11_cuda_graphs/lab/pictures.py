"""The lesson's one picture: who waits for whom in a decode step, launched one by one, with fewer
kernels, and as a graph.

    python -m lessons.l11_cuda_graphs.lab.pictures

writes timeline.svg beside this file: recorded and modelled, not measured.
"""

from pathlib import Path

from lessons.l11_cuda_graphs.lab.timeline import (
    KINDS,
    LaunchCost,
    busy_share,
    eager_spans,
    gantt_rows,
    graph_spans,
    recorded_step,
    with_fused_kernels,
)
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.plotting import gantt
from lessons.toolbox.model.config import ModelConfig

SVG = Path(__file__).parent / "timeline.svg"
# the shape of models/tiny
TINY = ModelConfig("llama", 4096, 384, 6, 6, 2, 64, 1024, 1024, tie_word_embeddings=True)
BATCH, CONTEXT = 1, 512
SHOWN_US = 160.0
ALT = (
    "Three pairs of rows over the first microseconds of a decode step. Plain and fused: the CPU "
    "launches without a pause, and "
    "the GPU runs a short kernel after each launch, then waits for the next. Graph: one launch, "
    "then the GPU's kernels follow "
    "each other."
)


def draw() -> ClassFigure:
    """CPU and GPU: the plain decoder, the fused one, and the fused one as a graph, as the
    launch-cost model has them.
    """
    cost, plain = LaunchCost(), recorded_step(TINY, BATCH, CONTEXT).launches
    fused = recorded_step(TINY, BATCH, CONTEXT, twin=with_fused_kernels).launches
    ways = {
        "plain": eager_spans(plain, cost),
        "fused": eager_spans(fused, cost),
        "fused, graph": graph_spans(fused, cost),
    }
    rows = {}
    for label, spans in ways.items():
        rows |= gantt_rows(label, spans, SHOWN_US)
    first, second, third = (f"{spans[-1].end / 1000:.2f} ms" for spans in ways.values())
    return gantt(
        rows,
        kinds=list(KINDS),
        xlabel="µs from the begin of the step",
        title=f"From {first} to {second} by fusing, to {third} by launching once: the GPU works "
        f"{busy_share(ways['fused, graph']):.0%} of the step instead of "
        f"{busy_share(ways['plain']):.0%}",
        caption=f"predicted, not measured: {len(plain)} and {len(fused)} kernels recorded from "
        f"models/tiny's shape, "
        f"batch {BATCH}, context {CONTEXT}, 16 bits · launch {cost.eager_us:g} µs, graph "
        f"{cost.graph_us:g} µs, latency "
        f"{cost.latency_us:g} µs, gap {cost.gap_us:g} µs, a kernel {cost.kernel_us:g} µs or its "
        f"bytes at "
        f"{cost.bytes_per_s / 1e12:g} TB/s",
    )


if __name__ == "__main__":
    save_svg(draw(), SVG, alt=ALT)
