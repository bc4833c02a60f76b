"""The lesson's pictures: who waits for whom in a decode step, launched one by one, with fewer
kernels, and as a graph; and for a slider, what a launch costs.

    python -m lessons.l11_cuda_graphs.lab.pictures

writes timeline.svg beside this file: recorded and modelled, not measured.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l11_cuda_graphs.lab.timeline import (
    KINDS,
    LaunchCost,
    busy_share,
    eager_spans,
    gantt_rows,
    graph_spans,
    plain,
    recorded_step,
    with_fused_kernels,
)
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.plotting import class_plot, gantt
from lessons.toolbox.model.config import ModelConfig

HERE = Path(__file__).parent
# the shape of models/tiny
TINY = ModelConfig("llama", 4096, 384, 6, 6, 2, 64, 1024, 1024, tie_word_embeddings=True)
BATCH, CONTEXT = 1, 512
# Llama-3-8B, of the slider
LLAMA_3_8B = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, rope_theta=5e5)
BATCHES = [1, 4, 16, 32, 64]
SHOWN_US = 160.0


def draw() -> ClassFigure:
    """CPU and GPU: the plain decoder, the fused one, and the fused one as a graph, as the
    launch-cost model has them.
    """
    cost, single = LaunchCost(), recorded_step(TINY, BATCH, CONTEXT).launches
    fused = recorded_step(TINY, BATCH, CONTEXT, twin=with_fused_kernels).launches
    ways = {
        "plain": eager_spans(single, cost),
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
        xlabel=f"the first {SHOWN_US:g} µs of the step",
        title=f"From {first} to {second} by fusing, to {third} by launching once: the GPU works "
        f"{busy_share(ways['fused, graph']):.0%} of the step instead of "
        f"{busy_share(ways['plain']):.0%}",
        caption=f"predicted, not measured · models/tiny's shape, batch {BATCH}, context {CONTEXT}, "
        f"16 bits · {len(single)} and {len(fused)} kernels, {cost.eager_us:g} µs a launch",
    )


@cache
def launches_of(batch: int, context: int, twin: Callable) -> list:
    """The kernels of a step of Llama-3-8B. Only their bytes grow with batch and context."""
    return recorded_step(LLAMA_3_8B, batch, context, twin=twin).launches


def draw_launch_cost(launch_us: float = 6.0, context: int = 1024) -> ClassFigure:
    """For a slider: a step of Llama-3-8B over the batch, if a launch takes so many µs."""
    cost = replace(LaunchCost(), eager_us=launch_us)
    ways = {
        "eager": ("naive", plain, eager_spans),
        "eager, fused": ("naive", with_fused_kernels, eager_spans),
        "graph": ("optimized", plain, graph_spans),
        "graph, fused": ("optimized", with_fused_kernels, graph_spans),
    }
    ms = {
        label: [spans(launches_of(b, context, twin), cost)[-1].end / 1000 for b in BATCHES]
        for label, (_, twin, spans) in ways.items()
    }
    with torch.device("meta"):
        model = Decoder(LLAMA_3_8B)
    params = sum(p.numel() for p in model.parameters()) - model.embed_tokens.weight.numel()
    kv_bytes = context * LLAMA_3_8B.kv_bytes_per_token(2)
    floor = [1e3 * (2 * params + batch * kv_bytes) / cost.bytes_per_s for batch in BATCHES]
    fusing = ms["eager"][0] / ms["eager, fused"][0]
    capturing = ms["eager, fused"][0] / ms["graph, fused"][0]
    return class_plot(
        BATCHES,
        {label: (role, [(t,) * 3 for t in ms[label]]) for label, (role, *_) in ways.items()},
        floor=floor,
        floor_label="weights and KV read once",
        title=f"At {launch_us:g} µs a launch and batch 1, fusing gains {fusing:.1f}x, "
        f"then capturing {capturing:.1f}x",
        xlabel="sequences in the batch",
        ylabel="predicted ms of one decode step",
        caption=f"predicted, not measured · Llama-3-8B, context {context}, 16 bits · gap "
        f"{cost.gap_us:g} µs, a kernel {cost.kernel_us:g} µs or its bytes at "
        f"{cost.bytes_per_s / 1e12:g} TB/s",
    )


if __name__ == "__main__":
    save_svg(draw(), HERE / "timeline.svg")
