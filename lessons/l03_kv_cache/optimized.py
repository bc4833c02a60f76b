"""The preallocated cache with its two kernels: `append_kernel` writes the new rows, `decode_kernel`
lets one query read them all.

Read cache.py first: `KVPool` is the idea. stand_ins.py has the same operations in PyTorch, for
machines where kernels would be interpreted. arguments.py says what the two wrappers accept.

Sources: Pope et al. 2022, section 2; the running max and sum of the decode kernel: Milakov &
Gimelshein 2018, section 3 (lesson 8 takes it apart).
"""

from torch import Tensor

from lessons.l02_naive_attention.optimized import attention
from lessons.l02_naive_attention.rope import rotate
from lessons.l03_kv_cache.arguments import (
    check_append_inputs,
    check_one_device,
    check_one_query_inputs,
    check_tile_options,
)
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import AttentionOps
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH, attend_each
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


def append_rows(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write k, v: [T, Hkv, D] into k_cache, v_cache: [slots, Hkv, D] at slot_mapping: [T] int64,
    distinct; -1 skips a token.

    v and v_cache may have heads of another width than k and k_cache. Raises ValueError if shapes,
    dtypes or strides do not fit. A slot beyond the cache is not checked: it is on the device.
    """
    check_append_inputs(k, v, k_cache, v_cache, slot_mapping)
    check_one_device(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    num_tokens, num_kv_heads, head_dim = k.shape
    k_row, v_row = num_kv_heads * head_dim, num_kv_heads * v.shape[2]
    if num_tokens == 0 or max(k_row, v_row) == 0:
        return
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
    q_row = q_ptr + sequence * stride_qb + head * stride_qh
    q = tl.load(q_row + column, mask=inside, other=0.0).to(tl.float32) * softmax_scale
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    k_ptr += sequence * stride_kb + kv_head * stride_kh
    v_ptr += sequence * stride_vb + kv_head * stride_vh

    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(tl.maximum(length - window, 0), length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = (key < length)[:, None]
        k_tile = k_ptr + key[:, None] * stride_kn + column[None, :]
        v_tile = v_ptr + key[:, None] * stride_vn + column[None, :]
        k = tl.load(k_tile, mask=held & inside, other=0.0).to(tl.float32)
        v = tl.load(v_tile, mask=held & inside_v, other=0.0).to(tl.float32)
        scores = tl.where(key < length, tl.sum(q[None, :] * k, axis=1), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0))
        # What was summed so far is relative to the old max. alpha makes it relative to the new one.
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(scores - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        m_i = m_new
    # An empty sequence attends to nothing. The test is not l_i > 0, which would hide a NaN.
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
    check_one_query_inputs(q, k_cache, v_cache, context_lens)
    check_tile_options(window, block_n)
    check_one_device(q=q, k_cache=k_cache, v_cache=v_cache, context_lens=context_lens)
    num_sequences, num_heads, head_dim = q.shape
    _, capacity, num_kv_heads, v_head_dim = v_cache.shape
    out = q.new_empty(num_sequences, num_heads, v_head_dim)
    if out.numel() == 0:
        return out
    decode_kernel[num_sequences, num_heads](
        q,
        k_cache,
        v_cache,
        out,
        context_lens,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
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
    return attend_each(attention, q, k_cache, v_cache, batch, softmax_scale, window)


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
