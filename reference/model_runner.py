"""One pass of the model over what a scheduler chose: tensors in, logits out."""

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l12_paged_kv.blocks import Copy
from lessons.l12_paged_kv.stand_ins import LESSON_12_TORCH, paged_batch
from lessons.l14_continuous_batching.sequence import Step


class ModelRunner:
    """The model, its pool of blocks, and nothing that outlives a step."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, max_model_len: int):
        self.model = model
        self.pool = KVPool(
            model.config,
            num_blocks,
            block_size,
            LESSON_12_TORCH,
            model.dtype,
            model.device,
            max_context_len=max_model_len,
        )

    @torch.inference_mode()
    def __call__(self, step: Step, tables: dict[int, list[int]]) -> Tensor:
        """Run a step. Returns hidden: [T, hidden_size] of all its tokens, in the chunks' order."""
        self.copy_blocks(step.copies)
        chunks = [(chunk.tokens, chunk.sequence.computed) for chunk in step.chunks]
        owned = [tables[chunk.sequence.row] for chunk in step.chunks]
        batch = paged_batch(chunks, self.pool.block_size, owned, self.model.device)
        return self.model(batch.tokens, self.pool.attending(batch))

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """hidden: [T, hidden_size] -> [len(rows), V]. Only of these rows, because V is large."""
        return self.model.logits(hidden[rows])

    def copy_blocks(self, copies: list[Copy]) -> None:
        """Copy whole blocks of all layers, before anything is written into them."""
        if not copies:
            return
        source, target = torch.tensor(copies, device=self.model.device).unbind(1)
        for slots in (self.pool.k_slots, self.pool.v_slots):
            blocks = self.pool.blocks(slots)
            blocks[:, target] = blocks[:, source]
