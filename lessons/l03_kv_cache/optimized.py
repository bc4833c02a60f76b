"""The preallocated cache with its two kernels: `append_kernel` writes the new rows, `decode_kernel`
lets one query read them all.

Read cache.py first: `KVPool` is the idea. stand_ins.py has the same operations in PyTorch, for
machines where kernels would be interpreted.

Sources: Pope et al. 2022, section 2; the running max and sum of the decode kernel: Milakov &
Gimelshein 2018, section 3 (lesson 8 takes it apart).
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.optimized import attention
from lessons.l02_naive_attention.rope import rotate
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH, prefill_each
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def append_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    stride_kt,
    stride_vt,
    stride_kslot,
    stride_vslot,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per new token: copy its row of K and of V, Hkv · D values each (V's heads may be
    narrower), to its slot.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:  # -1 marks a token that is not kept
        column = tl.arange(0, BLOCK)
        k = tl.load(k_ptr + token * stride_kt + column, mask=column < K_ROW, other=0.0)
        v = tl.load(v_ptr + token * stride_vt + column, mask=column < V_ROW, other=0.0)
        tl.store(k_cache_ptr + slot * stride_kslot + column, k, mask=column < K_ROW)
        tl.store(v_cache_ptr + slot * stride_vslot + column, v, mask=column < V_ROW)


def check_one_device(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors, [...] each, lie on one device: a kernel given foreign
    memory crashes, or reads it.
    """
    if len({x.device for x in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {x.device}" for name, x in tensors.items())
        raise ValueError(f"{', '.join(tensors)}: got {found}; accepted: one device for all")


def append_rows(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write k, v: [T, Hkv, D] into k_cache, v_cache: [slots, Hkv, D] at slot_mapping: [T] int64,
    distinct; -1 skips a token.

    v and v_cache may have heads of another width than k and k_cache. Raises ValueError if shapes,
    dtypes or strides do not fit. A slot beyond the cache is not checked: it lies on the device.
    """
    caches, rows = (k_cache, v_cache), (k, v)
    if (
        {x.ndim for x in rows + caches} != {3}
        or v.shape[:2] != k.shape[:2]
        or k_cache.shape[1:] != k.shape[1:]
        or v_cache.shape != (*k_cache.shape[:2], v.shape[2])
    ):
        raise ValueError(
            f"k, v, k_cache, v_cache: got {[tuple(x.shape) for x in rows + caches]}; accepted: [T, "
            f"Hkv, D], "
            "[T, Hkv, Dv], [slots, Hkv, D], [slots, Hkv, Dv]"
        )
    if len({x.dtype for x in rows + caches}) > 1:
        raise ValueError(
            f"k, v, k_cache, v_cache: got {[x.dtype for x in rows + caches]}; accepted: one dtype "
            f"for all four"
        )
    check_one_device(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    num_tokens = len(k)
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"slot_mapping: got {slot_mapping.dtype} {tuple(slot_mapping.shape)}; accepted: int64 "
            f"({num_tokens},)"
        )
    if any(x.stride()[1:] != (x.shape[2], 1) for x in rows + caches):
        raise ValueError(
            f"k, v, k_cache, v_cache: got strides {[x.stride() for x in rows + caches]}; accepted: "
            "(any, width of a head, 1)"
        )
    if num_tokens:
        k_row, v_row = k[0].numel(), v[0].numel()
        append_kernel[num_tokens,](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k.stride(0),
            v.stride(0),
            k_cache.stride(0),
            v_cache.stride(0),
            K_ROW=k_row,
            V_ROW=v_row,
            BLOCK=triton.next_power_of_2(max(k_row, v_row)),
        )


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    context_lens_ptr,
    softmax_scale,
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
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per sequence and query head: walks over the keys in tiles, keeping max m_i, sum
    l_i and weighted values acc.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head = head // GROUP
    column = tl.arange(0, BLOCK_D)
    inside, inside_v = column < HEAD_DIM, column < V_HEAD_DIM
    q = (
        tl.load(
            q_ptr + sequence * stride_qb + head * stride_qh + column, mask=inside, other=0.0
        ).to(tl.float32)
        * softmax_scale
    )
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    k_ptr += sequence * stride_kb + kv_head * stride_kh
    v_ptr += sequence * stride_vb + kv_head * stride_vh

    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(tl.maximum(length - window, 0), length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = (key < length)[:, None]
        k = tl.load(
            k_ptr + key[:, None] * stride_kn + column[None, :], mask=held & inside, other=0.0
        ).to(tl.float32)
        v = tl.load(
            v_ptr + key[:, None] * stride_vn + column[None, :], mask=held & inside_v, other=0.0
        ).to(tl.float32)
        scores = tl.where(key < length, tl.sum(q[None, :] * k, axis=1), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0))
        # what was summed relative to the old max, relative to the new one
        shrink = tl.exp(m_i - m_new)
        weights = tl.exp(scores - m_new)
        l_i = l_i * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(weights[:, None] * v, axis=0)
        m_i = m_new
    # an empty sequence attends to nothing (not l_i > 0: that would hide a NaN)
    out = tl.where(length > 0, acc / l_i, 0.0)
    row = out_ptr + (sequence * tl.num_programs(1) + head) * V_HEAD_DIM
    tl.store(row + column, out.to(out_ptr.dtype.element_ty), mask=inside_v)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    block_n: int = 32,
) -> Tensor:
    """One query per sequence over its cache: q: [B, Hq, D]; k_cache, v_cache: [B, capacity, Hkv, D]
    -> [B, Hq, D].

    v_cache may have heads of another width, which is then the output's. context_lens: [B] int32 or
    int64, the rows in use, the query's own included; 0 gives zeros. window: only the last `window`
    rows count. block_n: keys per tile, a power of two. float32 inside. Raises ValueError.
    """
    if (
        q.ndim != 3
        or k_cache.ndim != 4
        or v_cache.ndim != 4
        or k_cache.shape[:3] != v_cache.shape[:3]
        or q.shape[::2] != k_cache.shape[::3]
        or q.shape[1] % k_cache.shape[2]
        or context_lens.shape != q.shape[:1]
    ):
        shapes = [tuple(x.shape) for x in (q, k_cache, v_cache, context_lens)]
        raise ValueError(
            f"q, k_cache, v_cache, context_lens: got {shapes}; accepted: [B, Hq, D], [B, capacity, "
            f"Hkv, D], "
            "[B, capacity, Hkv, Dv], [B], with Hq a multiple of Hkv"
        )
    if len({q.dtype, k_cache.dtype, v_cache.dtype}) > 1 or q.dtype not in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        raise ValueError(
            f"q, k_cache, v_cache: got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}; accepted: all "
            f"three float32, "
            "float16 or bfloat16"
        )
    if context_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"context_lens: got {context_lens.dtype}; accepted: int32 or int64")
    check_one_device(q=q, k_cache=k_cache, v_cache=v_cache, context_lens=context_lens)
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache)):
        raise ValueError(
            "q, k_cache, v_cache: got a last dimension that is not dense; accepted: stride 1 in it"
        )
    (num_sequences, num_heads, head_dim), (_, capacity, num_kv_heads, v_head_dim) = (
        q.shape,
        v_cache.shape,
    )
    out = torch.empty(num_sequences, num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    if out.numel():
        decode_kernel[num_sequences, num_heads](
            q,
            k_cache,
            v_cache,
            out,
            context_lens,
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            capacity if window is None else window,
            *q.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            V_HEAD_DIM=v_head_dim,
            BLOCK_D=triton.next_power_of_2(max(head_dim, v_head_dim)),
            BLOCK_N=block_n,
        )
    return out


# ---------------------------------------------------------------- the rung


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    batch: Batch,
    cos_sin_cache: Tensor,
) -> Tensor:
    """Rotate q and k in PyTorch, store k and v by `append_kernel`. Shapes as in AttentionOps."""
    q = rotate(q, batch.positions, cos_sin_cache)
    k = rotate(k, batch.positions, cos_sin_cache)
    append_rows(k, v, k_slots, v_slots, batch.slot_mapping)
    return q


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Lesson 2's kernel, sequence by sequence. q: [T, Hq, D] -> [T, Hq, Dv]."""
    return prefill_each(attention, q, k_cache, v_cache, batch, softmax_scale, window)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """`decode_kernel` for all sequences at once. q: [B, Hq, D] -> [B, Hq, Dv]."""
    k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    return decode_attention(q, k_cache, v_cache, batch.context_lens, softmax_scale, window)


LESSON_03 = AttentionOps(write, prefill, decode)
PREALLOCATED = Rung("KV cache, preallocated", LESSON_03, LESSON_03_TORCH)
