"""Multi-head, multi-query and grouped-query attention for one new token, the shared heads repeated
until there is one for each.

    MHA  every query head has its own KV head           Hkv = Hq
    MQA  all query heads share one                      Hkv = 1
    GQA  groups of Hq / Hkv query heads share one       between the two

Repeating is how the definition reads, and how many models' first code ran: K and V are read,
written Hq / Hkv times as large, and read again. optimized.py reads them once.

Sources: Shazeer 2019, Fast Transformer Decoding (MQA), section 3; Ainslie et al. 2023, GQA, section
2.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.request import OnToken
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.cache import KVCache
from lessons.l03_kv_cache.naive import cached_loop


def repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """A KV head for each query head: [length, Hkv, D] -> [length, num_heads, D], head h a copy of
    KV head h // (num_heads / Hkv).

    repeat_interleave gives 0 0 0 1 1 1; `repeat` gives 0 1 0 1 0 1, which is another model.
    """
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def decode_mha(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The newest token attends to all, every query head to its own KV head. q: [1, H, D]; k, v:
    [length, H, D] -> [1, H, D].

    No mask, because nothing lies in the newest token's future; a window is a slice.
    """
    if window is not None:
        k, v = k[-window:], v[-window:]
    scores = torch.einsum("qhd,nhd->hqn", q, k) * softmax_scale  # [H, 1, length]
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.einsum("hqn,nhd->qhd", torch.softmax(wide, dim=-1).to(v.dtype), v)


def decode_repeated(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The same for any number of KV heads, by making it MHA first. q: [1, Hq, D]; k, v: [length,
    Hkv, D] -> [1, Hq, D].
    """
    return decode_mha(q, repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1]), softmax_scale, window)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """A batch: q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]; context_lens: [B], the rows
    in use -> [B, Hq, D].
    """
    return sequence_by_sequence(
        decode_repeated, q, k_cache, v_cache, context_lens, softmax_scale, window
    )


def sequence_by_sequence(
    decode_one: Callable,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """decode_one(q: [1, Hq, D], k, v: [length, Hkv, D], scale, window) on each sequence's rows in
    use. Shapes as above.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return torch.cat(
        [
            decode_one(q[b : b + 1], k_cache[b, :length], v_cache[b, :length], scale, window)
            for b, length in enumerate(context_lens.tolist())
        ]
    )


class RepeatedKVCache(KVCache):
    """Lesson 3's cache, holding Hkv heads, that repeats them to Hq at every step (kept repeated, it
    would be an MHA model's).
    """

    def prefill(self, layer: int, q: Tensor, end: int) -> Tensor:
        k, v = (repeat_kv(rows[layer, :end], q.shape[1]) for rows in (self.keys, self.values))
        return attention(
            q, k, v, self.config.softmax_scale, window=self.config.sliding_window(layer)
        )

    def decode(self, layer: int, q: Tensor, end: int) -> Tensor:
        return decode_repeated(
            q,
            self.keys[layer, :end],
            self.values[layer, :end],
            self.config.softmax_scale,
            self.config.sliding_window(layer),
        )


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """One prompt after the other, K and V repeated at every step. Arguments, result and errors as
    in lesson 2's `generate`.
    """
    return cached_loop(
        lambda model, max_tokens: RepeatedKVCache(
            model.config, max_tokens, model.dtype, model.device
        ),
        model,
        prompts,
        max_new_tokens,
        sampling,
        on_token,
    )
