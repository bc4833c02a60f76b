"""Decode over latents for at most 16 heads: each warp has a quarter of the channels.

paged_mla_kernel gives each warp some keys of a tile, and then all weights go to all warps, because
each has other columns of the result. Here a warp has the same channels in both products: of the
key, and of the value, which is the same row. Only its scores go to the others, which add them up.
Read `grouped_mla_kernel` beside paged_mla_kernel: tiles are [G, …], and Triton gives the first
dimension of a product to the warps, one group each.

All warps then compute the same weights. So the way pays where heads are few, and the kernel waits
for memory.
"""

from lessons.l12_paged_kv.kernels.hooks import equal_split, paged_row
from lessons.toolbox.kernels.triton_ import tl, triton

GROUPS = 4  # of channels, and warps of a program
LEAST = 16  # channels of a group that a tensor core's product needs at least


def is_grouped(num_heads: int, rank: int, rope: int, itemsize: int, num_warps: int) -> bool:
    """Whether grouped_mla_kernel serves queries of these sizes."""
    is_wide = min(rank, rope) >= GROUPS * LEAST
    return num_heads <= 16 and is_wide and itemsize == 2 and num_warps == GROUPS


@triton.jit
def sum_of_groups(x):
    """x: [G, H, N] -> [H, N]. Each warp has another group. tl.sum would add number after number;
    here a thread gets all groups of its numbers at once, through shared memory.
    """
    HALVES: tl.constexpr = (x.shape[1], x.shape[2], x.shape[0] // 2, 2)
    if x.shape[0] == 1:
        total = tl.reshape(x, (x.shape[1], x.shape[2]))
    elif x.shape[0] == 2:
        first, second = tl.split(tl.permute(x, (1, 2, 0)))
        total = first + second
    else:
        first, second = tl.split(tl.reshape(tl.permute(x, (1, 2, 0)), HALVES))
        first, second = tl.split(first + second)
        total = first + second
    return total


@triton.jit
def in_all_groups(total, part):
    """total: [H, N] for each group: [G, H, N]. What is added to a product keeps the product's
    layout, in which a row's maximum is found within a warp. Without this addition of 0 · part, a
    product, it would take 64 exchanges between threads.
    """
    return total[None, :, :] + part * 0.0


@triton.jit
def grouped_mla_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    lse_ptr,
    items_ptr,
    context_lens_ptr,
    block_table_ptr,
    scale_log2e,
    num_heads,
    window,
    split_size,
    stride_qb,
    stride_qh,
    stride_kblock,
    stride_kn,
    stride_table,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW_OF: tl.constexpr = paged_row,
    SPLIT_OF: tl.constexpr = equal_split,
):
    """One program per split: every row is key (RANK + ROPE values) and value (the first RANK)."""
    sequence, length, begin, end, place = SPLIT_OF(
        items_ptr, context_lens_ptr, window, split_size, num_heads, BLOCK_N
    )
    if items_ptr is not None and sequence < 0:  # an idle item of the list
        return
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    group = tl.arange(0, GROUPS)[:, None, None]
    latent = group * (RANK // GROUPS) + tl.arange(0, RANK // GROUPS)[None, None, :]
    rope = RANK + group * (ROPE // GROUPS) + tl.arange(0, ROPE // GROUPS)[None, None, :]
    q_row = (q_ptr + sequence * stride_qb + head * stride_qh)[None, :, None]
    is_row = is_head[None, :, None]
    q_latent = tl.load(q_row + latent, mask=is_row, other=0.0)
    q_pe = tl.load(q_row + rope, mask=is_row, other=0.0)
    table_ptr = block_table_ptr + sequence * stride_table

    m_i = tl.full((GROUPS, BLOCK_H), float("-inf"), tl.float32)
    l_i = tl.zeros((GROUPS, BLOCK_H), tl.float32)
    acc = tl.zeros((GROUPS, BLOCK_H, RANK // GROUPS), tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        in_split = key < end
        page, row = ROW_OF(table_ptr, sequence, key, in_split, PAGE_SIZE)
        kv_row = kv_ptr + (page * stride_kblock + row * stride_kn)[None, :, None]
        is_key = in_split[None, :, None]
        # key and value, loaded once
        c_kv = tl.load(kv_row + latent, mask=is_key, other=0.0)
        k_pe = tl.load(kv_row + rope, mask=is_key, other=0.0)
        part = tl.dot(q_latent, tl.permute(c_kv, (0, 2, 1)), input_precision="ieee")
        part = tl.dot(q_pe, tl.permute(k_pe, (0, 2, 1)), part, input_precision="ieee")
        total = sum_of_groups(part) * scale_log2e
        total = tl.where(in_split[None, :], total, float("-inf"))
        scores = in_all_groups(total, part)
        m_new = tl.maximum(m_i, tl.max(scores, axis=2))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, :, None])
        l_i = l_i * alpha + tl.sum(p, axis=2)
        acc = tl.dot(p.to(c_kv.dtype), c_kv, acc * alpha[:, :, None], input_precision="ieee")
        m_i = m_new

    out = tl.where(begin < length, acc / l_i[:, :, None], 0.0)
    partial = place + head * tl.num_programs(1)
    out_at = out_ptr + (partial * RANK)[None, :, None] + latent
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_row)
    # the same in all groups
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453  # ln 2
    first = is_head[None, :] & (tl.arange(0, GROUPS)[:, None] == 0)
    tl.store(lse_ptr + partial[None, :] + tl.zeros_like(lse).to(tl.int32), lse, mask=first)
