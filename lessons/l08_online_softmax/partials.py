"""softmax(scores) · V in parts that know nothing of each other, and the kernel that merges them.

`partial_kernel` gives one program each row and each split of its keys; `merge_kernel` gives one
program each row. Both are the same loop, `online_values`: merging is attention whose scores are the
parts' log-sum-exps and whose values are their outputs. Lesson 10 puts q · k in the place of the
scores and merges with this file.

A part leaves (out, lse) rather than (m, l, acc): one number less, no unit of its own to agree on,
and with e^lse = e^m · l and e^lse · out = e^m · acc nothing is lost but rounding
(`naive.from_state`). FlashInfer's `merge_states` takes the same pair; its lse is a log2, ours a
natural logarithm: multiply by log2(e) to pass it there.

Sources: Ye et al. 2025, FlashInfer (section 2.2, attention states); Dao et al. 2023, Flash-Decoding
for long-context inference.
"""

import torch
from torch import Tensor

from lessons.l08_online_softmax.optimized import LOWEST, check_rows
from lessons.toolbox.kernels.triton_ import tl, triton

BLOCK_KEYS = 32  # keys, or states, of one step
STAGES = 2  # steps on their way while one is added


@triton.jit
def partial_kernel(
    scores_ptr,
    v_ptr,
    outs_ptr,
    lses_ptr,
    num_rows,
    num_keys,
    split_size,
    stride_scores,
    stride_v,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row and split: scores [R, N], v [N, D] -> outs [S, R, D], lses [S, R] of its
    split_size keys.
    """
    # One axis for both, because a grid's second axis holds at most 65535 programs.
    state = tl.program_id(0).to(tl.int64)
    row = state % num_rows
    begin = tl.program_id(0) // num_rows * split_size
    end = tl.minimum(begin + split_size, num_keys)
    out, lse = online_values(
        scores_ptr + row * stride_scores,
        1,
        v_ptr,
        stride_v,
        begin,
        end,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        STAGES,
    )
    column = tl.arange(0, BLOCK_D)
    tl.store(
        outs_ptr + state * HEAD_DIM + column,
        out.to(outs_ptr.dtype.element_ty),
        mask=column < HEAD_DIM,
    )
    tl.store(lses_ptr + state, lse)


@triton.jit
def merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    num_splits,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row: outs [S, R, D], lses [S, R] -> out [R, D], lse [R]. A state with lse
    −inf counts nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    out, lse = online_values(
        lses_ptr + row,
        num_rows,
        outs_ptr + row * HEAD_DIM,
        num_rows * HEAD_DIM,
        0,
        num_splits,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        STAGES,
    )
    column = tl.arange(0, BLOCK_D)
    tl.store(
        out_ptr + row * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM
    )
    tl.store(lse_ptr + row, lse)


@triton.jit
def online_values(
    scores_ptr,
    stride_score,
    v_ptr,
    stride_v,
    begin,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """softmax(scores) · V over begin ≤ n < end, in one pass: out [BLOCK_D], and lse. Nothing to
    see: zeros and −inf.
    """
    column = tl.arange(0, BLOCK_D)
    m = tl.full((), LOWEST, tl.float32)
    l = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        # int64, because splits · rows · D passes 2^31
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        score = tl.load(scores_ptr + n * stride_score, mask=n < end, other=float("-inf")).to(
            tl.float32
        )
        held = (n < end)[:, None] & (column < HEAD_DIM)[None, :]
        v = tl.load(v_ptr + n[:, None] * stride_v + column[None, :], mask=held, other=0.0).to(
            tl.float32
        )
        # what counts nothing may hold anything, and 0 · NaN is NaN
        v = tl.where((score != float("-inf"))[:, None], v, 0.0)
        m_new = tl.maximum(m, tl.max(score, axis=0))
        alpha = tl.exp(m - m_new)
        p = tl.exp(score - m_new)
        l = l * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    share = 1.0 / tl.where(l == 0.0, 1.0, l)
    return acc * share, m + tl.log(l)


def partial_attention(scores: Tensor, v: Tensor, split_size: int) -> tuple[Tensor, Tensor]:
    """softmax(scores) · V of every `split_size` keys by themselves. scores: [R, N], v: [N, D] ->
    outs [S, R, D], lses [S, R].

    Results in float32, because they are still to be merged; S = N / split_size, rounded up. scores
    are −inf where masked. It is the size of a split that is given, not their number: so a row's
    sums are cut at the same places whatever else there is. Raises ValueError.
    """
    check_rows(scores)
    if (
        v.ndim != 2
        or len(v) != scores.shape[1]
        or v.dtype != scores.dtype
        or v.device != scores.device
        or not v.shape[1]
        or v.stride(1) != 1
    ):
        raise ValueError(
            f"v: got {v.dtype} {tuple(v.shape)} on {v.device}, strides {v.stride()}; accepted: "
            f"{scores.dtype} [{scores.shape[1]}, D] on {scores.device} with D at least 1 and "
            "stride "
            "1 in the last dimension"
        )
    if split_size < 1:
        raise ValueError(f"split_size: got {split_size}; accepted: 1 or more keys")
    (num_rows, num_keys), head_dim = scores.shape, v.shape[1]
    num_splits = triton.cdiv(num_keys, split_size)
    outs = torch.empty(num_splits, num_rows, head_dim, dtype=torch.float32, device=scores.device)
    lses = torch.empty(num_splits, num_rows, dtype=torch.float32, device=scores.device)
    if lses.numel():
        partial_kernel[num_rows * num_splits,](
            scores,
            v,
            outs,
            lses,
            num_rows,
            num_keys,
            min(split_size, num_keys),
            scores.stride(0),
            v.stride(0),
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_N=BLOCK_KEYS,
            STAGES=STAGES,
        )
    return outs, lses


def merge_states(
    outs: Tensor, lses: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Finished parts merged. outs: [S, ..., D], lses: [S, ...] float32, natural logarithms -> out
    [..., D], lse [...] float32.

    dtype: of out, by default that of outs. A part that has seen nothing has lse −inf; what its
    `out` holds does not matter. S = 0 gives zeros and −inf. Raises ValueError unless both are
    contiguous, on one device, and outs float32, float16, bfloat16.
    """
    check_states(outs, lses)
    shape, head_dim = lses.shape[1:], outs.shape[-1]
    out = torch.empty(*shape, head_dim, dtype=dtype or outs.dtype, device=outs.device)
    lse = torch.empty(shape, dtype=torch.float32, device=outs.device)
    if lse.numel():
        merge_kernel[lse.numel(),](
            outs,
            lses,
            out,
            lse,
            len(lses),
            lse.numel(),
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_N=min(BLOCK_KEYS, block_for(len(lses))),
            STAGES=STAGES,
            num_warps=merge_warps(triton.next_power_of_2(head_dim)),
        )
    return out, lse


def merge_warps(block_d: int) -> int:
    """Warps of a program that merges rows of block_d columns: no more than fit along one row, each
    over 128 columns. A column's sum then stays in a warp. Across warps it would go through shared
    memory, in few of its banks.
    """
    return max(1, block_d // 128)


def merge_states_torch(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_states` in PyTorch, for machines without a GPU: the weights are a softmax of the
    log-sum-exps.

    outs: [S, ..., D], lses: [S, ...], S at least 1 -> out [..., D] like outs, lse [...] float32.
    Raises ValueError.
    """
    check_states(outs, lses)
    lse = torch.logsumexp(lses, dim=0)
    # all −inf: 0 instead of −inf − −inf
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    values = outs.float().masked_fill((lses == -torch.inf)[..., None], 0.0)
    return torch.einsum("s...,s...d->...d", weights, values).to(outs.dtype), lse


def block_for(num_splits: int) -> int:
    """States of one step: the next power of two, 2 at least."""
    return max(2, triton.next_power_of_2(num_splits))


def check_states(outs: Tensor, lses: Tensor) -> None:
    """Raise ValueError unless outs: [S, ..., D] and lses: [S, ...] float32 are contiguous and on
    one device.
    """
    if (
        outs.ndim < 2
        or not outs.shape[-1]
        or outs.is_meta
        or lses.shape != outs.shape[:-1]
        or lses.dtype != torch.float32
        or outs.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or outs.device != lses.device
    ):
        got = " and ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (outs, lses))
        raise ValueError(
            f"outs, lses: got {got}; accepted: [S, ..., D], D at least 1, in float32, float16 or "
            "bfloat16 and [S, ...] in float32, on one device with data"
        )
    if not (outs.is_contiguous() and lses.is_contiguous()):
        raise ValueError(
            f"outs, lses: got strides {outs.stride()} and {lses.stride()}; accepted: contiguous"
        )
