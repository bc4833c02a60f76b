"""When the CPU launches and when the GPU runs: predicted from a recorded step by a launch-cost
model, or seen by the profiler.

The model: the CPU needs `eager_us` for each operation; a kernel starts once it is launched and
`gap_us` after the one before has ended; it takes the time of its bytes at the memory's bandwidth,
and never less than `kernel_us`. A graph is launched once, then the GPU goes from kernel to kernel
by itself: graph ≈ kernels + launches · gap_us, and eager ≈ the larger of that and launches ·
eager_us.

Source of the idea: NVIDIA, Getting Started with CUDA Graphs (2019).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l07_kernel_fusion import optimized as lesson7
from lessons.l07_kernel_fusion.fused_decoder import fused, ops_of
from lessons.l11_cuda_graphs.naive import LOCKSTEP, decode_batch, decode_logits
from lessons.l11_cuda_graphs.simulator import Launch, SimulatedGraph
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.model.config import ModelConfig

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "linear")
GATHERS = ("embedding", "index_select", "index")  # read only the rows that are asked for
SCATTERS = ("index_put_", "index_copy_")  # write only the rows that are given
LAUNCH, PRODUCT, ATTENTION, OTHER = KINDS = (
    "launch by the CPU",
    "matrix product",
    "attention",
    "all other kernels",
)


@dataclass(frozen=True)
class LaunchCost:
    """Assumed, not measured: orders of magnitude of a server with PyTorch. Times in µs; bandwidth:
    an H200's data sheet.
    """

    eager_us: float = 6.0  # of the CPU for one operation: Python, PyTorch, the driver
    graph_us: float = 12.0  # of the CPU for one whole graph, however long
    latency_us: float = 3.0  # from the end of a launch to the start of its kernel
    # from the end of a kernel to the start of the next, when that is launched already
    gap_us: float = 0.5
    kernel_us: float = 2.0  # the shortest kernel
    bytes_per_s: float = CHIPS["h200"].memory_bytes_per_s

    def kernel_time_us(self, launch: Launch) -> float:
        """µs that the GPU is busy with one kernel."""
        return max(self.kernel_us, 1e6 * moved_bytes(launch) / self.bytes_per_s)


@dataclass(frozen=True)
class Span:
    """One kernel: launched by the CPU from cpu_start to cpu_end, run by the GPU from start to end;
    µs from the start of the step.
    """

    name: str
    cpu_start: float
    cpu_end: float
    start: float
    end: float


def plain(model: Decoder) -> Decoder:
    """Lesson 2's decoder as it is: every small operation a kernel of its own."""
    return model


def with_fused_kernels(model: Decoder) -> Decoder:
    """Lesson 7's twin, with the kernels that a GPU runs, wherever the model is."""
    return fused(model, ops_of(lesson7))


