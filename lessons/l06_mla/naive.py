"""A cache of latents that decompresses everything at every step: small to keep, expensive to read.

Rung by rung: lesson 3's cache keeps k and v of every head. `LatentPool` keeps one row of rank +
rope values, c_kv ‖ k_pe, and makes k and v of all heads from it whenever they are needed.
optimized.py does not make them at all.

Source: DeepSeek-V2 (2024), section 2.1.2, equations 9 to 13.
"""

from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend, Decoder
from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l04_positions.stand_ins import turn_
from lessons.l06_mla.deepseek import MLAttention, latent
from lessons.toolbox.model.config import ModelConfig


class LatentPool(KVPool):
    """One row a token and layer, c_kv ‖ k_pe: [layers, num_blocks, block_size, 1, rank + rope].

    For a model of LatentAttention. Its V has no width: the first `rank` values of a row are c_kv.
    """

    layer_of: dict[int, MLAttention]

    def learn_layers(self, model: Decoder) -> None:
        """Keep the layers, whose matrices expand the latents. model: from `latent`."""
        self.layer_of = {i: model.layers[i].self_attn.expanded for i in model.stage_layers}

    @staticmethod
    def rows(config: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
        return (1, config.mla.latent_dim), (1, 0)

    def attending(self, batch: Batch, first_block: int = 0) -> Attend:
        """attend(layer, q: [T, H, nope + rope], k: c_kv ‖ k_pe, v: c_kv) -> [T, H, v_dim]."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slots = self.k_slots[layer - self.layers.start]
            q = self.ops.write(q, k, v, slots, None, batch, self.cos_sin_cache)
            self.written_bytes += k.nbytes
            latents = self.blocks(slots)[first_block:]
            return self.read(self.layer_of[layer], q, latents, batch)

        return attend

    def read(self, mla: MLAttention, q: Tensor, latents: Tensor, batch: Batch) -> Tensor:
        """Expand all latents, then ordinary attention. latents: [blocks, block_size, 1, rank +
        rope], q: [T, H, nope + rope] -> [T, H, v_dim].
        """
        k_cache, v_cache = self.expanded_rows(mla, latents, batch)
        return self.ops.prefill(q, k_cache, v_cache, batch, self.config.softmax_scale, None)

    def expanded_rows(
        self, mla: MLAttention, latents: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """k: [B, max_context_len, H, nope + rope] and v: [B, max_context_len, H, v_dim]."""
        rows = latents[: len(batch.context_lens), : batch.max_context_len]
        widths = [self.config.mla.kv_lora_rank, self.config.mla.qk_rope_head_dim]
        return mla.expand(*rows.split(widths, dim=-1))


def write_latents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: None,
    batch: Batch,
    cos_sin_cache: Tensor,
) -> Tensor:
    """Rotate q_pe and k_pe in place, store c_kv ‖ k_pe; v is a part of it. Shapes as in
    LatentPool.
    """
    rope_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[batch.positions][:, None].to(q.dtype).chunk(2, dim=-1)
    turn_(q[..., -rope_dim:], cos, sin)
    turn_(k[..., -rope_dim:], cos, sin)
    k_slots.index_put_((batch.slot_mapping,), k)
    return q


LATENTS_TORCH = LESSON_03_TORCH._replace(write=write_latents)
EXPANDED = Rung(
    "latents, expanded at every step",
    LATENTS_TORCH,
    LATENTS_TORCH,
    prepare=latent,
    cache=LatentPool,
)
