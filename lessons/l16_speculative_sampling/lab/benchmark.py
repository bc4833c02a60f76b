"""Seconds of 128 tokens for each request of a batch: one token a pass, a small model that drafts,
and n-grams. All three give the same greedy tokens. Then the verification alone.

    python -m lessons.toolbox.measure.bench 16
"""

from dataclasses import replace

import torch

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l03_kv_cache.lab.workload import ON_GPU, read_floor_s
from lessons.l14_continuous_batching import loop
from lessons.l16_speculative_sampling import naive, optimized
from lessons.l16_speculative_sampling.generate import generate
from lessons.l16_speculative_sampling.lab.workload import (
    SHAPE,
    TIMED_TOKENS,
    embedded_pair,
    held_out_prompts,
)
from lessons.l16_speculative_sampling.more.split import verify_split
from lessons.l16_speculative_sampling.stand_ins import verify_torch
from lessons.toolbox.measure.bench import Benchmark, Unavailable, needs, on_gpu

COUNT = 4  # drafted tokens of a step
EXACT = replace(GREEDY, ignore_eos=True)  # so that every answer has 128 tokens
VOCAB_SIZE = 128_256 if ON_GPU else 4096


def requests(batch: int, device: torch.device) -> tuple:
    """(prompts,)"""
    return (held_out_prompts(batch),)


def plain(prompts):
    """Lesson 14's loop: one token of each request a pass."""
    target = embedded_pair()[0]
    return lambda: loop.generate(target, prompts, TIMED_TOKENS, EXACT)


def with_draft(prompts):
    """models/tiny-draft drafts 4 tokens."""
    target, draft, _ = embedded_pair()
    options = dict(draft=draft, num_speculative_tokens=COUNT)
    return lambda: generate(target, prompts, TIMED_TOKENS, EXACT, **options)


def with_ngrams(prompts):
    """The request's own text drafts up to 4 tokens."""
    target = embedded_pair()[0]
    return lambda: generate(target, prompts, TIMED_TOKENS, EXACT, num_speculative_tokens=COUNT)


def floor_s(batch: int) -> float:
    """Seconds to read the target's weights as often as a perfect draft of 4 tokens needs."""
    target = embedded_pair()[0]
    weights = sum(p.numel() for p in target.parameters()) * target.dtype.itemsize
    return -(-TIMED_TOKENS // (COUNT + 1)) * read_floor_s(weights)


# ---------------------------------------------------------------- verification alone


def rows(batch: int, device: torch.device) -> tuple:
    """(p, q, drafted, u, cu_rows) of sequences with 4 drafted tokens each."""
    total = batch * (COUNT + 1)
    p, q = (3 * torch.randn(2, total, VOCAB_SIZE, device=device)).softmax(-1)
    q = (p + q) / 2  # a draft that is right in about half of its mass
    drafted = torch.multinomial(q, 1).squeeze(1)
    u = torch.rand(total, 2, device=device).clamp(max=1 - 2.0**-24)
    cu_rows = torch.arange(batch + 1, dtype=torch.int32, device=device) * (COUNT + 1)
    return p, q, drafted, u, cu_rows


def row_by_row(p, q, drafted, u, cu_rows):
    """The paper's rule, sequence after sequence."""
    if ON_GPU:
        raise Unavailable("waits for the GPU at every token")
    return lambda: naive.verify(p, q, drafted, u, cu_rows)[1].float()


def in_pytorch(p, q, drafted, u, cu_rows):
    """A dozen operations for all sequences."""
    return lambda: verify_torch(p, q, drafted, u, cu_rows, COUNT + 1)[1].float()


@on_gpu
def in_one_launch(p, q, drafted, u, cu_rows):
    """A program for each sequence."""
    return lambda: optimized.verify(p, q, drafted, u, cu_rows, COUNT + 1)[1].float()


@on_gpu
def in_parts(p, q, drafted, u, cu_rows):
    """Several programs a sequence, in two launches."""
    return lambda: verify_split(p, q, drafted, u, cu_rows, COUNT + 1)[1].float()


@on_gpu
def flashinfer(p, q, drafted, u, cu_rows):
    """FlashInfer's, which draws its own random numbers: only its time is compared."""
    with needs("flashinfer-python"):
        from flashinfer.sampling import chain_speculative_sampling
    batch, vocab_size = len(cu_rows) - 1, p.shape[1]
    p, q = p.view(batch, -1, vocab_size), q.view(batch, -1, vocab_size)
    draft, tokens = q[:, :-1].contiguous(), drafted.view(batch, -1)[:, :-1].int().contiguous()
    emitted = in_parts(p.flatten(0, 1), q.flatten(0, 1), drafted, u, cu_rows)()

    def call():
        chain_speculative_sampling(draft, tokens, p)
        return emitted

    return call


BENCHMARKS = [
    Benchmark(
        name="l16_batch",
        title="With a batch of {x}, speculation has {speedup:.2f}x the speed of one token a pass",
        x_name="requests of a batch",
        x_values=[1, 2, 4, 8, 16],
        quick_x_values=[1, 8],
        inputs=requests,
        providers={
            "one token a pass": ("naive", plain),
            f"tiny-draft, K = {COUNT}": ("optimized", with_draft),
            f"n-grams, K = {COUNT}": ("optimized", with_ngrams),
        },
        ylabel=f"time for {TIMED_TOKENS} tokens of each request",
        floor_s=floor_s,
        floor_label=f"weights once for {COUNT + 1} tokens",
        dtype="float32",
        shape=SHAPE,
        tolerance=0.0,
    ),
    Benchmark(
        name="l16_verify",
        title="Verifying {x} sequences at once is {speedup:.1f}x as fast as one after the other",
        x_name="sequences",
        x_values=[1, 4, 16, 64, 256] if ON_GPU else [1, 4, 16, 64],
        quick_x_values=[1, 16],
        inputs=rows,
        providers={
            "row by row": ("naive", row_by_row),
            "PyTorch": ("optimized" if not ON_GPU else "naive", in_pytorch),
            "one launch": ("optimized", in_one_launch),
            "in parts": ("optimized", in_parts),
            "FlashInfer": ("library", flashinfer),
        },
        ylabel="time of a verification",
        # The sum and the place: about one and a half walks over a row of p and a row of q.
        floor_s=lambda batch: read_floor_s(batch * 3 * VOCAB_SIZE * 4),
        floor_label="one row of p and q, read 1.5 times",
        dtype="float32",
        shape=f"vocabulary {VOCAB_SIZE}, K = {COUNT}" + ("" if ON_GPU else " · threads 1"),
        tolerance=0.0,
    ),
]
