"""Exercises of lesson 05: attention that repeats nothing, a kernel for a group, a conversion with
bugs, the bytes of it all.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import causal_mask
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.config import ModelConfig


@exercise(
    "5.1",
    "Attention that repeats no KV head",
    minutes=30,
    difficulty=2,
    replaces="lessons.l05_gqa.naive:attention_repeated",
)
def attend_in_groups(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None = None
) -> Tensor:
    """The newest T tokens attend to all tokens so far, themselves included, each to those before
    it. q: [T, Hq, D]; k, v: [N, Hkv, D], N at least T -> [T, Hq, D] of q's dtype.

    Query head h reads KV head h // group, group = Hq / Hkv. window: None, or how many of the last
    tokens each token sees, itself included. T is 1 in a decode step. Errors: none to raise.
    `causal_mask(T, N, window)` (lesson 2, imported above) gives [T, N] bool: who sees whom, bottom
    right aligned, the window included. k and v are views of a cache; do not change them.
    Aim: no tensor of [N, Hq, D]; nothing is repeated.

    Example: 4 query heads, 2 KV heads, D = 1, one token so far whose v is [[5], [7]]. A softmax
    over one key is 1, so the result is [[[5], [5], [7], [7]]]: heads 0 and 1 read KV head 0, heads
    2 and 3 KV head 1.
    """
    # SOLUTION
    sees = causal_mask(len(q), len(k), window, q.device)
    rows = q.unflatten(1, (k.shape[1], -1))  # [T, Hkv, group, D]
    scores = torch.einsum("thgd,nhd->hgtn", rows, k) * softmax_scale
    p = torch.softmax(scores.float().masked_fill(~sees, -torch.inf), dim=-1).to(v.dtype)
    return torch.einsum("hgtn,nhd->thgd", p, v).reshape(q.shape)
    # END


@triton.jit
def group_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    context_lens_ptr,
    scale_log2e,
    window,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Exercise 5.2's kernel: `gqa_decode`, which launches it, says what it has to do."""
    kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)  # of the query tile
    # the query head of each row; rows from GROUP on belong to none
    head = kv_head * GROUP + row
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    # out is dense
    out_rows = (
        out_ptr
        + (sequence * tl.num_programs(0) * GROUP + head[:, None]) * HEAD_DIM
        + column[None, :]
    )
    # SOLUTION 5.2
    in_head = (column < HEAD_DIM)[None, :]
    in_group = (row < GROUP)[:, None] & in_head
    q = tl.load(
        q_ptr + sequence * stride_qb + head[:, None] * stride_qh + column[None, :],
        mask=in_group,
        other=0.0,
    )
    k_ptr += sequence * stride_kb + kv_head * stride_kh
    v_ptr += sequence * stride_vb + kv_head * stride_vh
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(tl.maximum(length - window, 0), length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = (key < length)[:, None] & in_head
        k = tl.load(
            k_ptr + key[:, None].to(tl.int64) * stride_kn + column[None, :], mask=held, other=0.0
        )
        v = tl.load(
            v_ptr + key[:, None].to(tl.int64) * stride_vn + column[None, :], mask=held, other=0.0
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e
        scores = tl.where((key < length)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    out = tl.where(length > 0, acc / l_i[:, None], 0.0)
    tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=in_group)
    # END


@exercise(
    "5.2",
    "A kernel in which one program serves a whole group",
    minutes=60,
    difficulty=4,
    replaces="lessons.l05_gqa.optimized:decode_attention",
)
def gqa_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """One query per sequence over its cache, by `group_kernel` above: its body is the exercise,
    this launch is given.

    q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]; context_lens: [B], the rows in use ->
    [B, Hq, D], of q's dtype.
    One program per KV head and sequence. It loads the GROUP = Hq / Hkv query heads as the rows of a
    tile [BLOCK_M, BLOCK_D], both powers of two of 16 at least, and then each tile of K and V,
    [BLOCK_N, BLOCK_D], once for all of them. float32 inside.
    - Rows of the query tile from GROUP on, and columns from HEAD_DIM on, are padding: neither
      loaded nor stored.
    - Cache rows from `length` on were never written and may be NaN. `window`: only the last
      `window` rows count, at least 1.
    - A sequence of length 0 gives zeros.
    - scale_log2e is softmax_scale · log2(e), because exp(x) = 2^(x · log2 e): use tl.exp2. Dots:
      input_precision="ieee".
    Lesson 3's decode_kernel shows the running maximum and sum for one query head; here each row has
    its own.
    Without a GPU it runs in the interpreter; a stub cannot raise on a GPU, so there an empty one
    gives garbage.

    Example: B = 1, Hq = 2, Hkv = 1, D = 1, softmax_scale = 1, context_lens = [2], k_cache = [0, ln
    3, NaN], v_cache = [4, 8, NaN]
        q = [0, 1]    head 0: weights 1/2, 1/2 -> 6      head 1: weights 1/4, 3/4 -> 7
    """
    (num_sequences, num_heads, head_dim), (_, capacity, num_kv_heads, _) = q.shape, k_cache.shape
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    group, out = num_heads // num_kv_heads, torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group_kernel[num_kv_heads, num_sequences](
        q,
        k_cache,
        v_cache,
        out,
        context_lens,
        softmax_scale * 1.4426950408889634,
        capacity if window is None else window,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=16,
    )
    return out


@exercise("5.3", "Find the bugs: a conversion to fewer KV heads", minutes=25, difficulty=2)
def convert_to_gqa(
    weights: dict[str, Tensor], config: ModelConfig, num_kv_heads: int
) -> tuple[dict[str, Tensor], ModelConfig]:
    """The weights and the config of the same model with num_kv_heads KV heads, each the mean of a
    group of neighbours.

    weights: the decoder's state dict: "layers.0.self_attn.k_proj.weight" [Hkv · D, hidden_size],
    "….k_proj.bias" [Hkv · D] if the model has biases, v_proj likewise; the rows of KV head h are h
    · D to (h + 1) · D. num_kv_heads divides config.num_key_value_heads. A mean has its heads'
    dtype.
    All other weights come back as they are. `weights` and its tensors stay as they were. Errors:
    none to raise.

    Example: 4 KV heads of D = 1, k_proj.weight = [[1], [3], [10], [20]], to 2 heads -> [[2], [15]];
    the config says 2 KV heads.
        With 4 query heads, heads 0 and 1 then read 2 in the place of 1 and 3; heads 2 and 3 read
          15.

    The code below runs, and its shapes are right. It has three bugs. Delete the line with
    `raise` and find them.
    """
    # SOLUTION
    converted = dict(weights)
    for name, weight in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            # [groups, heads of a group, D, ...]
            heads = weight.view(num_kv_heads, -1, config.head_dim, *weight.shape[1:])
            converted[name] = heads.mean(1).flatten(0, 1)
    return converted, replace(config, num_key_value_heads=num_kv_heads)
    # STUB
    # converted = dict(weights)
    # for name, weight in weights.items():
    #     if name.endswith(("k_proj.weight", "v_proj.weight")):
    #         heads = weight.view(-1, num_kv_heads, config.head_dim, weight.shape[1])
    #         converted[name] = heads.sum(0).flatten(0, 1)
    # return converted, replace(config, num_key_value_heads=num_kv_heads)
    # END


@exercise("5.4", "Predict: what sharing KV heads saves", minutes=15, difficulty=1)
def shared_heads(
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    context: int,
    memory_gib: float,
) -> tuple[float, float, float, int]:
    """Of a decoder: MiB (2^20 bytes) of K and V that one decode step of one sequence moves, three
    ways, and what fits.

    All layers together, `context` tokens in the cache. In this order:
        MiB read in groups: every cached K and V once
        MiB if the model were MHA (a KV head for every query head), every K and V once
        MiB moved by repeat_interleave: cached K and V read, their copies for every query head
          written, the copies read
        sequences of `context` tokens whose caches fit into memory_gib GiB (2^30 bytes), whole
          sequences, Hkv heads stored
    Errors: none to raise. Aim: formulas, no loop.

    Example: 2 layers, 4 query heads, 1 KV head, head_dim 64, float16, context 1024, 0.01 GiB:
        a token keeps 2 · 2 · 1 · 64 · 2 = 512 bytes -> 0.5 MiB; MHA 2.0; repeated 0.5 + 2.0 + 2.0 =
          4.5; 10.24 / 0.5 -> 20
    Write down your guess first: Llama-3-8B (32 layers, 32 and 8 heads, 128) in bfloat16, 8192
    tokens, 100 GiB.
    """
    # SOLUTION
    per_head = 2 * num_hidden_layers * head_dim * dtype.itemsize * context / 2**20
    grouped, mha = per_head * num_key_value_heads, per_head * num_attention_heads
    return grouped, mha, grouped + 2 * mha, int(memory_gib * 1024 // grouped)
    # END
