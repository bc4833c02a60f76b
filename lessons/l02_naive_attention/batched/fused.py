"""Sampling on a GPU in a few launches: `sample_batch` with kernels, and without a sort.

`sampling.probabilities` and `sampling.draw` are the specification. `sample_fused` takes the same
random number of each row and gives the same token. Four launches read the logits (two if no row
asks for top-k or top-p, one if all rows are greedy), and one draws: see sample_kernels.py.
Penalties are one launch more. No value is read back, so a step can be captured.

Probabilities are float32's, right to 2e-5, and counted in units of 2^-40 of the likeliest token's.
A token a billion times less likely than that has 1100 units. One below 2^-41 has none and is never
drawn.

Source: the draw by inverse CDF, Devroye 1986, *Non-uniform random variate generation*, chapter 3.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_penalties import SeenTokens
from lessons.l02_naive_attention.batched.batch_rows import SamplingBatch, has_penalties, is_sampled
from lessons.l02_naive_attention.batched.draw_kernel import draw_kernel
from lessons.l02_naive_attention.batched.sample_kernels import (
    BANDS,
    bands_kernel,
    largest_kernel,
    lists_kernel,
    narrow_kernel,
    penalize_kernel,
)
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.toolbox.kernels.triton_ import triton

# Tokens of a part: many programs for a batch of many rows, and more programs a row for few rows.
LARGE_PART, SMALL_PART = 4096, 2048
ENOUGH_PROGRAMS = 256  # about two for each SM of an H200 or A100
SLOTS = 2048  # places of the lists that draw_kernel looks at together
MAX_VOCAB = 2**22  # so that a row's units fit in int64
# Above it PyTorch takes tokens for equally likely that these kernels, which compare logits, do not.
HOTTEST = 1e4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def has_ranks(params: SamplingParams) -> bool:
    """Whether a row is cut by rank or mass, which asks for a search."""
    return is_sampled(params) and (params.top_k > 0 or params.top_p < 1)


def is_hot(params: SamplingParams) -> bool:
    """Whether a row has to be sampled in PyTorch."""
    return params.temperature > HOTTEST


def part_size(rows: int, vocab_size: int) -> int:
    """How many tokens a program reads. Any size gives the same tokens."""
    programs = rows * triton.cdiv(vocab_size, LARGE_PART)
    return LARGE_PART if programs >= ENOUGH_PROGRAMS else SMALL_PART


@torch.no_grad()
def sample_fused(logits: Tensor, batch: SamplingBatch, part: int | None = None) -> Tensor | None:
    """batch_sampling.sample_batch by kernels: [B, V] -> [B] int64, or None for float64 logits, a
    temperature above HOTTEST or a vocabulary above MAX_VOCAB, which have to be sampled there.

    part: tokens a program, a power of 2. Logits and batch were checked by sample_batch.
    """
    rows, vocab_size = logits.shape
    if logits.dtype not in DTYPES or vocab_size > MAX_VOCAB or batch.any(is_hot):
        return None
    part = part or part_size(rows, vocab_size)
    parts = triton.cdiv(vocab_size, part)
    scores = penalized(logits, batch.seen) if batch.any(has_penalties) else logits
    scores = scores if scores.stride(1) == 1 else scores.contiguous()

    def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    maxima, lists = memory(parts), memory(parts, part)
    bands, narrow = memory(parts, BANDS.value), memory(parts, BANDS.value)
    ranges = memory(parts, 2)
    masses, counts = memory(parts, 2, dtype=torch.int64), memory(parts, dtype=torch.int32)
    tokens = memory(dtype=torch.int64)
    asked = batch.temperature, batch.top_k, batch.top_p, batch.min_p
    row, grid = scores.stride(0), (rows, parts)
    sizes = dict(PART=part, PARTS=triton.next_power_of_2(parts), num_warps=8)

    largest_kernel[grid](scores, maxima, vocab_size, row, PART=part, num_warps=8)
    if batch.any(has_ranks):
        bands_kernel[grid](scores, maxima, *asked, bands, vocab_size, row, **sizes)
        found = bands, ranges, narrow
        narrow_kernel[grid](scores, maxima, *asked, *found, vocab_size, row, **sizes)
    if batch.any(is_sampled):
        found = ranges, narrow, masses, counts, lists
        lists_kernel[grid](scores, maxima, *asked, *found, vocab_size, row, **sizes)
    numbers = batch.stream, batch.drawn
    found = masses, counts, lists, tokens
    sizes["COLS"] = max(1, SLOTS // sizes["PARTS"])
    draw_kernel[(rows,)](scores, maxima, *asked, *numbers, *found, vocab_size, parts, row, **sizes)
    return tokens


def penalized(logits: Tensor, seen: SeenTokens) -> Tensor:
    """SeenTokens.penalize_ on a copy. logits: [B, V] -> [B, V] float32."""
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    width = seen.tokens.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    penalize_kernel[len(logits), triton.cdiv(width, block)](
        scores,
        seen.tokens,
        seen.counts,
        seen.distinct,
        seen.repetition,
        seen.presence,
        seen.frequency,
        width,
        scores.stride(0),
        BLOCK=block,
        enable_fp_fusion=False,  # rounds each product and each difference, as PyTorch does
    )
    return scores
