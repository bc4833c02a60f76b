"""Wrong answers to lesson 03's exercises: real slips, and the hint for whoever made them.

The wrong ones of 3.2, 3.3 and 3.4 stand in files of their own.
"""

from functools import partial

import torch

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.rope import new_cos_sin_cache
from lessons.l03_kv_cache import cache as lesson
from solutions.l03_kv_cache import KVPool
from tests.exercises.wrong import Answers, l03_chat, l03_pool, l03_traffic

answers = Answers()
l03_pool.add_to(answers)
l03_traffic.add_to(answers)
l03_chat.add_to(answers)

# ---------------------------------------------------------------- 3.1 a chunk over caches


def slipped_chunk(
    q,
    k_cache,
    v_cache,
    context_lens,
    softmax_scale=None,
    window=None,
    *,
    align="context",
    causal=True,
    strict=False,
    hide_v="all",
    hide_scores="inf",
    lens="own",
    heads="interleave",
    scale_by="D",
    own_scale=True,
    use_window=True,
    extra_key=0,
    fixed_window=False,
    out_dtype=None,
    in_place=False,
    default_scale="if none",
    maximum="row",
    own_strides=True,
):
    """Chunk attention with one slip. The keyword switches exist only here, to spell the wrong
    answers briefly.
    """
    (_, tq, hq, dim), (_, capacity, hkv, _) = q.shape, k_cache.shape
    if not own_strides:
        strides = capacity * hkv * dim, hkv * dim, dim, 1
        k_cache = k_cache.as_strided(k_cache.shape, strides)
    n = {
        "own": context_lens,
        "first": context_lens[:1].expand(len(q)),
        "longest": context_lens.max().expand(len(q)),
        "without_new": context_lens + tq,
    }[lens]
    given = softmax_scale is not None if default_scale == "if none" else bool(softmax_scale)
    scale = {"D": dim**-0.5, "none": 1.0}[scale_by]
    if given and own_scale:
        scale = softmax_scale
    row, step = torch.arange(capacity), torch.arange(tq)
    start = {"context": n - tq, "top_left": 0 * n, "capacity": 0 * n + capacity - tq}[align]
    own = start[:, None] + step
    if not causal:
        own = (n - 1)[:, None].expand(-1, tq)
    sees = row < own[:, :, None] if strict else row <= own[:, :, None]
    if window is not None and use_window:
        edge = (n - 1)[:, None].expand(-1, tq) if fixed_window else own
        sees = sees & (row > edge[:, :, None] - window - extra_key)
    k, v = k_cache, cleaned(v_cache, ~(row < n[:, None])[:, :, None, None], hide_v, in_place)
    if heads == "interleave":
        k, v = (x.repeat_interleave(hq // hkv, 2) for x in (k, v))
    else:
        k, v = (x.repeat(1, 1, hq // hkv, 1) for x in (k, v))
    scores = torch.einsum("bthd,bnhd->bhtn", q, k) * scale
    hidden = ~sees[:, None]
    if hide_scores == "minus a lot":
        scores = scores - hidden.to(scores.dtype) * 1e9
    else:
        least = {"inf": -torch.inf, "minus 10000": -1e4}[hide_scores]
        scores = scores.masked_fill(hidden, least)
    if maximum == "of all":
        weights = (scores - scores.max()).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.einsum("bhtn,bnhd->bthd", weights, v)
    out = torch.einsum("bhtn,bnhd->bthd", torch.softmax(scores, -1), v)
    return out.to(out_dtype or q.dtype)


def cleaned(v_cache, unused, how, in_place):
    """v_cache: [B, capacity, Hkv, D] without what lies in unused rows, or with some of it."""
    if in_place:
        v_cache.masked_fill_(unused, 0)
    if how == "nan alone":
        return torch.where(v_cache.isnan(), 0, v_cache)
    return v_cache.masked_fill(unused, 0) if how == "all" else v_cache


for name, slip, hint in [
    (
        "top_left_mask",
        dict(align="top_left"),
        "Your first query sees row 0 alone. Its row is context_lens[b] - T.",
    ),
    (
        "aligned_to_capacity",
        dict(align="capacity"),
        "You align the queries with the buffer's end, not with the rows in use.",
    ),
    (
        "no_causal_mask",
        dict(causal=False),
        "Your queries see each other's future: the chunk is causal inside.",
    ),
    (
        "maximum_of_all",
        dict(maximum="of all"),
        "What you subtract is not each row's largest score: far below it every exp is 0, and "
        "0 / 0 is NaN.",
    ),
    (
        "strides_ignored",
        dict(own_strides=False),
        "You read an argument as if its rows followed each other. Its strides say where they are.",
    ),
    ("strict_mask", dict(strict=True), "Your queries do not see their own row."),
    (
        "nan_values",
        dict(hide_v="nothing"),
        "A weight of 0 times NaN is NaN: the unused rows of v_cache have to go.",
    ),
    (
        "additive_mask",
        dict(hide_scores="minus a lot"),
        "You subtract a large number from a score; NaN minus anything is NaN.",
    ),
    ("first_length", dict(lens="first"), "Every sequence is cut at sequence 0's length."),
    (
        "longest_length",
        dict(lens="longest"),
        "Every sequence is cut at the longest length: shorter ones read rows not in use.",
    ),
    (
        "new_rows_not_counted",
        dict(lens="without_new"),
        "context_lens counts the new rows already; you add T once more.",
    ),
    (
        "tiled_heads",
        dict(heads="tile"),
        "`repeat` gives KV heads 0, 1, 0, 1; query heads 0 and 1 share KV head 0: 0, 0, 1, 1.",
    ),
    ("no_scale", dict(scale_by="none"), "The scores are not scaled by 1 / √D."),
    (
        "ignores_scale",
        dict(own_scale=False),
        "softmax_scale is given, and you use 1 / √D all the same.",
    ),
    (
        "infinite_values",
        dict(hide_v="nan alone"),
        "You clear NaN alone. Unused rows may hold infinity too, and 0 · inf is NaN.",
    ),
    (
        "mask_of_minus_10000",
        dict(hide_scores="minus 10000"),
        "-10000 hides nothing where all scores are lower still. Only -inf is below every score.",
    ),
    (
        "scale_or_default",
        dict(default_scale="if falsy"),
        "`softmax_scale or …` takes the default for 0.0 too. Ask `is None`.",
    ),
    ("no_window", dict(use_window=False), "You ignore `window`."),
    (
        "window_off_by_one",
        dict(extra_key=1),
        "Your window holds one row too many: it counts the query's own.",
    ),
    (
        "one_window_for_all",
        dict(fixed_window=True),
        "All queries share the last one's window. Each counts from its own row.",
    ),
    (
        "returns_float32",
        dict(out_dtype=torch.float32),
        "You compute in float32, which is fine, and forget to return q's dtype.",
    ),
    (
        "cleans_the_cache",
        dict(in_place=True),
        "You write zeros into the caller's cache. Work on a copy of what you change.",
    ),
]:
    answers.wrong("3.1", hint, name)(partial(slipped_chunk, **slip))


@answers.alternative("3.1")
def by_pytorch(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    """PyTorch's attention under a mask that is spelled out."""
    row = torch.arange(k_cache.shape[1])
    own = context_lens[:, None, None] + torch.arange(-q.shape[1], 0)[:, None]
    sees = (row <= own) & (row > own - (window or len(row)))
    in_use = (row < context_lens[:, None])[:, :, None, None]
    k, v = (torch.where(in_use, x, 0).transpose(1, 2) for x in (k_cache, v_cache))
    mask = sees[:, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(q.transpose(1, 2), k, v, mask, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@answers.wrong("3.1", "A loop over sequences: a server extends hundreds of them in a step.")
def sequence_by_sequence(q, k_cache, v_cache, context_lens, softmax_scale=None, window=None):
    return torch.stack(
        [
            naive.attention_per_head(
                q[b], k_cache[b, :n], v_cache[b, :n], softmax_scale, window=window
            )
            for b, n in enumerate(context_lens.tolist())
        ]
    )


# ---------------------------------------------------------------- 3.2 a pool, written another way


@answers.alternative("3.2")
class TheLessonsPool(lesson.KVPool):
    def forget(self, block, held):
        if block not in range(len(held)):
            raise ValueError(f"block: got {block}")
        if block == len(held) - 1:
            return held[:-1]
        self.move(len(held) - 1, block, held[-1])
        return [*held[:block], held[-1], *held[block + 1 : -1]]


@answers.alternative("3.2")
class ByPadding(KVPool):
    """Grows by padding each block with zeros."""

    def reserve(self, tokens):
        if tokens <= self.block_size:
            return
        more = max(64, 2 ** (tokens - 1).bit_length()) - self.block_size
        grown = []
        for slots in (self.k_slots, self.v_slots):
            blocks = self.blocks(slots)
            self.growth_copy_bytes += blocks.nbytes
            padded = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, more)).flatten(1, 2)
            grown.append(torch.cat([padded, torch.zeros_like(slots[:, -1:])], dim=1))
        self.k_slots, self.v_slots = grown
        self.block_size += more
        self.cos_sin_cache = new_cos_sin_cache(self.config, self.block_size)
