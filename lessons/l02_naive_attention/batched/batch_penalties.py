"""Penalties for a batch: the tokens that each row has seen, kept on the device between the steps.

Penalties change the logits of seen tokens only, so what is kept is as wide as a context and not as
the vocabulary: two numbers a token instead of 128 thousand a row.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import SamplingParams


def float64_column(values: list[float], device: torch.device | str) -> Tensor:
    """One number a row, for tensors that are B rows wide: -> [B, 1] float64."""
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


@dataclass
class SeenTokens:
    """The distinct tokens of each row's prompt and output, and how often its output holds them.

    A row of fewer than L distinct tokens repeats its first one, with the same count. Repetitions
    get the same penalty, so writing a logit twice does no harm.
    """

    tokens: Tensor  # [B, L] int64
    counts: Tensor  # [B, L] int64
    distinct: Tensor  # [B, 1] int64; the tokens after so many are repetitions
    repetition: Tensor  # [B, 1] float64, and so are the other two
    presence: Tensor
    frequency: Tensor
    highest_token: int  # of the lists of token ids that it was made from
    room: int  # how many tokens can be appended before L grows

    @classmethod
    def of(
        cls,
        params: list[SamplingParams],
        prompts: list[list[int]],
        outputs: list[list[int]],
        device: torch.device | str,
        room: int,
    ) -> "SeenTokens":
        """What each row has seen: its prompt and its output, lists of token ids."""
        tokens, counts = [], []
        for prompt, output in zip(prompts, outputs):
            in_output = Counter(output)
            row = list(dict.fromkeys([*prompt, *output]))  # distinct, in the order of the text
            tokens.append(row)
            counts.append([in_output[token] for token in row])
        width = max(map(len, tokens), default=0) + max(room, 1)
        return cls(
            tokens=_rectangle(tokens, width, device),
            counts=_rectangle(counts, width, device),
            distinct=torch.tensor([[len(row)] for row in tokens], device=device),
            repetition=float64_column([p.repetition_penalty for p in params], device),
            presence=float64_column([p.presence_penalty for p in params], device),
            frequency=float64_column([p.frequency_penalty for p in params], device),
            highest_token=max((max(row) for row in tokens if row), default=0),
            room=max(room, 1),
        )

    def append(self, new: Tensor) -> None:
        """Count one more token of each row's output, in place. new: [B, 1] int64."""
        if self.room == 0:
            self._grow()
        self.room -= 1
        known = (self.tokens == new) & (self.distinct > 0)
        is_new = ~known.any(dim=1, keepdim=True)
        column = torch.arange(self.tokens.shape[1], device=new.device)
        # The first token of an empty row fills it: all that follows is then its repetition.
        written = is_new & ((column == self.distinct) | (self.distinct == 0))
        self.tokens.copy_(torch.where(written, new, self.tokens))
        self.counts.copy_(torch.where(written, 1, self.counts + known))
        self.distinct += is_new

    def _grow(self) -> None:
        """Twice as wide. New tensors: a CUDA graph over the old ones must be captured again."""
        self.room = self.tokens.shape[1]
        for name in ("tokens", "counts"):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old[:, :1].expand_as(old)], dim=1))

    def penalize_(self, logits: Tensor) -> None:
        """sampling.penalize for every row, in place. logits: [B, V]."""
        dtype = logits.dtype
        # 1.0 for an empty row, whose tokens are only placeholders
        repetition = torch.where(self.distinct > 0, self.repetition, 1.0).to(dtype)
        presence, frequency = self.presence.to(dtype), self.frequency.to(dtype)
        x = logits.gather(1, self.tokens)
        x = torch.where(x > 0, x / repetition, x * repetition)
        x = x - frequency * self.counts - presence * (self.counts > 0)
        logits.scatter_(1, self.tokens, x)


def _rectangle(rows: list[list[int]], width: int, device: torch.device | str) -> Tensor:
    """Rows of different lengths -> [B, width] int64, each filled up with its first entry, or 0."""
    filled = [row + (row[:1] or [0]) * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device)
