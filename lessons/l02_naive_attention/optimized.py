"""The same attention with one kernel between the two matrix products: scale, mask and softmax in a
single pass.

naive.py sends the N×N scores through memory once for each step (scale, float32, mask, softmax,
mask, back); here each score is read once and each probability written once. K and V are not
repeated either: the query heads that share a KV head become the rows of one matrix. What stays: the
N×N scores still exist. Lesson 9 removes them.

Source: the fused softmax of Triton's tutorials; one row a program, as in Milakov & Gimelshein 2018,
section 2 ("safe softmax").
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import (
    check_inputs,
    check_shapes,
    masked_softmax,
    recompute_loop,
)
from lessons.l02_naive_attention.request import OnToken, check_call
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.toolbox.kernels.triton_ import tl, triton

MAX_KEYS = 16384  # a row lives in one program's registers: 32 float32 per thread at 16 warps


@triton.jit
def softmax_kernel(
    scores_ptr,
    probs_ptr,
    softmax_scale,
    num_queries,
    num_keys,
    window,
    stride_sh,
    stride_sq,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per row of scores [H, Tq, Tk]: probs = softmax(scores · softmax_scale) over the
    keys that the query sees.
    """
    query = tl.program_id(0)
    # int64, because head · Tq · Tk passes 2^31 at 32 heads of 8192 tokens
    head = tl.program_id(1).to(tl.int64)
    key = tl.arange(0, BLOCK_N)
    sees = key < num_keys
    reads = sees
    if CAUSAL:
        # bottom-right aligned: the last query belongs to the last key
        last = query + num_keys - num_queries
        sees = sees & (key <= last) & (key > last - window)
        # From one multiple of 16 keys to another, because only then the compiler knows that
        # neighbours are masked alike, and loads 16 bytes at a time instead of 2. In bfloat16 those
        # 16 keys are one sector, which memory sends whole anyway.
        reads = reads & (key < (last + 16) // 16 * 16) & (key >= (last - window + 1) // 16 * 16)
    # A masked load reads nothing from memory, so a causal mask halves the bytes that are read.
    row = tl.load(scores_ptr + head * stride_sh + query * stride_sq + key, mask=reads, other=0.0)
    row = tl.where(sees, row.to(tl.float32) * softmax_scale, float("-inf"))
    weights = tl.exp(row - tl.max(row, axis=0))
    # where, because a row that sees nothing divides 0 by 0
    probs = tl.where(sees, weights / tl.sum(weights, axis=0), 0.0)
    out_row = probs_ptr + (head * num_queries + query) * num_keys
    tl.store(out_row + key, probs.to(probs_ptr.dtype.element_ty), mask=key < num_keys)


def fused_softmax(
    scores: Tensor, softmax_scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """softmax(scores · softmax_scale + mask) over the last dimension. scores: [H, Tq, Tk] -> [H,
    Tq, Tk], the same dtype.

    float32 inside. A query that sees no key gets zeros. Raises ValueError for more than MAX_KEYS
    keys, float64, or rows that are not dense.
    """
    if (
        scores.ndim != 3
        or scores.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or scores.shape[2] > MAX_KEYS
    ):
        raise ValueError(
            f"scores: got {scores.dtype} {tuple(scores.shape)}; accepted: [H, Tq, Tk] in float32, "
            f"float16 or "
            f"bfloat16 with Tk at most {MAX_KEYS}"
        )
    if scores.shape[2] > 1 and scores.stride(2) != 1:
        raise ValueError(
            f"scores: got strides {scores.stride()}; accepted: rows that are dense, stride 1 in "
            f"the last dimension"
        )
    num_heads, num_queries, num_keys = scores.shape
    probs = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    if probs.numel():
        block_n = triton.next_power_of_2(num_keys)
        # Queries first, because a grid's second axis holds at most 65535 programs.
        softmax_kernel[num_queries, num_heads](
            scores,
            probs,
            softmax_scale,
            num_queries,
            num_keys,
            num_keys if window is None else window,
            scores.stride(0),
            scores.stride(1),
            CAUSAL=causal,
            BLOCK_N=block_n,
            num_warps=warps_for(block_n),
        )
    return probs


def warps_for(block_n: int) -> int:
    """Warps of a program that holds block_n scores: 512 scores a warp are 16 registers a thread, up
    to 16 warps.
    """
    return min(16, max(1, block_n // 512))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """As naive.attention, with the kernel. q: [Tq, Hq, D]; k, v: [Tk, Hkv, D] -> [Tq, Hq, D].
    Raises ValueError.
    """
    check_shapes(q, k, v, causal, window)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return weighted_values(fused_softmax(grouped_scores(q, k), scale, causal, window), v)


def attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """`attention` with PyTorch in the kernel's place, for machines without a GPU: an interpreted
    kernel takes seconds.

    q: [Tq, Hq, D]; k, v: [Tk, Hkv, D] -> [Tq, Hq, D]. Raises ValueError.
    """
    scale, sees = check_inputs(q, k, v, softmax_scale, causal, window)
    # scaling q is cheaper than scaling N×N scores
    return weighted_values(masked_softmax(grouped_scores(q * scale, k), sees), v)


def attention_for(device: torch.device):
    """The version of `attention` to generate with: the kernel where it is compiled, PyTorch where
    it would be interpreted.
    """
    return attention if device.type == "cuda" else attention_torch


def grouped_scores(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ with the query heads of one KV head stacked as rows. q: [Tq, Hq, D], k: [Tk, Hkv, D] ->
    [Hq, Tq, Tk].
    """
    (num_queries, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    # [Hkv, group · Tq, D]
    rows = q.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    return torch.bmm(rows, k.permute(1, 2, 0)).view(num_heads, num_queries, len(k))


def weighted_values(probs: Tensor, v: Tensor) -> Tensor:
    """probs: [Hq, Tq, Tk], v: [Tk, Hkv, Dv] -> [Tq, Hq, Dv]."""
    num_heads, num_queries, num_keys = probs.shape
    # [Hkv, group · Tq, Tk]
    rows = probs.view(v.shape[1], -1, num_keys)
    return torch.bmm(rows, v.transpose(0, 1)).view(num_heads, num_queries, -1).transpose(0, 1)


def generate(
    model: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int | list[int],
    sampling: SamplingParams | list[SamplingParams] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """As naive.generate, every step over the whole sequence, with this file's attention
    (`attention_for` the model's device).
    """
    check_call(model, on_token)  # before its device is asked for
    return recompute_loop(
        attention_for(model.device), model, prompts, max_new_tokens, sampling, on_token
    )
