"""The first token after a known prefix, a lookup, and attention over a prefix that many share.

    python -m lessons.toolbox.measure.bench 13

The first two are measured on a CPU, where a prompt of this small model takes its time. On a GPU the
engine of lesson 15 is measured, and here the kernels of cascade attention.
"""

import itertools
import random

import torch
from torch import Tensor

from lessons.l02_naive_attention.request import read_requests
from lessons.l03_kv_cache.lab.workload import ON_GPU as HAS_GPU
from lessons.l03_kv_cache.lab.workload import SHAPE, model_of, read_floor_s, weight_bytes
from lessons.l13_prefix_caching.cache import NoCache
from lessons.l13_prefix_caching.cascade import attend_separately, cascade_attention
from lessons.l13_prefix_caching.cascade_kernels import cascade_decode
from lessons.l13_prefix_caching.generate import BLOCK_SIZE, WaveRunner
from lessons.l13_prefix_caching.lab import peers
from lessons.l13_prefix_caching.lab.cascade_traffic import Shared, cascade_bytes
from lessons.l13_prefix_caching.lab.traffic import tokens
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.toolbox.measure.bench import Benchmark, Unavailable, on_gpu
from lessons.toolbox.measure.device import default_dtype

DTYPE = default_dtype()
TOLERANCE = 3e-2 if HAS_GPU else 1e-4  # relative; 16 bits on a GPU, 32 on a CPU
QUESTION = 16  # tokens after the known prefix
PREFIXES = [64, 128, 256, 512, 1024]
HEADS, KV_HEADS, HEAD_DIM = (32, 8, 128) if HAS_GPU else (6, 2, 64)
SHARED, OWN = (8192, 256) if HAS_GPU else (1024, 64)  # tokens
BATCHES = [1, 2, 4, 8, 16, 32] + ([64, 128] if HAS_GPU else [])
LENGTHS = [256, 512, 1024, 2048, 4096, 8192]


# ---------------------------------------------------------------- the first token


def prefix_of(count: int, device: torch.device) -> tuple[list[int]]:
    """A prefix of so many tokens. Raises Unavailable on a GPU."""
    if device.type == "cuda":
        raise Unavailable("measured on a CPU; on a GPU lesson 15 measures the engine")
    return (tokens(random.Random(count), count),)


