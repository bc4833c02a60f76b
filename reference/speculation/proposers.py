"""Proposers: a smaller model, which takes a pass for each guess or one for all, and the sequence's
own text. Lesson 16 explains the first and the last, lesson 17 (PARD) the other.
"""

from itertools import accumulate

import torch
from torch import Tensor

from lessons.l02_naive_attention.batched.batch_sampling import (
    batch_probabilities,
    read_tokens,
    sample_batch,
)
from lessons.l16_speculative_sampling.stand_ins import draw_rows
from reference.engine.model_runner import ModelRunner
from reference.engine.request import EngineSequence
from reference.speculation.protocol import Draft, Proposer, Ran, Tables
from reference.speculation.verification import DRAFTS, Row, RowBatches, adjust_rows, numbers


class NgramProposer(Proposer):
    """What followed the newest tokens the last time follows again.

    Of all n-grams of `shortest` to `longest` tokens it knows where the newest one ends, so a step
    looks up a few tuples, however long the text is. Source: Saxena 2023, prompt lookup decoding.
    """

    taps, pools = None, ()

    def __init__(self, longest: int, shortest: int = 1):
        self.sizes = range(longest, shortest - 1, -1)
        # of each sequence: {n-gram: where it ends}, and up to where its text is in it
        self.known: dict[int, dict[tuple, int]] = {}
        self.read: dict[int, int] = {}

    def most(self, sequence: EngineSequence) -> int:
        """No limit of its own."""
        return 2**31

    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """What stands behind the longest n-gram that was there before; nothing if none was."""
        return [Draft(self.lookup(s, count)) for s, count in zip(sequences, counts)]

    def lookup(self, sequence: EngineSequence, count: int) -> list[int]:
        """At most `count` tokens."""
        tokens, end = sequence.all_tokens, sequence.computed + 1  # behind it stand places
        known = self.known.setdefault(sequence.row, {})
        # The n-grams that end before the newest token, because those at it are looked for.
        for at in range(self.read.get(sequence.row, 1), end):
            for size in self.sizes:
                if size <= at:
                    known[tuple(tokens[at - size : at])] = at
        self.read[sequence.row] = end
        for size in self.sizes:
            behind = known.get(tuple(tokens[end - size : end])) if size < end else None
            if behind is not None:
                return tokens[behind : min(behind + count, end)]
        return []

    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """The text itself tells everything. features: [T, F]."""

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """The child reads the text for itself."""

    def forget(self, sequence: EngineSequence) -> None:
        """Drop its n-grams."""
        self.known.pop(sequence.row, None)
        self.read.pop(sequence.row, None)


