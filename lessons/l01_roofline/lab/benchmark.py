"""Two measurements in which bytes decide: a copy that passes memory once or twice, and a linear
layer over more and more tokens.

    python -m lessons.toolbox.measure.bench 01
"""

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor

from lessons.l01_roofline import naive, optimized
from lessons.toolbox.measure.bench import Benchmark, on_gpu
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import (
    Chip,
    measured_ceilings,
    read_bandwidth,
    time_floor_s,
)

FACTOR = 0.5
# The weights are 16 MiB on a CPU and 128 MiB on a GPU.
FEATURES = {"cpu": 2048, "cuda": 8192}[default_device().type]
DTYPE = default_dtype()
# On a CPU no kernel is timed. PyTorch's copy stands for it.
ONE_PASS = {"cpu": "optimized", "cuda": "library"}[default_device().type]


def copy_bytes(elements: int) -> float:
    """Each element is read once and written once."""
    return 2 * elements * DTYPE.itemsize


def two_passes(x: Tensor):
    """Copy, then scale in place: what two library calls do."""
    return lambda: x.clone().mul_(FACTOR)


def linear_inputs(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x: [tokens, FEATURES], weight: [FEATURES, FEATURES]."""
    return (
        torch.randn(tokens, FEATURES, device=device, dtype=DTYPE),
        torch.randn(FEATURES, FEATURES, device=device, dtype=DTYPE) / FEATURES**0.5,
    )


def linear_bytes(tokens: int) -> float:
    """The weights once, the activations in and out."""
    return DTYPE.itemsize * (FEATURES * FEATURES + 2 * tokens * FEATURES)


def linear_flops(tokens: int) -> float:
    return 2 * tokens * FEATURES * FEATURES


@lru_cache
def linear_ceilings() -> Chip:
    """What this machine reaches on a working set as large as the weights: a server's cache may hold
    all of them.
    """
    read = read_bandwidth(default_device(), DTYPE.itemsize * FEATURES * FEATURES)
    rate = max(read, measured_ceilings().memory_bytes_per_s)
    return dataclasses.replace(measured_ceilings(), memory_bytes_per_s=rate)


def linear_floor_s(tokens: int) -> float:
    """Seconds that those ceilings allow."""
    return time_floor_s(linear_bytes(tokens), linear_flops(tokens), linear_ceilings(), DTYPE)


def one_by_one(x: Tensor, weight: Tensor):
    """Each token reads all weights again: decoding without a batch."""
    return lambda: torch.cat([row @ weight.T for row in x.split(1)])


BENCHMARKS = [
    Benchmark(
        name="l01_scale_copy",
        title="One pass over memory is {speedup:.1f}x as fast as two at {x:,} elements: bytes "
        "decide",
        x_name="elements",
        x_values=[2**n for n in range(16, 27, 2)],
        quick_x_values=[2**18, 2**22],
        inputs=lambda n, device: (torch.randn(n, device=device, dtype=DTYPE),),
        providers={
            "two passes: copy, then scale": ("naive", two_passes),
            "one pass: Triton kernel": (
                "optimized",
                on_gpu(lambda x: lambda: optimized.scale_copy(x, FACTOR)),
            ),
            "one pass: PyTorch": (ONE_PASS, lambda x: lambda: naive.scale_copy(x, FACTOR)),
        },
        metric="bandwidth",
        ylabel="bandwidth",
        bytes_moved=copy_bytes,
        floor_s=lambda n: time_floor_s(copy_bytes(n), 0, measured_ceilings(), DTYPE),
        floor_label="measured copy or read",
        dtype=str(DTYPE).removeprefix("torch."),
        tolerance=0,
    ),
    Benchmark(
        name="l01_linear_tokens",
        title="{x} tokens at once: {speedup:.0f}x faster than one by one, the weights are read "
        "once",
        x_name="tokens in one matrix product",
        x_values=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        quick_x_values=[1, 8, 64],
        inputs=linear_inputs,
        providers={
            "one by one": ("naive", one_by_one),
            "one product": ("optimized", lambda x, weight: lambda: x @ weight.T),
        },
        ylabel="time",
        bytes_moved=linear_bytes,
        flops=linear_flops,
        floor_s=linear_floor_s,
        floor_label="roofline, measured at this size",
        dtype=str(DTYPE).removeprefix("torch."),
        shape=f"{FEATURES} -> {FEATURES} features",
        tolerance=1e-2,
    ),
]
