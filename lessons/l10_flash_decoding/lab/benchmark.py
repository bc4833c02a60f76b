"""One sequence over its context, over the number of splits, and the batch that makes splitting
needless.

    python -m lessons.toolbox.measure.bench 10

On a CPU the kernels are interpreted and not timed: tasks on its cores stand for programs on SMs
(workers.py).
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.optimized import decode_attention as one_program_a_query_head
from lessons.l05_gqa.optimized import decode_attention as one_program_a_kv_head
from lessons.l06_mla.lab import batches as latents
from lessons.l06_mla.lab.counts import decode_bytes, decode_flops
from lessons.l10_flash_decoding.lab.workload import (
    BATCH_CONTEXT,
    BATCHES,
    CONTEXTS,
    DTYPE,
    LONG,
    ON_GPU,
    SHAPE,
    SPLIT_SIZE,
    TOLERANCE,
    floor_s,
    inputs_of,
    kv_bytes,
)
from lessons.l10_flash_decoding.mla import mla_flash_decode
from lessons.l10_flash_decoding.optimized import flash_decode
from lessons.l10_flash_decoding.workers import decode_on_workers
from lessons.toolbox.measure.bench import Benchmark, Unavailable, needs, on_gpu
from lessons.toolbox.measure.device import core_count


def unsplit(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor, *_):
    """Lesson 5's kernel on a GPU; on a CPU one task a sequence. Shapes as in inputs_of."""
    decode = one_program_a_kv_head if ON_GPU else decode_on_workers
    return lambda: decode(q, k, v, context_lens)


