"""The lesson's one picture: who waits for whom in a decode step, launched one by one and as a graph.

    python -m lessons.l11_cuda_graphs.picture      writes timeline.svg beside this file (recorded and modelled, not measured)
"""
from pathlib import Path

from lessons.l11_cuda_graphs.timeline import KINDS, LaunchCost, busy_share, eager_spans, gantt_rows, graph_spans, recorded_step
from lessons.toolbox.config import ModelConfig
from lessons.toolbox.figure import ClassFigure, save_svg
from lessons.toolbox.plotting import gantt

SVG = Path(__file__).parent / "timeline.svg"
TINY = ModelConfig("llama", 4096, 384, 6, 6, 2, 64, 1024, 1024, tie_word_embeddings=True)  # the shape of models/tiny
BATCH, CONTEXT = 1, 512
SHOWN_US = 220.0
ALT = ("Two pairs of rows over the first microseconds of a decode step. Eager: the CPU launches without a pause, and the GPU "
       "runs a short kernel after each launch, then waits for the next. Graph: one launch, then the GPU's kernels follow each other.")


def draw() -> ClassFigure:
    """CPU and GPU, eager and captured, as the launch-cost model has them."""
    cost = LaunchCost()
    launches = recorded_step(TINY, BATCH, CONTEXT).launches
    eager, graph = eager_spans(launches, cost), graph_spans(launches, cost)
    return gantt(
        gantt_rows("eager", eager, SHOWN_US) | gantt_rows("graph", graph, SHOWN_US), kinds=list(KINDS),
        title=f"Launched one by one, the GPU works {busy_share(eager):.0%} of a step of {eager[-1].end / 1000:.2f} ms; "
              f"as a graph, {busy_share(graph):.0%} of {graph[-1].end / 1000:.2f} ms",
        xlabel="µs from the begin of the step",
        caption=f"predicted, not measured: {len(launches)} kernels recorded from models/tiny's shape, batch {BATCH}, "
                f"context {CONTEXT}, 16 bits · launch {cost.eager_us:g} µs, graph {cost.graph_us:g} µs, "
                f"latency {cost.latency_us:g} µs, gap {cost.gap_us:g} µs, a kernel {cost.kernel_us:g} µs or its bytes at {cost.bytes_per_s / 1e12:g} TB/s")


if __name__ == "__main__":
    save_svg(draw(), SVG, alt=ALT)
