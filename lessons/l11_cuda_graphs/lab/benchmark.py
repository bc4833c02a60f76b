"""What a step costs: one by one or in lockstep, narrow or wide, padded or not; on a GPU eager,
fused, captured, and compiled.

    python -m lessons.toolbox.measure.bench 11
"""

import torch

from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l11_cuda_graphs.lab.workload import (
    BATCHES,
    DTYPE,
    LLAMA_8B,
    LLAMA_CONTEXT,
    ON_GPU,
    TINY,
    TINY_CONTEXT,
    WIDE_CONTEXT,
    WIDTHS,
    shape_of,
    step_bytes,
    step_floor_s,
    step_of,
    widened,
)
from lessons.l11_cuda_graphs.naive import decode_batch, decode_logits, eager_step
from lessons.l11_cuda_graphs.optimized import CudaGraphs, GraphRunner, bucket_for, padded
from lessons.toolbox.measure.bench import Benchmark, Unavailable, needs

DTYPE_NAME = str(DTYPE).removeprefix("torch.")
# Relative. In the 16 bits of a GPU, kernels round at other places than PyTorch.
TOLERANCE = 5e-2 if ON_GPU else 1e-4
BUCKETS = [1, 2, 4, 8, 16, 32, 64]


# ---------------------------------------------------------------- providers
# Each takes (model, pool, inputs) and gives a function without arguments.


def inference(step):
    """`step` without autograd's bookkeeping."""
    return torch.inference_mode()(step)


def eager(model, pool, inputs):
    """Every operation launched by itself."""
    step = eager_step(model, pool)
    return inference(lambda: step(inputs))


def fused_eager(model, pool, inputs):
    """The same with lesson 7's kernels: fewer launches."""
    return eager(needs_gpu(fused(model)), pool, inputs)


def captured(model, pool, inputs):
    """One launch, of a graph that is as large as the pool has blocks."""
    runner = GraphRunner(needs_gpu(model), pool, CudaGraphs(model.device), [pool.num_blocks])
    return lambda: runner(inputs)


def fused_captured(model, pool, inputs):
    """One launch of fewer kernels."""
    return captured(fused(model), pool, inputs)


def needs_gpu(model):
    """`model`, if it is on a GPU."""
    if model.device.type != "cuda":
        raise Unavailable("needs a GPU: on a CPU nothing is launched, so there is nothing to save")
    return model


def library(name):
    """A peer of peers.py."""

    def make(model, pool, inputs):
        needs_gpu(model)
        with needs("transformers"):
            from lessons.l11_cuda_graphs.lab import peers
        return getattr(peers, name)(model, pool, inputs)

    return make


def one_after_the_other(model, pool, inputs):
    """B steps of one sequence each, over the same pool."""

    def steps():
        logits = []
        for row in range(inputs.shape[1]):
            one = inputs[:, row : row + 1]
            batch = decode_batch(one.to(model.device), int(one[3]))
            hidden = model(batch.tokens, pool.attending(batch, first_block=row))
            logits.append(model.logits(hidden))
        return torch.cat(logits)

    return inference(steps)


# ---------------------------------------------------------------- padding


def in_a_larger_pool(batch, device):
    """A step of `batch` sequences over a pool with as many blocks as their bucket."""
    model, pool, inputs = step_of(TINY, bucket_for(batch, BUCKETS), TINY_CONTEXT)
    return model, pool, inputs[:, :batch]


def padded_step(model, pool, inputs):
    """What a graph of the bucket runs: on a GPU as a graph, on a CPU eagerly. The rows of padding
    are computed and dropped.
    """
    if ON_GPU:
        return captured(model, pool, inputs)
    whole = decode_batch(padded(inputs, pool.num_blocks), pool.block_size)
    return inference(lambda: decode_logits(model, pool, whole)[: inputs.shape[1]])


# ---------------------------------------------------------------- what is compared


def decode_step(name: str, title: str, config, context: int) -> Benchmark:
    """A step of a model on a GPU over the batch: eager, fused, captured, compiled, the floor."""
    return Benchmark(
        name=name,
        title=title,
        x_name="sequences in the batch",
        x_values=BATCHES,
        quick_x_values=[1, 8],
        inputs=lambda batch, device: step_of(config, batch, context),
        providers={
            "eager": ("naive", eager),
            "eager, fused kernels": ("naive", fused_eager),
            # First, because a title compares it with "eager": the same kernels, launched otherwise.
            "graph": ("optimized", captured),
            "graph, fused kernels": ("optimized", fused_captured),
            "torch.compile reduce-overhead": ("library", library("compiled_step")),
            "transformers, static cache, compiled": ("library", library("transformers_step")),
        },
        ylabel="time of one decode step",
        bytes_moved=lambda batch: step_bytes(config, batch, context),
        floor_s=lambda batch: step_floor_s(config, batch, context),
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=shape_of(config, context=context),
        tolerance=TOLERANCE,
    )


BENCHMARKS = [
    Benchmark(
        name="l11_lockstep",
        title="{x} sequences in lockstep are {speedup:.1f}x faster than one after the other",
        x_name="sequences",
        x_values=BATCHES,
        quick_x_values=[1, 8],
        inputs=lambda batch, device: step_of(TINY, batch, TINY_CONTEXT),
        providers={
            "one after the other": ("naive", one_after_the_other),
            "in lockstep": ("optimized", eager),
        },
        ylabel="a token for each sequence",
        floor_s=lambda batch: step_floor_s(TINY, batch, TINY_CONTEXT),
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=shape_of(TINY, context=TINY_CONTEXT),
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l11_width",
        x_name="hidden size",
        x_values=WIDTHS,
        quick_x_values=WIDTHS[:3],
        title="The same operations, ever wider: a narrow model pays for "
        + (
            "launching them, {speedup:.1f}x faster as a graph at {x}"
            if ON_GPU
            else "each of them, a wide one for its weights"
        ),
        inputs=lambda width, device: step_of(widened(width), 1, WIDE_CONTEXT),
        providers={"eager": ("naive", eager), "graph": ("optimized", captured)},
        ylabel="time of one decode step",
        floor_s=lambda width: step_floor_s(widened(width), 1, WIDE_CONTEXT),
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=f"6 layers, context {WIDE_CONTEXT}, batch 1",
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l11_padding",
        title="In buckets of powers of two, a step's time is a staircase",
        x_name="sequences in the batch",
        x_values=[1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16] + ([17, 24, 32, 33, 48, 64] if ON_GPU else []),
        quick_x_values=[1, 3, 4, 5, 8],
        inputs=in_a_larger_pool,
        providers={
            "exact batch, eager": ("naive", eager),
            "padded to its bucket": ("optimized", padded_step),
        },
        ylabel="time of one decode step",
        floor_s=lambda batch: step_floor_s(TINY, batch, TINY_CONTEXT),
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=shape_of(TINY, context=TINY_CONTEXT),
        tolerance=TOLERANCE,
    ),
]
if ON_GPU:
    BENCHMARKS += [
        decode_step(
            "l11_step_8b",
            "Capturing alone makes a step {speedup:.2f}x faster at batch {x}, "
            "{floor_percent:.0f}% of the floor",
            LLAMA_8B,
            LLAMA_CONTEXT,
        ),
        decode_step(
            "l11_step_tiny",
            "Where launches are all, capturing alone gains {speedup:.1f}x, even at batch {x}",
            TINY,
            TINY_CONTEXT,
        ),
    ]
