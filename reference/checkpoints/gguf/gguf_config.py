"""The metadata of a GGUF file as a ModelConfig, and back.

    config = config_of(read_gguf("model.gguf"))
    metadata = metadata_of(config)

llama.cpp reads a model's settings from the keys that begin with its architecture:
"llama.block_count". So these are all read here, or known to change nothing, or refused by name.
Keys of other beginnings (general, tokenizer, quantize) say where the file comes from and how it
makes tokens.

Architectures: llama (Llama 1 to 3, Mistral without a window), qwen2, qwen3. Source: llama-arch.cpp
and convert_hf_to_gguf.py of llama.cpp.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lessons.l02_naive_attention.rope import rope_inv_freq
from lessons.toolbox.model.arguments import is_number, is_whole, refuse, shown
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import LARGEST, LARGEST_SIZE, CheckpointError
from lessons.toolbox.model.rope_scaling import RopeScaling, yarn_mscale
from reference.checkpoints.gguf.gguf_file import GgufFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# what each family of checkpoints is called here
WRITTEN_AS = dict(llama="llama", mistral="llama", ministral="llama", qwen2="qwen2", qwen3="qwen3")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1: what each pair's wavelength is multiplied with
SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
# keys that change nothing at these values, and keys that never do
NEUTRAL = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}
HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
STOP_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


# ---------------------------------------------------------------- reading


class _Settings:
    """The keys of one architecture. What is taken is checked; what is left over is refused."""

    def __init__(self, metadata: dict[str, Any], architecture: str):
        self.prefix = f"{architecture}."
        self.left = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }

    def whole(self, key: str, largest: int, default: int | None = None) -> int:
        value = self._take(key, default)
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]  # one number a layer, the same for all
        if not is_whole(value, high=largest):
            raise CheckpointError(
                f"{self.prefix}{key} must be a whole number up to {largest}, not {shown(value)}"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._take(key, default)
        if not is_number(value, 0) or value == 0:
            raise CheckpointError(f"{self.prefix}{key} must be positive, not {shown(value)}")
        # the shortest decimal of a float32 is what its writer meant: 1e-05, not 9.99999974e-06
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        return self._take(key, default)

    def _take(self, key: str, default: Any) -> Any:
        if key not in self.left and default is None:
            raise CheckpointError(f"the key {self.prefix}{key} is missing")
        return self.left.pop(key, default)

    def refuse_rest(self) -> None:
        for key, value in self.left.items():
            if key not in HARMLESS and NEUTRAL.get(key) != value:
                raise CheckpointError(
                    f"{self.prefix}{key} is {shown(value)}, and the decoder does not read this key"
                )


def config_of(file: GgufFile) -> ModelConfig:
    """Shape of the model in a file. Raises CheckpointError, one line: another architecture, a key
    that is missing, wrong, or unknown and might change the result, sizes that do not fit.
    """
    try:
        return _config_of(file)
    except ValueError as error:  # CheckpointError is one
        raise CheckpointError(f"{file.path}: {error}") from None


def _config_of(file: GgufFile) -> ModelConfig:
    metadata, tensors = file.metadata, file.tensors
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 1)
    if kind != "model" or parts != 1:
        raise CheckpointError(
            f"it holds {shown(kind)} in {shown(parts)} files; accepted: a model in one file "
            "(llama-gguf-split --merge joins them)"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        accepted = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"general.architecture is {shown(architecture)}; supported: {accepted}"
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError("the tensor token_embd.weight is missing")
    own = _Settings(metadata, architecture)
    sizes = {name: own.whole(key, LARGEST.get(name, LARGEST_SIZE)) for name, key in SIZES.items()}
    heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
    kv_heads = own.whole("attention.head_count_kv", LARGEST_SIZE, heads)
    head_dim = own.whole("attention.key_length", LARGEST_SIZE, max(hidden_size // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := own.whole(key, LARGEST_SIZE, head_dim)) != head_dim:
            raise CheckpointError(f"{architecture}.{key} must be {head_dim}, not {value}")
    config = ModelConfig(
        model_type=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=own.positive("attention.layer_norm_rms_epsilon"),
        rope_theta=own.positive("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, own, sizes["max_position_embeddings"]),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=architecture == "qwen3",
        eos_token_ids=stop_tokens_of(metadata),
    )
    own.refuse_rest()
    return config


def stop_tokens_of(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer: of a text, of a chat's turn, of a message."""
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in STOP_TOKENS]
    return tuple(dict.fromkeys(id for id in named if is_whole(id, 0)))