@on_gpu
def per_query_head(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """Lesson 3's kernel: four times the programs of lesson 5's, and four times its loads."""
    return lambda: one_program_a_query_head(q, k, v, context_lens)


def split(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """As many splits as the machine has room for. Shapes as in inputs_of."""
    if ON_GPU:
        return lambda: flash_decode(q, k, v, context_lens)
    return lambda: decode_on_workers(
        q, k, v, context_lens, num_splits=max(1, core_count() // len(q))
    )


def split_by_size(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """Splits of SPLIT_SIZE keys: bits that do not depend on the batch. Shapes as in inputs_of."""
    decode = flash_decode if ON_GPU else decode_on_workers
    return lambda: decode(q, k, v, context_lens, split_size=SPLIT_SIZE)


def split_into(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor, num_splits: int):
    """So many splits. Shapes as in inputs_of."""
    decode = flash_decode if ON_GPU else decode_on_workers
    return lambda: decode(q, k, v, context_lens, num_splits=num_splits)


def split_on_one_core(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor, num_splits: int):
    """The same tasks, one after the other: what splits cost where nothing is idle. Shapes as in
    inputs_of.
    """
    if ON_GPU:
        raise Unavailable("a GPU has no way to run on one SM alone")
    return lambda: decode_on_workers(q, k, v, context_lens, num_splits=num_splits, num_workers=1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor, *_):
    """PyTorch's; its flash backend on a GPU splits by itself. Shapes as in inputs_of."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], keys, values, enable_gqa=True
    )[:, :, 0]


@on_gpu
def flashinfer(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """FlashInfer's batch decode, which plans its splits on the host. Shapes as in inputs_of."""
    with needs("flashinfer-python"):
        from lessons.l05_gqa.lab import peers as peer
    return peer.decode(q, k, v)


def split_latents(q: Tensor, kv_cache: Tensor, context_lens: Tensor):
    """Lesson 6's kernel in splits. q: [B, H, 576], kv_cache: [B, context, 576]."""
    return lambda: mla_flash_decode(q, kv_cache, context_lens, latents.SCALE)[0]


def latents_benchmark(num_heads: int, title: str) -> Benchmark:
    """Decode attention over latents on a GPU, over the batch: few heads are bound by memory, many
    by their products.
    """
    context = latents.BATCHES[num_heads]
    return Benchmark(
        name=f"l10_mla_{num_heads}",
        title=title,
        x_name="sequences in the batch",
        x_values=[1, 2, 4, 8, 16, 32, 64, 128],
        quick_x_values=[1, 64],
        inputs=latents.batch_inputs(num_heads),
        providers={
            "one program a sequence and block of heads": ("naive", latents.own_batch),
            "split": ("optimized", split_latents),
            SDPA: ("library", latents.sdpa_batch),
            "FlashInfer": ("library", latents.flashinfer_batch),
        },
        floor_s=latents.batch_floor_s(num_heads),
        bytes_moved=lambda n: decode_bytes(n, context, bytes_per_value=DTYPE.itemsize),
        flops=lambda n: decode_flops(n, context, num_heads),
        shape=f"{num_heads} heads, latent 512 + 64, context {context}",
        **COMMON | {"floor_label": "read once, or the products"},
    )


# Not more threads than PyTorch has here: those of OpenMP spin on after a call, and would take the
# cores from the tasks.
SDPA = "PyTorch SDPA" if ON_GPU else f"PyTorch SDPA, threads: {torch.get_num_threads()}"
DECODERS = {
    "one program per KV head": ("naive", unsplit),
    "one program per query head": ("naive", per_query_head),
    "split": ("optimized", split),
    f"split size {SPLIT_SIZE}": ("optimized", split_by_size),
    SDPA: ("library", sdpa),
    "FlashInfer": ("library", flashinfer),
}
COMMON = dict(
    ylabel="decode attention of one layer",
    floor_label="KV read once",
    dtype=str(DTYPE).removeprefix("torch."),
    tolerance=TOLERANCE,
)
BENCHMARKS = [
    Benchmark(
        name="l10_context",
        title="One sequence of {x} tokens: {speedup:.1f}x faster in splits",
        x_name="tokens in the context",
        x_values=CONTEXTS,
        quick_x_values=CONTEXTS[:2],
        inputs=lambda context, device: inputs_of(1, context, device),
        providers=DECODERS,
        bytes_moved=lambda context: kv_bytes(1, context),
        floor_s=lambda context: floor_s(1, context),
        shape=f"batch 1, {SHAPE}",
        **COMMON,
    ),
    Benchmark(
        name="l10_splits",
        title="{x} splits take {optimized_growth:.2f}x the time of {first}",
        x_name="splits",
        x_values=[1, 2, 4, 8, 16, 32, 64, 128],
        quick_x_values=[1, 8],
        inputs=lambda splits, device: (*inputs_of(1, LONG, device), splits),
        providers={
            "on one core": ("naive", split_on_one_core),
            "on the whole machine": ("optimized", split_into),
            SDPA: ("library", sdpa),
        },
        bytes_moved=lambda splits: kv_bytes(1, LONG),
        floor_s=lambda splits: floor_s(1, LONG),
        shape=f"batch 1, context {LONG}, {SHAPE}",
        **COMMON,
    ),
    Benchmark(
        name="l10_batch",
        title="At {x} sequences splits gain {speedup:.2f}x: the batch fills the machine by itself",
        x_name="sequences in the batch",
        x_values=BATCHES,
        quick_x_values=[1, 4],
        inputs=lambda batch, device: inputs_of(batch, BATCH_CONTEXT, device),
        providers=DECODERS,
        bytes_moved=lambda batch: kv_bytes(batch, BATCH_CONTEXT),
        floor_s=lambda batch: floor_s(batch, BATCH_CONTEXT),
        shape=f"context {BATCH_CONTEXT}, {SHAPE}",
        **COMMON,
    ),
]
if ON_GPU:
    BENCHMARKS += [
        latents_benchmark(
            16, "16 heads, {x} sequences: latents in splits reach {floor_percent:.0f}% of the floor"
        ),
        latents_benchmark(
            128,
            "128 heads, {x} sequences: bound by products, {floor_percent:.0f}% of the floor",
        ),
    ]
