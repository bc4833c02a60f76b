"""DeepSeek-V2 and V3: a decoder whose keys and values of all heads are made from one small latent
per token.

Read MLAttention from `forward` upwards: it hands its `attend` a token's q of every head, one
rotated key k_pe and one latent c_kv. Two adapters turn the course's ordinary attend into such a
one, with the same result:

    expanded    k = W_UK c_kv ‖ k_pe and v = W_UV c_kv for every head: ordinary attention with H heads; any cache of the course
    absorbed    q_nope W_UK ‖ q_pe against c_kv ‖ k_pe: one KV head whose values are c_kv, and W_UV after the attention

Parameters carry the names of Hugging Face checkpoints. kv_b_proj holds, head by head, W_UK's rows
and then W_UV's.

Sources: DeepSeek-V2 (2024), section 2.1 and appendix C; DeepSeek-V3 (2024), section 2.1.1;
transformers' modeling_deepseek_v3.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Attend, Decoder, DecoderLayer, RMSNorm
from lessons.l02_naive_attention.rope import Rotate
from lessons.l06_mla.moe import MoE
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig

LATENT_NORM_EPS = 1e-6  # fixed in the published code, whatever rms_norm_eps says


class MLAttention(nn.Module):
    """Multi-head latent attention. H heads; a head of q and k is nope + rope wide, a head of v
    v_dim; the latent has `rank`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        mla, size, bias = config.mla, config.hidden_size, config.qkv_bias
        self.num_heads, self.mla = config.num_attention_heads, mla
        q_size = self.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(size, q_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, mla.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, q_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, mla.latent_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            mla.kv_lora_rank, self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * mla.v_head_dim, size, bias=config.o_bias)

    def queries(self, x: Tensor, rotate: Rotate) -> Tensor:
        """x: [T, hidden_size] -> q: [T, H, nope + rope], the last `rope` coordinates rotated."""
        q = (
            self.q_proj(x)
            if self.mla.q_lora_rank is None
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        )
        q_nope, q_pe = self.split_query(q.unflatten(-1, (self.num_heads, -1)))
        return torch.cat([q_nope, rotate(q_pe)], dim=-1)

    def split_query(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q: [T, H, nope + rope] -> q_nope: [T, H, nope], q_pe: [T, H, rope]."""
        return q.split([self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim], dim=-1)

    def latents(self, x: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """x: [T, hidden_size] -> c_kv: [T, 1, rank], normed, no position in it; k_pe: [T, 1, rope],
        rotated. All that is kept.
        """
        c_kv, k_pe = self.kv_a_proj_with_mqa(x)[:, None].split(
            [self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1
        )
        return self.kv_a_layernorm(c_kv), rotate(k_pe)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK: [H, nope, rank] and W_UV: [H, v_dim, rank], views of kv_b_proj, whose rows lie head
        by head: nope, then v_dim.
        """
        per_head = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        return per_head.split([self.mla.qk_nope_head_dim, self.mla.v_head_dim], dim=1)

    def expand(self, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """c_kv: [T, 1, rank], k_pe: [T, 1, rope] -> k: [T, H, nope + rope], v: [T, H, v_dim]. k_pe
        is the same in every head.
        """
        k_nope, v = (
            self.kv_b_proj(c_kv)
            .unflatten(-1, (self.num_heads, -1))
            .squeeze(1)
            .split([self.mla.qk_nope_head_dim, self.mla.v_head_dim], dim=-1)
        )
        return torch.cat([k_nope, k_pe.expand(-1, self.num_heads, -1)], dim=-1), v.contiguous()

    def absorb(self, q: Tensor) -> Tensor:
        """q: [T, H, nope + rope] -> [T, H, rank + rope], because q_nope · (W_UK c) = (q_nope W_UK)
        · c.
        """
        q_nope, q_pe = self.split_query(q)
        return torch.cat(
            [torch.einsum("thn,hnr->thr", q_nope, self.up_projections()[0]), q_pe], dim=-1
        )

    def project_values(self, out: Tensor) -> Tensor:
        """out: [T, H, rank], weighted sums of latents -> [T, H, v_dim], because Σ w (W_UV c) = W_UV
        Σ w c.
        """
        return torch.einsum("thr,hvr->thv", out, self.up_projections()[1])

    def forward(self, x: Tensor, rotate: Rotate, attend: Callable) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]. attend(q, k_pe, c_kv) -> [T, H, v_dim]."""
        c_kv, k_pe = self.latents(x, rotate)
        return self.o_proj(attend(self.queries(x, rotate), k_pe, c_kv).flatten(-2))


# ---------------------------------------------------------------- from an ordinary attend to one that gets latents


def expanded(model: "DeepseekDecoder", attend: Attend) -> Attend:
    """attend(layer, q, k: [T, H, nope + rope], v: [T, H, v_dim]) as a function of (layer, q, k_pe,
    c_kv) -> [T, H, v_dim].
    """

    def attend_to_latents(layer: int, q: Tensor, k_pe: Tensor, c_kv: Tensor) -> Tensor:
        return attend(layer, q, *model.layers[layer].self_attn.expand(c_kv, k_pe))

    return attend_to_latents


def absorbed(model: "DeepseekDecoder", attend: Attend) -> Attend:
    """attend(layer, q: [T, H, rank + rope], k: [T, 1, rank + rope], v: [T, 1, rank]) as a function
    of (layer, q, k_pe, c_kv).
    """

    def attend_to_latents(layer: int, q: Tensor, k_pe: Tensor, c_kv: Tensor) -> Tensor:
        mla = model.layers[layer].self_attn
        return mla.project_values(
            attend(layer, mla.absorb(q), torch.cat([c_kv, k_pe], dim=-1), c_kv)
        )

    return attend_to_latents


def untouched(model: "DeepseekDecoder", attend: Attend) -> Attend:
    """attend itself: q [T, H, nope + rope], k_pe [T, 1, rope] and c_kv [T, 1, rank] reach it as
    they are.
    """
    return attend


# ---------------------------------------------------------------- the whole


class DeepseekDecoder(Decoder):
    """DeepSeek-V2 or V3 (config.mla). attend gets expanded k and v, unless a twin says otherwise:
    `latent()`, `absorbed()`.
    """

    adapter = staticmethod(expanded)

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.mla is None:
            raise ValueError(
                f"config.mla: got None (model_type {config.model_type!r}); accepted: an MLAConfig "
                f"(others: Decoder)"
            )
        has_experts = config.moe is not None and config.moe.has_experts(index)
        return DecoderLayer(
            config, MLAttention(config), MoE(config) if has_experts else MLP(config)
        )

    def latent(self) -> "DeepseekDecoder":
        """The same weights; attend(layer, q [T, H, nope + rope], k_pe [T, 1, rope], c_kv [T, 1,
        rank]) decides itself.
        """
        return self._twin(untouched, self.config)

    def absorbed(self) -> "DeepseekDecoder":
        """The same weights as a model with one KV head: k is c_kv ‖ k_pe, v is c_kv, and config
        says so to any cache.
        """
        mla = self.config.mla
        return self._twin(
            absorbed,
            replace(
                self.config,
                num_key_value_heads=1,
                head_dim=mla.latent_dim,
                v_head_dim=mla.kv_lora_rank,
            ),
        )

    def _twin(self, adapter: Callable, config: ModelConfig) -> "DeepseekDecoder":
        twin = copy.copy(self)  # shallow, so every parameter is shared
        twin.adapter, twin.config = adapter, config
        return twin

    def unrotated(self) -> Decoder:
        rope, head = self.config.rope_dim, self.config.mla.qk_head_dim
        raise ValueError(
            f"unrotated: got a decoder that rotates {rope} of the {head} coordinates of a head; "
            f"accepted: one that "
            "rotates whole heads (a cache that rotates cannot know which)"
        )

    def rotation(self, positions: Tensor) -> Rotate:
        """How q_pe and k_pe turn: [T, H, rope] -> [T, H, rope]. Interleaved pairs (2i, 2i + 1)
        leave as (i, i + rope / 2).

        That reorders the coordinates of q_pe and k_pe alike, and no product of the two depends on
        their order.
        """
        rotate = super().rotation(positions)
        if not self.config.mla.rope_interleave:
            return rotate
        return lambda x: rotate(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1))

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens: [T] int64, positions: [T] int64 -> hidden: [T, hidden_size]."""
        return super().forward(tokens, positions, self.adapter(self, attend))


def load_decoder(
    name_or_path: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The checkpoint in the class that its config asks for: DeepseekDecoder or Decoder. Raises
    CheckpointError.
    """
    kind = DeepseekDecoder if load_config(name_or_path).mla else Decoder
    return kind.from_pretrained(name_or_path, device, dtype)
