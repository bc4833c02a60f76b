# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=10
# Generated from solutions/l10_flash_decoding.py, checksum 88d06ae76e85. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 10: partial results merged, waves and bytes of a plan, the merge as a kernel,
a split decode with bugs.
"""

import torch
from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise(
    "10.1",
    "Merge partial results by their log-sum-exp",
    minutes=25,
    difficulty=2,
    replaces="lessons.l10_flash_decoding.naive:combine",
)
def combine(partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What attention over all keys gives, from attention over each split. -> out: [B, Hq, D], lse:
    [B, Hq], dtype as given.

    partial_out: [B, Hq, S, D], S at least 1: split s alone gave softmax(scores) · V, divided by its
    own sum of weights. partial_lse: [B, Hq, S]: log Σ exp(score) over the keys of split s, base e;
    any size, ±1000 too. −inf: a split without keys. The rows of partial_out of a split without keys
    were never written and may hold anything, NaN included; nothing of them shows. A sequence
    without keys, all splits −inf, gives zeros and −inf. float32, float64. The arguments stay.
    Errors: none to raise. Aim: no loop over sequences or heads. A solved exercise decodes for the
    ladder, on a CPU.

    Example, one head, D = 1: split 0 saw one key of score 0 and value 4, split 1 three keys of
    score 0 and value 8, split 2 none:
        partial_out = [4, 8, NaN], partial_lse = [log 1, log 3, −inf]
            -> out = (1·4 + 3·8) / 4 = 7, lse = log 4
    """
    raise NotImplementedError("Exercise 10.1: Merge partial results by their log-sum-exp")


@exercise("10.2", "Predict: programs, waves and bytes of a plan", minutes=15, difficulty=1)
def plan_of(
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context_len: int,
    num_splits: int,
    num_slots: int,
    itemsize: int,
) -> tuple[int, int, float, float]:
    """Of one layer's decode step in splits: (programs, waves, efficiency, partial traffic over KV
    traffic).

    programs: of the split kernel, one for each sequence, KV head and split. waves: rounds of
    num_slots programs at once. efficiency: the share of all slots in all waves that have a program.
    The last number: bytes of partial results (one float32 for each value of out, one for the lse,
    per query head and split), written once and read once, divided by the bytes of K and V, read
    once, `itemsize` bytes a value, context_len keys a sequence. With one split there are no partial
    results. Errors: none to raise.

    Example: 2 sequences, 8 and 4 heads, head_dim 64, 1000 keys, 16 splits, 100 slots, 2 bytes a
    value:
        2 · 4 · 16 = 128 programs in 2 waves, efficiency 128 / 200 = 0.64
        partials 2 · (2 · 8 · 16 · (64 + 1) · 4) = 133120 bytes, KV 2 · 1000 · 2 · 4 · 64 · 2 =
          2048000: 0.065
    Write down your guess first: Llama-3-8B (32 and 8 heads of 128, 16 bits), one sequence of 65536
    keys on 264 slots, 33 splits.
    """
    raise NotImplementedError("Exercise 10.2: Predict: programs, waves and bytes of a plan")


@triton.jit
def combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program per row: partial_out [R, S, HEAD_DIM] and partial_lse [R, S], both dense, -> out
    [R, HEAD_DIM].

    BLOCK_S splits at a time; BLOCK_D is the power of two that holds HEAD_DIM values.
    """
    row = tl.program_id(0).to(tl.int64)
    step, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    raise NotImplementedError("Exercise 10.3: The same merge as a Triton kernel")


@exercise("10.3", "The same merge as a Triton kernel", minutes=40, difficulty=3)
def combine_splits(partial_out: Tensor, partial_lse: Tensor) -> Tensor:
    """Merged rows, by `combine_kernel` above, which is yours to write; this wrapper is done. ->
    out: [R, D] float32.

    partial_out: [R, S, D] and partial_lse: [R, S], float32, dense; −inf, never written rows and
    rows without a key as in 10.1. S is any number from 1 on, more than a step's 16 splits as well:
    keep a running maximum, sum and weighted values, as lesson 8. Empty splits after the others
    must not change a bit, because their number depends on the longest sequence of the batch.
    float32 inside. Every load has a mask and `other=`. Errors: none to raise.

    Example, R = 1, D = 1: partial_out = [[[4], [8], [NaN]]], partial_lse = [[log 1, log 3, −inf]]
    -> [[7]].
    """
    rows, num_splits, head_dim = partial_out.shape
    out = partial_out.new_full((rows, head_dim), torch.nan)
    combine_kernel[rows,](
        partial_out,
        partial_lse,
        out,
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_S=16,
    )
    return out


@exercise(
    "10.4", "Find the bugs: a decode that must not notice its batch", minutes=30, difficulty=3
)
def invariant_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    split_size: int,
    window: int | None = None,
) -> Tensor:
    """One query per sequence over its cache, in splits of split_size keys. q: [B, Hq, D] float32 ->
    [B, Hq, D].

    k_cache, v_cache: [B, capacity, Hkv, D] float32; the first context_lens[b] rows are in use,
    those after them may hold NaN. context_lens: [B] int64; 0 gives zeros. Query head h reads KV
    head h // (Hq / Hkv). Scores are scaled by 1 / √D. window: only the last `window` rows of a
    sequence count. Splits begin at its first counted row, split_size keys each, the last one
    shorter. A sequence's result has the same bits whatever else is in the batch, and however long
    the cache is. Errors: none to raise.

    Example, one head, D = 1, split_size 2, lengths 3: scores [0, 0, log 2], values [2, 4, 9]
        split 0: m = 0, l = 2, acc = 6; split 1: m = log 2, l = 1, acc = 9; relative to log 2: (6/2
          + 9) / (2/2 + 1) = 6

    The code below runs, and for one sequence with one head and equal keys it is right. It has four
    bugs. Delete the first line and find them.
    """
    raise NotImplementedError("Exercise 10.4: Find the bugs: a decode that must not notice its batch")
    (batch, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    group, out = num_heads // num_kv_heads, torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        rows = q[b].view(group, num_kv_heads, head_dim).transpose(0, 1)
        l, acc = torch.zeros(num_kv_heads, group), torch.zeros(num_kv_heads, group, head_dim)
        num_splits = max(1, 16 // (batch * num_kv_heads))
        size = -(-length // num_splits)
        for start in range(0, length, max(size, 1)):
            end = min(start + size, length)
            begin = start if window is None else max(start, end - window)
            k, v = k_cache[b, begin:end], v_cache[b, begin:end]
            scores = torch.bmm(rows, k.permute(1, 2, 0)) * head_dim ** -0.5
            p = torch.exp(scores - scores.amax(-1, keepdim=True))
            l = l + p.sum(-1)
            acc = acc + torch.bmm(p, v.transpose(0, 1))
        if length:
            out[b] = (acc / l[..., None]).view(num_heads, head_dim)
    return out
