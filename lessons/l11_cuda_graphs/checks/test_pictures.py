"""Proves the launch-cost model on paper, that a recorded step moves what it must, the README's
predictions, and the picture.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l11_cuda_graphs.lab import pictures, timeline
from lessons.l11_cuda_graphs.lab.testing import captured
from lessons.l11_cuda_graphs.lab.timeline import LaunchCost, eager_spans, graph_spans, recorded_step
from lessons.l11_cuda_graphs.lab.workload import LLAMA_8B, step_bytes
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.proof.pages import pages


def test_the_model_on_paper():
    """Three kernels of 2 µs: eager they wait for their launches of 6 µs, in a graph they follow
    each other.
    """
    x = torch.zeros(8)
    launches = captured(lambda: ((x + 1) * 2).relu())[0].launches
    cost = LaunchCost(
        eager_us=6, graph_us=12, latency_us=3, gap_us=0.5, kernel_us=2, bytes_per_s=4.8e12
    )
    assert [(s.start, s.end) for s in eager_spans(launches, cost)] == [(9, 11), (15, 17), (21, 23)]
    assert [(s.start, s.end) for s in graph_spans(launches, cost)] == [
        (15, 17),
        (17.5, 19.5),
        (20, 22),
    ]
    # 64 bytes at 1 byte/µs: now the kernels hide the launches
    slow = replace(cost, bytes_per_s=1e6)
    assert [(s.start, s.end) for s in eager_spans(launches, slow)] == [
        (9, 73),
        (73.5, 137.5),
        (138, 202),
    ]
    assert timeline.busy_share(eager_spans(launches, cost)) == 6 / 23


def test_a_recorded_step_moves_weights_and_cache_once():
    """Beside them only activations: a few percent. And the number of launches does not depend on
    the batch.
    """
    config = replace(pictures.TINY, num_hidden_layers=3, vocab_size=32000)
    for batch in (1, 8):
        launches = recorded_step(config, batch, 256).launches
        moved = sum(map(timeline.moved_bytes, launches))
        weights = 2 * sum(p.numel() for p in Decoder(config).parameters())
        floor = weights + batch * 256 * config.kv_bytes_per_token(2)
        assert floor < moved < 1.15 * floor
    assert len({len(recorded_step(config, batch, 64).launches) for batch in (1, 2, 16)}) == 1


def test_a_graph_needs_room_for_what_lives_at_once():
    x = torch.zeros(1000)
    graph, _ = captured(lambda: x.add(1).mul(2).relu().sum(0, keepdim=True))
    # an input and an output of the same kernel, never more
    assert timeline.peak_bytes(graph) == 2 * 4000
    step = recorded_step(pictures.TINY, 8, 64)
    made = sum(x.nbytes for launch in step.launches for x in launch.outputs)
    assert 8 * pictures.TINY.vocab_size * 2 <= timeline.peak_bytes(step) < made / 5


def event(name, device, start, end):
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end)
    )


def test_a_profile_becomes_spans():
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    events = [
        event("aten::mm", cpu, 99, 140),
        event("cudaLaunchKernel", cpu, 100, 104),
        event("cuLaunchKernelEx", cpu, 110, 113),
        event("gemv2T_kernel", gpu, 108, 120),
        event("decode_kernel", gpu, 121, 130),
    ]
    spans = timeline.spans_of(events)
    assert [(s.cpu_start, s.cpu_end, s.start, s.end) for s in spans] == [
        (0, 4, 8, 20),
        (10, 13, 21, 30),
    ]
    graph = timeline.spans_of([event("cudaGraphLaunch", cpu, 50, 60), *events[3:]])
    assert {(s.cpu_start, s.cpu_end) for s in graph} == {(0, 10)} and len(graph) == 2
    rows = timeline.gantt_rows("graph", graph, 1000)
    assert [kind for *_, kind in rows["graph: GPU"]] == [
        timeline.PRODUCT,
        timeline.ATTENTION,
    ] and len(rows["graph: CPU"]) == 1
    with pytest.raises(
        ValueError,
        match="events: got no kernel or no launch; accepted: a profile of a step that ran on a GPU",
    ):
        timeline.spans_of(events[:3])


def test_the_predictions_of_the_readme():
    """Its table, and the memory that it names, as the simulator records them and the model
    predicts.
    """
    text, cost = pages(Path(__file__).parents[1]), LaunchCost()
    models = {
        "models/tiny, 512": (pictures.TINY, 512),
        "Llama-3-8B, 4096": (replace(LLAMA_8B, num_hidden_layers=32), 4096),
    }
    for name, (config, context) in models.items():
        twins = {name: timeline.plain, f"{name}, fused": timeline.with_fused_kernels}
        for label, twin in twins.items():
            launches = recorded_step(config, 1, context, twin=twin).launches
            eager, graph = eager_spans(launches, cost)[-1].end, graph_spans(launches, cost)[-1].end
            read = 1e6 * step_bytes(config, 1, context, torch.bfloat16) / cost.bytes_per_s
            times = f"{eager / 1000:.2f} | {graph / 1000:.2f} | {read / 1000:.2g}"
            row = f"| {label} | {len(launches)} | {times} |"
            assert row in text, f"the README lacks {row}"
    step = recorded_step(config, 32, 4096, twin=timeline.with_fused_kernels)
    made = sum(x.nbytes for launch in step.launches for x in launch.outputs)
    assert f"at batch 32 makes {made / 1e6:.0f} MB of tensors" in text
    assert f"{timeline.peak_bytes(step) / 1e6:.1f} MB live at once" in text


@pytest.mark.parametrize("draw", [pictures.draw, pictures.draw_launch_cost])
@pytest.mark.sample(4, of="pictures")
def test_the_pictures_fit(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
