"""A chunk and eight decodes: in two passes, as when prompts and decodes take turns, or in one. And
how long eight decodes wait for their next token, at worst, when a long prompt arrives.

python -m lessons.toolbox.measure.bench 15
"""

import torch

from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.lab.workload import (
    BUDGET,
    CHUNKS,
    DECODES,
    DTYPE_NAME,
    PROMPTS,
    SHAPE,
    arriving_prompt,
    floor_s,
    mixed_step,
)
from lessons.toolbox.measure.bench import Benchmark

TOLERANCE = 1e-4 if DTYPE_NAME == "float32" else 5e-2


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


def behind_the_whole_prompt(runner, decodes, whole, last_chunk):
    """What a decode waits through when prompts go first. -> logits: [9, V], the decodes' first."""
    return in_two_passes(runner, decodes, whole)


def beside_the_last_chunk(runner, decodes, whole, last_chunk):
    """The longest step of a chunked prompt: its last chunk sees all chunks before it. These run
    here, before the clock does. -> logits: [9, V]
    """
    runner(whole)
    return in_one_pass(runner, decodes, last_chunk)


BENCHMARKS = [
    Benchmark(
        name="l15_mixed_step",
        title="A chunk of {x} tokens and eight decodes: one pass is {speedup:.2f}x as fast as two",
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
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l15_worst_gap",
        title="A whole prompt of {x} tokens: decodes wait {speedup:.1f}x as long as beside chunks "
        f"of {BUDGET - DECODES}",
        x_name="tokens of the prompt that arrives",
        x_values=PROMPTS,
        quick_x_values=PROMPTS[:2],
        inputs=lambda tokens, device: arriving_prompt(tokens),
        providers={
            "prompts first, whole": ("naive", behind_the_whole_prompt),
            "beside the last chunk": ("optimized", beside_the_last_chunk),
        },
        ylabel="worst inter-token latency",
        floor_s=floor_s,
        floor_label="weights and the decodes' KV read once",
        dtype=DTYPE_NAME,
        shape=f"{SHAPE}, budget {BUDGET}",
        tolerance=TOLERANCE,
    ),
]
