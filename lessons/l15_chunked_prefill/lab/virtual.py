"""A model that is a hash, over a memory that holds tokens: it shows every mistake of a scheduler,
and runs a history in a millisecond.

What a pool of K and V would hold of a token, `TokenMemory` holds as the token itself.
`VirtualModel` writes a step's tokens through the block tables, reads each sequence's context back
the same way, and makes the next token from what it has read. So a block that was lost, mixed up or
not copied changes the answer, and is reported at once.
"""

from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.sequence import Sequence, Step

VOCAB = 97
NEVER_WRITTEN = -1


def next_token(row: int, context: list[int]) -> int:
    """What the model says after these tokens; row: instead of a seed."""
    return crc32(bytes(context), row) % VOCAB


def answer(row: int, prompt: list[int], length: int) -> list[int]:
    """The tokens of a request that runs alone."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(row, tokens))
    return tokens[len(prompt) :]


def new_request(row: int, prompt: list[int], limit: int, places: int = 1) -> Sequence:
    """A request that ends at its limit."""
    return Sequence(row, list(prompt), limit, GREEDY, frozenset(), places=places)


class TokenMemory:
    """Blocks of tokens and their positions, in the shape in which lesson 12 swaps K and V: [1,
    num_blocks, block_size].
    """

    def __init__(self, blocks: BlockManager):
        shape = (1, blocks.num_blocks, blocks.block_size)
        self.k_slots = torch.full(shape, NEVER_WRITTEN)
        self.v_slots = torch.full(shape, NEVER_WRITTEN)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What a block holds, as lesson 3's KVPool says it."""
        return self.k_slots, self.v_slots

    def blocks(self, slots: Tensor) -> Tensor:
        """slots: [1, num_blocks, block_size] -> the same, which are blocks already."""
        return slots


class VirtualModel:
    """An executor: step -> a token for each sequence that is sampled."""

    def __init__(self, blocks: BlockManager):
        self.blocks = blocks
        self.memory = TokenMemory(blocks)
        self.computed_tokens = 0

    def __call__(self, step: Step) -> list[int]:
        self.copy(step)
        for chunk in step.chunks:
            self.write(chunk.sequence, chunk.count)
        self.computed_tokens += step.num_tokens
        return [
            next_token(chunk.sequence.row, self.read(chunk.sequence, chunk.count))
            for chunk in step.chunks
            if chunk.is_sampled
        ]

    def copy(self, step: Step) -> None:
        """All copies at once, as a kernel does it: in no order, so no target may appear twice."""
        targets = [target for _, target in step.copies]
        assert len(targets) == len(set(targets)), "two copies into one block"
        if targets:
            source, target = torch.tensor(step.copies).unbind(1)
            for slots in (self.memory.k_slots, self.memory.v_slots):
                slots[:, target] = slots[:, source]

    def write(self, sequence: Sequence, count: int) -> None:
        """Store the sequence's next `count` tokens through its block table."""
        start, size = sequence.computed, self.blocks.block_size
        table = self.blocks.tables[sequence.row]
        places = torch.arange(start, start + count)
        at = torch.tensor(table)[places // size] * size + places % size
        tokens = torch.tensor(sequence.tokens[start : start + count])
        self.memory.k_slots.view(-1)[at] = tokens
        self.memory.v_slots.view(-1)[at] = places

    def read(self, sequence: Sequence, count: int) -> list[int]:
        """The context up to the end of the chunk, through the block table."""
        end, table = sequence.computed + count, self.blocks.tables[sequence.row]
        context = self.memory.k_slots[0, table].flatten()[:end].tolist()
        assert context == sequence.tokens[:end], "a context of other tokens than the sequence's"
        return context


def run(
    scheduler,
    execute: Callable[[Step], list[int]],
    look: Callable[[Step], None] = lambda step: None,
) -> None:
    """One step: schedule, look at it, execute, finish, leave."""
    step = scheduler.schedule()
    look(step)
    tokens = execute(step)
    for sequence, token in zip(scheduler.finish(step), tokens):
        sequence.append(token)
    scheduler.leave()
