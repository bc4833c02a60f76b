"""FlashAttention with 8-bit matrix products: twice the rate of bfloat16 on paper, and an error that
has to be looked at.

q, k and v carry one scale a head; the weights p are between 0 and 1, so a fixed factor moves them
into the range of the format. Read `attention_fp8` (PyTorch, all at once, rounding where the kernel
rounds), then `flash_fp8_kernel` beside flash_kernel.

Sources: Micikevicius et al. 2022, FP8 Formats for Deep Learning, section 3 (E4M3: 448 is the
largest); Shah et al. 2024, FlashAttention-3, section 3.3 (layout of V, block scales).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l09_flash_attention.arguments import check_heads, check_options, check_tiles
from lessons.l09_flash_attention.naive import tile_scores
from lessons.l09_flash_attention.optimized import LOG2_E, key_range, load_rows
from lessons.l09_flash_attention.tiles import Tiles, chip_of, has_e4m3
from lessons.toolbox.kernels.triton_ import tl, triton

E4M3_MAX = 448.0
FP8_TILES = Tiles(128, 64, 8, 2)
# weights are stored as 2^8 · p: 256 < 448, and p down to 2^-14 keeps all its bits instead of 2^-6
P_SHIFT = tl.constexpr(8.0)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, H, D] -> float8_e4m3fn of the same shape, and the scale of each head: [H] float32, x ≈
    x8 · scale.
    """
    scale = (x.float().abs().amax((0, 2)) / E4M3_MAX).clamp(min=1e-12)
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = True
) -> Tensor:
    """What 8 bits cost, in PyTorch: q, k, v and the weights rounded to E4M3, the sums exact. Shapes
    as in naive.attention.

    One maximum for a whole row, so small differences to the kernel remain, whose maximum grows tile
    by tile.
    """
    q, k, v = ((x8.float() * scale[:, None]) for x8, scale in map(quantize, (q, k, v)))
    query, key = (
        torch.arange(len(q), device=q.device) + len(k) - len(q),
        torch.arange(len(k), device=q.device),
    )
    scores = tile_scores(
        q, k, query, key, q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale, causal
    )
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * 2**P_SHIFT.value
    rounded = p.to(torch.float8_e4m3fn).float() / p.sum(-1, keepdim=True)
    return torch.einsum(
        "hqk,khd->qhd", rounded, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    )


def attention_fp8_by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    block_n: int = 128,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """attention_fp8 in the order of gluon_fp8.py, which walks from the last tile of block_n keys to
    the first. Everything but the codes is float64. Returns out and log-sum-exp as naive.attention.

    multiply: adds up products of codes, [Hq, M, K] and [Hq, K, N]; exactly, if not given.
    """
    softmax_scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    coded = [(x8.double().transpose(0, 1), scale) for x8, scale in map(quantize, (q, k, v))]
    (q, q_scale), (k, k_scale), (v, v_scale) = coded  # [Hq, T or Tk, D], [Hq]
    qk_scale = (softmax_scale * q_scale.double() * k_scale)[:, None, None]
    query = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
    m = q.new_full((*q.shape[:2], 1), float("-inf"))
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    for start in reversed(range(0, k.shape[1], block_n)):
        key = torch.arange(start, min(start + block_n, k.shape[1]), device=q.device)
        scores = multiply(q, k[:, key].transpose(1, 2)) * qk_scale
        if causal:
            scores = scores.masked_fill(key > query[:, None], float("-inf"))
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        m_safe = m_new.masked_fill(m_new.isneginf(), 0)
        alpha, p = (m - m_safe).exp(), (scores - m_safe).exp() * 2**P_SHIFT.value
        l = l * alpha + p.sum(-1, keepdim=True)
        codes = p.float().to(torch.float8_e4m3fn).double()
        acc = acc * alpha + multiply(codes, v[:, key])
        m = m_new
    out = acc / l.masked_fill(l == 0, 1) * v_scale[:, None, None]
    return out.transpose(0, 1), (m + (l / 2**P_SHIFT.value).log())[..., 0].T


