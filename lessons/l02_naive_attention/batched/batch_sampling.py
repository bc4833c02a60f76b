"""Sampling a whole batch on the device: each row its own settings, no sort, no wait for the GPU.

`sampling.sample` is the specification, one row at a time. Here all rows go together:

    batch = SamplingBatch.of(params, prompts, outputs, device)  # when the set of requests changes
    # logits: [B, V] -> [B] on the device
    tokens = sample_batch(logits, batch)
    batch.append(tokens)                                        # before the next step is sampled
    answers = read_tokens(tokens)                               # a list; here Python waits
    # rows 0 and 2 go on, as rows 0 and 1
    batch = batch.select([0, 2])

Python decides which passes are needed from the parameters, which it knows, and never from the value
of a tensor. So `sample_batch` and `append` can be captured in a CUDA graph.

A row's token depends on nothing but that row: its logits, its parameters, its tokens, its seed, and
how many tokens it has drawn. A request gives the same tokens alone, in any batch, and when it is
computed again after a preemption.

For float64 logits the distribution is the specification's to 1e-12, and the tokens are those of
`sampling.sample`. For others it is computed in float32: its probabilities are right to 2e-5, and
where a comparison of the specification is closer than that (is this token the last that top-p
keeps?) it may fall the other way. So about one token in a million differs from `sampling.sample`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lessons.l02_naive_attention.batched.batch_cuts import (
    FEW,
    keep_down_to,
    kth_largest,
    largest,
    lowest_kept,
    reaching,
)
from lessons.l02_naive_attention.batched.batch_math import (
    BLOCK,
    blocks_of,
    draw_tokens,
    first_largest,
    total,
)
from lessons.l02_naive_attention.batched.batch_rows import (
    Rows,
    SamplingBatch,
    has_cut,
    has_few,
    has_many,
    has_penalties,
    has_top_p,
    is_sampled,
)
from lessons.l02_naive_attention.random_streams import uniform

# Logits that are sampled together. On a CPU what is computed from them then stays in the cache, and
# on a GPU it stays below 200 MB.
GROUP = {"cpu": 2**19, "cuda": 2**23}
# Outside, a temperature would leave the range of float32; inside, it does what it would do there.
COLDEST, HOTTEST = 1e-30, 1e30
BAD_LOGITS = -1  # the token of a row whose largest logit is NaN or infinite


# ---------------------------------------------------------------- a step


@torch.no_grad()
def sample_batch(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The next token of each row. logits: [B, V], any float dtype -> [B] int64 on their device.

    BAD_LOGITS for a row whose largest logit is not finite: `read_tokens` raises for it. Changes
    neither logits nor batch. Raises ValueError for logits that do not belong to the batch.
    """
    tokens = torch.empty_like(batch.drawn)
    for rows, group in _groups(logits, batch):
        tokens[rows] = _sample_group(logits[rows], group)
    return tokens


def read_tokens(tokens: Tensor) -> list[int]:
    """The sampled tokens on the host, which waits for them here. tokens: [B] -> B token ids.

    Raises ValueError for a row whose largest logit was not finite.
    """
    ids = tokens.tolist()
    for row, token in enumerate(ids):
        if token == BAD_LOGITS:
            raise ValueError(f"logits: the largest of row {row} is not finite; accepted: finite")
    return ids


