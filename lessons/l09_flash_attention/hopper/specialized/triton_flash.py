"""FlashAttention in Triton with tensor descriptors and a loop that the compiler splits.

The step between optimized.py and gluon_flash.py. What Gluon writes by hand, a warp that loads, two
warpgroups that compute, rings of buffers and their mbarriers, Triton's compiler makes here of one
loop (`warp_specialize`). README.md says when it does and when it does not.

Source: Dao 2023, FlashAttention-2, algorithm 1; Triton 3.7, `tl.range(warp_specialize=True)`.
"""

import torch
from torch import Tensor

from lessons.l09_flash_attention.arguments import check_heads, check_options, check_tiles
from lessons.l09_flash_attention.tiles import Tiles, chip_of
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import has_triton

LOG2_E = tl.constexpr(1.4426950408889634)
# {compute capability: {head size: tiles}}. On Hopper 4 warps become 12: two warpgroups that compute
# and one that loads. 8 warps stay 8, and all of them do everything.
TILES = {
    90: {64: Tiles(128, 128, 4, 2), 128: Tiles(128, 128, 4, 2), 256: Tiles(128, 32, 4, 2)},
    100: {64: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 3), 256: Tiles(64, 32, 8, 2)},
}
INTERPRETED = Tiles(32, 32)


@triton.jit
def rows_of(ptr, num_rows, num_columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """A descriptor of a dense matrix [num_rows, num_columns] with tiles of [BLOCK, COLUMNS]."""
    return tl.make_tensor_descriptor(
        ptr,
        shape=[num_rows, num_columns],
        strides=[num_columns, 1],
        block_shape=[BLOCK, COLUMNS],
    )


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def flash_descriptor_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    num_queries,
    num_keys,
    softmax_scale,
    CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head. k_desc, v_desc: of [Tk, Hkv · HEAD_DIM]; out: [T,
    Hq, HEAD_DIM] and lse: [T, Hq], both dense. EDGE: whether a tile may hold keys that a query does
    not see.
    """
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # backwards: the heaviest first
    # The kernel makes these two itself. The compiler cuts their tiles in two, one for each
    # warpgroup, and cannot do that to a descriptor that comes from the host.
    q_desc = rows_of(q_ptr, num_queries, num_heads * HEAD_DIM, BLOCK_M, HEAD_DIM)
    out_desc = rows_of(out_ptr, num_queries, num_heads * HEAD_DIM, BLOCK_M, HEAD_DIM)
    q = q_desc.load([start_m, head * HEAD_DIM])
    kv_column, qk_scale = head // GROUP * HEAD_DIM, softmax_scale * LOG2_E
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    # bottom-right aligned: the last query belongs to the last key
    first = start_m + num_keys - num_queries
    row, end = tl.arange(0, BLOCK_M), num_keys
    last_key = tl.full((BLOCK_M,), 0, tl.int32) + (num_keys - 1)  # that a query sees
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(0, first + BLOCK_M))
        last_key = tl.minimum(last_key, first + row)
    # One loop, with a mask in every tile. The compiler refuses a second loop for the diagonal, and
    # with an `if` around the mask it leaves the loop as it is.
    for start_n in tl.range(0, end, BLOCK_N, warp_specialize=True):
        k = k_desc.load([start_n, kv_column])
        scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if EDGE:
            # The product is added to this, so -inf stays -inf, and the mask is done before the
            # product is.
            sees = tl.arange(0, BLOCK_N)[None, :] <= (last_key - start_n)[:, None]
            scores = tl.where(sees, scores, float("-inf"))
        scores = tl.dot(q, tl.trans(k), scores)
        m_new = tl.maximum(m_i, tl.max(scores, axis=1) * qk_scale)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if EDGE else m_new
        alpha = tl.exp2(m_i - m_safe)
        p = tl.exp2(scores * qk_scale - m_safe[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        v = v_desc.load([start_n, kv_column])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m_i = m_new
    # late division; a query without a key has l = 0 and acc = 0
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_desc.store([start_m, head * HEAD_DIM], out.to(out_ptr.dtype.element_ty))
    # In `start_m + row` the compiler would add the second warpgroup's 64 rows twice.
    lse_ptr += start_m.to(tl.int64) * num_heads + head
    lse = (m_i + tl.log2(l_i)) / LOG2_E
    tl.store(lse_ptr + row * num_heads, lse, mask=row < num_queries - start_m)


def flash_attention_specialized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence. q: [T, Hq, D], k, v: [Tk, Hkv, D] -> out: [T, Hq, D], lse: [T, Hq] float32.

    bfloat16, dense, D 64, 128 or 256, on a GPU of compute capability 9.0 or 10.0, or a CPU. tiles:
    None takes TILES'. Raises ValueError.
    """
    check_launch(q, k, v, softmax_scale, causal)
    num_heads, head_dim = q.shape[1:]
    chip = chip_of(q.device)
    tiles = tiles or (TILES[chip][head_dim] if chip else INTERPRETED)
    check_tiles(tiles, len(q))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel():
        give_scratch_memory(q.device)
        flash_descriptor_kernel[num_heads, triton.cdiv(len(q), tiles.block_m)](
            q,
            host_descriptor(k, tiles.block_n),
            host_descriptor(v, tiles.block_n),
            out,
            lse,
            len(q),
            len(k),
            head_dim**-0.5 if softmax_scale is None else softmax_scale,
            CAUSAL=causal,
            EDGE=causal or len(k) % tiles.block_n > 0,
            GROUP=num_heads // k.shape[1],
            HEAD_DIM=head_dim,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out, lse


def check_launch(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal) -> None:
    """Raises ValueError for what flash_descriptor_kernel does not take."""
    check_heads(q, k, v, (torch.bfloat16,))
    check_options(q, softmax_scale, causal, None, None, None, None)
    dense = all(x.is_contiguous() for x in (q, k, v))
    if q.shape[2] not in TILES[90] or v.shape[2] != q.shape[2] or not dense or not len(k):
        raise ValueError(
            f"q, k, v: got {[tuple(x.shape) for x in (q, k, v)]} with strides "
            f"{[x.stride() for x in (q, k, v)]}; accepted: head size "
            f"{', '.join(map(str, TILES[90]))} for all, one key or more, dense"
        )
    if chip_of(q.device) not in (None, *TILES):
        raise ValueError(
            f"q: got {q.device} of compute capability {chip_of(q.device) / 10}; accepted: "
            f"{', '.join(str(chip / 10) for chip in TILES)}, or a CPU"
        )


def host_descriptor(x: Tensor, rows: int):
    """A descriptor of [T, H · D] with tiles of [rows, D], made before the launch. x: [T, H, D]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.flatten(1), [rows, x.shape[2]])


def give_scratch_memory(device: torch.device) -> None:
    """Triton asks for the memory in which a kernel keeps the descriptors that it makes."""
    if has_triton():
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )
