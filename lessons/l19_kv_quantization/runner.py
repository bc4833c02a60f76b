"""Which pool and which operations serve a model over a quantized cache: lesson 12's rungs with a
pool of codes. Everything else of lesson 12 (runner, blocks, copies, swap) works as it is, because a
block of codes is a block.

    runner = quantized_runner(model, "int8", num_blocks=64, block_size=16, max_context_len=512)
    logits = runner.step({0: prompt})
"""

from dataclasses import replace
from functools import partial

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.generate import Rung
from lessons.l12_paged_kv.runner import PagedRunner, new_pool, paged_rung_of
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.pool import KernelPool, QuantizedLatentPool, QuantizedPool
from lessons.toolbox.model.arguments import refuse

AUTO = "auto"  # the cache in the model's dtype
ROWS = "fp8_ds_mla"  # DeepSeek's rows of codes, for latents (kernels/latents/naive.py)


def quantized_rung_of(model: Decoder, kv_cache_dtype: str) -> Rung:
    """Lesson 12's rung for this model, over a cache of this format. "auto": over its own.

    The kernels serve ordinary models on a GPU. On a CPU, for latents, and for scores with rules of
    their own (Gemma 2, gpt-oss) the codes become numbers first.
    """
    rung = paged_rung_of(model)
    if kv_cache_dtype == AUTO:
        return rung
    if kv_cache_dtype == ROWS:
        from lessons.l19_kv_quantization.kernels.latents.pool import row_pool_of  # few need it

        return replace(rung, name=f"{rung.name} of {ROWS}", cache=row_pool_of(model))
    if kv_cache_dtype not in FORMATS:
        refuse("kv_cache_dtype", kv_cache_dtype, ", ".join((AUTO, *FORMATS, ROWS)))
    if model.config.mla is not None:
        pool = QuantizedLatentPool
    elif model.device.type != "cuda" or model.config.has_score_rules:
        pool = QuantizedPool
    else:
        pool = KernelPool
    name = f"{rung.name} of {kv_cache_dtype}"
    return replace(rung, name=name, cache=partial(pool, FORMATS[kv_cache_dtype]))


def quantized_runner(
    model: Decoder, kv_cache_dtype: str, num_blocks: int, block_size: int, max_context_len: int
) -> PagedRunner:
    """Lesson 12's runner over a new pool of codes. max_context_len: the longest sequence."""
    rung = quantized_rung_of(model, kv_cache_dtype)
    model = rung.prepare(model)
    return PagedRunner(model, new_pool(model, num_blocks, block_size, max_context_len, rung))
