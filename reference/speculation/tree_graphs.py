"""Decode steps with token trees as CUDA graphs.

Lesson 17's kernel asks a table who sees whom, so the table is a buffer like any other, and what is
fixed is only its width: the most nodes that a tree has. A tree that was cut at the end of an
answer, a chain, and a sequence that runs one token go through the same graph. How many sequences
there are, and where each begins, stands in tensors, too: those behind the last have no tokens, and
their programs end at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l17_tree_speculation.runner import with_trees
from lessons.l17_tree_speculation.trees.tree import Tree
from reference.features.decode_graphs import Chunks, DecodeGraphs


class TreeGraphs(DecodeGraphs):
    """most_nodes: of a tree, its root among them. most_sequences: of a step. Other arguments are
    DecodeGraphs's.
    """

    lists_splits = False

    def __init__(self, *args, most_nodes: int, most_sequences: int, **arguments):
        self.most_nodes, self.most_sequences = most_nodes, most_sequences
        super().__init__(*args, most_each=most_nodes, **arguments)

    def filled(
        self, bucket: int, chunks: Chunks, tables: list[list[int]], trees: Sequence[Tree | None]
    ) -> tuple[Tensor, ...]:
        """rows: [3, bucket] int64, token, position and slot of each; starts: [B + 1] and lengths:
        [B] int32; table: [B, max_blocks]; tree: [bucket, most_nodes] int8.
        """
        most = min(bucket, self.most_sequences)
        rows = torch.zeros(3, bucket, dtype=torch.int64)
        rows[2] = -1  # padding is written nowhere
        starts = torch.zeros(most + 1, dtype=torch.int32)
        lengths = torch.zeros(most, dtype=torch.int32)
        tree = torch.zeros(bucket, self.most_nodes, dtype=torch.int8)
        if chunks:
            batch = new_batch(chunks, self.pool.block_size, "cpu", tables)
            batch = with_trees(batch, list(trees) or [None] * len(chunks))
            count = len(batch.tokens)
            rows[:, :count] = torch.stack([batch.tokens, batch.positions, batch.slot_mapping])
            behind = most - len(chunks)
            starts = pad(batch.cu_seqlens_q, (0, behind), value=count)
            lengths[: len(chunks)] = batch.context_lens
            if batch.tree is not None:
                tree[:count, : batch.tree.shape[1]] = batch.tree
        return rows, starts, lengths, self.table_of(tables, most), tree

    def batch_over(
        self, rows: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, tree: Tensor
    ) -> Batch:
        """The step over these buffers: rows: [3, bucket] and the rest of `filled`."""
        tokens, positions, slots = rows
        return Batch(
            tokens,
            positions,
            slots,
            cu_seqlens_q=starts,
            context_lens=lengths,
            logits_at=starts[:-1],  # not read: the engine chooses its rows
            max_seqlen_q=self.most_nodes,
            max_context_len=self.max_model_len,
            block_table=table,
            tree=tree,
        )
