"""Decode steps as CUDA graphs: lesson 11's GraphRunner over lesson 12's block tables.

A step in which every sequence runs one token, or its newest and a few drafted ones, is copied into
the buffers of the smallest bucket that holds it, and launched whole. Steps with prompts in them
differ in shape each time and stay eager.

Drafted chains need no graphs of their own. Inside a graph each token is a sequence of its own with
one new token: the K + 1 tokens of a sequence share its block table, and see contexts that grow by
one. All K and V of a layer are written before they are read, so each sees those in front of it. So
one bucket serves any mix of draft lengths. The price: K and V are read by each of them, from the L2
cache mostly. Trees do need their own, tree_graphs.py, because a node does not see all that lies in
front of it.

A step of more than one token has two graphs: one splits all contexts in the same number, the other
by lesson 10's list of splits, made inside the graph from the lengths that a replay finds. Which of
them is replayed is decided for each step by its lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l11_cuda_graphs.naive import decode_batch
from lessons.l11_cuda_graphs.optimized import PinnedCopies, bucket_for, padded
from lessons.l12_paged_kv.runner import by_length
from lessons.l17_tree_speculation.heads.heads import tapped_features
from lessons.l17_tree_speculation.trees.tree import Tree
from lessons.l21_multi_lora.batch import NO_ADAPTER, AdapterBatch, AdapterContext, most_tiles
from reference.features.lora import Adapters

Chunks = list[tuple[list[int], int]]  # of each sequence its new tokens, and how many it holds


class DecodeGraphs:
    """Captured steps for each bucket, all over the same weights and pool.

    graphs: lesson 11's CudaGraphs, or its stand-in. buckets: tokens of a step. max_model_len: the
    longest that a sequence may become, because Python knows no length inside a graph. most_each:
    tokens of a sequence that are launched so; one with more is a prompt. adapters: of the model;
    then a graph launches their kernels with the most tiles that its rows can fall into. taps:
    behind how many layers it is read on the way, as by lesson 17's `tapped_features`.
    """

    lists_splits = True  # whether its steps are of single queries, which can be split by length

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        graphs,
        buckets: Sequence[int],
        max_model_len: int,
        most_each: int = 1,
        adapters: Adapters | None = None,
        taps: tuple[int, ...] = (),
    ):
        self.adapter_rows: dict[int, AdapterBatch] = {}  # empty for a model without adapters
        self.most_each = most_each
        # Kept, because a graph reads their memory again at every replay.
        self.model = model
        self.pool = pool
        self.buckets = sorted(set(buckets))
        self.max_model_len = max_model_len
        self.hidden_size = model.config.hidden_size
        self.inputs = {}
        # {(bucket, whether by length): ...}
        self.graphs, self.outputs = {}, {}
        # The largest first, so that the others fit into the memory that it has taken.
        for bucket in reversed(self.buckets):
            # Nothing but padding: capturing writes into no block of the pool.
            inputs = tuple(x.to(model.device) for x in self.filled(bucket, [], [], []))
            self.inputs[bucket] = inputs
            if adapters is not None:
                self.num_slots = adapters.slots.num_slots
                rows = self.adapter_rows[bucket] = self.rows_in(bucket, [], model.device)
            for listed in (False, True) if self.lists_splits and bucket > 1 else (False,):
                step = partial(run, model, pool, self.batch_over(*inputs), taps, listed)
                if adapters is not None:
                    step = partial(run_over, adapters.context, rows, step)
                key = bucket, listed
                self.graphs[key], self.outputs[key] = graphs.capture(step)
        self.pinned = None
        if model.device.type == "cuda":
            of_each_kind = zip(*self.inputs.values())
            self.pinned = [PinnedCopies(dict(zip(self.inputs, kind))) for kind in of_each_kind]

    def fits(self, chunks: Chunks) -> bool:
        """Whether a step can be replayed: few tokens of each sequence, and not too many in all."""
        counts = [len(new) for new, _ in chunks]
        return max(counts) <= self.most_each and sum(counts) <= self.buckets[-1]

    @torch.inference_mode()
    def __call__(
        self,
        chunks: Chunks,
        tables: list[list[int]],
        row_slots: list[int] | None = None,
        trees: Sequence[Tree | None] = (),
        late: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replay a step that fits. tables: the blocks of each sequence. row_slots: the adapter of
        each token, None for none. trees: where a sequence's tokens are the nodes of one. late:
        writes tokens that the host does not know yet into those that the graph reads, [T] int64.
        Returns hidden: [T, hidden_size] and what was tapped: [T, F], the same without taps.
        """
        count = sum(len(new) for new, _ in chunks)
        bucket = bucket_for(count, self.buckets)
        self.copy_in(bucket, *self.filled(bucket, chunks, tables, trees))
        if late is not None:
            late(self.inputs[bucket][0][0, :count])
        if (buffers := self.adapter_rows.get(bucket)) is not None:
            buffers.copy_in(self.rows_in(bucket, row_slots or [], "cpu"))
        lengths = [held + at + 1 for new, held in chunks for at in range(len(new))]
        key = bucket, (bucket, True) in self.graphs and by_length(self.pool, lengths)
        self.graphs[key].replay()
        # A clone, because the next replay overwrites the graph's own output.
        found = self.outputs[key][:count].clone()
        hidden = found[:, : self.hidden_size]
        tapped = found[:, self.hidden_size :]
        return hidden, (tapped if tapped.shape[1] else hidden)

    def filled(
        self, bucket: int, chunks: Chunks, tables: list[list[int]], trees: Sequence[Tree | None]
    ) -> tuple[Tensor, Tensor]:
        """What a graph reads, with padding behind it, on the CPU. inputs: [4, bucket], table:
        [bucket, max_blocks]. Trees have graphs of their own.
        """
        singles, tables = one_by_one(chunks, tables)
        inputs = padded(decode_inputs(singles, tables, self.pool.block_size), bucket)
        return inputs, self.table_of(tables, bucket)

    def table_of(self, tables: list[list[int]], count: int) -> Tensor:
        """[count, max_blocks] int32. Zeros behind a sequence's blocks, because nothing reads there,
        and block 0 exists.
        """
        width = -(-self.max_model_len // self.pool.block_size)
        filled = torch.zeros(count, width, dtype=torch.int32)
        # Only what is used goes through Python's lists: a model of a long context would take longer
        # to write its zeros than to run the step.
        for row, table in zip(filled.numpy(), tables):
            row[: len(table)] = table[:width]  # shorter than the target's, if a draft's context is
        return filled

    def batch_over(self, inputs: Tensor, table: Tensor) -> Batch:
        """The step over these buffers. inputs: [4, bucket]; table: [bucket, max_blocks]."""
        return replace(decode_batch(inputs, self.max_model_len), block_table=table)

    def rows_in(
        self, bucket: int, row_slots: list[int], device: torch.device | str
    ) -> AdapterBatch:
        """These rows in a batch of the bucket's size. What fills it up has no adapter."""
        filled = row_slots + [NO_ADAPTER] * (bucket - len(row_slots))
        return AdapterBatch.of(filled, device, num_tiles=most_tiles(bucket, self.num_slots))

    def copy_in(self, bucket: int, *new: Tensor) -> None:
        """What `filled` gives into the graph's buffers: it would never see others."""
        if self.pinned is None:
            for buffer, x in zip(self.inputs[bucket], new):
                buffer.copy_(x)
        else:
            for pinned, x in zip(self.pinned, new):
                pinned.copy_in(x, bucket)


def one_by_one(chunks: Chunks, tables: list[list[int]]) -> tuple[Chunks, list[list[int]]]:
    """Each token as a sequence of its own, behind those in front of it, and whose blocks it
    reads.
    """
    if all(len(new) == 1 for new, _ in chunks):
        return chunks, tables
    singles = [([token], held + at) for new, held in chunks for at, token in enumerate(new)]
    owned = [table for (new, _), table in zip(chunks, tables) for _ in new]
    return singles, owned


def decode_inputs(chunks: Chunks, tables: list[list[int]], block_size: int) -> Tensor:
    """What changes from step to step, one column a sequence, as lesson 11's step_inputs: [4, B]
    int64, on the CPU. Rows: token, position, slot of its K and V, context with itself.
    """
    held = [length for _, length in chunks]
    slots = [
        table[length // block_size] * block_size + length % block_size
        for length, table in zip(held, tables)
    ]
    tokens = [new[0] for new, _ in chunks]
    lengths = [length + 1 for length in held]
    return torch.tensor([tokens, held, slots, lengths], dtype=torch.int64)


def run(
    model: Decoder, pool: KVPool, batch: Batch, taps: tuple[int, ...], listed: bool = False
) -> Tensor:
    """The step itself: hidden: [T, hidden_size], and what was tapped beside it: [T, hidden_size +
    F]. Looks at no value of the batch's tensors from Python. listed: with a list of splits.
    """
    if listed:
        # Here and not once, because a list that a warm-up made would not be made by the graph.
        batch = replace(batch, plans={})
    hidden, tapped = tapped_features(model, batch.tokens, pool.attending(batch), taps)
    return torch.cat([hidden, tapped], dim=-1) if taps else hidden


def run_over(context: AdapterContext, rows: AdapterBatch, step: Callable[[], Tensor]) -> Tensor:
    """A step with the adapters of its rows, whose tensors change from replay to replay."""
    with context.over(rows):
        return step()
