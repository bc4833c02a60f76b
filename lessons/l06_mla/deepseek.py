"""DeepSeek-V2 and V3: a decoder whose keys and values of all heads are made from one small latent
per token.

Read `MLAttention.forward` first: it makes q, one latent c_kv and one key k_pe of a token, then k
and v of every head from these two, and attends like any other model. So any cache of the course
serves it. The two classes below it give the same result in two other ways:

    LatentAttention     hands attend q, and c_kv ‖ k_pe in place of k: the cache decides (naive.py)
    AbsorbedAttention   compares q_nope W_UK ‖ q_pe with c_kv ‖ k_pe, as one KV head whose values
                        are c_kv, and applies W_UV after the attention

Rotation is `attend`'s, as in every model: it turns the last `rope` coordinates of q and k, which
are q_pe and k_pe in all three. Parameters carry the names of Hugging Face checkpoints. kv_b_proj
holds, head by head, W_UK's rows and then W_UV's.

Sources: DeepSeek-V2 (2024), section 2.1 and appendix C; DeepSeek-V3 (2024), section 2.1.1;
transformers' modeling_deepseek_v3.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import MLP, Decoder, DecoderLayer, RMSNorm, swap
from lessons.l02_naive_attention.variants.gemma import GemmaDecoder
from lessons.l02_naive_attention.variants.glm4 import Glm4Decoder
from lessons.l02_naive_attention.variants.granite import GraniteDecoder
from lessons.l02_naive_attention.variants.olmo import OlmoDecoder
from lessons.l02_naive_attention.variants.parallel import CohereDecoder, PhiDecoder
from lessons.l02_naive_attention.variants.starcoder2 import Starcoder2Decoder
from lessons.l06_mla.gpt_oss import GptOssDecoder
from lessons.l06_mla.mamba.bamba import BambaDecoder
from lessons.l06_mla.mamba.granite_hybrid import GraniteHybridDecoder
from lessons.l06_mla.mamba.nemotron_h import NemotronHDecoder
from lessons.l06_mla.moe import MoE, MoEDecoder
from lessons.l06_mla.variants.lfm2 import Lfm2Decoder
from lessons.l06_mla.variants.llama4 import Llama4Decoder
from lessons.l06_mla.variants.qwen3_next import Qwen3NextDecoder
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.mamba_config import MambaConfig
from lessons.toolbox.model.state_config import ConvConfig, StateConfig

LATENT_NORM_EPS = 1e-6  # fixed in the published code, whatever rms_norm_eps says


class MLAttention(nn.Module):
    """Multi-head latent attention, expanded: k and v of H heads are made from each token's latent.

    A head of q and k is nope + rope wide, a head of v v_dim; the latent has `rank` values.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        mla, size, bias = config.mla, config.hidden_size, config.qkv_bias
        self.num_heads, self.mla = config.num_attention_heads, mla
        rank, q_size = mla.kv_lora_rank, self.num_heads * mla.qk_head_dim
        kv_size = self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(size, q_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, mla.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, q_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, mla.latent_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(rank, kv_size, bias=False)
        self.o_proj = nn.Linear(self.num_heads * mla.v_head_dim, size, bias=config.o_bias)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        q = self.queries(x)  # [T, H, nope + rope]
        c_kv, k_pe = self.latents(x)  # [T, 1, rank], [T, 1, rope]
        k, v = self.expand(c_kv, k_pe)  # [T, H, nope + rope], [T, H, v_dim]
        return self.o_proj(attend(q, k, v).flatten(-2))

    def queries(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size] -> q: [T, H, nope + rope], not rotated."""
        if self.mla.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = self.split_query(q.unflatten(-1, (self.num_heads, -1)))
        return torch.cat([q_nope, self.in_halves(q_pe)], dim=-1)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden_size] -> c_kv: [T, 1, rank], normed; k_pe: [T, 1, rope], not rotated.

        These two are all that a cache must keep.
        """
        widths = [self.mla.kv_lora_rank, self.mla.qk_rope_head_dim]
        c_kv, k_pe = self.kv_a_proj_with_mqa(x)[:, None].split(widths, dim=-1)
        return self.kv_a_layernorm(c_kv), self.in_halves(k_pe)

    def in_halves(self, x: Tensor) -> Tensor:
        """Rotary coordinates that are stored in pairs (2i, 2i + 1) as (i, i + rope / 2). x: [T, H,
        rope].

        That reorders q_pe and k_pe alike, and no product of the two depends on their order.
        """
        if not self.mla.rope_interleave:
            return x
        return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)

    def split_query(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q: [T, H, nope + rope] -> q_nope: [T, H, nope], q_pe: [T, H, rope]."""
        return q.split([self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim], dim=-1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK: [H, nope, rank] and W_UV: [H, v_dim, rank], views of kv_b_proj, whose rows are
        stored head by head: nope, then v_dim.
        """
        per_head = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        return per_head.split([self.mla.qk_nope_head_dim, self.mla.v_head_dim], dim=1)

    def expand(self, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """c_kv: [..., 1, rank], k_pe: [..., 1, rope] -> k: [..., H, nope + rope], v: [..., H,
        v_dim]. k_pe is the same in every head.
        """
        heads = self.kv_b_proj(c_kv).squeeze(-2).unflatten(-1, (self.num_heads, -1))
        k_nope, v = heads.split([self.mla.qk_nope_head_dim, self.mla.v_head_dim], dim=-1)
        k_pe = k_pe.expand(*k_nope.shape[:-1], -1)
        return torch.cat([k_nope, k_pe], dim=-1), v.contiguous()

    def absorb(self, q: Tensor) -> Tensor:
        """q: [T, H, nope + rope] -> [T, H, rank + rope], because q_nope · (W_UK c) = (q_nope W_UK)
        · c.
        """
        q_nope, q_pe = self.split_query(q)
        q_latent = torch.einsum("thn,hnr->thr", q_nope, self.up_projections()[0])
        return torch.cat([q_latent, q_pe], dim=-1)

    def project_values(self, out: Tensor) -> Tensor:
        """out: [T, H, rank], weighted sums of latents -> [T, H, v_dim], because Σ w (W_UV c) = W_UV
        Σ w c.
        """
        return torch.einsum("thr,hvr->thv", out, self.up_projections()[1])


# ---------------------------------------------------------------- the same in two other ways


class LatentAttention(nn.Module):
    """attend(q: [T, H, nope + rope], k: c_kv ‖ k_pe: [T, 1, rank + rope], v: c_kv: [T, 1, rank]) ->
    [T, H, v_dim]: what to do with latents is the cache's decision.
    """

    def __init__(self, expanded: MLAttention):
        super().__init__()
        self.expanded = expanded

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        c_kv, k_pe = self.expanded.latents(x)
        out = attend(self.expanded.queries(x), torch.cat([c_kv, k_pe], dim=-1), c_kv)
        return self.expanded.o_proj(out.flatten(-2))


class AbsorbedAttention(LatentAttention):
    """attend(q: [T, H, rank + rope], k: c_kv ‖ k_pe: [T, 1, rank + rope], v: c_kv: [T, 1, rank]) ->
    [T, H, rank]: ordinary attention with one KV head.
    """

    def forward(self, x: Tensor, attend: Callable) -> Tensor:  # [T, hidden_size] -> the same
        c_kv, k_pe = self.expanded.latents(x)
        q = self.expanded.absorb(self.expanded.queries(x))
        out = attend(q, torch.cat([c_kv, k_pe], dim=-1), c_kv)
        return self.expanded.o_proj(self.expanded.project_values(out).flatten(-2))


def latent(model: Decoder) -> Decoder:
    """The same weights with LatentAttention in every layer. Raises ValueError without latents."""
    check_has_latents(model)
    return swap(model, {MLAttention: LatentAttention})


def absorbed(model: Decoder) -> Decoder:
    """The same weights as a model with one KV head, which any cache of the course can hold.

    Raises ValueError for a model without latents.
    """
    check_has_latents(model)
    mla, twin = model.config.mla, swap(model, {MLAttention: AbsorbedAttention})
    twin.config = replace(
        model.config,
        num_key_value_heads=1,
        head_dim=mla.latent_dim,
        v_head_dim=mla.kv_lora_rank,
    )
    return twin


def check_has_latents(model: Decoder) -> None:
    """Raise ValueError unless the model has latent attention."""
    if model.config.mla is None:
        raise ValueError(
            f"model: got model_type {model.config.model_type!r}; accepted: one with latents to "
            "cache (DeepSeek-V2, V3)"
        )


# ---------------------------------------------------------------- the whole


class DeepseekDecoder(Decoder):
    """DeepSeek-V2 or V3: the decoder with latent attention, and experts in most layers."""

    def new_layer(self, index: int) -> DecoderLayer:
        config = self.config
        if config.mla is None:
            raise ValueError(
                f"config.mla: got None (model_type {config.model_type!r}); accepted: an MLAConfig "
                "(others: Decoder)"
            )
        has_experts = config.moe is not None and config.moe.has_experts(index)
        mlp = MoE(config) if has_experts else MLP(config)
        return DecoderLayer(config, MLAttention(config), mlp)


OF_VARIANT = {
    "cohere": CohereDecoder,
    "gemma": GemmaDecoder,
    "glm4": Glm4Decoder,
    "llama4": Llama4Decoder,
    "nemotron_h": NemotronHDecoder,
    "olmo": OlmoDecoder,
    "phi": PhiDecoder,
    "starcoder2": Starcoder2Decoder,
}
OF_STATES = {ConvConfig: Lfm2Decoder, StateConfig: Qwen3NextDecoder, MambaConfig: BambaDecoder}


def load_decoder(
    name_or_path: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The checkpoint in the class that its config asks for. Raises CheckpointError."""
    kind = decoder_class(load_config(name_or_path))
    return kind.from_pretrained(name_or_path, device, dtype)


def decoder_class(config: ModelConfig) -> type[Decoder]:
    """The decoder that has this shape's parts."""
    if config.variant is not None:
        return OF_VARIANT[config.variant]
    if config.multipliers is not None:
        return GraniteDecoder if config.state is None else GraniteHybridDecoder
    if config.state is not None:
        return OF_STATES[type(config.state)]
    if config.norms_after:
        return GemmaDecoder
    if config.mla is not None:
        return DeepseekDecoder
    if config.attention_sinks:
        return GptOssDecoder
    return Decoder if config.moe is None else MoEDecoder
