# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=11
# Generated from solutions/l11_cuda_graphs.py, checksum d8460ec91bc8. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 11: what bounds a step, which batch sizes to capture, a step that cannot be
captured, and the runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.naive import decode_batch, decode_logits
from lessons.toolbox.exercises.exercise import exercise


@exercise("11.1", "Predict: bound by launches or by bytes?", minutes=15, difficulty=1)
def decode_step_us(
    num_launches: int,
    weight_bytes: float,
    kv_bytes_per_token: float,
    context: int,
    batch: int,
    memory_bytes_per_s: float,
    launch_us: float = 6.0,
    graph_us: float = 12.0,
) -> tuple[float, float, int]:
    """µs of a step launched one by one, µs of the same step as a graph, and the batch from which on
    a graph gains nothing.

    A step reads all weights once, and `context` tokens of cache for each of `batch` sequences, at
    memory_bytes_per_s. Its kernels hide their launches, or are hidden by them, so it takes as long
    as the longer of the two:
        launched one by one   num_launches · launch_us against the bytes
        as a graph            graph_us, once, against the bytes
    Third number: the smallest batch (1 or more) whose bytes alone take at least
    num_launches · launch_us. Errors: none to raise.

    Example: 1000 launches of 6 µs, 9.6 GB of weights, 100 kB a token, context 4800, 4.8 TB/s:
        weights 2000 µs, cache 100 µs a sequence; at batch 10: 3000 µs of bytes
        eager max(6000, 3000), graph max(12, 3000)
        from batch 40 on 2000 + 40 · 100 >= 6000          -> (6000.0, 3000.0, 40)
    Write down your guess first: Llama-3-8B in 16 bits (15 GB to read, 128 KiB a token), 970
    launches, context 4096, H200.
    """
    raise NotImplementedError("Exercise 11.1: Predict: bound by launches or by bytes?")


@exercise("11.2", "Choose the batch sizes to capture", minutes=25, difficulty=2)
def choose_buckets(steps: dict[int, int], num_graphs: int) -> list[int]:
    """At most `num_graphs` (1 or more) batch sizes to capture, ascending, so that as few rows as
    possible are padding.

    steps: {batch size: how many decode steps had it}, as a server counted them; sizes and counts
    are 1 or more. A step of b sequences runs in the smallest bucket that holds them, so
    bucket - b of its rows are padding. Padded rows are counted over all steps. Every observed size
    must find a bucket. Where several choices are equally good, return any of them. Errors: none to
    raise. Aim: do not try all choices, because a server sees hundreds of sizes.

    Example: steps = {1: 50, 3: 10, 4: 10, 7: 1}, num_graphs = 2
        [4, 7]   pads 50 · 3 + 10 · 1 = 160 rows
        [1, 7]   pads 10 · 4 + 10 · 3 =  70 rows      -> [1, 7]
    """
    raise NotImplementedError("Exercise 11.2: Choose the batch sizes to capture")


@dataclass
class State:
    """Everything that a step of the toy decoder below reads and keeps, in tensors that exist before
    the capture.
    """

    tokens: Tensor  # [B] int64, the newest token of each sequence
    lengths: Tensor  # [B] int64, how many tokens it has, the newest included; 0: a row of padding
    memory: Tensor  # [B, capacity, D] float32, the tokens' vectors; the first lengths[b] rows count
    seed: Tensor  # [] int64, how many steps have drawn random numbers
    embedding: Tensor  # [V, D] float32


