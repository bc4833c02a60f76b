"""The indexer over pages: the score of every key that a query may see, from index keys in 8 or 16
bits.

Read `index_kernel` beside `index_scores` of naive.py. A tile of keys is loaded once and meets the
heads of the query in one product; ReLU, the weights and the sum over heads stay in registers, so
only one number a key leaves the kernel. Two factors never enter the product, because ReLU(s · x)
is s · ReLU(x) for s > 0: the scale of a key multiplies the finished score, and the scale of a
query is part of its weights (`in_fp8` of indexer.py puts it there).

Source: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equation 1, and its inference/model.py.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.arguments import (
    MAX_ELEMENTS,
    check_grid,
    check_one_device,
    check_values,
)
from lessons.l12_paged_kv.kernels.hooks import paged_row
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.model.arguments import check_whole

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_TILE = 16
# E4M3 counts exponents from 7, float16 from 15
E4M3_IN_FLOAT16 = tl.constexpr(256.0)


@triton.jit
def e4m3_as_float16(codes):
    """The number of each code of E4M3, divided by 256. codes: uint8 -> float16, exact.

    Both formats have sign, exponent and mantissa in the same order (lesson 19), so moving bits is
    enough, and no chip needs an instruction for it.
    """
    bits = codes.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def index_kernel(
    q_ptr,
    weights_ptr,
    keys_ptr,
    scales_ptr,
    out_ptr,
    block_table_ptr,
    sequences_ptr,
    positions_ptr,
    num_heads,
    width,
    stride_qt,
    stride_qh,
    stride_wt,
    stride_kblock,
    stride_kn,
    stride_sblock,
    stride_table,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per query and tile of keys. out: [T, width] float32, dense. scales_ptr: None if
    keys are numbers and not codes.
    """
    token = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    position = tl.load(positions_ptr + token).to(tl.int32)
    seen = key <= position
    sequence = tl.load(sequences_ptr + token).to(tl.int64)
    table_ptr = block_table_ptr + sequence * stride_table
    block, row = paged_row(table_ptr, sequence, key, seen, PAGE_SIZE)
    column = tl.arange(0, DIM)
    place = block * stride_kblock + row * stride_kn
    # [BLOCK_N, DIM]
    k = tl.load(keys_ptr + place[:, None] + column[None, :], mask=seen[:, None], other=0)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + block * stride_sblock + row, mask=seen, other=0.0)
        k = e4m3_as_float16(k)
    k = k.to(q_ptr.dtype.element_ty)  # exact, because a code has 4 significant bits

    scores = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_heads, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        is_head = head < num_heads
        q_row = q_ptr + token * stride_qt + head[:, None] * stride_qh
        q = tl.load(q_row + column[None, :], mask=is_head[:, None], other=0.0)
        weight = tl.load(weights_ptr + token * stride_wt + head, mask=is_head, other=0.0)
        # [BLOCK_H, BLOCK_N]
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        # No maximum, because on a GPU that turns NaN into 0 and hides it.
        products = tl.where(products < 0.0, 0.0, products)
        scores += tl.sum(products * weight[:, None], axis=0)
    if scales_ptr is not None:
        scores = scores * (scale * E4M3_IN_FLOAT16)
    scores = tl.where(seen, scores, float("-inf"))
    tl.store(out_ptr + token * width + key, scores, mask=key < width)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_table: Tensor,
    sequences: Tensor,
    positions: Tensor,
    max_context_len: int,
) -> Tensor:
    """As naive.py's `paged_index_scores`. q: [T, Hi, Di], weights: [T, Hi] float32, keys:
    [num_blocks, block_size, Di] -> [T, max_context_len] float32.

    q may hold codes of E4M3 as numbers: 16 bits hold them exactly. Raises ValueError.
    """
    check_index_inputs(q, weights, keys, scales, block_table, sequences, positions)
    check_whole(max_context_len=max_context_len)
    tokens, num_heads, dim = q.shape
    out = torch.empty(tokens, max_context_len, dtype=torch.float32, device=q.device)
    block_h, block_n, num_warps = tiles_for(num_heads, q.element_size())
    if out.numel():
        index_kernel[triton.cdiv(max_context_len, block_n), tokens](
            q,
            weights,
            keys,
            scales,
            out,
            block_table,
            sequences,
            positions,
            num_heads,
            max_context_len,
            *q.stride()[:2],
            weights.stride(0),
            *keys.stride()[:2],
            0 if scales is None else scales.stride(0),
            block_table.stride(0),
            DIM=dim,
            PAGE_SIZE=keys.shape[1],
            BLOCK_H=block_h,
            BLOCK_N=block_n,
            num_warps=num_warps,
        )
    return out