def recorded_step(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    twin: Callable[[Decoder], Decoder] = plain,
) -> SimulatedGraph:
    """The kernels of a decode step, as a GPU would launch them, of a model of any size: it exists
    on the meta device only.
    """
    with torch.device("meta"):
        model = twin(Decoder(config).to(dtype).eval().requires_grad_(False))
    pool = KVPool(config, batch, context, LOCKSTEP.kernels, dtype, "meta")
    inputs = torch.zeros(4, batch, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        step = decode_batch(inputs, max_context_len=context)
        graph = SimulatedGraph()
        graph.record(lambda: decode_logits(model, pool, step))
    return graph


def moved_bytes(launch: Launch) -> int:
    """Bytes that a kernel reads and writes: every tensor that it is given or makes, each once; of a
    table only the rows used.
    """
    inputs = launch.inputs
    if launch.name in GATHERS:
        return 2 * _nbytes(launch.outputs)
    if launch.name == "rope_cache_kernel":
        return 2 * _nbytes(inputs[:3])  # q, k and v, read and written
    if launch.name in SCATTERS:
        return 2 * _nbytes(inputs[-1:])
    return _nbytes({id(x): x for x in (*inputs, *launch.outputs)}.values())


def _nbytes(tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


# ---------------------------------------------------------------- the model


def eager_spans(launches: list[Launch], cost: LaunchCost) -> list[Span]:
    """Each kernel is launched by itself: the GPU waits for the CPU, or runs after it."""
    spans, end = [], 0.0
    for i, launch in enumerate(launches):
        cpu_start = i * cost.eager_us
        start = max(cpu_start + cost.eager_us + cost.latency_us, end + cost.gap_us)
        end = start + cost.kernel_time_us(launch)
        spans.append(Span(launch.name, cpu_start, cpu_start + cost.eager_us, start, end))
    return spans


def graph_spans(launches: list[Launch], cost: LaunchCost) -> list[Span]:
    """All kernels are launched at once: every span carries the same launch."""
    spans, start = [], cost.graph_us + cost.latency_us
    for launch in launches:
        end = start + cost.kernel_time_us(launch)
        spans.append(Span(launch.name, 0.0, cost.graph_us, start, end))
        start = end + cost.gap_us
    return spans


def busy_share(spans: list[Span]) -> float:
    """How much of the step the GPU works: 0 to 1."""
    return sum(span.end - span.start for span in spans) / spans[-1].end


def peak_bytes(graph: SimulatedGraph) -> int:
    """The most that a graph's own tensors hold at one moment, each from its making to its last use:
    its pool's least size.
    """
    born, dies, sizes = {}, {}, {}
    for i, launch in enumerate(graph.launches):
        for x in (*launch.inputs, *launch.outputs):
            dies[x.untyped_storage()._cdata] = i
        for x in launch.outputs:
            key = x.untyped_storage()._cdata
            born[key], sizes[key] = i, x.untyped_storage().nbytes()
    # the caller reads it after the last kernel
    dies[graph.output.untyped_storage()._cdata] = len(graph.launches)
    return max(
        sum(size for key, size in sizes.items() if born[key] <= i <= dies[key])
        for i in range(len(graph.launches))
    )


# ---------------------------------------------------------------- as rows of a Gantt chart


def kind_of(name: str) -> str:
    """Which of KINDS a kernel is, by its name here or in the profiler."""
    lower = name.lower()
    if lower in MATRIX_PRODUCTS or any(
        part in lower for part in ("gemm", "gemv", "cutlass", "nvjet", "splitk")
    ):
        return PRODUCT
    return ATTENTION if any(part in lower for part in ("decode", "combine", "attention")) else OTHER


def gantt_rows(label: str, spans: list[Span], until_us: float) -> dict[str, list[tuple]]:
    """{"label: CPU": launches, "label: GPU": kernels} up to `until_us`, as plotting.gantt takes
    them.
    """
    launches = sorted({(span.cpu_start, span.cpu_end) for span in spans})
    return {
        f"{label}: CPU": [(a, min(b, until_us), LAUNCH) for a, b in launches if a < until_us],
        f"{label}: GPU": [
            (s.start, min(s.end, until_us), kind_of(s.name)) for s in spans if s.start < until_us
        ],
    }


def measured_spans(step: Callable[[], Tensor]) -> list[Span]:
    """Spans of step() on this GPU, by torch.profiler, after a warm-up. step() returns a tensor,
    [...].
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return spans_of(profiler.events())


def spans_of(events) -> list[Span]:
    """The profiler's events as spans, from the first launch on: kernel i belongs to launch i; a
    graph's kernels share one.
    """
    kernels = sorted(
        (e for e in events if e.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda e: e.time_range.start,
    )
    launches = sorted(
        (
            e
            for e in events
            if e.device_type == torch.autograd.DeviceType.CPU and "launch" in e.name.lower()
        ),
        key=lambda e: e.time_range.start,
    )
    if not kernels or not launches:
        raise ValueError(
            "events: got no kernel or no launch; accepted: a profile of a step that ran on a GPU"
        )
    zero = min(launches[0].time_range.start, kernels[0].time_range.start)
    paired = [launches[min(i, len(launches) - 1)] for i in range(len(kernels))]
    return [
        Span(
            kernel.name,
            launch.time_range.start - zero,
            launch.time_range.end - zero,
            kernel.time_range.start - zero,
            kernel.time_range.end - zero,
        )
        for kernel, launch in zip(kernels, paired)
    ]
