"""What absorbing saves and where it loses: a decode step, new tokens after a context, a prompt
alone, batches, beside GQA.

    python -m lessons.toolbox.measure.bench 06
"""

from functools import partial

import torch
from torch import Tensor

from lessons.l02_naive_attention.optimized import attention_for
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import decode_attention_torch
from lessons.l06_mla.deepseek import AbsorbedAttention, LatentAttention
from lessons.l06_mla.lab.batches import (
    BATCHES,
    batch_floor_s,
    batch_inputs,
    beside_inputs,
    flashinfer_batch,
    heads_step,
    latent_step,
    latents_floor_s,
    own_batch,
    repeated_rows,
    sdpa_batch,
)
from lessons.l06_mla.lab.counts import absorbed_flops, decode_bytes, decode_flops, expanded_flops
from lessons.l06_mla.lab.workload import (
    CACHED,
    CONFIG,
    DTYPE,
    ON_GPU,
    SHAPE,
    THREADS,
    TOLERANCE,
    layer_inputs,
    one_layer,
    pool_of,
    read_floor_s,
    step_bytes,
)
from lessons.l06_mla.naive import EXPANDED
from lessons.l06_mla.optimized import ABSORBED
from lessons.toolbox.measure.bench import Benchmark, needs
from lessons.toolbox.measure.hardware import measured_ceilings, time_floor_s

SCALE, RANK = CONFIG.softmax_scale, CONFIG.mla.kv_lora_rank


# ---------------------------------------------------------------- a step with its projections


def step_with(rung: Rung):
    """The layer's step with the cache of a rung."""

    def make(x: Tensor, c_kv: Tensor, k_pe: Tensor):
        pool, held = pool_of(c_kv, k_pe, len(x), rung), len(c_kv)
        batch = new_batch([([0] * len(x), held)], pool.block_size, x.device)
        layer = LatentAttention(one_layer().attention)

        @torch.inference_mode()
        def step():
            return layer(x, partial(pool.attending(batch), 0))

        return step

    return make


def library(x: Tensor, c_kv: Tensor, k_pe: Tensor):
    """transformers' step over the same latents."""
    with needs("transformers"):
        from lessons.l06_mla.lab import peers as peer
    return peer.step(one_layer(), x, c_kv, k_pe)


# ---------------------------------------------------------------- many new tokens, in either form


def expanded_pass(x: Tensor, c_kv: Tensor, k_pe: Tensor):
    """k and v of every head from all latents, then ordinary attention."""
    return step_with(ABSORBED if len(x) > 1 else EXPANDED)(x, c_kv, k_pe)


def absorbed_pass(x: Tensor, c_kv: Tensor, k_pe: Tensor):
    """The new queries come to the latents, however many they are."""
    pool, held = pool_of(c_kv, k_pe, len(x)), len(c_kv)
    batch = new_batch([([0] * len(x), held)], pool.block_size, x.device)
    layer, attention = AbsorbedAttention(one_layer().attention), attention_for(x.device)
    rows, ops = pool.k_slots[0], pool.ops

    def attend(q, k, v):
        q = ops.write(q, k, v, rows, None, batch, pool.cos_sin_cache)
        keys = rows[: held + len(x)]
        if len(q) == 1 and not ON_GPU:
            return decode_attention_torch(q, keys, keys[..., :RANK], SCALE)
        return attention(q, keys, keys[..., :RANK], SCALE)

    @torch.inference_mode()
    def run():
        return layer(x, attend)

    return run


def prompt_floor_s(tokens: int) -> float:
    """Seconds that this machine's ceilings allow for a prompt: the projections and the cheaper form
    of attention.
    """
    projections = (
        sum(p.numel() for p in one_layer().parameters())
        - one_layer().attention.kv_b_proj.weight.numel()
    )
    flops = 2 * tokens * projections + expanded_flops(tokens, tokens, CONFIG.num_attention_heads)
    return time_floor_s(0, flops, measured_ceilings(), DTYPE)


def chunk_floor_s(new: int) -> float:
    """As prompt_floor_s, `new` tokens after CACHED others."""
    projections = (
        sum(p.numel() for p in one_layer().parameters())
        - one_layer().attention.kv_b_proj.weight.numel()
    )
    forms = (
        form(new, CACHED + new, CONFIG.num_attention_heads)
        for form in (expanded_flops, absorbed_flops)
    )
    return max(
        time_floor_s(0, 2 * new * projections + min(forms), measured_ceilings(), DTYPE),
        read_floor_s(step_bytes(CACHED)),
    )