@triton.jit
def flash_fp8_kernel(
    q_ptr,
    k_ptr,
    v_t_ptr,
    out_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    softmax_scale,
    num_queries,
    num_keys,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vh,
    stride_vd,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head. v_t: [Hkv, HEAD_DIM, num_keys]; out: [T, Hq,
    HEAD_DIM], dense.
    """
    head = tl.program_id(0).to(tl.int64)
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    k_ptr += head // GROUP * stride_kh
    v_t_ptr += head // GROUP * stride_vh
    q = load_rows(
        q_ptr + head * stride_qh, start_m, num_queries, stride_qm, HEAD_DIM, BLOCK_M, HEAD_DIM, True
    )
    qk_scale = (
        softmax_scale * LOG2_E * tl.load(q_scale_ptr + head) * tl.load(k_scale_ptr + head // GROUP)
    )
    m_i, l_i = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    first = start_m + num_keys - num_queries
    row = start_m + tl.arange(0, BLOCK_M)
    # int64, because column · stride passes 2^31 at 8 million keys
    column = tl.arange(0, HEAD_DIM).to(tl.int64)
    edges = key_range(first, num_keys, 0, CAUSAL, False, BLOCK_M, BLOCK_N)
    for edge in tl.static_range(2):
        for start_n in tl.range(
            edges[edge], edges[edge + 1], BLOCK_N, num_stages=1 if edge else None
        ):
            key = start_n + tl.arange(0, BLOCK_N)
            k = load_rows(
                k_ptr, start_n, num_keys, stride_kn, HEAD_DIM, BLOCK_N, HEAD_DIM, edge == 1
            )
            scores = tl.dot(q, tl.trans(k))
            if edge:
                sees = (key < num_keys)[None, :]
                if CAUSAL:
                    sees = sees & (key[None, :] <= (first + tl.arange(0, BLOCK_M))[:, None])
                scores = tl.where(sees, scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, axis=1) * qk_scale)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if edge else m_new
            alpha = tl.exp2(m_i - m_safe)
            p = tl.exp2(scores * qk_scale - m_safe[:, None] + P_SHIFT)
            # shifted as well, so the division takes the shift back
            l_i = l_i * alpha + tl.sum(p, axis=1)
            v_t = tl.load(
                v_t_ptr + column[:, None] * stride_vd + key[None, :],
                mask=(key < num_keys)[None, :],
                other=0.0,
            )
            # A product of its own, because Hopper adds 8-bit products in few bits: BLOCK_N of them,
            # then float32 takes over.
            acc = acc * alpha[:, None] + tl.dot(p.to(v_t.dtype), tl.trans(v_t))
            m_i = m_new
    out = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None] * tl.load(v_scale_ptr + head // GROUP)
    cell = (row[:, None] * tl.num_programs(0) + head) * HEAD_DIM + column[None, :]
    tl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=(row < num_queries)[:, None])


def flash_attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    tiles: Tiles = FP8_TILES,
) -> Tensor:
    """One sequence, rounded to E4M3 on the way in. q: [T, Hq, D]; k, v: [Tk, Hkv, D], 16 or 32 bits
    -> [T, Hq, D] of q's dtype.

    D: 32, 64, 128 or 256. Raises ValueError, also on a GPU older than compute capability 8.9.
    """
    check_heads(q, k, v)
    check_options(q, softmax_scale, causal, None, None, None, None)
    if q.shape[2] not in (32, 64, 128, 256) or v.shape[2] != q.shape[2]:
        raise ValueError(
            f"q, k, v: got head sizes {q.shape[2]} and {v.shape[2]}; accepted: 32, 64, 128 or 256, "
            f"the same for all"
        )
    check_tiles(tiles, len(q), smallest=32)  # because 8-bit products add 32 at a time
    if not has_e4m3(q.device):
        raise ValueError(
            f"q: got a GPU of compute capability {chip_of(q.device) / 10}; accepted: 8.9 or newer, "
            f"because older ones have no 8-bit floating point"
        )
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = map(quantize, (q, k, v))
    # Transposed once, because the 8-bit matrix instruction reads its operands along the summed
    # dimension only: the keys, for V.
    v_t = v8.permute(1, 2, 0).contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        flash_fp8_kernel[q.shape[1], triton.cdiv(len(q), tiles.block_m)](
            q8,
            k8,
            v_t,
            out,
            q_scale,
            k_scale,
            v_scale,
            q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
            len(q),
            len(k),
            *q8.stride()[:2],
            *k8.stride()[:2],
            *v_t.stride()[:2],
            CAUSAL=causal,
            GROUP=q.shape[1] // k.shape[1],
            HEAD_DIM=q.shape[2],
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out
