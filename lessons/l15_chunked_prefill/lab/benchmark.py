"""A chunk and eight decodes: in two passes, as when prompts and decodes take turns, or in one.

python -m lessons.toolbox.measure.bench 15
"""

import torch

from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.lab.workload import (
    CHUNKS,
    DTYPE_NAME,
    SHAPE,
    floor_s,
    mixed_step,
)
from lessons.toolbox.measure.bench import Benchmark


def in_two_passes(runner, decodes, prompt):
    """The prompt's chunk, then the decodes. -> logits: [9, V], the decodes' first."""

    def passes():
        last = runner(prompt)
        return torch.cat([runner(decodes), last])

    return passes


def in_one_pass(runner, decodes, prompt):
    """Both together. -> logits: [9, V]"""
    step = Step([*decodes.chunks, *prompt.chunks], [])
    return lambda: runner(step)


BENCHMARKS = [
    Benchmark(
        name="l15_mixed_step",
        title="A chunk of {x} tokens and eight decodes in one pass: {speedup:.2f}x faster than in "
        "two",
        x_name="tokens of the chunk",
        x_values=CHUNKS,
        quick_x_values=CHUNKS[:2],
        inputs=lambda chunk, device: mixed_step(chunk),
        providers={
            "prompt, then decodes": ("naive", in_two_passes),
            "one pass": ("optimized", in_one_pass),
        },
        ylabel="time of a chunk and eight tokens",
        floor_s=floor_s,
        floor_label="weights and the decodes' KV read once",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=5e-2 if DTYPE_NAME != "float32" else 1e-4,
    ),
]
