"""Lesson 15's model, a hash over a memory of tokens, on a stream: every mistake with a block, a row
or a placeholder changes an answer.
"""

from typing import NamedTuple

import torch

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.sequence import Chunk, Sequence, Step
from lessons.l15_chunked_prefill.lab.virtual import TokenMemory, next_token
from lessons.l25_one_step_ahead.device import PLACEHOLDER, Pass
from lessons.l25_one_step_ahead.stream import Work


class Placed(NamedTuple):
    """A chunk as it was launched. The host's lists go on changing, so these are copies.

    tokens: ids, and PLACEHOLDER where the pass before has the token. row: its token there.
    """

    sequence: Sequence
    start: int
    tokens: list[int]
    table: list[int]
    row: int | None


class VirtualDevice:
    """A model that is a hash (lesson 15) on a stream. pass_s, sample_s: what they take, seconds."""

    def __init__(self, blocks: BlockManager, stream, pass_s: float = 0.0, sample_s: float = 0.0):
        self.blocks, self.stream = blocks, stream
        self.memory = TokenMemory(blocks)
        self.pass_s, self.sample_s = pass_s, sample_s
        self.computed_tokens = 0
        self.sampled: dict[Pass, Work] = {}

    def launch(self, step: Step, before: Pass | None = None) -> Pass:
        """As Device.launch. logits: {sequence: the tokens that it sees}."""
        passed = Pass.of(step)
        chunks = [self.placed(chunk, before) for chunk in step.chunks]
        copies = list(step.copies)
        self.computed_tokens += step.num_tokens
        self.stream.launch("pass", self.pass_s, lambda: self.run(passed, chunks, copies, before))
        return passed

    def placed(self, chunk: Chunk, before: Pass | None) -> Placed:
        """What the device is told of a chunk."""
        sequence, tokens = chunk.sequence, chunk.tokens
        assert not sequence.finished, "runs a request that is known to have ended"
        row = before.row_of(sequence) if PLACEHOLDER in tokens else None
        table = list(self.blocks.tables[sequence.row])
        return Placed(sequence, sequence.computed, tokens, table, row)

    def run(self, passed: Pass, chunks: list[Placed], copies: list, before: Pass | None) -> None:
        """The pass itself: copy blocks, write all new tokens, see what each sequence sees."""
        for slots in self.memory.tensors:
            if copies:
                source, target = torch.tensor(copies).unbind(1)
                slots[:, target] = slots[:, source]
        for chunk in chunks:
            self.write(chunk, before)
        seen = {chunk.sequence: self.context(chunk) for chunk in chunks}
        passed.logits = {sequence: seen[sequence] for sequence in passed.ending}

    def write(self, chunk: Placed, before: Pass | None) -> None:
        """Store a chunk's tokens through its block table; a placeholder is looked up here."""
        ids = [before.tokens[chunk.row] if t == PLACEHOLDER else t for t in chunk.tokens]
        places = torch.arange(chunk.start, chunk.start + len(ids))
        size = self.blocks.block_size
        at = torch.tensor(chunk.table)[places // size] * size + places % size
        self.memory.k_slots.view(-1)[at] = torch.tensor(ids)
        self.memory.v_slots.view(-1)[at] = places

    def context(self, chunk: Placed) -> list[int]:
        """All tokens of a sequence up to the end of its chunk, as the memory holds them."""
        end = chunk.start + len(chunk.tokens)
        tokens, places = (slots[0, chunk.table].flatten()[:end] for slots in self.memory.tensors)
        assert places.tolist() == list(range(end)), "K and V of other places than the sequence's"
        return tokens.tolist()

    def sample(self, passed: Pass, sequences: list[Sequence]) -> None:
        """As Device.sample."""
        passed.sequences = list(sequences)

        def draw() -> None:
            passed.tokens = [next_token(s.row, passed.logits[s]) for s in passed.sequences]

        self.sampled[passed] = self.stream.launch("sample", self.sample_s, draw)

    def read(self, passed: Pass) -> list[int]:
        """As Device.read."""
        self.stream.wait(self.sampled.pop(passed))
        return passed.tokens
