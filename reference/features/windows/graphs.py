"""Decode steps over groups of layers as CUDA graphs: the inputs of each group, one below the other.

A group whose layers have a window sees a sequence that begins with its first page that is left. So
its contexts, slots and tables are its own; tokens and positions are those of the step.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l11_cuda_graphs.naive import decode_batch
from lessons.l11_cuda_graphs.optimized import padded
from lessons.l17_tree_speculation.trees.tree import Tree
from reference.features.decode_graphs import Chunks, DecodeGraphs, decode_inputs, one_by_one
from reference.features.windows.blocks import GroupTable
from reference.features.windows.pool import seen_by_groups

ROWS = 4  # of a group's inputs: token, position, slot, context


class GroupGraphs(DecodeGraphs):
    """DecodeGraphs of a pool of groups. Arguments are those of DecodeGraphs."""

    lists_splits = False  # each group would need a list of its own

    def filled(
        self, bucket: int, chunks: Chunks, tables: list[GroupTable], trees: Sequence[Tree | None]
    ) -> tuple[Tensor, Tensor]:
        """inputs: [4 G, bucket], table: [G, bucket, max_blocks], of G groups; on the CPU."""
        singles, tables = one_by_one(chunks, tables)
        inputs, found = [], []
        positions = torch.tensor([held for _, held in singles], dtype=torch.int64)
        no_step = [([], [], [])] * len(self.pool.groups.windows)  # while it is captured
        size = self.pool.block_size
        for seen, owned, _ in seen_by_groups(singles, tables, size) if singles else no_step:
            rows = decode_inputs(seen, owned, size)
            rows[1] = positions
            inputs.append(padded(rows, bucket))
            found.append(self.table_of(owned, bucket))
        return torch.cat(inputs), torch.stack(found)

    def batch_over(self, inputs: Tensor, table: Tensor) -> Batch:
        """The step over these buffers. inputs: [4 G, bucket]; table: [G, bucket, max_blocks]."""
        batches = [
            replace(decode_batch(rows, self.longest(window)), block_table=owned)
            for rows, owned, window in zip(inputs.split(ROWS), table, self.pool.groups.windows)
        ]
        return replace(batches[0], groups=tuple(batches))

    def longest(self, window: int | None) -> int:
        """Tokens that a group sees at most, because Python knows no length inside a graph: those of
        a window, of its first page, and what is drafted.
        """
        if window is None:
            return self.max_model_len
        return min(self.max_model_len, window + self.pool.block_size + self.most_each)
