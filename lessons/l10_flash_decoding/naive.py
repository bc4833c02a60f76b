"""Decoding in splits, in PyTorch: each split of the keys is attended to by itself, then the results
are merged by their LSE.

Read `split_decode` first: one turn of its inner loop is one program of optimized.py's
split_decode_kernel. Then read `combine`, which does what combine_kernel does. It is lesson 8's
`merge`, because a normalised result `out` with its log-sum-exp is itself a Partial (m = lse,
l = 1).

Sources: Dao, Haziza, Massa & Sizov 2023, Flash-Decoding for long-context inference; Rabe & Staats
2021, section 2.
"""

from functools import reduce

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l08_online_softmax.naive import Partial, finish, from_scores, from_state, merge
from lessons.l09_flash_attention.naive import LESSON_09_TORCH
from lessons.l10_flash_decoding.splits import cdiv, split_bounds

# On a CPU nothing waits for work, so any number shows that the tokens stay the same.
CPU_SPLITS = 4


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> Tensor:
    """One query per sequence over its cache, in splits. q: [B, Hq, D]; k_cache, v_cache: [B,
    capacity, Hkv, D] -> [B, Hq, D].

    context_lens: [B] int, the rows in use; 0 gives zeros. window: only the last `window` rows
    count. num_splits: of every sequence, whatever its length; or split_size: keys in every split,
    whatever the batch. Neither: one split.
    """
    if split_size is not None:
        num_splits = max(1, cdiv(int(context_lens.max()), split_size))
    partials = split_decode(
        q, k_cache, v_cache, context_lens, softmax_scale, window, num_splits or 1, split_size or 0
    )
    return combine(*partials)[0].to(q.dtype)


def split_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    softmax_scale: float | None = None,
    window: int | None = None,
    num_splits: int = 1,
    split_size: int = 0,
    block_n: int = 1,
) -> tuple[Tensor, Tensor]:
    """What each split finds: partial_out: [B, Hq, S, D] and partial_lse: [B, Hq, S], float32
    (float64 for float64).

    An empty split finds 0 and −inf. Arguments as in `flash_decode`; num_splits is S, the others as
    in `split_bounds`.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    sequences = []
    for one, k, v, length in zip(q, k_cache, v_cache, context_lens.tolist()):
        # From this sequence's own length: bounds made from the capacity would leave its later
        # splits without a key.
        bounds = split_bounds(length, num_splits, split_size, window, block_n)
        found = [
            finish(attend_to_split(one, k[start:end], v[start:end], scale)) for start, end in bounds
        ]
        # [Hq, S, D], [Hq, S]
        sequences.append([torch.stack(x, dim=1) for x in zip(*found)])
    partial_out, partial_lse = (torch.stack(x) for x in zip(*sequences))
    return partial_out, partial_lse


def attend_to_split(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Partial:
    """The Partial of one query over some keys. q: [Hq, D]; k, v: [n, Hkv, D], n may be 0 -> m, l:
    [Hq], acc: [Hq, D].

    The query heads of a KV head are the rows of one matrix: consecutive heads, because head h reads
    KV head h // group.
    """
    # [Hkv, group, D]
    rows = q.view(k.shape[1], -1, q.shape[-1])
    # [Hkv, group, n]
    scores = torch.bmm(rows, k.permute(1, 2, 0)) * softmax_scale
    return Partial(*(x.flatten(0, 1) for x in from_scores(scores, v.transpose(0, 1))))


def combine(partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The merged result of all splits. partial_out: [B, Hq, S, D], partial_lse: [B, Hq, S] -> out:
    [B, Hq, D], lse: [B, Hq].

    partial_lse in base e. A split whose lse is −inf weighs nothing, whatever partial_out holds
    there; all −inf: 0 and −inf.
    """
    parts = (
        from_state(partial_out[..., split, :], partial_lse[..., split])
        for split in range(partial_lse.shape[-1])
    )
    return finish(reduce(merge, parts))


# ---------------------------------------------------------------- the rung


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Every sequence in CPU_SPLITS splits. q: [B, Hq, D] -> [B, Hq, Dv]."""
    k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    lens = batch.context_lens
    return flash_decode(q, k_cache, v_cache, lens, softmax_scale, window, num_splits=CPU_SPLITS)


LESSON_10_TORCH = LESSON_09_TORCH._replace(decode=decode)
