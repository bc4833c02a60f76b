"""Decode steps as CUDA graphs: lesson 11's GraphRunner over lesson 12's block tables.

A step in which every sequence runs one token, or its newest and a few drafted ones, is copied into
the buffers of the smallest bucket that holds it, and launched whole. Steps with prompts in them
differ in shape each time and stay eager.

Drafted tokens need no graphs of their own. Inside a graph each token is a sequence of its own with one
new token: the K + 1 tokens of a sequence share its block table, and see contexts that grow by one. All
K and V of a layer are written before anybody reads, so each sees those in front of it. So one bucket
serves any mix of draft lengths. The price: K and V are read by each of them, from the L2 cache mostly.
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
from lessons.l21_multi_lora.batch import NO_ADAPTER, AdapterBatch, AdapterContext, most_tiles
from reference.lora import Adapters

Chunks = list[tuple[list[int], int]]  # of each sequence its new tokens, and how many it holds


class DecodeGraphs:
    """One captured step for each bucket, all over the same weights and pool.

    graphs: lesson 11's CudaGraphs, or its stand-in. buckets: tokens of a step. max_model_len: the
    longest that a sequence may become, because Python knows no length inside a graph. most_each:
    tokens of a sequence that are launched so; one with more is a prompt. adapters: of the model; then
    a graph launches their kernels with the most tiles that its rows can fall into.
    """

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
    ):
        self.adapter_rows: dict[int, AdapterBatch] = {}  # empty for a model without adapters
        self.most_each = most_each
        # Kept, because a graph reads their memory again at every replay.
        self.model = model
        self.pool = pool
        self.buckets = sorted(set(buckets))
        self.inputs, self.tables, self.graphs, self.hidden = {}, {}, {}, {}
        max_blocks = -(-max_model_len // pool.block_size)
        # The largest first, so that the others fit into the memory that it has taken.
        for bucket in reversed(self.buckets):
            # Nothing but padding: capturing writes into no block of the pool.
            nothing = torch.empty(4, 0, dtype=torch.int64)
            inputs = padded(nothing, bucket).to(model.device)
            table = torch.zeros(bucket, max_blocks, dtype=torch.int32, device=model.device)
            batch = replace(decode_batch(inputs, max_model_len), block_table=table)
            step = partial(run, model, pool, batch)
            if adapters is not None:
                self.num_slots = adapters.slots.num_slots
                rows = self.adapter_rows[bucket] = self.rows_in(bucket, [], model.device)
                step = partial(run_over, adapters.context, rows, step)
            self.graphs[bucket], self.hidden[bucket] = graphs.capture(step)
            self.inputs[bucket], self.tables[bucket] = inputs, table
        on_gpu = model.device.type == "cuda"
        self.pinned = [PinnedCopies(self.inputs), PinnedCopies(self.tables)] if on_gpu else None

    def fits(self, chunks: Chunks) -> bool:
        """Whether a step can be replayed: few tokens of each sequence, and not too many in all."""
        counts = [len(new) for new, _ in chunks]
        return max(counts) <= self.most_each and sum(counts) <= self.buckets[-1]

    @torch.inference_mode()
    def __call__(
        self, chunks: Chunks, tables: list[list[int]], row_slots: list[int] | None = None
    ) -> Tensor:
        """Replay a step that fits. tables: the blocks of each sequence. row_slots: the adapter of each
        token, None for none. Returns hidden: [T, hidden_size].
        """
        singles, tables = one_by_one(chunks, tables)
        bucket = bucket_for(len(singles), self.buckets)
        inputs = padded(decode_inputs(singles, tables, self.pool.block_size), bucket)
        width = self.tables[bucket].shape[1]
        # Zeros behind a sequence's blocks, because nobody reads there, and block 0 exists.
        rows = [[*table, *[0] * (width - len(table))] for table in tables]
        rows += [[0] * width] * (bucket - len(rows))
        self.copy_in(bucket, inputs, torch.tensor(rows, dtype=torch.int32))
        if (buffers := self.adapter_rows.get(bucket)) is not None:
            buffers.copy_in(self.rows_in(bucket, row_slots or [], "cpu"))
        self.graphs[bucket].replay()
        # A clone, because the next replay overwrites the graph's own output.
        return self.hidden[bucket][: len(singles)].clone()

    def rows_in(
        self, bucket: int, row_slots: list[int], device: torch.device | str
    ) -> AdapterBatch:
        """These rows in a batch of the bucket's size. What fills it up has no adapter."""
        filled = row_slots + [NO_ADAPTER] * (bucket - len(row_slots))
        return AdapterBatch.of(filled, device, num_tiles=most_tiles(bucket, self.num_slots))

    def copy_in(self, bucket: int, inputs: Tensor, table: Tensor) -> None:
        """inputs: [4, bucket] and table: [bucket, max_blocks], on the CPU, into the graph's buffers:
        it would never see others.
        """
        if self.pinned is None:
            self.inputs[bucket].copy_(inputs)
            self.tables[bucket].copy_(table)
        else:
            for pinned, new in zip(self.pinned, (inputs, table)):
                pinned.copy_in(new, bucket)


def one_by_one(chunks: Chunks, tables: list[list[int]]) -> tuple[Chunks, list[list[int]]]:
    """Each token as a sequence of its own, behind those in front of it, and whose blocks it reads."""
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
    return torch.tensor([tokens, held, slots, [length + 1 for length in held]])


def run(model: Decoder, pool: KVPool, batch: Batch) -> Tensor:
    """The step itself: hidden: [B, hidden_size]. Looks at no value of the batch's tensors from
    Python.
    """
    return model(batch.tokens, pool.attending(batch))


def run_over(context: AdapterContext, rows: AdapterBatch, step: Callable[[], Tensor]) -> Tensor:
    """A step with the adapters of its rows, whose tensors change from replay to replay."""
    with context.over(rows):
        return step()
