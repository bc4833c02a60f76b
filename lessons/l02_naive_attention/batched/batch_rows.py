"""The rows of a sampled batch: their settings as tensors; part of batch_sampling.py."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_cuts import FEW
from lessons.l02_naive_attention.batched.batch_math import Workspace
from lessons.l02_naive_attention.batched.batch_penalties import SeenTokens, float64_column
from lessons.l02_naive_attention.random_streams import streams_of
from lessons.l02_naive_attention.sampling import SamplingParams

Rows = slice | Tensor  # some rows of a batch: a slice, or [N] int64 on its device


# ---------------------------------------------------------------- what a row asks for


def is_sampled(params: SamplingParams) -> bool:
    """Whether the row is drawn and not greedy."""
    return params.temperature > 0


def has_penalties(params: SamplingParams) -> bool:
    """Whether the row's logits change before anything else."""
    return params.has_penalties


def has_cut(params: SamplingParams) -> bool:
    """Whether some tokens are cut."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def has_few(params: SamplingParams) -> bool:
    """Whether top_k is so small that the row's largest entries answer everything."""
    return 1 <= params.top_k <= FEW


def has_many(params: SamplingParams) -> bool:
    """Whether top_k needs a search over the row."""
    return params.top_k > FEW


def has_top_p(params: SamplingParams) -> bool:
    """Whether top-p cuts."""
    return params.top_p < 1


def is_searched(params: SamplingParams) -> bool:
    """Whether a cut needs a search over the row, which costs more than all the rest."""
    return has_many(params) or (has_top_p(params) and not has_few(params))


# ---------------------------------------------------------------- the batch


def take_rows(batch, rows: Rows):
    """Some rows of a dataclass of tensors [B, ...]: a slice shares their memory, [N] int64
    copies.
    """
    tensors = {
        field.name: getattr(batch, field.name)[rows]
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    return dataclasses.replace(batch, **tensors)


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
    kinds: list[tuple[list[int], Rows]]  # rows that are sampled together, as numbers and as Rows
    workspace: Workspace
    search: Callable | None = None  # what finds top-p in the place of batch_cuts.lowest_kept
    # (logits, batch) -> tokens of a group of rows, [B] int64, or None if they have to be sampled
    # here
    shortcut: Callable | None = None

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
        has the same seed when a later batch is made. room: how many tokens a row can append before
        the lists of seen tokens move to new memory. Raises ValueError.
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
            stream=streams_of([p.seed for p in params], device),
            drawn=torch.tensor([len(output) for output in outputs], device=device),
            seen=seen,
            kinds=_kinds(params, device),
            workspace=Workspace(),
        )

    def any(self, condition: Callable[[SamplingParams], bool]) -> bool:
        """Whether a row's parameters meet the condition. Known to Python: no tensor is read."""
        return any(condition(p) for p in self.params)

    def append(self, tokens: Tensor) -> None:
        """Note what was sampled, in place: the rows have drawn and seen it. tokens: [B] int64.

        If a batch with penalties is captured in a graph, this can be replayed `room` times.
        """
        self.drawn += 1
        if self.seen is not None:
            # A row with bad logits ends when its token is read; until then any id will do.
            self.seen.append(tokens.clamp(min=0)[:, None])

    def select(self, rows: list[int]) -> "SamplingBatch":
        """The batch of these rows, in this order. Copies: this batch stays as it is.

        Raises ValueError for no rows.
        """
        if not rows:
            raise ValueError("rows: got []; accepted: one or more rows, an empty batch has no step")
        device = self.drawn.device
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        selected = self._take(index, rows)
        kinds = _kinds(selected.params, device)
        # its own memory, because a captured graph of this batch goes on writing into the old one
        return dataclasses.replace(selected, kinds=kinds, workspace=Workspace())

    def groups(self, size: int) -> Iterator[tuple[Rows, "SamplingBatch"]]:
        """Rows of one kind, at most `size` together, and the part of the batch that is theirs."""
        if len(self.kinds) == 1 and len(self.params) <= size:
            yield slice(None), self  # cutting the one part would cost a tenth of a greedy step
            return
        for numbers, rows in self.kinds:
            for start in range(0, len(numbers), size):
                part = slice(start, min(start + size, len(numbers)))
                # the rows of a slice are all rows, so a part of it is that slice again
                group = part if isinstance(rows, slice) else rows[part]
                yield group, self._take(group, numbers[part])

    def _take(self, rows: Rows, numbers: list[int]) -> "SamplingBatch":
        tensors = take_rows(self, rows)
        seen = None if self.seen is None else take_rows(self.seen, rows)
        params = [self.params[row] for row in numbers]
        return dataclasses.replace(tensors, params=params, seen=seen)


def _columns(values: list[float], device: torch.device | str) -> Tensor:
    """One number a row, for tensors [B, blocks, BLOCK] -> [B, 1, 1]."""
    return float64_column(values, device)[:, :, None]


def _kinds(
    params: list[SamplingParams], device: torch.device | str
) -> list[tuple[list[int], Rows]]:
    """Rows that need no search apart from those that do, so that they do not pay for it."""
    searched = [row for row, p in enumerate(params) if is_searched(p)]
    others = [row for row, p in enumerate(params) if not is_searched(p)]
    if searched and others:
        return [(rows, torch.tensor(rows, device=device)) for rows in (others, searched)]
    every = list(range(len(params)))
    return [(every, slice(0, len(every)))]
