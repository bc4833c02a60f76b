"""Decode steps as CUDA graphs for a model with states: the slots are one more tensor that a graph
reads anew at each replay.

A step in which each sequence runs one token is captured. Padding has slot -1, for which lesson 27's
kernels read and write nothing. A prompt of one token stays eager, because its state begins, and so
does a step with drafts, because the tokens of one sequence follow each other in its state.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l17_tree_speculation.trees.tree import Tree
from reference.features.decode_graphs import Chunks, DecodeGraphs
from reference.features.states.layers import new_state_step
from reference.features.states.slots import SlotTable

PADDING = -1  # the slot of a row without a sequence


class StateGraphs(DecodeGraphs):
    """DecodeGraphs over a HybridPool."""

    def fits(self, chunks: Chunks) -> bool:
        """Whether a step can be replayed: one token of each sequence, none of which begins."""
        return super().fits(chunks) and all(held for _, held in chunks)

    def filled(
        self, bucket: int, chunks: Chunks, tables: list[SlotTable], trees: Sequence[Tree | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As DecodeGraphs', and slots: [bucket] int64."""
        slots = [table.slot for table in tables] + [PADDING] * (bucket - len(tables))
        return *super().filled(bucket, chunks, tables, trees), torch.tensor(slots)

    def batch_over(self, inputs: Tensor, table: Tensor, slots: Tensor) -> Batch:
        """As DecodeGraphs', over slots: [bucket] too."""
        bucket = len(slots)
        step = new_state_step([1] * bucket, [1] * bucket, [PADDING] * bucket, slots.device)
        batch = super().batch_over(inputs, table)
        return replace(batch, states=replace(step, decode_slots=slots))
