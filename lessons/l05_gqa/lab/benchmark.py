"""What sharing KV heads saves, and what repeating them gives back: over KV heads, query heads,
context, batch; a whole step.

    python -m lessons.toolbox.measure.bench 05
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.lab.workload import CONFIG, ON_GPU, SHAPE, TOLERANCE
from lessons.l03_kv_cache.optimized import decode_attention as decode_per_query_head
from lessons.l05_gqa import naive
from lessons.l05_gqa.lab.workload import (
    BATCH,
    CONTEXT,
    CONTEXTS,
    DTYPE_NAME,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MODEL_CONTEXT,
    MODEL_KV_HEADS,
    SEQUENCES,
    floor_of,
    inputs_of,
    model_floor_s,
    model_inputs,
    shape_of,
)
from lessons.l05_gqa.naive import REPEATED
from lessons.l05_gqa.optimized import IN_GROUPS, decode_attention, decode_attention_grouped
from lessons.toolbox.measure.bench import Benchmark, needs, on_gpu


def repeated(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """naive.py's arithmetic, all sequences in one expression. Shapes as in inputs_of."""

    def attend():
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bhd,bnhd->bhn", q, keys).float() * HEAD_DIM**-0.5
        return torch.einsum("bhn,bnhd->bhd", torch.softmax(scores, dim=-1).to(v.dtype), values)

    return attend if ON_GPU else lambda: naive.decode_attention(q, k, v, context_lens)


def grouped(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """The lesson's: the kernel on a GPU, PyTorch on a CPU, sequence after sequence. Shapes as in
    inputs_of.
    """
    decode = decode_attention if ON_GPU else decode_attention_grouped
    return lambda: decode(q, k, v, context_lens)


def per_query_head(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """Lesson 3's kernel: no copy, but each tile loaded once for every query head. Shapes as in
    inputs_of.
    """
    return lambda: decode_per_query_head(q, k, v, context_lens)


def sdpa(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """PyTorch's, told of the groups. Shapes as in inputs_of."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], keys, values, enable_gqa=True
    )[:, :, 0]


def sdpa_repeated(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """PyTorch's, handed repeated heads, as models called it before it knew groups. Shapes as in
    inputs_of.
    """
    group = q.shape[1] // k.shape[2]

    def attend():
        keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values)[
            :, :, 0
        ]

    return attend


def flashinfer(q: Tensor, k: Tensor, v: Tensor, context_lens: Tensor):
    """FlashInfer's batch decode on tensor cores. Shapes as in inputs_of."""
    with needs("flashinfer-python"):
        from lessons.l05_gqa.lab import peers as peer
    return peer.decode(q, k, v)


def step_with(rung: Rung):
    """The logits of one token through the whole model over a cache of this rung."""

    def make(model, keys: Tensor, values: Tensor):
        held = MODEL_CONTEXT - 1
        pool = rung.new_cache(model, 1, MODEL_CONTEXT)
        pool.k_slots[:, :held], pool.v_slots[:, :held] = keys, values
        batch = new_batch([([7], held)], MODEL_CONTEXT, keys.device)

        @torch.inference_mode()
        def step():
            return model.logits(model(batch.tokens, pool.attending(batch)))

        return step

    return make


DECODES = {
    "K and V repeated": ("naive", repeated),
    "lesson 3: a program per query head": ("naive", on_gpu(per_query_head)),
    "read in groups": ("optimized", grouped),
    "SDPA, enable_gqa": ("library", sdpa),
    "SDPA, heads repeated": ("library", sdpa_repeated),
    "FlashInfer": ("library", on_gpu(flashinfer)),
}


def of_one_layer(
    name: str,
    title: str,
    x_name: str,
    x_values: list[int],
    quick: list[int],
    sizes,
    heads: str,
    **fixed: int,
) -> Benchmark:
    """Decode attention of one layer. sizes(x) -> (batch, context, query heads, KV heads); heads,
    fixed: for the caption.
    """

    def floor(x):
        batch, context, _, num_kv_heads = sizes(x)
        return floor_of(batch, context, num_kv_heads)

    return Benchmark(
        name=name,
        title=title,
        x_name=x_name,
        x_values=x_values,
        quick_x_values=quick,
        providers=DECODES,
        inputs=lambda x, device: inputs_of(*sizes(x)),
        bytes_moved=lambda x: floor(x)[0],
        floor_s=lambda x: floor(x)[1],
        ylabel="decode attention of one layer",
        floor_label="KV read once",
        dtype=DTYPE_NAME,
        shape=shape_of(heads, **fixed),
        tolerance=TOLERANCE,
    )


BENCHMARKS = [
    of_one_layer(
        "l05_kv_heads",
        "{x} KV heads become {first}: reading in groups gets {optimized_growth:.0f}x cheaper, "
        "repeating only {naive_growth:.1f}x",
        f"KV heads of {HEADS} query heads (1: MQA, {HEADS}: MHA)",
        [1, 2, 4, 8, 16, 32],
        [1, 8, 32],
        lambda kv_heads: (BATCH, CONTEXT, HEADS, kv_heads),
        f"{HEADS}/x",
        batch=BATCH,
        context=CONTEXT,
    ),
    of_one_layer(
        "l05_query_heads",
        f"On {KV_HEADS} KV heads, {{x}} query heads cost {{optimized_growth:.1f}}x as much as "
        "{first} when read in groups, {naive_growth:.1f}x when repeated",
        f"query heads on {KV_HEADS} KV heads",
        [8, 16, 32, 64],
        [8, 64],
        lambda heads: (BATCH, CONTEXT, heads, KV_HEADS),
        f"x/{KV_HEADS}",
        batch=BATCH,
        context=CONTEXT,
    ),
    of_one_layer(
        "l05_context",
        "Reading in groups is {speedup:.1f}x faster than repeating at {x} tokens",
        "tokens in each sequence",
        CONTEXTS,
        [CONTEXTS[0], CONTEXTS[2]],
        lambda context: (BATCH, context, HEADS, KV_HEADS),
        f"{HEADS}/{KV_HEADS}",
        batch=BATCH,
    ),
    of_one_layer(
        "l05_batch",
        "{x} sequences: reading in groups is {speedup:.1f}x faster than repeating",
        "sequences in the batch",
        SEQUENCES,
        [1, 4],
        lambda batch: (batch, CONTEXT, HEADS, KV_HEADS),
        f"{HEADS}/{KV_HEADS}",
        context=CONTEXT,
    ),
    Benchmark(
        name="l05_step",
        title="A whole decode step: {x} KV heads cost {optimized_growth:.1f}x as much as {first} "
        "when read in groups, {naive_growth:.1f}x when repeated",
        x_name="KV heads of the model",
        x_values=MODEL_KV_HEADS,
        quick_x_values=MODEL_KV_HEADS,
        inputs=model_inputs,
        providers={
            "K and V repeated": ("naive", step_with(REPEATED)),
            "read in groups": (
                "optimized",
                step_with(IN_GROUPS),
            ),
        },
        ylabel="one step of the whole model",
        floor_s=model_floor_s,
        floor_label="weights and KV read once",
        dtype=DTYPE_NAME,
        shape=f"context {MODEL_CONTEXT}, {SHAPE.replace(f'/{CONFIG.num_key_value_heads}', '/x')}",
        tolerance=TOLERANCE,
    ),
]
