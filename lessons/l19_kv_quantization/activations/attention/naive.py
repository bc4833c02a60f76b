"""Naive: attention by products of E4M3, in PyTorch. What a prompt's queries see of an FP8 cache
when q, k, v and the weights p all stay in 8 bits.

    scores[m, n] = q_scale[m] · k_scale[n] · (q_code[m] · k_code[n])
    p[m, n]      = 2^(score − top[m])                                    top: the row's maximum
    out[m]       = Σ_n E4M3(p[m, n] · v_scale[n] · unit) · v_code[n]  /  Σ_n p[m, n] · unit

A scale of V belongs to a key, and the second sum is over keys, so it joins p before p is rounded.
Three choices keep the rounding of p the same wherever a tile ends:

- top is rounded up to a whole number. A later, larger top then moves p by a power of two, which
  changes no code of E4M3.
- unit is a power of two as well, such that the largest p · v_scale · unit is between 64 and 256,
  below 448. Weights down to 2^-12 of it keep their three bits. So a row of V whose scale is far
  above the others' costs these some bits of their weights (a row of zeros has the scale 1).
- The sum of p is that of the weights before they are rounded, in float32.

Sources: Shah et al. 2024, FlashAttention-3, section 3.3; vLLM's attention_config
use_prefill_query_quantization, which quantizes the queries of prompts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import check_inputs
from lessons.l12_paged_kv.naive import gathered
from lessons.l19_kv_quantization.formats import FORMATS, wide

FP8 = FORMATS["fp8"]
LARGEST_WEIGHT = 7  # 2^7 · 2 > p · v_scale · unit


class Coded(NamedTuple):
    """Rows as codes: [T, H, D] uint8, the bits of E4M3 numbers; scales: [T, H, 1]."""

    codes: Tensor
    scales: Tensor


def products(q: Coded, k: Coded, v: Coded, softmax_scale: float, window: int | None) -> Tensor:
    """The newest Tq tokens over all Tk: q of [Tq, Hq, D], k of [Tk, Hkv, D] and v of [Tk, Hkv, Dv]
    -> [Tq, Hq, Dv] in the dtype of the scales. window: as in lesson 2's `attention`.
    """
    dtype = wide(q.scales).dtype
    group = q.codes.shape[1] // k.codes.shape[1]
    q8, k8, v8 = (x.codes.view(torch.float8_e4m3fn).to(dtype) for x in (q, k, v))
    q_scale, k_scale, v_scale = (wide(x.scales) for x in (q, k, v))
    _, sees = check_inputs(q8, k8, v8, softmax_scale, True, window)
    k8, v8, k_scale, v_scale = (x.repeat_interleave(group, 1) for x in (k8, v8, k_scale, v_scale))

    scores = torch.einsum("qhd,khd->hqk", q8, k8) * k_scale.permute(1, 2, 0)
    scores = scores * (q_scale * softmax_scale / torch.log(q_scale.new_tensor(2.0))).transpose(0, 1)
    scores = scores.masked_fill(~sees, -torch.inf)
    top = scores.amax(-1, keepdim=True).ceil()
    v_scale = v_scale.permute(1, 2, 0)  # [Hq, 1, Tk]
    largest = (v_scale * sees).amax(-1, keepdim=True)  # of the keys that a query sees
    unit = LARGEST_WEIGHT - largest.log2().floor().clamp(min=-100)
    p = torch.exp2(scores - top.masked_fill(top == -torch.inf, 0) + unit)
    weights = rounded(p * v_scale)
    total = p.sum(-1, keepdim=True)
    out = torch.einsum("hqk,khd->hqd", weights, v8) / total.masked_fill(total == 0, 1)
    return out.transpose(0, 1).to(q.scales.dtype)


def rounded(x: Tensor) -> Tensor:
    """x: [...], within ±448, as the nearest numbers of E4M3, in x's dtype."""
    return x.float().to(torch.float8_e4m3fn).to(x.dtype)


def fp8_attention(
    q: Tensor,
    k_codes: Tensor,
    v_codes: Tensor,
    k_scales: Tensor,
    v_scales: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """One sequence after the other, its rows gathered. q: [T, Hq, D] -> [T, Hq, Dv]; the
    cache and the rest as in naive.py's `dequantized_attention`.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    outs = [q.new_empty(0, q.shape[1], v_codes.shape[-1])]
    starts = cu_seqlens_q.tolist()
    for b, length in enumerate(context_lens.tolist()):
        new = q[starts[b] : starts[b + 1]]
        if not length:
            outs.append(new.new_zeros(*new.shape[:2], v_codes.shape[-1]))
            continue
        rows = [gathered(x, block_table[b], length) for x in (k_codes, k_scales, v_codes, v_scales)]
        outs.append(products(Coded(*FP8.quantize(new)), Coded(*rows[:2]), Coded(*rows[2:]), scale,
                             window))  # fmt: skip
    return torch.cat(outs)