@torch.no_grad()
def batch_probabilities(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The distribution that `sample_batch` draws from: sampling.probabilities for each row.

    logits: [B, V] -> [B, V] float64 for float64 logits, else float32. A row sums to 1, or is NaN
    where the largest logit is not finite.
    """
    probabilities = torch.empty_like(logits, dtype=_precision(logits))
    for rows, group in _groups(logits, batch):
        probabilities[rows] = _group_probabilities(logits[rows], group)
    return probabilities


def _groups(logits: Tensor, batch: SamplingBatch) -> Iterator[tuple[Rows, SamplingBatch]]:
    """Rows with at most GROUP logits together, but one row at least."""
    if logits.dim() != 2 or len(logits) != len(batch.params) or not logits.is_floating_point():
        raise ValueError(
            f"logits: got {logits.dtype} {list(logits.shape)}; accepted: [{len(batch.params)}, V] "
            f"of a float dtype, one row for each row of the batch"
        )
    vocab_size = logits.shape[1]
    if batch.seen is not None and batch.seen.highest_token >= vocab_size:
        raise ValueError(
            f"prompts, outputs: got token {batch.seen.highest_token}; accepted: 0 to "
            f"{vocab_size - 1}, the columns of the logits"
        )
    group_numel = GROUP.get(logits.device.type, GROUP["cuda"])
    row_numel = blocks_of(vocab_size) * BLOCK
    return batch.groups(size=max(1, group_numel // row_numel))


def _precision(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- a group of rows


def _sample_group(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits: [B, V] -> [B] int64."""
    if batch.shortcut is not None and (found := batch.shortcut(logits, batch)) is not None:
        return found
    memory = _memory(logits, batch)
    scores = _scores(logits, batch, memory[0])
    maxima = scores.amax(dim=-1)
    highest = maxima.amax(dim=-1)
    tokens = first_largest(scores, maxima)
    if batch.any(is_sampled):
        p = _kept(scores, highest[:, None, None], batch, *memory[1:])
        drawn = draw_tokens(p, uniform(batch.stream, batch.drawn))
        tokens = torch.where(batch.temperature.view(-1) > 0, drawn, tokens)
    return torch.where(highest.isfinite(), tokens, BAD_LOGITS)


def _group_probabilities(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits: [B, V] -> [B, V]."""
    memory = _memory(logits, batch)
    scores = _scores(logits, batch, memory[0])
    maxima = scores.amax(dim=-1)
    highest = maxima.amax(dim=-1)[:, None, None]
    p = _kept(scores, highest, batch, *memory[1:])
    greedy = one_hot(first_largest(scores, maxima), p[0].numel()).view(p.shape)
    p = torch.where(batch.temperature > 0, p / total(p), greedy)
    p = torch.where(highest.isfinite(), p, torch.nan)
    return p.flatten(1)[:, : logits.shape[1]].to(scores.dtype)


def _memory(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Room for a group's logits and for what is computed from them, [4, B, blocks, BLOCK]."""
    shape = (len(logits), blocks_of(logits.shape[1]), BLOCK)
    return batch.workspace.tensors(4, shape, _precision(logits), logits.device)


def _scores(logits: Tensor, batch: SamplingBatch, memory: Tensor) -> Tensor:
    """The logits after penalties. logits: [B, V] -> [B, blocks, BLOCK], in `memory` if they differ
    from the logits.
    """
    vocab_size = logits.shape[1]
    penalized = batch.any(has_penalties)
    if logits.dtype == memory.dtype and vocab_size % BLOCK == 0 and not penalized:
        return logits.reshape(memory.shape)
    rows = memory.flatten(1)
    rows[:, :vocab_size] = logits
    rows[:, vocab_size:] = -torch.inf
    if penalized:
        batch.seen.penalize_(rows)
    return memory


def _kept(
    scores: Tensor, highest: Tensor, batch: SamplingBatch, p: Tensor, kept: Tensor, ties: Tensor
) -> Tensor:
    """Probabilities relative to the likeliest token's, and 0 for tokens that are cut.

    scores: [B, blocks, BLOCK], highest: [B, 1, 1] -> as scores, in the memory of p or kept. A cut
    that one row asks for runs over all rows of the group, and changes nothing in the others.
    """
    temperature = batch.temperature.clamp(COLDEST, HOTTEST).to(p.dtype)
    # the largest goes first: a difference overflows only to -inf
    torch.sub(scores, highest, out=p).div_(temperature).exp_()
    if not batch.any(has_cut):
        return p
    lowest = batch.min_p.to(p.dtype)
    if batch.any(has_few):
        candidates = largest(p, max(params.top_k for params in batch.params if has_few(params)))
        lowest = torch.maximum(lowest, kth_largest(candidates, batch.top_k))
    if batch.any(has_many):
        lowest = torch.maximum(lowest, lowest_kept(p, batch.top_k, kept))
    weight = total(torch.ge(p, lowest, out=kept).mul_(p))
    if not batch.any(has_top_p):
        return kept
    wanted = torch.where(batch.top_p < 1, batch.top_p * weight, math.inf)
    if batch.any(lambda params: has_top_p(params) and has_few(params)):
        lowest = torch.maximum(lowest, reaching(candidates, batch.top_k, wanted))
    if batch.any(lambda params: has_top_p(params) and not has_few(params)):
        searched = torch.where(batch.top_k <= FEW, math.inf, wanted)
        search = batch.search or lowest_kept
        lowest = torch.maximum(lowest, search(p, searched, kept, weights=p))
    return keep_down_to(p, lowest, wanted, kept, ties)
