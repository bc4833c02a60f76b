"""Sampling a whole batch on the device: each row its own settings, no sort, no wait for the GPU.

`sampling.probabilities` is the specification, one row at a time. Here all rows go together:

    batch = SamplingBatch.of(params, prompts, outputs, device)  # when the set of requests changes
    tokens = sample_batch(logits, batch)                        # logits: [B, V] -> [B] on the device
    batch.append(tokens)                                        # before the next step is sampled
    answers = read_tokens(tokens)                               # a list; here Python waits
    batch = batch.select([0, 2])                                # rows 0 and 2 go on, as rows 0 and 1

Python decides which passes are needed from the parameters, which it knows, and never from the value
of a tensor. So `sample_batch` and `append` can be captured in a CUDA graph.

A row's token depends on nothing but that row: its logits, its parameters, its tokens, its seed, and
how many tokens it has drawn. A request gives the same tokens alone, in any batch, and when it is
computed again after a preemption.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lessons.l02_naive_attention.batch_cuts import (
    FEW,
    keep_down_to,
    kth_largest,
    largest,
    lowest_kept,
    reaching,
)
from lessons.l02_naive_attention.batch_math import (
    BLOCK,
    Workspace,
    blocks_of,
    draw_tokens,
    first_largest,
    mix64,
    total,
    uniform,
)
from lessons.l02_naive_attention.batch_penalties import SeenTokens, float64_column, take_rows
from lessons.l02_naive_attention.sampling import SamplingParams

# Logits that are sampled together. On a CPU what is computed from them then stays in the cache, and
# on a GPU it stays below a gigabyte.
GROUP = {"cpu": 2**19, "cuda": 2**23}
# Outside, a temperature would leave the range of float32; inside, it does what it would do there.
COLDEST, HOTTEST = 1e-30, 1e30
BAD_LOGITS = -1  # the token of a row whose largest logit is NaN or infinite


@dataclass
class SamplingBatch:
    """What the rows of a batch are sampled with. Make it by `SamplingBatch.of`."""

    params: list[SamplingParams]  # of row b, seed included
    temperature: Tensor  # [B, 1, 1] float64, and so are the next three
    top_k: Tensor  # inf: all tokens
    top_p: Tensor
    min_p: Tensor
    stream: Tensor  # [B] int64, from the seed: which random numbers are the row's
    drawn: Tensor  # [B] int64: tokens drawn so far, so the place in that stream
    seen: SeenTokens | None  # None: no row has a penalty
    workspace: Workspace

    @classmethod
    def of(
        cls,
        params: list[SamplingParams],
        prompts: list[list[int]],
        outputs: list[list[int]],
        device: torch.device | str = "cpu",
        room: int = 256,
    ) -> "SamplingBatch":
        """The batch of requests that have produced `outputs` so far; lists hold one entry a row.

        A row without a seed gets a fresh one. Keep `batch.params[b]` with the request, so that it
        has the same seed when a later batch is made. room: tokens that can be appended before the
        lists of seen tokens move to new memory. Raises ValueError.
        """
        if not len(params) == len(prompts) == len(outputs) >= 1:
            raise ValueError(
                f"params, prompts, outputs: got {len(params)}, {len(prompts)} and {len(outputs)} "
                f"entries; accepted: one each for every row, and one or more rows"
            )
        params = [p.seeded() for p in params]
        seen = None
        if any(p.has_penalties for p in params):
            seen = SeenTokens.of(params, prompts, outputs, device, room)
        return cls(
            params=params,
            temperature=_columns([p.temperature for p in params], device),
            top_k=_columns([p.top_k if p.top_k > 0 else math.inf for p in params], device),
            top_p=_columns([p.top_p for p in params], device),
            min_p=_columns([p.min_p for p in params], device),
            stream=mix64(torch.tensor([p.seed for p in params], device=device)),
            drawn=torch.tensor([len(output) for output in outputs], device=device),
            seen=seen,
            workspace=Workspace(),
        )

    def any(self, condition: Callable[[SamplingParams], bool]) -> bool:
        """Whether a row's parameters meet the condition. Known to Python: no tensor is read."""
        return any(condition(p) for p in self.params)

    def append(self, tokens: Tensor) -> None:
        """Note what was sampled, in place: the rows have drawn and seen it. tokens: [B] int64."""
        self.drawn += 1
        if self.seen is not None:
            # A row with bad logits ends when its token is read; until then any id will do.
            self.seen.append(tokens.clamp(min=0)[:, None])

    def select(self, rows: list[int]) -> "SamplingBatch":
        """The batch of these rows, in this order. Copies: this batch stays as it is. Raises ValueError
        for no rows.
        """
        if not rows:
            raise ValueError("rows: got []; accepted: one or more rows, an empty batch has no step")
        index = torch.tensor(rows, dtype=torch.int64, device=self.drawn.device)
        return self._take(index, [self.params[row] for row in rows])

    def _take(self, rows: slice | Tensor, params: list[SamplingParams]) -> "SamplingBatch":
        seen = None if self.seen is None else take_rows(self.seen, rows)
        return replace(take_rows(self, rows), params=params, seen=seen)