class DraftModelProposer(Proposer):
    """A smaller model over the target's block tables.

    held: how many tokens of each sequence have their K and V in its pool. It may be behind the
    target: the last token of a draft, for one, never ran. What is lacking in a block that is not
    full runs with the next draft's first pass. A full block is completed at once, because the
    prefix cache may hand it to another sequence. So of a sequence that it has not met, the full
    blocks are there.
    """

    taps = None

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.pools = (runner.pool,)
        self.max_context_len = runner.max_model_len
        self.held: dict[int, int] = {}
        self.batches: list[RowBatches] = []  # of the first drafted token, the second, …

    def most(self, sequence: EngineSequence) -> int:
        """As many as its context has room for."""
        return max(0, self.max_context_len - sequence.computed)

    @torch.inference_mode()
    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """Token after token, for all sequences together."""
        drafted: list[list[int]] = [[] for _ in sequences]
        q: list[list[Tensor]] = [[] for _ in sequences]
        for index in range(max(counts)):
            active = [b for b, count in enumerate(counts) if count > index]
            rows = [Row(sequences[b], list(drafted[b])) for b in active]
            tokens, p = self.draw(self.next_logits(rows, tables), rows, index)
            for at, b in enumerate(active):
                drafted[b].append(tokens[at])
                if sequences[b].sampling.temperature > 0:
                    q[b].append(p[at])
        return [Draft(own, torch.stack(p) if p else None) for own, p in zip(drafted, q)]

    def next_logits(self, rows: list[Row], tables: Tables) -> Tensor:
        """What the draft says after the drafted tokens of each row: [B, V]."""
        chunks = [self.lacking(row.sequence, row.ahead) for row in rows]
        hidden = self.runner.run(chunks, [tables[row.sequence.row] for row in rows])
        for row, (tokens, first) in zip(rows, chunks):
            self.held[row.sequence.row] = first + len(tokens)
        ends = [end - 1 for end in accumulate(len(tokens) for tokens, _ in chunks)]
        return self.runner.logits(hidden, ends)

    def lacking(self, sequence: EngineSequence, drafted: list[int]) -> tuple[list[int], int]:
        """The tokens that the next pass runs, and how many stand in front of them."""
        newest = sequence.computed
        if drafted:
            return drafted[-1:], newest + len(drafted)
        held = self.held_of(sequence, newest)
        return sequence.all_tokens[held : newest + 1], held

    def held_of(self, sequence: EngineSequence, computed: int) -> int:
        """How many of its tokens are in the pool; of a new sequence that has computed so many."""
        size = self.runner.pool.block_size
        return self.held.get(sequence.row, computed // size * size)

    def draw(self, logits: Tensor, rows: list[Row], index: int) -> tuple[list[int], Tensor | None]:
        """A token for each row, and what it was drawn from. logits: [B, V] -> p: [B, V] float32;
        None if all are greedy. index: of the token in the draft.
        """
        if index == len(self.batches):
            self.batches.append(RowBatches())
        adjust_rows(logits, rows)
        batch = self.batches[index](rows, logits.device)
        if all(row.sampling.temperature == 0 for row in rows):
            return read_tokens(sample_batch(logits, batch)), None
        p = batch_probabilities(logits, batch).float()
        return draw_rows(p, numbers(batch, DRAFTS)).tolist(), p

    @torch.inference_mode()
    def observe(self, ran: list[Ran], features: Tensor | None, tables: Tables) -> None:
        """Complete the blocks that are full now, prompts above all. features: [T, F], not read."""
        chunks, owned, size = [], [], self.runner.pool.block_size
        for sequence, first, count, _ in ran:
            end = min(first + count, self.max_context_len)
            held = min(self.held_of(sequence, first), end)  # what was rejected is not held
            if end // size > held // size:
                chunks.append((sequence.all_tokens[held:end], held))
                owned.append(tables[sequence.row])
                held = end
            self.held[sequence.row] = held
        if chunks:
            self.runner.run(chunks, owned)

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """Both own the same blocks, and lack the same tokens."""
        self.held[child.row] = self.held[parent.row]

    def forget(self, sequence: EngineSequence) -> None:
        """Its blocks are another sequence's now."""
        self.held.pop(sequence.row, None)


class ParallelDraftProposer(DraftModelProposer):
    """The same with one pass of the draft: its newest token and masks for the further guesses.

    A mask has a place in the target's blocks for the time of the pass, where the drafted token has
    one. Its K and V are not held, so the tokens that come there run, and write over them.
    """

    def __init__(self, runner: ModelRunner, mask_token: int):
        super().__init__(runner)
        self.mask_token = mask_token
        self.places: dict[int, Tensor] = {}  # of this step's sequences: [count, V]

    @torch.inference_mode()
    def propose(
        self, sequences: list[EngineSequence], counts: list[int], tables: Tables
    ) -> list[Draft]:
        """All places of all sequences in one pass. Then tokens are drawn as from a chain."""
        chunks, rows, end = [], [], 0
        for sequence, count in zip(sequences, counts):
            tokens, held = self.lacking(sequence, [])
            chunks.append(([*tokens, *[self.mask_token] * (count - 1)], held))
            end += len(tokens) + count - 1
            rows += range(end - count, end)
            self.held[sequence.row] = held + len(tokens)
        hidden = self.runner.run(chunks, [tables[sequence.row] for sequence in sequences])
        places = self.runner.logits(hidden, rows).split(counts)
        self.places = {sequence.row: part for sequence, part in zip(sequences, places)}
        return super().propose(sequences, counts, tables)

    def next_logits(self, rows: list[Row], tables: Tables) -> Tensor:
        """Those of the pass, [B, V]: a place does not know what was drawn before it."""
        return torch.stack([self.places[row.sequence.row][len(row.ahead)] for row in rows])
