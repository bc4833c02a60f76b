"""The verification of a batch in several programs a sequence: two launches in place of one.

`optimized.verify` has one program walk over a whole row, so it takes as long as that walk, and with
few sequences most of the GPU is idle. Here a row is cut into parts. `masses_kernel` sums each part
in a program of its own. `emit_kernel` finds the part in which the draw ends, and looks into that
one alone.

The decisions are those of `optimized.verify`, from the same numbers. Sums of parts are added in
float64, so a draw falls into another token only where the float32 sum of one part rounds.
"""

import torch
from torch import Tensor

from lessons.l16_speculative_sampling.arguments import check_rows
from lessons.l16_speculative_sampling.optimized import first_rejection, load_rest
from lessons.toolbox.kernels.triton_ import tl, triton

PART = 2048  # tokens of the vocabulary that a program sums


@triton.jit
def ending_of(
    p_ptr,
    q_ptr,
    drafted_ptr,
    u_ptr,
    cu_rows_ptr,
    sequence,
    stride_p,
    stride_q,
    SURE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Where a sequence begins and ends, the row at which its draft ends, and the token drafted
    there: (first, end, stop, token). first == end for padding.
    """
    first = tl.load(cu_rows_ptr + sequence)
    end = tl.load(cu_rows_ptr + sequence + 1)
    rows = first + tl.arange(0, BLOCK_ROWS)
    stop = first_rejection(
        p_ptr, q_ptr, drafted_ptr, u_ptr, rows, end - 1, stride_p, stride_q, SURE
    )
    token = tl.load(drafted_ptr + stop, mask=stop < end - 1, other=0)
    return first, end, stop, token


@triton.jit
def masses_kernel(
    p_ptr,
    q_ptr,
    drafted_ptr,
    u_ptr,
    cu_rows_ptr,
    masses_ptr,
    vocab_size,
    stride_p,
    stride_q,
    SURE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """A program for a part of a sequence's last row: the mass of its residual, and of p.
    masses_ptr: [B, parts, 2].
    """
    sequence, part = tl.program_id(0), tl.program_id(1)
    first, end, stop, token = ending_of(
        p_ptr,
        q_ptr,
        drafted_ptr,
        u_ptr,
        cu_rows_ptr,
        sequence,
        stride_p,
        stride_q,
        SURE,
        BLOCK_ROWS,
    )
    p_row = p_ptr + stop.to(tl.int64) * stride_p
    q_row = p_row if SURE else q_ptr + stop.to(tl.int64) * stride_q
    ids = part * PART + tl.arange(0, PART)
    reads = (ids < vocab_size) & (first < end)
    rest = load_rest(p_row, q_row, ids, token, reads, stop < end - 1, SURE)
    p = tl.load(p_row + ids, mask=reads, other=0.0)
    out = masses_ptr + 2 * (sequence.to(tl.int64) * tl.num_programs(1) + part)
    tl.store(out, tl.sum(rest, axis=0))
    tl.store(out + 1, tl.sum(p, axis=0))


@triton.jit
def emit_kernel(
    p_ptr,
    q_ptr,
    drafted_ptr,
    u_ptr,
    cu_rows_ptr,
    masses_ptr,
    tokens_ptr,
    accepted_ptr,
    vocab_size,
    num_parts,
    stride_p,
    stride_q,
    SURE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program for a sequence: what it emits."""
    sequence = tl.program_id(0)
    first, end, stop, token = ending_of(
        p_ptr, q_ptr, drafted_ptr, u_ptr, cu_rows_ptr,
        sequence, stride_p, stride_q, SURE, BLOCK_ROWS,
    )  # fmt: skip
    is_real, has_draft = first < end, stop < end - 1
    parts = tl.arange(0, PARTS)
    cells = masses_ptr + 2 * (sequence.to(tl.int64) * num_parts + parts)
    masses = tl.load(cells, mask=parts < num_parts, other=0.0).to(tl.float64)
    total = tl.sum(masses, axis=0)
    if total == 0.0:  # p and q are equal up to rounding: draw from p
        has_draft = stop < first
        masses = tl.load(cells + 1, mask=parts < num_parts, other=0.0).to(tl.float64)
        total = tl.sum(masses, axis=0)
    u_draw = tl.load(u_ptr + 2 * stop + 1, mask=is_real, other=0.0)
    mass = u_draw.to(tl.float64) * total

    # The part in which the running sum passes `mass`; if none does, the last that weighs anything.
    reached = tl.cumsum(masses, axis=0)
    weighs = masses > 0.0
    passing = tl.min(tl.where(weighs & (reached > mass), parts, PARTS), axis=0)
    part = tl.minimum(passing, tl.max(tl.where(weighs, parts, 0), axis=0))
    rest_of_mass = (mass - tl.sum(tl.where(parts < part, masses, 0.0), axis=0)).to(tl.float32)
    ids = part * PART + tl.arange(0, PART)
    p_row = p_ptr + stop.to(tl.int64) * stride_p
    q_row = p_row if SURE else q_ptr + stop.to(tl.int64) * stride_q
    reads = (ids < vocab_size) & is_real
    rest = load_rest(p_row, q_row, ids, token, reads, has_draft, SURE)
    is_above = (rest > 0.0) & (tl.cumsum(rest, axis=0) > rest_of_mass)
    drawn = tl.min(tl.where(is_above, ids, vocab_size), axis=0)
    # The two sums of a part round differently, as in optimized.py.
    drawn = tl.minimum(drawn, tl.max(tl.where(rest > 0.0, ids, 0), axis=0))
    drawn = tl.where(total >= 0.0, drawn, -1)  # -1: p holds NaN, and the host must hear of it

    rows = first + tl.arange(0, BLOCK_ROWS)
    kept = tl.load(drafted_ptr + rows, mask=rows < stop, other=-1)
    emitted = tl.where(rows == stop, drawn.to(tl.int64), kept)
    tl.store(tokens_ptr + rows, emitted, mask=rows < end)
    tl.store(accepted_ptr + sequence, stop - first)


def verify_split(
    p: Tensor,
    q: Tensor | None,
    drafted: Tensor,
    u: Tensor,
    cu_rows: Tensor,
    max_rows: int,
    part: int = PART,
) -> tuple[Tensor, Tensor]:
    """optimized.verify in two launches: same arguments, same result, same errors. part: tokens a
    program, a power of 2.
    """
    check_rows(p, q, drafted, u, cu_rows, max_rows)
    count, vocab_size = len(cu_rows) - 1, p.shape[1]
    parts = triton.cdiv(vocab_size, part)
    tokens = torch.empty_like(drafted)
    accepted = torch.empty(count, dtype=torch.int32, device=p.device)
    masses = torch.empty(count, parts, 2, dtype=torch.float32, device=p.device)
    if count:
        given = p, q, drafted, u, cu_rows, masses
        strides = p.stride(0), p.stride(0) if q is None else q.stride(0)
        sizes = dict(SURE=q is None, BLOCK_ROWS=triton.next_power_of_2(max_rows), PART=part)
        masses_kernel[count, parts](*given, vocab_size, *strides, **sizes)
        # not fused, so that the mass that is compared and the one that is left are the same number
        sizes |= dict(PARTS=triton.next_power_of_2(parts), enable_fp_fusion=False)
        emit_kernel[(count,)](*given, tokens, accepted, vocab_size, parts, *strides, **sizes)
    return tokens, accepted
