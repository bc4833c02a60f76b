"""One pass of the model over what a scheduler chose: tensors in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l12_paged_kv.blocks import BlockManager, Copy
from lessons.l12_paged_kv.runner import (
    PAGED,
    copy_blocks,
    new_pool,
    paged_rung_of,
    step_batch,
)
from lessons.l14_continuous_batching.sequence import Step
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from reference.engine.packed import packed

if TYPE_CHECKING:  # features are imported where one is asked for
    from lessons.l12_paged_kv.more.swap import HostSwap
    from lessons.l17_tree_speculation.trees.tree import Tree
    from lessons.toolbox.model.window_groups import WindowGroups
    from reference.features.decode_graphs import Chunks, DecodeGraphs
    from reference.features.kv_transfer.layers import LayerByLayer
    from reference.features.lora import Adapters
    from reference.vision.sight import Sight


class ModelRunner:
    """The model, its pool of blocks, and nothing that outlives a step. Any supported model: fused,
    with lesson 12's kernels on a GPU and its PyTorch operations on a CPU. kv_cache_dtype: "auto",
    or a format of lesson 19. adapters: None for a model without slots for them. runs_trees: whether
    sequences may run the nodes of a tree. rung: of a model that a feature has prepared for it; None
    prepares the model for the usual one. groups: of its layers, each with blocks of its own; None:
    a block holds all layers.
    """

    new_scheduler = ChunkedScheduler  # of an engine on it that does not speculate

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        kv_cache_dtype: str = "auto",
        adapters: Adapters | None = None,
        runs_trees: bool = False,
        rung: Rung | None = None,
        groups: WindowGroups | None = None,
    ):
        self.adapters = adapters
        self.model = model if rung else packed(paged_rung_of(model).prepare(model))
        rung = rung or rung_of(self.model, kv_cache_dtype, runs_trees)
        self.groups = groups
        if groups is not None:
            from reference.features.windows.pool import rung_in_groups

            rung = rung_in_groups(rung, groups)
        rung = self.rung_of_pool(rung, kv_cache_dtype)
        self.pool = new_pool(self.model, num_blocks, block_size, max_model_len, rung)
        self.max_model_len = max_model_len
        self.captured: DecodeGraphs | None = None
        self.sight: Sight | None = None  # of a model whose embedding asks it
        # Where lesson 17's drafts read the model, and what they found in the last step: [T, F].
        self.taps: tuple[int, ...] = ()
        self.features: Tensor | None = None
        # Writes tokens that the host does not know yet into those of the next step: [T] int64.
        self.late: Callable[[Tensor], None] | None = None
        self.new_batch = step_batch
        self.layers: LayerByLayer | None = None  # sends what a layer has written when it has run

    def rung_of_pool(self, rung: Rung, kv_cache_dtype: str) -> Rung:
        """What the pool is made of, for a runner that makes it otherwise."""
        return rung

    def capture(self, graphs, buckets: Sequence[int], most_each: int = 1) -> None:
        """From now on steps that only decode are replayed. Arguments: DecodeGraphs."""
        from reference.features.decode_graphs import DecodeGraphs

        kind, what = DecodeGraphs, (self.model, self.pool, graphs, buckets, self.max_model_len)
        if self.groups is not None:
            from reference.features.windows.graphs import GroupGraphs as kind
        if self.model.config.state is not None:
            from reference.features.states.graphs import StateGraphs as kind
        self.captured = kind(*what, most_each, self.adapters, self.taps)

    def capture_trees(self, graphs, buckets: Sequence[int], **sizes: int) -> None:
        """The same for steps in which sequences run trees. Arguments: TreeGraphs."""
        from reference.speculation.tree_graphs import TreeGraphs

        what = self.model, self.pool, graphs, buckets, self.max_model_len
        self.captured = TreeGraphs(*what, taps=self.taps, **sizes)

    @torch.inference_mode()
    def __call__(self, step: Step, tables: dict[int, list[int]]) -> Tensor:
        """Run a step. Returns hidden: [T, hidden_size] of all its tokens, in the chunks' order."""
        self.copy(step.copies)
        if self.layers is not None:
            self.layers.begin(step, tables)
        chunks = [(chunk.tokens, chunk.sequence.computed) for chunk in step.chunks]
        owned = [tables[chunk.sequence.row] for chunk in step.chunks]
        trees = [chunk.sequence.tree for chunk in step.chunks]
        with nullcontext() if self.sight is None else self.sight.over(step):
            if self.adapters is None:
                return self.run(chunks, owned, trees=trees)
            with self.adapters.rows_of(step) as row_slots:
                return self.run(chunks, owned, row_slots, trees)

    @torch.inference_mode()
    def run(
        self,
        chunks: Chunks,
        tables: list[list[int]],
        row_slots: list[int] | None = None,
        trees: Sequence[Tree | None] = (),
    ) -> Tensor:
        """Run some tokens of each sequence. tables: its blocks. row_slots: the adapter of each
        token, None for none. trees: where a sequence's tokens are the nodes of one. Returns hidden:
        [T, hidden_size].
        """
        # A captured step looks tokens up and sees no picture.
        is_plain = self.sight is None or self.sight.splice is None
        if self.captured is not None and is_plain and self.captured.fits(chunks):
            hidden, self.features = self.captured(chunks, tables, row_slots, trees, self.late)
            return hidden
        if self.groups is None:
            batch = self.batch_over(chunks, tables, trees)
        else:
            from reference.features.windows.pool import batch_in_groups

            over = partial(self.batch_over, trees=trees)
            batch = batch_in_groups(over, chunks, tables, self.pool.block_size)
        if self.late is not None:
            self.late(batch.tokens)
        attend = self.pool.attending(batch)
        if self.layers is not None:
            attend = self.layers.told(attend)
        with self.adapters_over(row_slots):
            return self.forward(batch.tokens, attend)

    def batch_over(
        self, chunks: Chunks, tables: list[list[int]], trees: Sequence[Tree | None]
    ) -> Batch:
        """The step over these blocks of each sequence. Arguments as in `run`."""
        batch = self.new_batch(self.pool, chunks, tables)
        if self.model.config.state is not None:
            from reference.features.states.pool import with_slots

            batch = with_slots(batch, chunks, tables)
        if any(trees):
            from lessons.l17_tree_speculation.runner import with_trees

            batch = with_trees(batch, trees, self.pool)
        return batch

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """The model itself. tokens: [T] -> hidden: [T, hidden_size]."""
        if not self.taps:
            self.features = hidden = self.model(tokens, attend)
            return hidden
        from lessons.l17_tree_speculation.heads.heads import tapped_features

        hidden, self.features = tapped_features(self.model, tokens, attend, self.taps)
        return hidden

    def copy(self, copies: list[Copy]) -> None:
        """Copy whole blocks, before a step writes into them."""
        copy_blocks(self.pool, copies)

    def adapters_over(self, row_slots: list[int] | None) -> AbstractContextManager:
        """Inside it the model adds each row's adapter."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.over(row_slots, self.model.device)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """hidden: [T, hidden_size] -> [len(rows), V]. Only of these rows, because V is large."""
        if rows != list(range(len(hidden))):  # a list of indices makes Python wait for the GPU
            hidden = hidden[rows]
        return self.model.logits(hidden)

    def scores(self, hidden: Tensor, rows: list[int], tokens: list[int], count: int) -> list:
        """Log-probabilities (Logprobs) of a token for each of these rows, and of the `count`
        likeliest. hidden: [T, hidden_size].
        """
        from reference.engine.sampler import top_logprobs

        logprobs = self.logits(hidden, rows).float().log_softmax(-1)
        return top_logprobs(logprobs, tokens, count)

    def new_swap(self, blocks: BlockManager, others: Sequence[KVPool] = ()) -> HostSwap:
        """Where K and V of this pool wait on the host. blocks: who owns which of its blocks.
        others: pools whose blocks have the same numbers.
        """
        from lessons.l15_chunked_prefill.swap import Lender
        from reference.features.swap import PoolsSwap

        return PoolsSwap(Lender(self.pool, blocks), [self.pool, *others])

    def when_dead(self, tell: Callable[[BaseException], None]) -> None:
        """Nothing dies here but with this process; a worker does."""

    def close(self) -> None:
        """Nothing has to be ended here; what the workers of `reference.parallel` hold does."""


def rung_of(model: Decoder, kv_cache_dtype: str, runs_trees: bool) -> Rung:
    """Lesson 12's rung for this model, over lesson 19's cache of codes if one is asked for, and
    with lesson 17's operations if sequences may run trees; lesson 27's for a model with states.
    """
    if model.config.state is not None:
        from reference.features.states.pool import hybrid_rung

        return hybrid_rung(kv_cache_dtype)
    rung = paged_rung_of(model)
    if kv_cache_dtype != "auto":
        from lessons.l19_kv_quantization.runner import quantized_rung_of
        from reference.engine.cache_arguments import cache_dtype_of

        rung = quantized_rung_of(model, cache_dtype_of(model.config, kv_cache_dtype))
    # by its operations, because a quantized cache is another rung with the same ones
    if runs_trees and rung.kernels is PAGED.kernels:
        from lessons.l17_tree_speculation.optimized import LESSON_17
        from lessons.l17_tree_speculation.stand_ins import LESSON_17_TORCH

        rung = replace(rung, kernels=LESSON_17, stand_ins=LESSON_17_TORCH)
    return rung
