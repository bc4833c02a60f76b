# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=08
# Generated from solutions/l08_online_softmax.py, checksum be454de314f6. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 08: two parts merged, splits with bugs, bytes and overflow, the butterfly of
a warp.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l08_online_softmax.naive import Partial
from lessons.toolbox.exercises.exercise import exercise

LOG2E = math.log2(math.e)  # exp(x) = exp2(x · LOG2E)
ALL_LANES = 0xFFFFFFFF  # one bit for each of a warp's 32 lanes


@exercise(
    "8.1",
    "Two parts of a row become one",
    minutes=25,
    difficulty=2,
    replaces="lessons.l08_online_softmax.naive:merge",
)
def merge(a: Partial, b: Partial) -> Partial:
    """What a and b have seen together, without looking at the scores again.

    A Partial knows of the scores seen so far: m [...], the largest one; l [...] = Σ exp(score − m);
    acc [..., D] = Σ exp(score − m) · value. a and b have the same shapes and dtype (float32 or
    float64), and so has the result. Nothing seen: m = −inf, l = 0, acc = 0. Merging with it changes
    nothing, and nothing merged with nothing is nothing again, not NaN. A row of a may be empty
    where b's is not. The arguments stay as they were. Errors: none to raise.

    Example: a has seen log 1 and log 2, with values 8 and 5: m = log 2, l = 1/2 + 1 = 1.5, acc =
    8/2 + 5 = 9
             b has seen log 4 and log 1, with values 2 and 0: m = log 4, l = 1 + 1/4 = 1.25, acc = 2
             merged: m = log 4, l = 1.5/2 + 1.25 = 2, acc = 9/2 + 2 = 6.5
                 (so softmax · V = 6.5 / 2 = 3.25)
    """
    raise NotImplementedError("Exercise 8.1: Two parts of a row become one")


@exercise(
    "8.2", "Find the bugs: attention in splits, logarithms in base 2", minutes=30, difficulty=3
)
def attention_in_splits(
    scores: Tensor, v: Tensor, splits: list[tuple[int, int]], block: int
) -> tuple[Tensor, Tensor]:
    """softmax(scores) · V split by split, then merged. scores: [M, N], v: [N, D], float32 -> out
    [M, D], lse2 [M], float32.

    splits: pairs (begin, end) that cover the columns 0 … N once; begin may equal end. A split is
    read in tiles of `block` columns (the last one shorter), each once. lse2 = log2 Σ exp(score):
    the unit in which FlashInfer keeps it, because a GPU computes exp2 and log2 and gets the others
    from them. A masked score is −inf. A row that sees nothing gives 0 and −inf; scores may be far
    above or far below 0. The arguments stay as they were. Errors: none to raise. Aim: never hold
    more than one tile of scores, [M, block].

    Example: scores [[log 1, log 2, log 4, log 1]], v [[8], [5], [2], [0]], splits [(0, 2), (2, 2),
    (2, 4)], block 2
        split 0: out 6, lse2 log2 3 · split 1: nothing seen, lse2 −inf · split 2: out 1.6, lse2 log2
          5
        weights 3 and 5 of 8: out (3 · 6 + 5 · 1.6) / 8 = 3.25, lse2 = log2 8 = 3

    The code below runs, and short rows around 0 even look right. It has three bugs. Delete the
    first line and find them.
    """
    raise NotImplementedError("Exercise 8.2: Find the bugs: attention in splits, logarithms in base 2")
    outs, lses = [], []
    for begin, end in splits:
        m = torch.zeros(len(scores))
        l, acc = torch.zeros(len(scores)), torch.zeros(len(scores), v.shape[1])
        for start in range(begin, end, block):
            columns = slice(start, min(start + block, end))
            tile = scores[:, columns] * LOG2E
            m_new = torch.maximum(m, tile.amax(-1))
            anchor = m_new.masked_fill(m_new == -torch.inf, 0.0)
            alpha, p = torch.exp2(m - anchor), torch.exp2(tile - anchor[:, None])
            l = l * alpha + p.sum(-1)
            acc = acc + p @ v[columns]
            m = m_new
        outs.append(acc / l.masked_fill(l == 0, 1.0)[:, None])
        lses.append(m + torch.log2(l))
    outs, lses = torch.stack(outs), torch.stack(lses)                       # [S, M, D], [S, M]
    m = lses.amax(0)
    weights = torch.exp2(lses - m.masked_fill(m == -torch.inf, 0.0))
    l = weights.sum(0)
    out = (weights[:, :, None] * outs).sum(0) / l.masked_fill(l == 0, 1.0)[:, None]
    return out, torch.log2(l)


@exercise(
    "8.3",
    "Predict: milliseconds of a softmax, and the score that breaks it",
    minutes=15,
    difficulty=1,
)
def softmax_numbers(
    num_rows: int, num_columns: int, dtype: torch.dtype, gb_per_s: float, max_block: int
) -> tuple[float, float, int]:
    """(ms of three passes, ms of the lesson's kernel, the smallest whole score whose exp is inf in
    `dtype`).

    Scores and probabilities, [num_rows, num_columns] of dtype each, are in memory that moves
    gb_per_s · 10⁹ bytes a second, read and written together; no cache helps, nothing but these
    bytes costs time. Three passes read the scores for the max, for the sum and to divide, and write
    the probabilities. The lesson's kernel keeps a row of up to max_block columns in registers; a
    longer one it reads twice. Errors: none to raise.

    Example: 64 rows of 100000 columns, torch.bfloat16, 4000 GB/s, max_block 32768: a pass is 12.8
    MB, 0.0032 ms
        -> (4 passes 0.0128, 3 passes 0.0096, 89), because exp(88) is 1.7e38 and exp(89) is beyond
        bfloat16's 3.4e38
    Write down your guess first: what are the three for 64 rows of 32000 columns in float16?
    """
    raise NotImplementedError("Exercise 8.3: Predict: milliseconds of a softmax, and the score that breaks it")


@exercise("8.4", "The butterfly of a warp", minutes=25, difficulty=3)
def warp_merge(
    m: Tensor, l: Tensor, shfl_xor_sync: Callable[[int, Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """All 32 lanes merge their (m, l): afterwards every lane holds those of the whole warp. m, l:
    [32] float32 -> [32], [32].

    A register is a tensor of 32 numbers, one for each lane; arithmetic happens in all lanes at
    once. A lane sees another lane's register only through shfl_xor_sync(mask, register, distance):
    lane i gets register[i xor distance]. mask: one bit for each lane that takes part; lanes outside
    it get garbage. Five exchanges of m and five of l are enough, and no more are made. A lane may
    have seen nothing: m = −inf and l = 0. If no lane has seen anything, the result is that, without
    NaN. Every lane must end with the same bits. The arguments stay as they were. Errors: none to
    raise.

    Example: lanes 0 to 3 hold m = 0, 0, log 2, log 4 and l = 1, 1, 3, 2, the other 28 have seen
    nothing
        -> in all lanes m = log 4 and l = (1 + 1) / 4 + 3 / 2 + 2 = 4
    """
    raise NotImplementedError("Exercise 8.4: The butterfly of a warp")