# ---------------------------------------------------------------- a step


@torch.no_grad()
def sample_batch(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The next token of each row. logits: [B, V], any float dtype -> [B] int64 on their device.

    BAD_LOGITS for a row whose largest logit is not finite: `read_tokens` raises for it. Computed in
    float64 for float64 logits, else in float32. Changes neither logits nor batch. Raises ValueError.
    """
    _check(logits, batch)
    groups = _groups(logits, batch)
    return torch.cat([_sample_group(logits[rows], group) for rows, group in groups])


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
    _check(logits, batch)
    groups = _groups(logits, batch)
    return torch.cat([_group_probabilities(logits[rows], group) for rows, group in groups])


def _columns(values: list[float], device: torch.device | str) -> Tensor:
    """One number a row, for tensors [B, blocks, BLOCK] -> [B, 1, 1]."""
    return float64_column(values, device)[:, :, None]


def _check(logits: Tensor, batch: SamplingBatch) -> None:
    if logits.dim() != 2 or len(logits) != len(batch.params) or not logits.is_floating_point():
        raise ValueError(
            f"logits: got {logits.dtype} {list(logits.shape)}; accepted: [{len(batch.params)}, V] "
            f"of a float dtype, one row for each row of the batch"
        )
    if batch.seen is not None and batch.seen.highest_token >= logits.shape[1]:
        raise ValueError(
            f"prompts, outputs: got token {batch.seen.highest_token}; accepted: 0 to "
            f"{logits.shape[1] - 1}, the columns of the logits"
        )


def _groups(logits: Tensor, batch: SamplingBatch) -> Iterator[tuple[slice, SamplingBatch]]:
    """Consecutive rows with at most GROUP logits together, but one row at least."""
    row_numel = blocks_of(logits.shape[1]) * BLOCK
    size = max(1, GROUP.get(logits.device.type, GROUP["cuda"]) // row_numel)
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        yield rows, batch._take(rows, batch.params[rows])


def _memory(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Room for a group's logits and for what is computed from them, [4, B, blocks, BLOCK]."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    shape = (len(logits), blocks_of(logits.shape[1]), BLOCK)
    return batch.workspace.tensors(4, shape, dtype, logits.device)


def _sample_group(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits: [B, V] -> [B] int64."""
    memory = _memory(logits, batch)
    scores = _scores(logits, batch, memory[0])
    maxima = scores.amax(dim=-1)
    highest = maxima.amax(dim=-1)
    tokens = first_largest(scores, maxima)
    if batch.any(_is_sampled):
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


def _scores(logits: Tensor, batch: SamplingBatch, memory: Tensor) -> Tensor:
    """The logits after penalties. logits: [B, V] -> [B, blocks, BLOCK], in `memory` if they differ
    from the logits.
    """
    vocab_size = logits.shape[1]
    penalized = batch.any(lambda params: params.has_penalties)
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
    if not batch.any(_has_cut):
        return p
    lowest = batch.min_p.to(p.dtype)
    if batch.any(_has_few):
        candidates = largest(p, max(params.top_k for params in batch.params if _has_few(params)))
        lowest = torch.maximum(lowest, kth_largest(candidates, batch.top_k))
    if batch.any(_has_many):
        lowest = torch.maximum(lowest, lowest_kept(p, batch.top_k, kept))
    weight = total(torch.ge(p, lowest, out=kept).mul_(p))
    if not batch.any(_has_top_p):
        return kept
    wanted = torch.where(batch.top_p < 1, batch.top_p * weight, math.inf)
    if batch.any(lambda params: _has_top_p(params) and _has_few(params)):
        lowest = torch.maximum(lowest, reaching(candidates, batch.top_k, wanted))
    if batch.any(lambda params: _has_top_p(params) and not _has_few(params)):
        searched = torch.where(batch.top_k <= FEW, math.inf, wanted)
        lowest = torch.maximum(lowest, lowest_kept(p, searched, kept, weights=p))
    return keep_down_to(p, lowest, wanted, kept, ties)


# ---------------------------------------------------------------- what a row asks for


def _is_sampled(params: SamplingParams) -> bool:
    return params.temperature > 0


def _has_few(params: SamplingParams) -> bool:
    return 1 <= params.top_k <= FEW


def _has_many(params: SamplingParams) -> bool:
    return params.top_k > FEW


def _has_top_p(params: SamplingParams) -> bool:
    return params.top_p < 1


def _has_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0