def first_tokens_of(new_cache):
    """A provider: the first token of a new question each time, after a prefix seen before."""

    def provider(prefix: list[int]):
        model = model_of(torch.float32)
        num_blocks = 4 * (-(-(len(prefix) + QUESTION) // BLOCK_SIZE))
        runner, questions = WaveRunner(model, num_blocks, new_cache=new_cache), question_list()

        def first_token(question: list[int]) -> int:
            (request,) = read_requests(model.config, [prefix + question], 1)
            runner.serve([request])
            return request.output[0]

        first_token(tokens(random.Random(99), QUESTION))
        return lambda: first_token(next(questions))

    return provider


def library(prefix: list[int]):
    """transformers, which is told what the prefix is, and copies it for every question."""
    first_token, questions = (
        peers.with_a_copied_prefix(model_of(torch.float32), prefix),
        question_list(),
    )
    return lambda: first_token(next(questions))


def question_list():
    """Questions without end, the same ones for every provider."""
    return (tokens(random.Random(n), QUESTION) for n in itertools.count(100))


# ---------------------------------------------------------------- a lookup


def lookups_in(new_cache):
    """A provider: which blocks of a prompt are known, beside 63 others with the same beginning."""

    def provider(prompt: list[int]):
        cache, draw, size = new_cache(BLOCK_SIZE), random.Random(0), len(prompt) // BLOCK_SIZE
        half = len(prompt) // 2
        for n in range(64):
            one = prompt if not n else prompt[:half] + tokens(draw, half)
            cache.insert(one, range(n * size, (n + 1) * size))
        return lambda: len(cache.match(prompt))

    return provider


# ---------------------------------------------------------------- a prefix that many share


def shared_inputs(batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """q: [B, Hq, D], prefix: [P, Hkv, D] twice, suffixes: [B, own, Hkv, D] twice, lens: [B]."""
    shapes = (
        (batch, HEADS, HEAD_DIM),
        *[(SHARED, KV_HEADS, HEAD_DIM)] * 2,
        *[(batch, OWN, KV_HEADS, HEAD_DIM)] * 2,
    )
    tensors = [torch.randn(shape, dtype=DTYPE, device=device) for shape in shapes]
    return *tensors, torch.full((batch,), OWN, dtype=torch.int32, device=device)


def sdpa(q, k_prefix, v_prefix, k_suffix, v_suffix, lens: Tensor):
    """PyTorch's fused attention, each sequence over a copy of the prefix of its own."""
    k, v = (
        torch.cat([prefix.expand(len(q), *prefix.shape), suffix], 1).transpose(1, 2)
        for prefix, suffix in ((k_prefix, k_suffix), (v_prefix, v_suffix))
    )
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def shared_bytes(batch: int) -> int:
    """The least that is read: the prefix once, every suffix once, in bytes."""
    shape = Shared(batch, SHARED, OWN, HEADS, KV_HEADS, HEAD_DIM, DTYPE.itemsize)
    once = shape._replace(batch=1, suffix=0)
    return cascade_bytes(once).keys_and_values + batch * OWN * shape.row_bytes


BENCHMARKS = [
    Benchmark(
        name="l13_first_token",
        title="After {x} known tokens the first token comes {speedup:.0f}x sooner",
        x_name="tokens of the known prefix",
        x_values=PREFIXES,
        quick_x_values=[64, 256],
        inputs=prefix_of,
        providers={
            "full prefill": ("naive", first_tokens_of(NoCache)),
            "hash blocks": ("optimized", first_tokens_of(HashBlocks)),
            "radix tree": ("optimized", first_tokens_of(RadixTree)),
            "transformers, prefix copied": ("library", library),
        },
        ylabel="time to the first token",
        floor_s=lambda prefix: read_floor_s(weight_bytes(torch.float32)),
        floor_label="weights read once",
        shape=f"{QUESTION} new tokens, blocks of {BLOCK_SIZE}, {SHAPE}",
        tolerance=0,
    ),
    Benchmark(
        name="l13_lookup",
        title="A lookup of {x} tokens takes {optimized_growth:.0f}x that of {first}",
        x_name="tokens of the prompt, all known",
        x_values=LENGTHS,
        quick_x_values=LENGTHS[:2],
        inputs=prefix_of,
        providers={
            "hash blocks": ("naive", lookups_in(HashBlocks)),
            "radix tree": ("optimized", lookups_in(RadixTree)),
        },
        ylabel="time of a lookup",
        floor_s=lambda length: read_floor_s(8 * length),
        floor_label="tokens read once",
        shape=f"blocks of {BLOCK_SIZE}, 64 prompts in the cache, Python",
        tolerance=0,
    ),
    Benchmark(
        name="l13_cascade",
        title=f"{{x}} sequences after {SHARED} shared tokens: {{speedup:.1f}}x faster together",
        x_name="sequences that share the prefix",
        x_values=BATCHES,
        quick_x_values=BATCHES[:3],
        inputs=shared_inputs,
        providers={
            "each reads the prefix": ("naive", lambda *x: lambda: attend_separately(*x)),
            "one product over it": ("optimized", lambda *x: lambda: cascade_attention(*x)),
            "its kernels": ("optimized", on_gpu(lambda *x: lambda: cascade_decode(*x))),
            "SDPA over copies": ("library", sdpa),
        },
        ylabel="decode attention of one layer",
        bytes_moved=shared_bytes,
        floor_s=lambda batch: read_floor_s(shared_bytes(batch)),
        floor_label="prefix and suffixes read once",
        dtype=str(DTYPE).removeprefix("torch."),
        shape=f"{OWN} own tokens each, heads {HEADS}/{KV_HEADS}, head_dim {HEAD_DIM}",
        tolerance=TOLERANCE,
    ),
]
