"""A copy whose reads have gaps: the same number of elements, further and further apart.

    python -m lessons.toolbox.measure.bench 00

On a CPU no kernel is timed, and PyTorch's strided copy stands for it. A CPU fetches 64 bytes at a
time where a GPU fetches 32, so there the gaps hurt up to a stride of 16 elements, not 8.
"""

import torch
from torch import Tensor

from lessons.l00_gpu_and_triton import optimized
from lessons.toolbox.measure.bench import Benchmark, Unavailable
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.hardware import measured_ceilings

ON_GPU = default_device().type == "cuda"
COUNT = 2**24 if ON_GPU else 2**22  # elements: beyond the caches of most CPUs
STRIDES = [1, 2, 4, 8, 16]


def source(stride: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """x: [COUNT · stride], what is read of it, side by side: [COUNT], and the stride."""
    x = torch.randn(COUNT * stride, device=device)
    return x, x[::stride].clone(), stride


def with_gaps(x: Tensor, packed: Tensor, stride: int):
    """Elements 0, stride, 2 · stride, …, by the kernel; on a CPU by PyTorch."""
    if ON_GPU:
        return lambda: optimized.every_nth(x, stride, COUNT)
    return lambda: x[::stride].clone(memory_format=torch.contiguous_format)


def side_by_side(x: Tensor, packed: Tensor, stride: int):
    """The same elements without gaps."""
    if ON_GPU:
        return lambda: optimized.every_nth(packed, 1, COUNT)
    return lambda: packed.clone()


def library(x: Tensor, packed: Tensor, stride: int):
    """PyTorch's copy of the strided view."""
    if not ON_GPU:
        raise Unavailable("on a CPU it is the version with gaps itself")
    return lambda: x[::stride].clone(memory_format=torch.contiguous_format)


def floor_s(stride: int) -> float:
    """Seconds to move what is asked for, and nothing else."""
    return 2 * 4 * COUNT / measured_ceilings().memory_bytes_per_s


BENCHMARKS = [
    Benchmark(
        name="l00_gaps",
        title="The same elements, {x} apart: {speedup:.1f}x slower than side by side",
        x_name="distance of two elements that are read",
        x_values=STRIDES,
        quick_x_values=[1, 8],
        inputs=source,
        providers={
            "with gaps": ("naive", with_gaps),
            "side by side": ("optimized", side_by_side),
            "PyTorch": ("library", library),
        },
        ylabel=f"time to copy {COUNT} elements",
        floor_s=floor_s,
        floor_label="what is asked for, once",
        dtype="float32",
        shape=f"{COUNT} elements",
        tolerance=0.0,
    ),
]
