"""The verification of a whole batch in one launch: accept, find the first rejection, draw from the
residual or the bonus row. Nothing comes back to the host in between.

Read `verify_kernel`, a program for each sequence. `first_rejection` looks at one number of p and
one of q for each drafted token. Then the program walks over the vocabulary of a single row, twice:
for the sum, and for the place where the running sum passes the random number. SURE: the draft was
sure of its tokens, as n-grams are. Then q is 1 there, and is never read.

Sources: as in naive.py; the draw by inverse CDF is Devroye 1986, Non-Uniform Random Variate
Generation, section III.2.
"""

import torch
from torch import Tensor

from lessons.l16_speculative_sampling.arguments import check_rows
from lessons.toolbox.kernels.triton_ import tl, triton

BLOCK_V = 1024  # tokens of the vocabulary that a program looks at together


@triton.jit
def first_rejection(
    p_ptr, q_ptr, drafted_ptr, u_ptr, rows, last, stride_p, stride_q, SURE: tl.constexpr
):
    """The row at which a sequence ends; `last` if all drafted tokens stay. rows: [BLOCK_ROWS]."""
    is_drafted = rows < last
    drafted = tl.load(drafted_ptr + rows, mask=is_drafted, other=0)
    # int64, because row · V passes 2^31 at 16,744 rows of 128,256 tokens
    wide = rows.to(tl.int64)
    p_there = tl.load(p_ptr + wide * stride_p + drafted, mask=is_drafted, other=0.0)
    q_there = 1.0
    if not SURE:
        q_there = tl.load(q_ptr + wide * stride_q + drafted, mask=is_drafted, other=0.0)
    u_accept = tl.load(u_ptr + 2 * rows, mask=is_drafted, other=0.0)
    passes = u_accept * q_there < p_there
    # The first that does not pass ends the chain, whatever follows it.
    stop = tl.min(tl.where(is_drafted & passes, last, rows), axis=0)
    return tl.minimum(stop, last)


@triton.jit
def load_rest(p_row, q_row, ids, token, reads, has_draft, SURE: tl.constexpr):
    """max(0, p - q) of some tokens, or p where there is no draft. SURE: q is 1 at `token`."""
    p = tl.load(p_row + ids, mask=reads, other=0.0)
    if SURE:
        return tl.where(has_draft & (ids == token), 0.0, p)
    # Not read without a draft, because the bonus row of q holds anything.
    q = tl.load(q_row + ids, mask=reads & has_draft, other=0.0)
    # where, because the maximum of NaN and 0 may be 0, and NaN in p must stay visible
    return tl.where(has_draft, tl.maximum(p - q, 0.0), p)


@triton.jit
def sum_of_row(
    p_row, q_row, vocab_size, token, is_real, has_draft, SURE: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The sum of what load_rest gives over the vocabulary."""
    total = 0.0
    for start in range(0, vocab_size, BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        reads = (ids < vocab_size) & is_real
        total += tl.sum(load_rest(p_row, q_row, ids, token, reads, has_draft, SURE), axis=0)
    return total


@triton.jit
def drawn_from_row(
    p_row,
    q_row,
    mass,
    vocab_size,
    token,
    is_real,
    has_draft,
    SURE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The first token whose running sum exceeds `mass`; if none does, the last with p > q."""
    running = 0.0
    drawn = vocab_size
    largest = 0
    for start in range(0, vocab_size, BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        # A masked load reads nothing, so traffic ends once the token is found.
        reads = (ids < vocab_size) & is_real & (drawn == vocab_size)
        rest = load_rest(p_row, q_row, ids, token, reads, has_draft, SURE)
        reached = running + tl.cumsum(rest, axis=0)
        is_above = (rest > 0.0) & (reached > mass)
        drawn = tl.minimum(drawn, tl.min(tl.where(is_above, ids, vocab_size), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(rest > 0.0, ids, 0), axis=0))
        running += tl.sum(rest, axis=0)
    # The two sums round differently, so the running one may end below `mass`.
    return tl.where(drawn == vocab_size, largest, drawn)


@triton.jit
def verify_kernel(
    p_ptr,
    q_ptr,
    drafted_ptr,
    u_ptr,
    cu_rows_ptr,
    tokens_ptr,
    accepted_ptr,
    vocab_size,
    stride_p,
    stride_q,
    SURE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """naive.verify_sequence for sequence program_id(0). u_ptr: [R, 2], dense."""
    sequence = tl.program_id(0)
    first = tl.load(cu_rows_ptr + sequence)
    end = tl.load(cu_rows_ptr + sequence + 1)
    is_real = first < end  # a sequence without rows is padding
    last = end - 1  # the bonus row
    rows = first + tl.arange(0, BLOCK_ROWS)
    stop = first_rejection(p_ptr, q_ptr, drafted_ptr, u_ptr, rows, last, stride_p, stride_q, SURE)

    # The row at which it ends: its residual, or p of the bonus row.
    has_draft = stop < last
    token = tl.load(drafted_ptr + stop, mask=is_real & has_draft, other=0)
    u_draw = tl.load(u_ptr + 2 * stop + 1, mask=is_real, other=0.0)
    p_row = p_ptr + stop.to(tl.int64) * stride_p
    q_row = p_row if SURE else q_ptr + stop.to(tl.int64) * stride_q
    total = sum_of_row(p_row, q_row, vocab_size, token, is_real, has_draft, SURE, BLOCK_V)
    if total == 0.0:  # p and q are equal up to rounding: draw from p
        has_draft = stop < first
        total = sum_of_row(p_row, q_row, vocab_size, token, is_real, has_draft, SURE, BLOCK_V)
    mass = u_draw * total
    drawn = drawn_from_row(p_row, q_row, mass, vocab_size, token, is_real, has_draft, SURE, BLOCK_V)
    drawn = tl.where(total >= 0.0, drawn, -1)  # -1: p holds NaN, and the host must hear of it

    drafted = tl.load(drafted_ptr + rows, mask=rows < stop, other=-1)
    emitted = tl.where(rows == stop, drawn.to(tl.int64), drafted)
    tl.store(tokens_ptr + rows, emitted, mask=rows < end)
    tl.store(accepted_ptr + sequence, stop - first)


def verify(
    p: Tensor,
    q: Tensor | None,
    drafted: Tensor,
    u: Tensor,
    cu_rows: Tensor,
    max_rows: int,
    block_v: int = BLOCK_V,
) -> tuple[Tensor, Tensor]:
    """naive.verify in one launch. p, q: [R, V] float32, drafted: [R] int64, u: [R, 2] float32 below
    1, cu_rows: [B + 1] int32 -> tokens: [R] int64, accepted: [B] int32.

    q: None if the draft was sure of its tokens (n-grams). max_rows: rows of the longest sequence,
    which the host knows. Raises ValueError.
    """
    check_rows(p, q, drafted, u, cu_rows, max_rows)
    tokens = torch.empty_like(drafted)
    accepted = torch.empty(len(cu_rows) - 1, dtype=torch.int32, device=p.device)
    if len(accepted):
        verify_kernel[(len(accepted),)](
            p,
            q,
            drafted,
            u,
            cu_rows,
            tokens,
            accepted,
            p.shape[1],
            p.stride(0),
            p.stride(0) if q is None else q.stride(0),
            SURE=q is None,
            BLOCK_ROWS=triton.next_power_of_2(max_rows),
            BLOCK_V=block_v,
        )
    return tokens, accepted
