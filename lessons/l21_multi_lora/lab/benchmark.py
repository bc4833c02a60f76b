"""Sixteen adapters in one batch: the per-adapter loop, all at once, and a merged matrix
for each adapter.

    python -m lessons.toolbox.measure.bench 21

One linear layer of Llama-3-8B's width. l21_batch times the corrections alone, l21_adapters a whole
layer, the base product within the time. On a CPU with a quarter of the width; there stand_ins.py
replaces the kernels, which are interpreted and not timed.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from lessons.l21_multi_lora import naive, optimized
from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.kernels import stand_ins
from lessons.l21_multi_lora.kernels.weights import SlotWeights
from lessons.toolbox.measure.bench import Benchmark
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import this_machine, time_floor_s

ON_GPU = default_device().type == "cuda"
DTYPE = default_dtype() if ON_GPU else torch.float32
WIDTH = 4096 if ON_GPU else 1024  # K and N
NUM_ADAPTERS, RANK = 16, 16
BATCHES = [16, 32, 64, 128, 256, 512] if ON_GPU else [16, 32, 64, 128, 256]
ADAPTER_COUNTS = [1, 2, 4, 8, 16]
ROWS = 64

add_lora = optimized.add_lora if ON_GPU else stand_ins.add_lora


class Layer(NamedTuple):
    """A base matrix, [N, K], and its adapters."""

    base: Tensor
    weights: SlotWeights


@lru_cache(maxsize=1)
def layer_on(device: torch.device) -> Layer:
    """Adapters whose correction is as large as the base product, so that a wrong one shows."""
    base = torch.randn(WIDTH, WIDTH, dtype=DTYPE, device=device) * WIDTH**-0.5
    weights = SlotWeights.empty(NUM_ADAPTERS, RANK, WIDTH, WIDTH, DTYPE, device)
    for slot in range(NUM_ADAPTERS):
        a = torch.randn(RANK, WIDTH, device=device) * WIDTH**-0.5
        weights.put(slot, a, torch.randn(WIDTH, RANK, device=device), scaling=RANK**-0.5)
    return Layer(base, weights)


def inputs_of(num_rows: int, num_adapters: int, device: torch.device) -> tuple:
    """Rows of all adapters in turn: neighbours never share one."""
    x = torch.randn(num_rows, WIDTH, dtype=DTYPE, device=device)
    row_slots = [row % num_adapters for row in range(num_rows)]
    return x, layer_on(device), AdapterBatch.of(row_slots, device)


# ---------------------------------------------------------------- providers


def one_after_the_other(x: Tensor, layer: Layer, batch: AdapterBatch):
    """The loop over adapters."""
    return lambda: naive.add_lora(linear(x, layer.base), x, layer.weights, batch)


def all_at_once(x: Tensor, layer: Layer, batch: AdapterBatch):
    """Segments, in two launches or two batched products."""
    return lambda: add_lora(linear(x, layer.base), x, layer.weights, batch)


def merged_matrices(x: Tensor, layer: Layer, batch: AdapterBatch):
    """A merged matrix for each adapter, made before the clock: no correction, but a base product
    for each, and as many matrices in memory.
    """
    matrices = []
    for slot, first, count in batch.segments:
        delta = layer.weights.b[slot].float().T @ layer.weights.a[slot].float()
        matrix = layer.base.float() + layer.weights.scaling[slot] * delta
        matrices.append((matrix.to(DTYPE), batch.order[first : first + count].long()))

    def run():
        if len(matrices) == 1:
            return linear(x, matrices[0][0])
        out = torch.empty_like(x)
        for matrix, rows in matrices:
            out[rows] = linear(x[rows], matrix)
        return out

    return run


PROVIDERS = {
    "adapter by adapter": ("naive", one_after_the_other),
    "all adapters at once": ("optimized", all_at_once),
    "a merged matrix each": ("library", merged_matrices),
}


def loop_alone(x: Tensor, layer: Layer, batch: AdapterBatch):
    """The loop without the base product. What it is added to grows from call to call, so each call
    begins with zeros.
    """
    return lambda: naive.add_lora(torch.zeros_like(x), x, layer.weights, batch)


def all_alone(x: Tensor, layer: Layer, batch: AdapterBatch):
    """Segments without the base product."""
    return lambda: add_lora(torch.zeros_like(x), x, layer.weights, batch)


CORRECTIONS = {
    "adapter by adapter": ("naive", loop_alone),
    "all adapters at once": ("optimized", all_alone),
}


def correction_bytes(num_rows: int) -> int:
    """Each adapter once, x once, the result once: a version that adds to nothing need not read
    zeros.
    """
    adapters = min(num_rows, NUM_ADAPTERS) * RANK * 2 * WIDTH
    return (adapters + 2 * num_rows * WIDTH) * DTYPE.itemsize


def correction_flops(num_rows: int) -> int:
    """Of the shrinks and the expands."""
    return 2 * num_rows * WIDTH * 2 * RANK


def layer_bytes(num_rows: int, num_adapters: int) -> int:
    """The base once, each adapter that is in use once, x and the result once."""
    adapters = min(num_rows, num_adapters) * RANK * 2 * WIDTH
    return (WIDTH * WIDTH + adapters + 2 * num_rows * WIDTH) * DTYPE.itemsize


def layer_flops(num_rows: int) -> int:
    """Of base and adapters."""
    return 2 * num_rows * WIDTH * (WIDTH + 2 * RANK)


def floor_s(num_rows: int, num_adapters: int) -> float:
    """Seconds to move the bytes or to multiply, whichever takes longer."""
    work = layer_bytes(num_rows, num_adapters), layer_flops(num_rows)
    return time_floor_s(*work, this_machine(), DTYPE)


SHARED = dict(
    dtype=str(DTYPE).removeprefix("torch."),
    tolerance=2e-2 if ON_GPU else 1e-4,
)
BENCHMARKS = [
    Benchmark(
        name="l21_batch",
        title=(
            f"With {{x}} rows, {NUM_ADAPTERS} adapters at once are {{speedup:.1f}}x as fast as "
            "one by one"
        ),
        x_name="rows of the batch",
        x_values=BATCHES,
        quick_x_values=BATCHES[:1],
        inputs=lambda rows, device: inputs_of(rows, NUM_ADAPTERS, device),
        providers=CORRECTIONS,
        ylabel="corrections of one layer",
        bytes_moved=correction_bytes,
        flops=correction_flops,
        floor_s=lambda rows: time_floor_s(
            correction_bytes(rows), correction_flops(rows), this_machine(), DTYPE
        ),
        floor_label="roofline of the adapters",
        shape=f"{WIDTH} → {WIDTH}, {NUM_ADAPTERS} adapters of rank {RANK}",
        **SHARED,
    ),
    Benchmark(
        name="l21_adapters",
        title=f"In {ROWS} rows, {{x}} adapters at once are {{speedup:.1f}}x as fast as one by one",
        x_name="adapters in the batch",
        x_values=ADAPTER_COUNTS,
        quick_x_values=ADAPTER_COUNTS[-1:],
        inputs=lambda adapters, device: inputs_of(ROWS, adapters, device),
        providers=PROVIDERS,
        ylabel="one linear layer with adapters",
        floor_label="roofline of base and adapters",
        bytes_moved=lambda adapters: layer_bytes(ROWS, adapters),
        flops=lambda adapters: layer_flops(ROWS),
        floor_s=lambda adapters: floor_s(ROWS, adapters),
        shape=f"{WIDTH} → {WIDTH}, {ROWS} rows, rank {RANK}",
        **SHARED,
    ),
]
