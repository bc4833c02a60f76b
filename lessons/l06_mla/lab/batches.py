"""Attention of single queries, alone: what a batch of them costs in each way, and beside models
that keep heads.

16 heads as in DeepSeek-V2-Lite, bound by memory; 128 as in V2 and V3, bound by the products on
today's GPUs.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lessons.l03_kv_cache.stand_ins import decode_attention_torch
from lessons.l06_mla.lab.counts import V3, decode_bytes, decode_flops
from lessons.l06_mla.lab.workload import CONFIG, DTYPE, ON_GPU, one_layer, read_floor_s
from lessons.l06_mla.optimized import mla_decode
from lessons.toolbox.measure.bench import needs, on_gpu
from lessons.toolbox.measure.hardware import measured_ceilings, time_floor_s

SCALE, RANK = CONFIG.softmax_scale, V3.kv_lora_rank
BATCHES = {16: 4096, 128: 8192} if ON_GPU else {16: 512, 128: 128}  # heads: tokens of each sequence


def batch_inputs(num_heads: int):
    """A function (sequences, device) -> q: [B, num_heads, 576], kv_cache: [B, context, 576],
    context_lens: [B].
    """

    def inputs(sequences: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(sequences, num_heads, V3.latent_dim, dtype=DTYPE, device=device)
        kv_cache = torch.randn(
            sequences, BATCHES[num_heads], V3.latent_dim, dtype=DTYPE, device=device
        )
        return (
            q,
            kv_cache,
            torch.full((sequences,), BATCHES[num_heads], dtype=torch.int32, device=device),
        )

    return inputs


def batch_floor_s(num_heads: int):
    """A function: sequences -> seconds below which this machine can neither read their latents nor
    do the products.
    """

    def floor_s(sequences: int) -> float:
        moved = decode_bytes(sequences, BATCHES[num_heads], bytes_per_value=DTYPE.itemsize)
        flops = decode_flops(sequences, BATCHES[num_heads], num_heads)
        return max(read_floor_s(moved), time_floor_s(0, flops, measured_ceilings(), DTYPE))

    return floor_s


def repeated_rows(q: Tensor, kv_cache: Tensor, context_lens: Tensor):
    """The one KV head copied for each query head, as if there were many. Shapes are those of
    batch_inputs.
    """

    def attend():
        keys = kv_cache[:, None].expand(-1, q.shape[1], -1, -1).contiguous()
        scores = torch.einsum("bhd,bhnd->bhn", q, keys) * SCALE
        return torch.einsum(
            "bhn,bhnr->bhr",
            torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype),
            keys[..., :RANK],
        )

    return attend


def own_batch(q: Tensor, kv_cache: Tensor, context_lens: Tensor):
    """The lesson's: one kernel on a GPU, sequence after sequence on a CPU. Shapes as in
    batch_inputs.
    """
    if ON_GPU:
        return lambda: mla_decode(q, kv_cache, context_lens, SCALE)[0]
    return lambda: torch.cat(
        [
            decode_attention_torch(one, rows[:, None], rows[:, None, :RANK], SCALE)
            for one, rows in zip(q.split(1), kv_cache)
        ]
    )


def sdpa_batch(q: Tensor, kv_cache: Tensor, context_lens: Tensor):
    """PyTorch's scaled_dot_product_attention; none of its fused kernels takes heads of 576. Shapes
    as in batch_inputs.
    """
    keys = kv_cache[:, None]
    return lambda: scaled_dot_product_attention(
        q[:, :, None], keys, keys[..., :RANK], scale=SCALE, enable_gqa=True
    )[:, :, 0]


@on_gpu
def flashinfer_batch(q: Tensor, kv_cache: Tensor, context_lens: Tensor):
    """FlashInfer's kernel for absorbed queries. Shapes as in batch_inputs."""
    with needs("flashinfer-python"):
        from lessons.l06_mla.lab.peers_gpu import flashinfer_decode
    return flashinfer_decode(q, kv_cache, SCALE, RANK)


# ---------------------------------------------------------------- beside models that keep heads


def beside_inputs(context: int, device: torch.device) -> tuple[int]:
    """The context alone: each model below has its own cache."""
    return (context,)


def heads_step(num_kv_heads: int, qk_dim: int, v_dim: int):
    """Decode attention of 16 query heads over so many KV heads. Returns the tokens attended to:
    outputs differ by model.
    """

    def make(context: int):
        device = one_layer().device
        q, k, v = (
            torch.randn(*shape, dtype=DTYPE, device=device)
            for shape in (
                (1, 16, qk_dim),
                (context, num_kv_heads, qk_dim),
                (context, num_kv_heads, v_dim),
            )
        )

        def step():
            decode_attention_torch(q, k, v, qk_dim**-0.5)
            return context

        return step

    return make


def latent_step(context: int):
    """Decode attention of 16 heads over latents, W_UK before and W_UV behind it included."""
    layer, device = one_layer().attention, one_layer().device
    q = torch.randn(1, 16, V3.qk_head_dim, dtype=DTYPE, device=device)
    rows = torch.randn(context, 1, V3.latent_dim, dtype=DTYPE, device=device)

    def step():
        with torch.inference_mode():
            layer.project_values(
                decode_attention_torch(layer.absorb(q), rows, rows[..., :RANK], SCALE)
            )
        return context

    return step


def latents_floor_s(context: int) -> float:
    """Seconds to read the latents of `context` tokens once."""
    return read_floor_s(decode_bytes(1, context, bytes_per_value=DTYPE.itemsize))
