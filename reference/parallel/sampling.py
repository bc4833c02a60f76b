"""Sampling where the logits are: a worker is told what rows of a step want, and tells tokens.

A row of logits is V numbers, and its token is one. Three ways, by what a row wants:

    the likeliest token    each shard of the last stage tells the others three numbers a row
                           (lesson 20's greedy.py), and no row of logits is ever put together
    anything else          these shards gather the row, and the first of them samples it by the
                           sampler of an engine in one process, with the same random numbers
    a draft that was       the row goes to the engine's process, because the distribution that
    drawn                  drafted it is there, and is as wide

The first of these shards keeps of each sequence what its sampler asks for, and hears only what is
new. remote_sampler.py is the other end.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference.engine.request import EngineSequence
from reference.engine.sampler import Sampler


class Told(NamedTuple):
    """A sequence that is sampled in this step, and what is new of it. id: its number. rows: of the
    step's hidden states, for its newest token and for each of `drafted`. new: tokens of its output
    that were not sampled here. who: as `wishes_of` makes it, the first time. masks: of each row,
    (bits of the tokens that may follow: [ceil(V / 32)] int32, whether only the end may) or None;
    None: it has no structure.
    """

    id: int
    rows: list[int]
    new: list[int]
    drafted: list[int]
    who: EngineSequence | None
    masks: list[tuple[np.ndarray, bool] | None] | None


class Wanted(NamedTuple):
    """What is wanted of a step. likeliest: rows of which the likeliest token is all. told: the
    other sequences. gone: numbers of those that will not come again.
    """

    likeliest: list[int]
    told: list[Told]
    gone: list[int]


class Sampled(NamedTuple):
    """What came of it. tokens: of Wanted.likeliest. emitted: of each of Wanted.told, Emitted or
    Verified. failed: in one line, why there are none.
    """

    tokens: list[int]
    emitted: list
    failed: str | None = None


class Masks:
    """In the place of a sequence's Constraint, in one step: what follows it and its drafted tokens
    was found out in the engine's process.
    """

    def __init__(self, masks: list[tuple[np.ndarray, bool] | None]):
        from reference.features.structured import Row  # here: few requests have a structure

        self.rows = [each and Row(torch.from_numpy(each[0]), each[1]) for each in masks]

    def row(self, ahead: list[int] | tuple = ()):
        """As Constraint.row."""
        return self.rows[len(ahead)]


class PartSampler:
    """What samples in the first shard of the last stage. speculates: whether sequences may have
    drafts. device: of the logits.
    """

    def __init__(self, speculates: bool, device: torch.device):
        self.device = device
        self.sequences: dict[int, EngineSequence] = {}
        if speculates:
            from reference.speculation.protocol import Draft  # here: few engines speculate
            from reference.speculation.verification import Verifier

            self.sampler, self.new_draft = Verifier(), Draft
        else:
            self.sampler, self.new_draft = Sampler(), None

    def __call__(self, logits: Tensor, told: list[Told]) -> list:
        """What each sequence emits, of which `hear` has told. logits: [R, V] of all their rows,
        which are changed. Raises ValueError for logits that are not finite.
        """
        sequences = [self.sequences[each.id] for each in told]
        drafts = [] if self.new_draft is None else [[self.new_draft(t.drafted) for t in told]]
        found = self.sampler(logits, sequences, *drafts)
        for sequence, emitted in zip(sequences, found):
            sequence.output += emitted.tokens
        return found

    def hear(self, wanted: Wanted) -> None:
        """From now on the sequences are as they are in the engine's process."""
        for id in wanted.gone:
            del self.sequences[id]
        for told in wanted.told:
            if told.who is not None:
                self.sequences[told.id] = moved(told.who, self.device)
            sequence = self.sequences[told.id]
            sequence.output += told.new
            sequence.constraint = None if told.masks is None else Masks(told.masks)


def moved(sequence: EngineSequence, device: torch.device) -> EngineSequence:
    """Its tensors, in place, where the logits are."""
    if sequence.bias is not None:
        sequence.bias = tuple(part.to(device) for part in sequence.bias)
    if sequence.bans is not None and sequence.bans.others is not None:
        sequence.bans = replace(sequence.bans, others=sequence.bans.others.to(device))
    return sequence


def sample_part(
    sampler: PartSampler,
    wanted: Wanted,
    likeliest: Callable[[list[int]], list[int]],
    logits: Callable[[list[int]], Tensor],
    is_first: bool,
) -> Sampled | None:
    """A shard's part of a step's sampling. likeliest, logits ([R, V]): of some rows; all shards
    call them in the same order, because they talk. is_first: whether this shard samples and tells.
    A failure is told, and the worker goes on: other requests are as they were.
    """
    rows = [row for each in wanted.told for row in each.rows]
    if is_first:
        sampler.hear(wanted)  # before anything can fail, because it is told once
    try:
        tokens = likeliest(wanted.likeliest) if wanted.likeliest else []
        gathered = logits(rows) if rows else None
        if not is_first:
            return None
        return Sampled(tokens, sampler(gathered, wanted.told) if rows else [])
    except ValueError as error:
        return Sampled([], [], str(error)) if is_first else None
