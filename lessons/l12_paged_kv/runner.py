"""A model over one pool of blocks: what a step does besides the model.

    runner = PagedRunner.for_model(model, num_blocks=64, block_size=16, max_context_len=512)
    logits = runner.step({0: prompt, 1: another})    # each sequence by its number
    logits = runner.step({0: [token]})               # the blocks for it are found on the way
    runner.fork(0, 2)                                # 2 goes on from where 0 is
    runner.free(0)

Read `step`: grow the tables, make the copies that growing asks for, run the model.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import Batch, new_batch
from lessons.l03_kv_cache.cache import AttentionOps, KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.blocks import BlockManager, Copy
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH, paged_batch


def paged_kernels() -> AttentionOps:
    """This lesson's kernels, which read K and V through a block table."""
    from lessons.l12_paged_kv.optimized import LESSON_12  # here, because a CPU needs no kernels

    return LESSON_12


PAGED = Rung("paged cache", paged_kernels, LESSON_12_TORCH, prepare=fused)


def paged_rung_of(model: Decoder) -> Rung:
    """Which rung serves this model: this one, or that of lesson 6's latents."""
    if model.config.mla is None:
        return PAGED
    from lessons.l12_paged_kv.kernels.latents import PAGED_LATENTS  # here: few models need it

    return PAGED_LATENTS


def new_pool(
    model: Decoder,
    num_blocks: int,
    block_size: int,
    max_context_len: int,
    rung: Rung | None = None,
) -> KVPool:
    """An empty pool of blocks on the model's device. model: prepared by `rung`; None: by this
    lesson's.
    """
    rung = rung or paged_rung_of(model)
    pool = rung.cache(
        model.config,
        num_blocks,
        block_size,
        rung.ops(model.device),
        model.dtype,
        model.device,
        layers=model.stage_layers,
        max_context_len=max_context_len,
    )
    pool.learn_layers(model)
    return pool


def step_batch(pool: KVPool, chunks: list[tuple[list[int], int]], tables: list[list[int]]) -> Batch:
    """The batch of a step; on a CPU with the list of work, which kernels have no use for; on a GPU
    with room for their lists of splits, if the lengths of its single queries differ much.

    chunks: of each sequence its new tokens, and how many it holds; tables: its blocks.
    """
    device = pool.k_slots.device
    if device.type != "cuda":
        return paged_batch(chunks, pool.block_size, tables, device)
    batch = new_batch(chunks, pool.block_size, device, tables)
    singles = len(chunks) if batch.max_seqlen_q == 1 else batch.num_decodes
    lengths = [held + 1 for _, held in chunks[:singles]]
    return replace(batch, plans={}) if by_length(pool, lengths) else batch


def by_length(pool: KVPool, context_lens: list[int]) -> bool:
    """Whether a step of single queries with these contexts is decoded by a list of splits."""
    from lessons.l10_flash_decoding import splits  # here, because a CPU splits nothing

    of_heads = pool.k_slots.shape[-2], splits.PROGRAMS_PER_SM
    # Pools whose kernels are of another size say so.
    programs, per_sm = getattr(pool, "programs_of_split", of_heads)
    slots = splits.sms_of(pool.k_slots.device) * per_sm
    return splits.pays_by_length(context_lens, programs, slots)


def copy_blocks(pool: KVPool, copies: list[Copy]) -> None:
    """Copy whole blocks of all layers, before anything is written into them."""
    if not copies:
        return
    source, target = torch.tensor(copies, device=pool.k_slots.device).unbind(1)
    for slots in pool.tensors:
        blocks = pool.blocks(slots)
        blocks[:, target] = blocks[:, source]


class PagedRunner:
    """Sequences, known by numbers, that share a model and a pool of blocks.

    held: tokens of each sequence whose K and V are stored. model: prepared by its rung. blocks: who
    owns which block of the pool; None: no sequence yet.
    """

    def __init__(self, model: Decoder, pool: KVPool, blocks: BlockManager | None = None):
        self.model = model
        self.pool = pool
        self.blocks = blocks or BlockManager(pool.num_blocks, pool.block_size)
        self.held: dict[int, int] = {}
        self.copied_blocks = 0

    @classmethod
    def for_model(
        cls, model: Decoder, num_blocks: int, block_size: int, max_context_len: int
    ) -> "PagedRunner":
        """A runner over a new pool. max_context_len: the longest that a sequence may become."""
        model = paged_rung_of(model).prepare(model)
        return cls(model, new_pool(model, num_blocks, block_size, max_context_len))

    def can_step(self, new: dict[int, list[int]]) -> bool:
        """Whether `step` with the same tokens would find enough free blocks."""
        needed = 0
        for sequence, tokens in new.items():
            held = self.held.get(sequence, 0)
            needed += self.blocks.needs(sequence, held, held + len(tokens))
        return needed <= self.blocks.num_free

    @torch.inference_mode()
    def step(self, new: dict[int, list[int]]) -> Tensor:
        """Run the new tokens of some sequences, one at least of each. Returns the logits after the
        last of each: [B, V], in the order of `new`.

        Raises OutOfBlocks; then the sequences before the one that found none have grown.
        """
        hidden, batch = self.run(new)
        return self.model.logits(hidden[batch.logits_at])

    def run(self, new: dict[int, list[int]]) -> tuple[Tensor, Batch]:
        """`step` up to the hidden state of every new token: [T, hidden_size], and their batch."""
        batch = self.grown(new)
        return self.model(batch.tokens, self.pool.attending(batch)), batch

    def grown(self, new: dict[int, list[int]]) -> Batch:
        """Find room for the new tokens. Returns the batch that computes them."""
        return step_batch(self.pool, *self.grow(new))

    def grow(self, new: dict[int, list[int]]) -> tuple[list[tuple[list[int], int]], list]:
        """Find room for the new tokens. Returns the chunks and tables that `step_batch` asks
        for.
        """
        chunks = []
        for sequence, tokens in new.items():
            held = self.held.get(sequence, 0)
            # Made at once, because a block that one sequence leaves here another may write into.
            self.copy(self.blocks.grow(sequence, held, held + len(tokens)))
            chunks.append((tokens, held))
            self.held[sequence] = held + len(tokens)
        return chunks, [self.blocks.tables[sequence] for sequence in new]

    def copy(self, copies: list[Copy]) -> None:
        """`copy_blocks` in this pool, counted."""
        self.copied_blocks += len(copies)
        copy_blocks(self.pool, copies)

    def fork(self, parent: int, child: int) -> None:
        """`child` goes on from where `parent` is, on the same blocks. Nothing is copied now."""
        self.blocks.fork(parent, child)
        self.held[child] = self.held[parent]

    def free(self, sequence: int) -> None:
        """Forget a sequence; blocks that no other sequence owns are free."""
        self.blocks.free(sequence)
        del self.held[sequence]