def _rope_scaling(file: GgufFile, own: _Settings, context: int) -> RopeScaling | None:
    """How the file stretches its rotary embeddings."""
    # without a type, a factor means linear, and older files call it scale_linear
    kind = own.text("rope.scaling.type", "linear")
    factor = own.positive("rope.scaling.factor", own.positive("rope.scale_linear", 1.0))
    original = own.whole("rope.scaling.original_context_length", 2**24, context)
    stretch = own.positive("rope.scaling.attn_factor", 1.0)
    fast = own.positive("rope.scaling.yarn_beta_fast", 32.0)
    slow = own.positive("rope.scaling.yarn_beta_slow", 1.0)
    plain = kind == "none" or (kind == "linear" and factor == 1)
    if ROPE_FACTORS in file.tensors and plain:
        factors = tuple(file.read(ROPE_FACTORS).dequantize().flatten().tolist())
        # LongRoPE with the same factors for short and long contexts, and the scores as they are
        return RopeScaling(
            "longrope",
            1.0,
            original_max_position_embeddings=context,
            attention_factor=1.0,
            short_factor=factors,
            long_factor=factors,
        )
    if plain:
        return None
    if kind == "linear" and ROPE_FACTORS not in file.tensors:
        return RopeScaling("linear", factor)
    if kind != "yarn" or ROPE_FACTORS in file.tensors:
        given = f"{shown(kind)} with{'' if ROPE_FACTORS in file.tensors else 'out'} {ROPE_FACTORS}"
        raise CheckpointError(f"rope.scaling.type is {given}; supported: none, linear, yarn")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=stretch * yarn_mscale(factor),
    )


# ---------------------------------------------------------------- writing


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """A model's shape under llama.cpp's keys. Raises ValueError for a model that its architectures
    do not cover, or that this course writes no keys for.
    """
    architecture = WRITTEN_AS.get(config.model_type)
    if architecture is None:
        refuse("model_type", config.model_type, ", ".join(WRITTEN_AS))
    if any(window is not None for window in config.sliding_windows):
        raise ValueError("model: got one with a sliding window; accepted: one without")
    values = {key: getattr(config, name) for name, key in SIZES.items()}
    values |= {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    values |= _rope_keys(config.rope_scaling)
    general = {"general.architecture": architecture, "general.type": "model"}
    return general | {f"{architecture}.{key}": value for key, value in values.items()}


def _rope_keys(scaling: RopeScaling | None) -> dict[str, Any]:
    """What llama.cpp reads about a stretched context; a Llama 3's is in `rope_factors`."""
    if scaling is None or scaling.rope_type in ("llama3", "longrope"):
        return {}
    keys = {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": float(scaling.factor)}
    if scaling.rope_type == "linear":
        return keys
    if not scaling.truncate or scaling.mscale or scaling.mscale_all_dim:
        raise ValueError("rope_scaling: got a yarn of gpt-oss or DeepSeek; accepted: Qwen's")
    return keys | {
        "rope.scaling.original_context_length": scaling.original_max_position_embeddings,
        "rope.scaling.attn_factor": scaling.magnitude / yarn_mscale(scaling.factor),
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }


def rope_factors(config: ModelConfig) -> Tensor | None:
    """What each pair's wavelength is multiplied with, [D / 2] float32; None where the metadata says
    it all.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type in ("linear", "yarn"):
        return None
    if scaling.rope_type == "longrope" and (
        scaling.short_factor != scaling.long_factor or scaling.magnitude != 1
    ):
        raise ValueError("rope_scaling: got Phi-3's longrope; accepted: llama3, linear, yarn")
    plain = rope_inv_freq(replace(config, rope_scaling=None))
    return (plain / rope_inv_freq(config)).to(torch.float32)
