"""Exercises of lesson 28: the index score, an exact top k with ties, a window with sinks whose
positions roll, a decode kernel that reads chosen rows, and the context from which choosing pays.
"""

import math

import torch
from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise("28.1", "The index score", minutes=20, difficulty=1)
def index_scores(q: Tensor, weights: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """DeepSeek's score of each key for each query, with which it chooses keys before any attention:

        score[t, s] = Σ_h weights[t, h] · ReLU(q[t, h] · k[s])

    q: [T, Hi, Di], weights: [T, Hi], k: [N, Di], all float32 -> [T, N] float32. There is one key
    for all heads. positions: [T], where each query is in the text: it sees keys 0 to its own
    position, and all others get -inf. A weight may be negative, so a score may be, too. Aim: no
    tensor has more than T · N values (so take one head after the other). Errors: none to raise.

    Example: one query at position 1, two heads of 2 numbers, q [[1, 0], [0, 1]], weights [2, 1],
    k [[3, -4], [-1, 5], [9, 9]]
        key 0: 2 · ReLU(3) + 1 · ReLU(-4) = 6    key 1: 2 · ReLU(-1) + 1 · ReLU(5) = 5
        -> [[6, 5, -inf]]
    Guess first: a softmax over the keys follows in attention. Why is there none here?
    """
    # SOLUTION
    scores = torch.zeros(len(q), len(k))
    for head in range(q.shape[1]):
        products = (q[:, head] @ k.T).clamp_(min=0)
        scores += products.mul_(weights[:, head, None])
    unseen = torch.arange(len(k)) > positions[:, None]
    return scores.masked_fill_(unseen, -math.inf)
    # END


@exercise("28.2", "An exact top k with ties", minutes=35, difficulty=3)
def top_k(scores: Tensor, k: int) -> tuple[int, list[int]]:
    """The keys with the k highest scores, without a sort. scores: [N] float32, no NaN.

    A float32 has 32 bits. Read as a whole number they are in the order of the values, once
        the sign bit of numbers >= 0 is set, and
        all 32 bits of negative numbers are turned round (0 becomes 1, and 1 becomes 0).
    So the k-th highest score can be found bit by bit, from the highest bit down: a bit of the
    threshold is 1 if at least k scores are >= the threshold with this bit set.
    `scores.view(torch.int32)` reads the bits; use int64 or Python's integers for what follows,
    because int32 has no room for the turned sign. -0.0 counts as 0.0.

    Returns
        the threshold: the whole number of the k-th highest score; 0 if there are fewer than k
        the positions that are chosen, ascending: all above the threshold, and of those that equal
            it the lowest positions, until there are k
    A score of -inf is a key that is not there: it is never chosen, and never counted. Aim: neither
    sort nor topk. Errors: none to raise.

    Example: scores [0.5, 2.0, 0.5, 0.5, -1.0], k = 2
        0.5 is 0x3F000000, with the sign bit set 0xBF000000 = 3204448256; 2.0 is 0xC0000000
        -> (3204448256, [0, 1]): 2.0 is above it, and of the three that equal it the first is taken
    """
    # SOLUTION
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32).long()
    order = torch.where(bits >= 0, bits + 2**31, -1 - bits)
    order = torch.where(scores == -math.inf, -1, order)
    threshold = 0
    for place in reversed(range(32)):
        tried = threshold | (1 << place)
        if int((order >= tried).sum()) >= k:
            threshold = tried
    above, equal = order > threshold, order == threshold
    if not threshold:  # fewer than k
        return 0, (order >= 0).nonzero()[:, 0].tolist()
    ties = k - int(above.sum())
    taken = above | (equal & (equal.cumsum(0) <= ties))
    return threshold, taken.nonzero()[:, 0].tolist()
    # END


@exercise("28.3", "A window with sinks, and positions that roll", minutes=25, difficulty=2)
def rolling_cache(seen: int, sinks: int, window: int) -> tuple[list[int | None], list[int], int]:
    """What a cache of sinks + window slots holds when `seen` tokens have been written, as in
    StreamingLLM, and at which positions its keys are rotated.

    Token i of the text is written to slot i while there are free slots. After that the first
    `sinks` slots stay as they are, and each new token takes the slot of the oldest other one.
    sinks: 0 or more, window: 1 or more, seen: 1 or more. Returns
        which token is in each slot: [sinks + window], None for a slot that is still empty
        the rotary position of the key in each *used* slot, in the order of the slots: not where it
            is in the text, but where it is among the tokens that are in the cache, in the order of
            the text, from 0
        the rotary position of the newest token's query
    So no position is ever larger than the cache, however long the text. Errors: none to raise.

    Example: sinks 2, window 3, seen 7: tokens 0 and 1 stay; 2, 3, 4 were written to slots 2, 3, 4,
    then 5 and 6 took the slots of 2 and 3
        slots [0, 1, 5, 6, 4]; in the order of the text 0 1 4 5 6 have the positions 0 1 2 3 4
        -> ([0, 1, 5, 6, 4], [0, 1, 3, 4, 2], 4)
    """
    # SOLUTION
    slots: list[int | None] = [None] * (sinks + window)
    for token in range(seen):
        slot = token if token < sinks else sinks + (token - sinks) % window
        slots[slot] = token
    used = [token for token in slots if token is not None]
    place = {token: position for position, token in enumerate(sorted(used))}
    return slots, [place[token] for token in used], place[seen - 1]
    # END


