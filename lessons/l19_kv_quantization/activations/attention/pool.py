"""Pools whose prompts attend by products of E4M3, and which of them serves a model.

A single token still reads numbers, or codes by `quantized_decode`: there FP8 products save nothing.
So a token's rounding depends on whether its step ran it alone or with others of its prompt, and an
answer may depend on the chunks, which it does not over the same cache without these products.
"""

from dataclasses import replace

from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.generate import Rung
from lessons.l09_flash_attention.tiles import has_e4m3
from lessons.l12_paged_kv.runner import paged_rung_of
from lessons.l19_kv_quantization.activations.attention.naive import fp8_attention
from lessons.l19_kv_quantization.activations.attention.optimized import HEAD_DIMS, fp8_prefill
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.naive import dequantized_attention
from lessons.l19_kv_quantization.pool import KernelPool, QuantizedPool
from lessons.toolbox.model.arguments import refuse

CHOICE = "attention_config use_prefill_query_quantization"


class ProductsPool(QuantizedPool):
    """QuantizedPool of FP8, in PyTorch. format, …: QuantizedPool's arguments but the first."""

    def __init__(self, *args, **arguments):
        super().__init__(FORMATS["fp8"], *args, **arguments)

    def reading(self, batch: Batch):
        """As in QuantizedPool; in a step with prompts by the naive functions of both kinds."""
        if batch.max_seqlen_q == 1:
            return super().reading(batch)
        front, tokens = batch.num_decodes, batch.num_decode_tokens
        table, starts, lens = batch.block_table, batch.cu_seqlens_q, batch.context_lens

        def read(layer: int, q: Tensor, keys: tuple, values: tuple) -> Tensor:
            k_codes, k_scales, v_codes, v_scales = map(self.blocks, (*keys, *values))
            pages = k_codes, v_codes, k_scales, v_scales
            config, out = self.config, q.new_empty(*q.shape[:2], values[0].shape[-1])
            how = dict(softmax_scale=config.softmax_scale, window=config.sliding_window(layer))
            single = table[:front], starts[: front + 1], lens[:front]
            out[:tokens] = dequantized_attention(q[:tokens], *pages, *single, self.format, **how)
            rest = table[front:], starts[front:] - starts[front], lens[front:]
            out[tokens:] = fp8_attention(q[tokens:], *pages, *rest, **how)
            return out

        return read


class ProductsKernelPool(KernelPool):
    """The same by kernels."""

    def __init__(self, *args, **arguments):
        super().__init__(FORMATS["fp8"], *args, **arguments)

    def prompts(
        self, q: Tensor, codes: tuple, part: Batch, softmax_scale: float, window: int | None
    ) -> Tensor:
        """As in KernelPool."""
        lens, most = (part.cu_seqlens_q, part.context_lens), part.max_seqlen_q
        how = softmax_scale, window
        return fp8_prefill(q, *codes, part.block_table, *lens, *how, max_seqlen_q=most)


def products_rung_of(model: Decoder) -> Rung:
    """Lesson 12's rung for this model over a cache of FP8 whose prompts multiply codes. Raises
    ValueError for a model of which no kernel does.
    """
    config, on_gpu = model.config, model.device.type == "cuda"
    others = {
        "latent attention": config.mla is not None,
        "states": config.state is not None,
        "a soft cap or sinks": config.has_score_rules,
        f"heads of {config.head_dim}": on_gpu and config.head_dim not in HEAD_DIMS,
        "a GPU older than compute capability 8.9": on_gpu and not has_e4m3(model.device),
    }
    for name, is_there in others.items():
        if is_there:
            refuse(CHOICE, True, f"False with {name}")
    rung = paged_rung_of(model)
    pool = ProductsKernelPool if on_gpu else ProductsPool
    return replace(rung, name=f"{rung.name} of fp8, products in fp8", cache=pool)