def tiles_for(num_heads: int, itemsize: int) -> tuple[int, int, int]:
    """(heads, keys, warps) of a program. itemsize: bytes of a number of q."""
    if itemsize == 4:  # for proofs: products without matrix units
        return SMALLEST_TILE, 32, 4
    block_h = min(64, max(SMALLEST_TILE, triton.next_power_of_2(num_heads)))
    return block_h, 128, 4


def check_index_inputs(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_table: Tensor,
    sequences: Tensor,
    positions: Tensor,
) -> None:
    """Raise ValueError unless q: [T, Hi, Di], keys: [num_blocks, block_size, Di] and the rest fit
    together, as in `index_scores`.
    """
    if (
        q.ndim != 3
        or keys.ndim != 3
        or weights.shape != q.shape[:2]
        or q.shape[2] != keys.shape[2]
        or q.shape[2] < SMALLEST_TILE
        or q.shape[2] & (q.shape[2] - 1)
    ):
        shapes = tuple(q.shape), tuple(weights.shape), tuple(keys.shape)
        raise ValueError(
            f"q, weights, keys: got {shapes}; accepted: [T, Hi, Di], [T, Hi], [num_blocks, "
            f"block_size, Di], Di a power of two from {SMALLEST_TILE} on"
        )
    wanted = q.dtype if scales is None else torch.uint8
    if q.dtype not in DTYPES or keys.dtype != wanted or weights.dtype != torch.float32:
        raise ValueError(
            f"q, weights, keys: got {q.dtype}, {weights.dtype}, {keys.dtype}; accepted: a float "
            f"dtype, float32, and {'that of q' if scales is None else 'uint8, because of scales'}"
        )
    if scales is not None and (scales.shape != keys.shape[:2] or scales.dtype != torch.float32):
        raise ValueError(
            f"scales: got {scales.dtype} {tuple(scales.shape)}; accepted: float32 "
            f"{tuple(keys.shape[:2])}, one a token"
        )
    given = {} if scales is None else {"scales": scales}
    check_one_device(q=q, weights=weights, keys=keys, block_table=block_table, **given)
    dense = {"q": q, "weights": weights, "keys": keys, **given}
    for name, x in dense.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: got a last dimension that is not dense; accepted: stride 1")
    if q.shape[1] * q.stride(1) > MAX_ELEMENTS:  # counted in 32 bits
        raise ValueError(f"q: got heads {q.stride(1)} elements apart; accepted: within 2^31")
    check_queries(len(q), block_table, sequences, keys.shape[:2], positions=positions)
    last = block_table.shape[1] * keys.shape[1] - 1
    check_values(-1, last, positions=positions)


def check_queries(
    tokens: int, block_table: Tensor, sequences: Tensor, pages: torch.Size, **others: Tensor
) -> None:
    """Raise ValueError unless block_table: [B, max_blocks] int32, and sequences and `others`: [T]
    int32 or int64 are those of T = `tokens` queries. pages: (num_blocks, block_size).
    """
    check_grid("q", tokens, "queries")
    if block_table.ndim != 2 or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table: got {block_table.dtype} {tuple(block_table.shape)} with strides "
            f"{block_table.stride()}; accepted: int32 [B, max_blocks], dense rows"
        )
    for name, x in {"sequences": sequences, **others}.items():
        if (
            x.shape != (tokens,)
            or x.dtype not in (torch.int32, torch.int64)
            or not x.is_contiguous()
        ):
            raise ValueError(
                f"{name}: got {x.dtype} {tuple(x.shape)}; accepted: int32 or int64 [{tokens}], "
                "dense, one for each query"
            )
    check_one_device(block_table=block_table, sequences=sequences, **others)
    check_values(0, len(block_table) - 1, sequences=sequences)
