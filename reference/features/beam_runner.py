"""What runs the beams of a search: blocks, pictures and adapters, over the engine's runner."""

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from lessons.l12_paged_kv.blocks import BlockManager, Copy
from lessons.l12_paged_kv.runner import PagedRunner
from lessons.l14_continuous_batching.sequence import Chunk, Step
from reference.engine.model_runner import ModelRunner

if TYPE_CHECKING:
    from lessons.l21_multi_lora.peft.adapters import Adapter
    from reference.vision.prompt import Placed


class Reading(NamedTuple):
    """A prompt that is read, as the engine's eyes ask for it. computed: tokens that have run."""

    computed: int
    pictures: tuple["Placed", ...]


class SearchRunner(PagedRunner):
    """Lesson 12's PagedRunner, whose steps the engine's runner runs, wherever its model is.

    adapter_of: the adapter of each beam that has one, by its number.
    """

    def __init__(self, runner: ModelRunner, blocks: BlockManager):
        super().__init__(runner.model, runner.pool, blocks)
        self.engine_runner = runner
        self.adapter_of: dict[int, Adapter] = {}

    def read(self, name: int, tokens: list[int], pictures: tuple["Placed", ...]) -> Tensor:
        """The next tokens of a prompt, with those of its pictures that are among them. Returns
        logits: [1, V].
        """
        with self.seeing(Reading(self.held.get(name, 0), pictures), len(tokens)):
            return self.step({name: tokens})

    def seeing(self, reading: Reading, count: int) -> AbstractContextManager:
        """Inside it the model sees the pictures of the next `count` tokens."""
        sight = self.engine_runner.sight
        if sight is None:
            return nullcontext()
        return sight.over(Step([Chunk(reading, count)], []))

    def step(self, new: dict[int, list[int]]) -> Tensor:
        """As in lesson 12: logits: [B, V]."""
        chunks, tables = self.grow(new)
        if not self.adapter_of:
            hidden = self.engine_runner.run(chunks, tables)
        else:
            adapters = [self.adapter_of.get(name) for name in new]
            counts = [len(tokens) for tokens in new.values()]
            with self.engine_runner.adapters.slots_of(adapters, counts) as row_slots:
                hidden = self.engine_runner.run(chunks, tables, row_slots)
        ends = accumulate(len(tokens) for tokens, _ in chunks)
        return self.engine_runner.logits(hidden, [end - 1 for end in ends])

    def copy(self, copies: list[Copy]) -> None:
        """As in lesson 12."""
        self.copied_blocks += len(copies)
        self.engine_runner.copy(copies)

    def fork(self, parent: int, child: int) -> None:
        """As in lesson 12; the child has its parent's adapter."""
        super().fork(parent, child)
        if parent in self.adapter_of:
            self.adapter_of[child] = self.adapter_of[parent]

    def free(self, sequence: int) -> None:
        """As in lesson 12."""
        super().free(sequence)
        self.adapter_of.pop(sequence, None)
