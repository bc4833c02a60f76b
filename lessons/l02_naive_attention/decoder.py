"""A Llama-family decoder in one file. It knows nothing of positions, caches, batches or pages.

It sees a flat run of tokens and calls one function, the course's only seam:

    decoder(tokens: [T], attend) -> hidden: [T, hidden_size]
    attend(layer: int, q: [T, Hq, D], k: [T, Hkv, D], v: [T, Hkv, Dv]) -> [T, Hq, Dv]

The decoder never mixes tokens and never knows their positions. Whatever depends on a position or
on another token happens inside `attend`: rotation, masks, caches. `attend` may overwrite q.
Read this file from the bottom up: Decoder, DecoderLayer, Attention, MLP, RMSNorm; then rope.py.
Parameters carry the names of Hugging Face checkpoints, so that loading one is a lookup.

Sources: Llama 2 (Touvron et al. 2023, section 2.2), RMSNorm (Zhang & Sennrich 2019),
GLU variants (Shazeer 2020), Qwen3 technical report (QK-norm).
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from lessons.toolbox.model.checkpoint import find_weights, load_config, load_weights
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.placement import read_device, read_dtype

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# ---------------------------------------------------------------- parts


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        # float32 at least, because the sum of squares overflows float16 above 256 per coordinate
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)  # Llama rounds before the weight, Gemma after it


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, intermediate_size: int | None = None):
        super().__init__()
        size, inner = config.hidden_size, intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden_size] -> [T, hidden_size]
        gate = nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, size, bias=config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, Hq, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hkv, D]
        out = attend(q, k, v)  # [T, Hq, D]
        return self.o_proj(out.flatten(-2))


class DecoderLayer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        self_attn: nn.Module | None = None,
        mlp: nn.Module | None = None,
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn or Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp or MLP(config)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attend)
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
                "DeepseekDecoder (lessons.l06_mla.deepseek), not with Decoder"
            )
        if not self.config.is_plain:
            raise CheckpointError(
                f"model_type {self.config.model_type!r} has experts or norms that Decoder lacks: "
                "load it with load_decoder (lessons.l06_mla.deepseek)"
            )
        return DecoderLayer(self.config)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Decoder":
        """Load a Hugging Face checkpoint by folder or hub name. Raises ValueError (CheckpointError
        for the checkpoint) with one line that says what is wrong.
        """
        device, dtype = read_device(device), read_dtype(dtype)  # before anything is fetched
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

    @property
    def stage_layers(self) -> range:
        """The layers that are here: all, or a run of them where a model is cut into stages. The
        others are replaced by an nn.Identity.
        """
        here = [i for i, layer in enumerate(self.layers) if not isinstance(layer, nn.Identity)]
        return range(here[0], here[-1] + 1)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """tokens: [T] int64 -> hidden: [T, hidden_size]."""
        x = self.embed_tokens(tokens)
        return self.norm(self.run_layers(x, attend))

    def run_layers(self, x: Tensor, attend: Attend, layers: Iterable[int] | None = None) -> Tensor:
        """The layers whose numbers are given, or all that are here. x: [T, hidden_size]."""
        for index in self.stage_layers if layers is None else layers:
            x = self.layers[index](x, partial(attend, index))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [T, hidden_size] -> [T, vocab_size]. Pass only the rows that you need, because
        the vocabulary is wide.
        """
        return self.lm_head(hidden)


def swap(module: nn.Module, factories: Mapping[type, Callable]) -> nn.Module:
    """A twin of `module` with some of its parts replaced. All weights are shared, none is copied.

    factories: {type: function of a part of exactly that type that returns the new part}. Parts
    inside a part are replaced first. A module without any such part is returned as it is.
    """
    children = {name: swap(child, factories) for name, child in module.named_children()}
    if any(children[name] is not child for name, child in module.named_children()):
        module = copy.copy(module)
        # A dictionary of its own, because a shallow copy would share it with the original.
        module._modules = {**module._modules, **children}
    factory = factories.get(type(module))
    return module if factory is None else factory(module)
