"""The libraries beside which the benchmark stands: every backend of PyTorch's SDPA, FlexAttention,
FlashInfer, flash-attn.

Each function takes q: [T, Hq, D], k, v: [Tk, Hkv, D] and `causal`, and returns a function of no
arguments that gives [T, Hq, D]. They raise Unavailable, one line, where they cannot run.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lessons.toolbox.measure.bench import Unavailable, needs

BACKENDS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}


def sdpa(backend: str) -> Callable:
    """scaled_dot_product_attention, held to one of BACKENDS. K and V are repeated beforehand where
    it cannot group heads.
    """

    def make(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
        if not q.is_cuda and backend in ("efficient", "cuDNN"):
            raise Unavailable("needs a GPU")
        group = q.shape[1] // k.shape[1]
        grouped = group > 1 and backend != "efficient"
        if group > 1 and backend == "efficient":  # not timed: it has no grouped heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]

        def run() -> Tensor:
            with sdpa_kernel(BACKENDS[backend]):
                return scaled_dot_product_attention(
                    *heads_first, is_causal=causal, enable_gqa=grouped
                )

        try:
            run()
        except RuntimeError as error:
            if "out of memory" in str(error).lower():
                raise
            raise Unavailable(str(error).split("\n")[0][:120]) from None
        return lambda: run()[0].transpose(0, 1)

    return make


def flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """torch.compile'd FlexAttention with a block mask. q: [T, Hq, D], k, v: [Tk, Hkv, D]."""
    if not q.is_cuda:
        raise Unavailable("needs a GPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    heads_first = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    mask = (
        create_block_mask(lambda b, h, i, j: i >= j, None, None, len(q), len(k), device=q.device)
        if causal
        else None
    )
    return lambda: compiled(*heads_first, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])[
        0
    ].transpose(0, 1)


def flashinfer(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """FlashInfer's prefill of a single sequence. q: [T, Hq, D], k, v: [Tk, Hkv, D]."""
    _needs_gpu(q)
    with needs("flashinfer-python"):
        from flashinfer import single_prefill_with_kv_cache
    return lambda: single_prefill_with_kv_cache(q, k, v, causal=causal)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """Dao's flash-attn: version 3 (flash_attn_interface) if it is there, else 2. q: [T, Hq, D], k,
    v: [Tk, Hkv, D].
    """
    _needs_gpu(q)
    try:
        from flash_attn_interface import flash_attn_func
    except ImportError:
        with needs("flash-attn"):
            from flash_attn import flash_attn_func

    def run() -> Tensor:
        out = flash_attn_func(q[None], k[None], v[None], causal=causal)
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run


def _needs_gpu(q: Tensor) -> None:
    if not q.is_cuda:
        raise Unavailable("needs a GPU")