@triton.jit
def chosen_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    indices_ptr,
    scale,
    num_keys,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per query head. q, out: [HEADS, DIM]; k, v: [num_blocks, PAGE, DIM]; table:
    [max_blocks] int32; indices: [num_keys] int32; all dense.
    """
    head = tl.program_id(0)
    column = tl.arange(0, DIM)
    q = tl.load(q_ptr + head * DIM + column, mask=column < DIM, other=0.0)
    # SOLUTION 28.4
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.zeros((), tl.float32)
    acc = tl.zeros((DIM,), tl.float32)
    for start in range(0, num_keys, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(indices_ptr + place, mask=place < num_keys, other=-1)
        is_key = key >= 0
        block = tl.load(table_ptr + key // PAGE, mask=is_key, other=0).to(tl.int64)
        row = (block * PAGE + key % PAGE)[:, None] * DIM + column[None, :]
        k = tl.load(k_ptr + row, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + row, mask=is_key[:, None], other=0.0)
        scores = tl.sum(q[None, :] * k, axis=1) * scale
        scores = tl.where(is_key, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0))
        # Until there is a key m_new is -inf, and -inf minus -inf is NaN.
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp(m_i - safe)
        p = tl.exp(scores - safe)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        m_i = m_new
    out = tl.where(l_i > 0.0, acc / l_i, 0.0)
    tl.store(out_ptr + head * DIM + column, out, mask=column < DIM)
    # END


@exercise("28.4", "A decode kernel that reads chosen rows", minutes=40, difficulty=3)
def attend_to_chosen(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, indices: Tensor, block: int = 16
) -> Tensor:
    """One new token over the keys of a list, by `chosen_rows_kernel` above, which is yours to
    write; this wrapper is done. q: [H, D], k, v: [num_blocks, page, D], one KV head for all query
    heads, all float32 -> [H, D].

    table: [max_blocks] int32: key i of the sequence is in row i % page of block table[i // page].
    indices: [K] int32: which keys; -1, at any place: none. scale is 1/√D, softmax runs over the
    listed keys alone, and a list without keys gives zeros. block: keys of a tile, a power of two; K
    is any number. Rows that are not listed are NaN, entries of the table that are not needed are
    2³⁰, and every load and store has a mask. A cache may have more than 2³¹ values, so the place of
    a row needs 64 bits. Loop with range(0, num_keys, BLOCK): a list is longer
    than a tile. Aim: nothing but the result is allocated. Errors: none to raise.

    Example: H = 1, D = 2, q [[√2, 0]], pages of 2, table [3, 0], indices [0, 3]
        key 0 is row 0 of block 3, key 3 is row 1 of block 0
        k there [0, 0] and [ln 3, 0], v there [1, 0] and [5, 4]
        scores 0 and ln 3, weights 1/4 and 3/4 -> [[4, 3]]
    """
    heads, dim = q.shape
    out = torch.full_like(q, float("nan"))
    chosen_rows_kernel[heads,](
        q,
        k,
        v,
        out,
        table,
        indices,
        dim**-0.5,
        len(indices),
        HEADS=heads,
        DIM=dim,
        PAGE=k.shape[1],
        BLOCK=block,
    )
    return out


@exercise("28.5", "Predict: from which context choosing pays", minutes=20, difficulty=2)
def pays_from(
    row_bytes: float,
    index_bytes: float,
    k: int,
    batch: int,
    bytes_per_s: float,
    fixed_s: float,
) -> int | None:
    """The shortest context, in whole tokens, at which sparse attention is faster than full
    attention, for a step that is bound by memory. None if there is none.

    Full attention reads row_bytes of each key of each sequence. Sparse attention reads index_bytes
    of each key, and row_bytes of the k keys that it chose, or of all keys if there are fewer. It
    needs fixed_s seconds more a step for its launches, whatever the batch. `batch` sequences have
    the same context. bytes_per_s: of memory. Errors: none to raise.

    Example: rows of 10 bytes, index rows of 2, k = 4, one sequence, 1 byte a second, fixed_s 0
        4 keys: 40 s against 8 + 40    5 keys: 50 against 10 + 40, equal    6 keys: 60 against 52
        -> 6
    Guess first: what does twice the batch change if fixed_s is 0? And if it is not?
    """
    # SOLUTION
    if index_bytes >= row_bytes:
        return None
    handicap = k * row_bytes + fixed_s * bytes_per_s / batch
    return math.floor(handicap / (row_bytes - index_bytes)) + 1
    # END