def noise(seed: int | Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """Random numbers to add to logits so that argmax samples (Gumbel's trick), [V] float64; equal
    for equal seeds.
    """
    mixed = (torch.arange(vocab_size, device=device) * 2654435761 + seed * 40503) % 2**31
    mixed = (mixed * 48271 + 11) % (2**31 - 1)
    return -((mixed.double() + 0.5) / 2**31).log().neg().log()


@exercise("11.3", "Find the bugs: a step that cannot be captured", minutes=30, difficulty=3)
def capturable_step(state: State) -> Tensor:
    """One step of a toy decoder, in operations that a graph can replay: the next token of each row,
    [B] int64.

    The step
        1. adds 1 to the seed,
        2. writes the newest token's vector into the sequence's memory, at row lengths[b] - 1,
        3. averages the rows in use,
        4. takes the token with the largest  average · embedding + noise(seed).
    Rows of padding (lengths 0): their memory stays as it is, and what the step returns for them
    does not matter.

    It is captured once and then replayed; between replays the caller writes into state.tokens and
    state.lengths, in place. So the step may not look at a value from Python, every shape must be
    known from shapes, and all that it keeps for the next step must stay where the graph found it.
    `state` is changed in place, none of its attributes is replaced. Errors: none.

    Example, B = 2, lengths = [2, 0]: memory[0, 1] = embedding[tokens[0]], memory[1] stays, average
    of row 0: of 2 vectors.

    The code below gives the right tokens when it is called step by step. It has four bugs. Delete
    the first line and find them.
    """
    raise NotImplementedError("Exercise 11.3: Find the bugs: a step that cannot be captured")
    state.seed = state.seed + 1
    rows = torch.arange(len(state.tokens), device=state.tokens.device)
    live = state.lengths > 0
    memory = state.memory.clone()
    memory[rows[live], state.lengths[live] - 1] = state.embedding[state.tokens[live]]
    state.memory = memory
    longest = int(state.lengths.max())
    seen = torch.arange(longest, device=rows.device) < state.lengths[:, None]
    total = torch.where(seen[:, :, None], state.memory[:, :longest], 0.0).sum(1)
    average = total / state.lengths.clamp(min=1)[:, None]
    drawn = noise(state.seed, len(state.embedding), rows.device)
    return (average @ state.embedding.T + drawn).argmax(-1)


@exercise(
    "11.4",
    "The runner: one graph for each bucket",
    minutes=40,
    difficulty=3,
    replaces="lessons.l11_cuda_graphs.optimized:GraphRunner",
)
class GraphRunner:
    """A decode step that is launched whole, captured for each bucket. On a GPU the ladder's last
    rung runs on yours.

    graphs.capture(step) -> (graph, output): calls step() a few times, then records it.
    graph.replay() runs what was recorded again, on the very tensors of the capture, and refills
    `output`, the tensor that step() returned.

    The step is (both imported above)
        decode_batch(inputs, max_context_len) -> a Batch whose tensors are views of `inputs`
        decode_logits(model, pool, batch) -> logits: [B, V]
    inputs: [4, B] int64 on model.device, rows tokens, positions, slot_mapping, context_lens.
    max_context_len: how many slots of each block the step may look at. Sequence b of a step owns
    block b of the pool. Padding: a column (0, 0, -1, 0) writes nowhere and sees nothing. Any
    other may damage a sequence that does not take part.

    A graph does not own the memory that it reads: keep model and pool as long as the runner lives.

    Example: buckets [1, 2, 4] of a pool with 4 blocks
        GraphRunner(model, pool, graphs, [1, 2, 4])
            -> three captures, of batch 4, then 2, then 1
        runner(inputs)  with inputs: [4, 3]
            -> replays the graph of batch 4 once, returns logits: [3, V]
    """

    def __init__(self, model: Decoder, pool: KVPool, graphs, buckets: Sequence[int] | None = None):
        """Capture every bucket, the largest first, without writing into any block of the pool.

        buckets: batch sizes in any order. None: powers of two below pool.num_blocks, and
        pool.num_blocks itself. Raises ValueError, before it captures anything, for a bucket below 1
        or above pool.num_blocks.
        """
        raise NotImplementedError("Exercise 11.4: The runner: one graph for each bucket")

    def __call__(self, inputs: Tensor) -> Tensor:
        """inputs: [4, B] int64, on the CPU, left as they are -> logits: [B, V], the caller's: no
        later call changes them.

        Runs the smallest bucket that holds B sequences, once. Raises ValueError if none does.
        """
        raise NotImplementedError("Exercise 11.4: The runner: one graph for each bucket")
