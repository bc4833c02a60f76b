"""Sampling on a GPU in three launches and two passes over the logits: `sample_batch` with kernels.

`sampling.probabilities` and `sampling.draw` are the specification, row by row with a sort. Here
nothing is sorted: a program finds by bisection where top-k and top-p cut, among the few tokens that
can be kept at all (sample_kernels.py). No value is read back, so a step can be captured.

What stays is the specification's: of tokens that tie with the k-th all, of equal tokens at the edge
of top-p those with the smallest ids. Probabilities are float32's, right to 2e-5; a token a billion
times less likely than the likeliest has 1100 units, and below 2^-41 none, so it is never drawn.

Sources: the bisection by bits as in batch_cuts.py; the draw by inverse CDF, Devroye 1986, chapter 3.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_penalties import SeenTokens
from lessons.l02_naive_attention.batched.batch_rows import SamplingBatch, has_penalties, is_sampled
from lessons.l02_naive_attention.batched.sample_kernels import (
    draw_kernel,
    penalize_kernel,
    tile_maxima_kernel,
    weigh_kernel,
)
from lessons.toolbox.kernels.triton_ import triton

TILE = 256  # tokens, of which the largest is noted
# Tokens of a part: many programs for a batch of many rows, and more programs a row for few rows.
LARGE_PART, SMALL_PART = 8192, 2048
ENOUGH_PROGRAMS = 256  # two for each SM of an H200 or A100
SLOTS = 2048  # candidates that a program looks at together


def part_size(rows: int, vocab_size: int) -> int:
    """How many tokens a program reads. Any size gives the same tokens."""
    programs = rows * triton.cdiv(vocab_size, LARGE_PART)
    return LARGE_PART if programs >= ENOUGH_PROGRAMS else SMALL_PART


@torch.no_grad()
def sample_fused(logits: Tensor, batch: SamplingBatch, part: int | None = None) -> Tensor:
    """batch_sampling.sample_batch for float32, float16 or bfloat16 logits: [B, V] -> [B] int64.

    part: tokens a program, a power of 2 and 16 or more. Logits and batch are checked by the caller.
    """
    rows, vocab_size = logits.shape
    part = part or part_size(rows, vocab_size)
    tile = min(TILE, part // 8)
    tiles, parts = part // tile, triton.cdiv(vocab_size, part)
    scores = penalized(logits, batch.seen) if batch.any(has_penalties) else logits
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    device = logits.device
    maxima = torch.empty(rows, parts * tiles, dtype=torch.float32, device=device)
    masses = torch.empty(rows, parts, dtype=torch.int64, device=device)
    counts = torch.empty(rows, parts, dtype=torch.int32, device=device)
    candidates = torch.empty(rows, parts * part, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    asked = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    all_tiles = triton.next_power_of_2(parts * tiles)
    all_parts = triton.next_power_of_2(parts)

    tile_maxima_kernel[rows, parts](
        scores, maxima, vocab_size, scores.stride(0), TILES=tiles, TILE=tile, num_warps=8
    )
    if batch.any(is_sampled):
        weigh_kernel[rows, parts](
            scores,
            maxima,
            *asked,
            masses,
            counts,
            candidates,
            vocab_size,
            parts * tiles,
            scores.stride(0),
            PART=part,
            ALL_TILES=all_tiles,
            num_warps=8,
        )
    draw_kernel[(rows,)](
        scores,
        maxima,
        *asked,
        batch.stream,
        batch.drawn,
        masses,
        counts,
        candidates,
        tokens,
        vocab_size,
        parts * tiles,
        parts,
        scores.stride(0),
        PART=part,
        TILES=tiles,
        ALL_TILES=all_tiles,
        PARTS=all_parts,
        COLS=max(1, SLOTS // all_parts),
        num_warps=8,
    )
    return tokens


def penalized(logits: Tensor, seen: SeenTokens) -> Tensor:
    """SeenTokens.penalize_ on a copy. logits: [B, V] -> [B, V] float32."""
    scores = logits.to(torch.float32, copy=True)
    width = seen.tokens.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    penalize_kernel[len(logits), triton.cdiv(width, block)](
        logits,
        scores,
        seen.tokens,
        seen.counts,
        seen.distinct,
        seen.repetition,
        seen.presence,
        seen.frequency,
        width,
        logits.stride(0),
        scores.stride(0),
        BLOCK=block,
    )
    return scores
