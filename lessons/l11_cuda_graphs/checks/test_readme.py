"""Proves that the examples and excerpts of README.md are those of the code."""

from pathlib import Path

import torch

from lessons.l11_cuda_graphs.lab import pictures
from lessons.l11_cuda_graphs.lab.timeline import (
    LaunchCost,
    eager_spans,
    graph_spans,
    recorded_step,
    with_fused_kernels,
)
from lessons.l11_cuda_graphs.lab.workload import TINY, WIDE_CONTEXT, step_bytes, widened
from lessons.l11_cuda_graphs.optimized import bucket_for
from lessons.l11_cuda_graphs.simulator import SimulatedGraph
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
README = pages(ROOM)


def test_the_excerpts_of_the_readme_are_the_code():
    """But for white space, because an excerpt stands further to the left."""
    code = "".join((ROOM / name).read_text("utf-8") for name in ("naive.py", "optimized.py"))
    excerpts = [block.split("```")[0] for block in README.split("```python\n")[1:]]
    assert len(excerpts) == 2
    for excerpt in excerpts:
        assert "".join(excerpt.split()) in "".join(code.split()), excerpt


def test_the_examples_on_paper():
    """Steps 1 to 5 and 8 of the derivation, and the numbers of the bottleneck."""
    launches_us, weights_us, cache_us = 1000 * 6, 9.6e9 / 4.8e6, 4800 * 100e3 / 4.8e6
    assert (launches_us, weights_us, cache_us) == (6000, 2000, 100)
    assert max(launches_us, weights_us + 10 * cache_us) == 6000
    assert max(LaunchCost().graph_us, weights_us + 10 * cache_us) == 3000
    assert (launches_us - weights_us) / cache_us == 40
    cost = LaunchCost()
    small_us = 81 * (cost.kernel_us + cost.gap_us)
    assert f"81 · ({cost.kernel_us:g} + {cost.gap_us:g}) = {small_us:g} µs" in README
    first_us = cost.graph_us + cost.latency_us
    alone_us = first_us + small_us
    assert f"= {alone_us:g} µs, {alone_us / 1e3:.2f} ms in all" in README
    assert bucket_for(9, [1, 2, 4, 8, 16]) - 9 == 7

    x, factor = torch.tensor([1.0, 2.0, 3.0]), 10
    graph, shown = SimulatedGraph(), []
    out = graph.record(lambda: (x + 1) * factor)
    graph.replay()
    shown.append(out.tolist())
    x.copy_(torch.tensor([5.0, 6.0, 7.0]))
    graph.replay()
    shown.append(out.tolist())
    x, factor = torch.zeros(3), 1000
    graph.replay()
    shown.append(out.tolist())
    assert shown == [[20, 30, 40], [60, 70, 80], [60, 70, 80]]

    read = step_bytes(TINY, 1, 512, torch.bfloat16)
    launches = len(recorded_step(TINY, 1, 512).launches)
    assert f"reads {read / 1e6:.0f} MB" in README and f"{launches} kernels" in README
    assert f"`{read / 4.8e12 * 1e6:.0f} µs`" in README and f"`{launches * 6e-3:.1f} ms`" in README
    narrow, wide = (step_bytes(widened(size), 1, WIDE_CONTEXT, torch.float32) for size in (64, 256))
    assert f"reads {wide / narrow:.0f} times the bytes" in README


def test_what_the_museum_says_of_fusing_and_of_capturing():
    cost = LaunchCost()
    plain = recorded_step(TINY, 1, 512).launches
    fused = recorded_step(TINY, 1, 512, twin=with_fused_kernels).launches
    ends = [eager_spans(plain, cost), eager_spans(fused, cost), graph_spans(fused, cost)]
    first, second, third = (spans[-1].end / 1000 for spans in ends)
    assert f"from {first:.2f} ms to {third:.2f} ms, {first / third:.1f}× faster" in README
    assert f"Fusing gained {first / second:.1f}×" in README
    assert f"capturing the fused step {second / third:.1f}×" in README
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert f"{len(sizes)} graphs up to 512, and not {3 + 512 // 8}" in README


def test_the_parts_of_the_predicted_graph():
    """Of Llama-3-8B, where not every kernel is a small one."""
    cost = LaunchCost()
    launches = recorded_step(pictures.LLAMA_3_8B, 1, 4096).launches
    times = [cost.kernel_time_us(launch) for launch in launches]
    small = [time for time in times if time <= cost.kernel_us]
    large_ms, gaps_ms = (sum(times) - sum(small)) / 1e3, len(launches) * cost.gap_us / 1e3
    start_ms, small_ms = (cost.graph_us + cost.latency_us) / 1e3, sum(small) / 1e3
    whole_ms = graph_spans(launches, cost)[-1].end / 1e3
    eager = eager_spans(launches, cost)[-1]
    for said in (
        f"{start_ms:.3f} ms to start, {len(small)} small kernels of 2 µs, "
        f"{len(times) - len(small)} large ones of {large_ms:.3f} ms together, {len(times)} gaps",
        f"{start_ms:.3f} + {small_ms:.3f} + {large_ms:.3f} + {gaps_ms:.3f} = {whole_ms:.2f} ms",
        f"{len(times)} · 6 µs = {eager.cpu_end / 1e3:.2f} ms, and "
        f"{(eager.end - eager.cpu_end) / 1e3:.2f} ms more",
    ):
        assert said in README, said