def batch_benchmark(num_heads: int, x_values: list[int], title: str) -> Benchmark:
    """Decode attention over more and more sequences, for so many heads."""
    return Benchmark(
        name=f"l06_batch_{num_heads}",
        title=title,
        x_name="sequences in the batch",
        x_values=x_values,
        quick_x_values=x_values[:2],
        inputs=batch_inputs(num_heads),
        providers={
            "rows copied for each head": ("naive", repeated_rows),
            "each row read once": ("optimized", own_batch),
            "PyTorch SDPA": ("library", sdpa_batch),
            "FlashInfer": ("library", flashinfer_batch),
        },
        ylabel="decode attention over latents",
        floor_s=batch_floor_s(num_heads),
        floor_label="read once, or the products",
        bytes_moved=lambda n: decode_bytes(n, BATCHES[num_heads], bytes_per_value=DTYPE.itemsize),
        flops=lambda n: decode_flops(n, BATCHES[num_heads], num_heads),
        dtype=DTYPE_NAME,
        tolerance=TOLERANCE,
        shape=f"{num_heads} heads, latent 512 + 64, context {BATCHES[num_heads]}{THREADS}",
    )


DTYPE_NAME = str(DTYPE).removeprefix("torch.")
BENCHMARKS = [
    Benchmark(
        name="l06_decode_step",
        title="At {x} tokens a step with absorbed weights is {speedup:.0f}x faster than "
        "decompressing",
        x_name="tokens in the context",
        x_values=[2**n for n in range(7, 16 if ON_GPU else 13)],
        quick_x_values=[128, 512],
        inputs=lambda n, device: layer_inputs(1, n - 1, device),
        providers={
            "decompress every step": ("naive", step_with(EXPANDED)),
            "absorbed": ("optimized", step_with(ABSORBED)),
            "transformers": ("library", library),
        },
        ylabel="decode step of one attention layer",
        bytes_moved=step_bytes,
        floor_s=lambda n: read_floor_s(step_bytes(n)),
        floor_label="weights and latents read once",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l06_new_tokens",
        title="{x} new tokens: absorbed runs at {speedup:.2f}x the speed of expanded",
        x_name=f"new tokens after {CACHED} cached ones",
        x_values=[1, 4, 16, 64, 128, 256, 512],
        quick_x_values=[1, 64],
        inputs=lambda n, device: layer_inputs(n, CACHED, device),
        providers={"expanded": ("naive", expanded_pass), "absorbed": ("optimized", absorbed_pass)},
        ylabel="one attention layer",
        floor_s=chunk_floor_s,
        floor_label="cheaper form, matrix products alone",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
    ),
    Benchmark(
        name="l06_prompt",
        title="A prompt of {x} alone: expanded is {speedup:.2f}x as fast as absorbed",
        x_name="tokens in the prompt",
        x_values=[64, 128, 256, 512, 1024],
        quick_x_values=[64, 256],
        inputs=lambda n, device: layer_inputs(n, 0, device),
        providers={"absorbed": ("naive", absorbed_pass), "expanded": ("optimized", expanded_pass)},
        ylabel="one attention layer",
        floor_s=prompt_floor_s,
        floor_label="matrix products alone",
        dtype=DTYPE_NAME,
        shape=SHAPE,
        tolerance=TOLERANCE,
    ),
    batch_benchmark(
        16,
        [1, 2, 4, 8, 16, 32, 64],
        "16 heads, {x} sequences: reading each row once is {speedup:.1f}x faster",
    ),
    batch_benchmark(
        128,
        [1, 2, 4, 8, 16, 32, 64, 128] if ON_GPU else [1, 2, 4, 8],
        "128 heads, {x} sequences: reading each row once is {speedup:.1f}x faster",
    ),
    Benchmark(
        name="l06_beside_gqa",
        title="At {x} tokens absorbed MLA is {speedup:.1f}x as fast as MHA of the same heads",
        x_name="tokens in the context",
        x_values=[2**n for n in range(7, 16 if ON_GPU else 14)],
        quick_x_values=[128, 1024],
        inputs=beside_inputs,
        providers={
            "MHA, 16 KV heads": ("naive", heads_step(16, 192, 128)),
            "MLA, absorbed": ("optimized", latent_step),
            "GQA, 4 KV heads": ("library", heads_step(4, 128, 128)),
        },
        ylabel="decode attention of one layer",
        floor_s=latents_floor_s,
        floor_label="latents read once",
        bytes_moved=lambda n: decode_bytes(1, n, bytes_per_value=DTYPE.itemsize),
        dtype=DTYPE_NAME,
        shape=f"16 query heads, one sequence{THREADS}",
        tolerance=0,
    ),
]
