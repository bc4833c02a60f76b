"""A Llama-family decoder in one file. It knows nothing of caches, batches or pages.

It sees a flat run of tokens and calls one function, the course's only seam:

    decoder(tokens: [T], positions: [T], attend) -> hidden: [T, hidden_size]
    attend(layer: int, q: [T, Hq, D], k: [T, Hkv, D], v: [T, Hkv, D]) -> [T, Hq, D]

Everything that this course teaches happens inside `attend`, or in the loop around the decoder.
Read it from the bottom up: Decoder, DecoderLayer, Attention, MLP, RMSNorm; then rope.py.
Parameters carry the names of Hugging Face checkpoints, so that loading one is a lookup.

Sources: Llama 2 (Touvron et al. 2023, section 2.2), RMSNorm (Zhang & Sennrich 2019),
GLU variants (Shazeer 2020), Qwen3 technical report (QK-norm).
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.rope import Rotate, rotation
from lessons.toolbox.model.checkpoint import find_weights, load_config, load_weights
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# ---------------------------------------------------------------- parts


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        # the sum of squares overflows float16 above 256 per coordinate
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)  # Llama rounds before the weight, Gemma after it


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, intermediate_size: int | None = None):
        super().__init__()
        size, inner, bias = (
            config.hidden_size,
            intermediate_size or config.intermediate_size,
            config.mlp_bias,
        )
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        size, head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )
        self.q_proj = nn.Linear(size, self.num_heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, self.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, self.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * head_dim, size, bias=config.o_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotate: Rotate, attend: Callable) -> Tensor:
        # [T, Hq, D]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)))
        # [T, Hkv, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        # [T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        # [T, Hq, D]
        out = attend(rotate(q), rotate(k), v)
        return self.o_proj(out.flatten(-2))


class DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, self_attn: nn.Module | None = None, mlp: nn.Module | None = None
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn or Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or MLP(config)

    def forward(self, x: Tensor, rotate: Rotate, attend: Callable) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


# ---------------------------------------------------------------- the whole


class Decoder(nn.Module):
    """The model. `config` tells its shape; `from_pretrained` fills it from a checkpoint."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.new_layer(index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_layer(self, index: int) -> DecoderLayer:
        """Layer `index`, its weights not yet loaded. Raises CheckpointError for a family that needs
        another decoder.
        """
        if self.config.mla is not None:
            raise CheckpointError(
                f"model_type {self.config.model_type!r} has latent attention: load it with "
                f"DeepseekDecoder "
                "(lessons.l06_mla.deepseek), not with Decoder"
            )
        return DecoderLayer(self.config)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Decoder":
        """Load a Hugging Face checkpoint by folder or hub name. Raises CheckpointError with one
        line that says what is wrong.
        """
        config = load_config(name_or_path)
        folder = find_weights(name_or_path, config)
        with torch.device("meta"):  # no memory until the weights arrive
            model = cls(config)
        load_weights(model, folder, device=device, dtype=dtype)
        return model.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def rotation(self, positions: Tensor) -> Rotate:
        """How q and k turn at `positions`: a function [T, H, D] -> [T, H, D], the same for all
        layers.
        """
        return rotation(self.config, positions, self.dtype)

    def unrotated(self) -> "Decoder":
        """The same weights in a decoder that hands q and k to `attend` as projected: positions are
        then attend's own business.
        """
        twin = copy.copy(self)  # shallow, so every parameter is shared
        twin.rotation = lambda positions: lambda x: x
        return twin

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens: [T] int64, positions: [T] int64 -> hidden: [T, hidden_size]."""
        rotate = self.rotation(positions)
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, partial(attend, index))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [T, hidden_size] -> [T, vocab_size]. Pass only the rows that you need: the
        vocabulary is wide.
        """
        return self.lm_head(hidden)
