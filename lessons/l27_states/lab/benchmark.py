"""A prompt through one layer, over its length, and a step of a batch of states.

    python -m lessons.toolbox.measure.bench 27

On a CPU the PyTorch chunks and the batched step of stand_ins.py stand for the kernels, which are
interpreted and not timed.
"""

import torch
from torch.nn.functional import normalize

from lessons.l03_kv_cache.lab.workload import DTYPE, ON_GPU, THREADS, TOLERANCE, read_floor_s
from lessons.l27_states import stand_ins
from lessons.l27_states.lab.costs import QWEN3_NEXT
from lessons.l27_states.lab.testing import packed_by, step_by
from lessons.l27_states.naive import gated_delta_rule
from lessons.toolbox.measure.bench import Benchmark

HEADS, DIM = (QWEN3_NEXT.state.heads, 128) if ON_GPU else (4, 64)
LENGTHS = [256, 1024, 4096, 16384] if ON_GPU else [128, 512, 2048]
BATCHES = [1, 4, 16, 64, 256] if ON_GPU else [1, 4, 16, 64]
SHAPE = f"{HEADS} heads, states of {DIM} x {DIM}{THREADS}"


def tokens(count: int, device: torch.device) -> list:
    """q, k, v, log_decay, beta of so many tokens: [count, HEADS, DIM], [count, HEADS]."""
    drawn = torch.Generator().manual_seed(27)
    q, k, v = (torch.randn(count, HEADS, DIM, generator=drawn) for _ in range(3))
    numbers = torch.rand(2, count, HEADS, generator=drawn)
    rows = [x.to(device, DTYPE) for x in (normalize(q, dim=-1), normalize(k, dim=-1), v)]
    return [*rows, -0.1 * numbers[0].to(device), numbers[1].to(device)]


def prompt(length: int, device: torch.device) -> tuple:
    """One prompt, and a slot that holds nothing of it."""
    states = torch.zeros(1, HEADS, DIM, DIM, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    has_state = torch.zeros(1, dtype=torch.bool, device=device)
    return *tokens(length, device), states, slots, starts, has_state


def step(batch: int, device: torch.device) -> tuple:
    """A token of each of so many sequences, and their states."""
    states = torch.zeros(batch, HEADS, DIM, DIM, device=device)
    return *tokens(batch, device), states, torch.arange(batch, device=device)


def of_device(name: str):
    """A provider: the kernel's wrapper, or its stand-in on a CPU."""

    def make(*inputs):
        function = getattr(stand_ins.wrappers(inputs[0].device), name)
        return from_the_same_states(function, inputs)

    return make


def plain(rule):
    """A provider: the naive rule."""
    return lambda *inputs: from_the_same_states(rule, inputs)


def from_the_same_states(function, inputs):
    """A call that begins with `states` each time, because it writes into them."""
    before = next(x for x in inputs if x.ndim == 4)
    states = before.clone()
    fresh = [states if x is before else x for x in inputs]

    def run():
        states.copy_(before)
        return function(*fresh)

    return run


COMMON = dict(dtype=str(DTYPE).removeprefix("torch."), shape=SHAPE, tolerance=TOLERANCE)
BENCHMARKS = [
    Benchmark(
        name="l27_prompt",
        title="In chunks a prompt of {x} tokens is {speedup:.1f}x as fast as token by token",
        x_name="tokens",
        x_values=LENGTHS,
        quick_x_values=LENGTHS[:2],
        inputs=prompt,
        providers={
            "token by token": ("naive", plain(packed_by(gated_delta_rule))),
            "in chunks": ("optimized", of_device("gated_delta_prompts")),
        },
        floor_s=lambda n: read_floor_s(4 * n * HEADS * DIM * DTYPE.itemsize),
        floor_label="q, k, v and the output once",
        **COMMON,
    ),
    Benchmark(
        name="l27_step",
        title="A step of {x} sequences is {speedup:.1f}x as fast as one after the other",
        x_name="sequences",
        x_values=BATCHES,
        quick_x_values=BATCHES[:3],
        inputs=step,
        providers={
            "one after the other": ("naive", plain(step_by(gated_delta_rule))),
            "one launch" if ON_GPU else "one batch": ("optimized", of_device("gated_delta_step")),
        },
        floor_s=lambda batch: read_floor_s(2 * batch * HEADS * DIM * DIM * 4),
        floor_label="states read and written once",
        **COMMON,
    ),
]
