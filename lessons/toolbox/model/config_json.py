"""From config.json to ModelConfig, in both dialects: transformers 5's (`rope_parameters`,
`layer_types`) and the older one (`rope_theta`, `rope_scaling`).

Source: transformers' configuration classes, whose defaults stand for absent keys wherever the
checkpoints on the hub rely on them; any other key is needed, because a guessed one gives a model
that runs and answers wrongly.
"""

import json
import math
from pathlib import Path
from typing import Any

from lessons.toolbox.model.config import ROPE_TYPES, MLAConfig, ModelConfig, MoEConfig, RopeScaling

# values of config.json's `model_type`
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
# What each DeepSeek scores experts with, how it chooses, and the factor where the key is absent:
# transformers' defaults.
ROUTERS = {
    "deepseek_v2": ("softmax", ("greedy", "group_limited_greedy"), 1.0),
    "deepseek_v3": ("sigmoid", ("noaux_tc",), 2.5),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message is one line that says what is wrong and what
    would be right.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises CheckpointError that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} holds no {file.name}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: malformed JSON or UTF-8
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


class _Fields:
    """Typed look-ups in a JSON object. A key that is absent or null takes its default; without a
    default it is needed.
    """

    def __init__(self, content: dict[str, Any], file: Path, within: str = ""):
        self.content, self.file, self.within = content, file, within

    def get(self, key: str, kinds: tuple[type, ...], accepted: str, default: Any = None) -> Any:
        value = self.content.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.file} lacks the key '{self.within}{key}' ({accepted})")
        if type(value) not in kinds:  # not isinstance, because True is an int
            raise CheckpointError(
                f"{self.file}: '{self.within}{key}' must be {accepted}, not {value!r}"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, (int,), "a positive integer", default)
        if value <= 0:
            raise CheckpointError(
                f"{self.file}: '{self.within}{key}' must be a positive integer, not {value!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, (int, float), "a positive number", default)
        if not 0 < value < math.inf:
            raise CheckpointError(
                f"{self.file}: '{self.within}{key}' must be a positive number, not {value!r}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, (bool,), "true or false", default)


def read_config(folder: Path) -> ModelConfig:
    """Shape of the checkpoint in `folder`, from its config.json; stop tokens also from
    generation_config.json.

    Raises CheckpointError, one line: malformed JSON, a key that is missing or of the wrong kind
    (named), an architecture or RoPE type that the decoder does not have (with those it has), sizes
    that do not divide.
    """
    file = folder / "config.json"
    raw = read_json(file)
    fields = _Fields(raw, file)
    family = fields.get("model_type", (str,), f"one of {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{file}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if raw.get("quantization_config"):
        method = (
            raw["quantization_config"].get("quant_method", "")
            if isinstance(raw["quantization_config"], dict)
            else ""
        )
        raise CheckpointError(
            f"{file}: the weights are quantized (quantization_config {method}); give a checkpoint "
            f"in 16 bits"
        )
    if raw.get("hidden_act") not in (None, "silu", "swish"):
        raise CheckpointError(
            f"{file}: hidden_act {raw['hidden_act']!r} is not supported; supported: silu"
        )

    num_heads = fields.size("num_attention_heads")
    # Llama 1 checkpoints have no such key: one KV head for each query head. Null means the same in
    # every family.
    absent_kv_heads = (
        num_heads if family in ("llama", *ROUTERS) or "num_key_value_heads" in raw else None
    )
    has_bias = family in ("llama", "qwen3", *ROUTERS) and fields.flag("attention_bias", False)
    try:
        mla = _mla(fields, family) if family in ROUTERS else None
        return ModelConfig(
            model_type=family,
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            num_hidden_layers=fields.size("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=fields.size("num_key_value_heads", absent_kv_heads),
            # DeepSeek's key head_dim is qk_rope_head_dim
            head_dim=mla.qk_head_dim if mla else _head_dim(fields, family),
            v_head_dim=mla.v_head_dim if mla else 0,
            mla=mla,
            moe=_moe(fields, family) if family in ROUTERS else None,
            intermediate_size=fields.size("intermediate_size"),
            max_position_embeddings=fields.size("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=_rope_fields(fields).number(
                "rope_theta", fields.number("rope_theta", 10000.0)
            ),
            rope_scaling=_rope_scaling(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=family == "qwen2" or has_bias,
            o_bias=has_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(fields, family),
            eos_token_ids=_eos_token_ids(raw, folder),
        )
    except CheckpointError:
        raise
    except ValueError as error:  # sizes that do not fit together
        raise CheckpointError(f"{file}: {error}") from error


def _mla(fields: _Fields, family: str) -> MLAConfig:
    # because null, which says that q has no low rank, must be said
    if "q_lora_rank" not in fields.content:
        raise CheckpointError(
            f"{fields.file} lacks the key 'q_lora_rank' (a positive integer, or null)"
        )
    if fields.size("num_key_value_heads", fields.size("num_attention_heads")) != fields.size(
        "num_attention_heads"
    ):
        raise CheckpointError(
            f"{fields.file}: 'num_key_value_heads' must be num_attention_heads in {family}, whose "
            f"heads share "
            f"latents instead, not {fields.content['num_key_value_heads']}"
        )
    return MLAConfig(
        q_lora_rank=None if fields.content["q_lora_rank"] is None else fields.size("q_lora_rank"),
        **{
            key: fields.size(key)
            for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        },
        rope_interleave=family == "deepseek_v2" or fields.flag("rope_interleave", True),
    )


def _moe(fields: _Fields, family: str) -> MoEConfig:
    scoring, methods, scaling = ROUTERS[family]
    for key, accepted in (("scoring_func", (scoring,)), ("topk_method", methods)):
        if fields.content.get(key) not in (None, *accepted):
            raise CheckpointError(
                f"{fields.file}: '{key}' must be {' or '.join(accepted)} in {family}, "
                f"not {fields.content[key]!r}"
            )
    normalises = fields.flag("norm_topk_prob", family == "deepseek_v3")
    # DeepSeek's code then divides by the sum, transformers' does not
    if normalises and family == "deepseek_v2":
        raise CheckpointError(
            f"{fields.file}: 'norm_topk_prob' must be false in deepseek_v2, as in all that were "
            f"published"
        )
    method = fields.content.get("topk_method") or methods[0]
    # V2-Lite names groups and does not use them
    num_groups = 1 if method == "greedy" else fields.size("n_group")
    return MoEConfig(
        **{
            key: fields.size(key)
            for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        },
        n_shared_experts=fields.size("n_shared_experts"),
        first_k_dense_replace=fields.get("first_k_dense_replace", (int,), "a count of layers"),
        moe_layer_freq=fields.size("moe_layer_freq", 1),
        scoring_func=scoring,
        topk_method=method,
        n_group=num_groups,
        topk_group=1 if num_groups == 1 else fields.size("topk_group"),
        norm_topk_prob=normalises,
        routed_scaling_factor=fields.number("routed_scaling_factor", scaling),
    )


def _head_dim(fields: _Fields, family: str) -> int:
    # Qwen3's is not derived from the hidden size
    if fields.content.get("head_dim") is not None or family == "qwen3":
        return fields.size("head_dim")
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.file}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads "
            f"({num_heads}), or the key 'head_dim' be given"
        )
    return hidden_size // num_heads


def _rope_fields(fields: _Fields) -> _Fields:
    """The object that describes RoPE: `rope_scaling` in the older dialect, `rope_parameters` since
    transformers 5.
    """
    key = "rope_scaling" if fields.content.get("rope_scaling") else "rope_parameters"
    return _Fields(fields.get(key, (dict,), "an object", {}), fields.file, f"{key}.")


def _rope_scaling(fields: _Fields) -> RopeScaling | None:
    rope = _rope_fields(fields)
    # `type` until transformers 4.43
    rope_type = rope.content.get("rope_type") or rope.content.get("type") or "default"
    for where in (fields, rope):
        if where.number("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"{fields.file}: 'partial_rotary_factor' must be 1, the decoder rotates whole heads"
            )
    if any(isinstance(value, dict) for value in rope.content.values()):
        raise CheckpointError(
            f"{fields.file}: '{rope.within[:-1]}' differs by layer type, which is not supported"
        )
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return RopeScaling("linear", factor=rope.number("factor"))
    if rope_type == "llama3":
        return RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.size(
                "original_max_position_embeddings", fields.size("max_position_embeddings")
            ),
        )
    if rope_type == "yarn":
        original = rope.size(
            "original_max_position_embeddings", fields.size("max_position_embeddings")
        )
        # A null factor is the ratio of the contexts, as transformers takes it.
        factor = rope.number("factor", fields.size("max_position_embeddings") / original)
        optional = {
            key: rope.number(key)
            for key in ("attention_factor", "mscale", "mscale_all_dim")
            if rope.content.get(key)
        }
        return RopeScaling(
            "yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            **optional,
        )
    raise CheckpointError(
        f"{fields.file}: rope_type {rope_type!r} is not supported; supported: default, "
        f"{', '.join(ROPE_TYPES)}"
    )


def _sliding_windows(fields: _Fields, family: str) -> tuple[int | None, ...]:
    """Per layer, how many keys a query sees (itself included), or None for all of them. Empty: all
    of them in every layer.
    """
    num_layers = fields.size("num_hidden_layers")
    window = None
    if family == "mistral" and "sliding_window" not in fields.content:
        # the default of transformers' MistralConfig; since v0.2 the checkpoints say null
        window = 4096
    elif fields.content.get("sliding_window") is not None and (
        family == "mistral"
        or (family.startswith("qwen") and fields.flag("use_sliding_window", False))
    ):
        window = fields.size("sliding_window")

    layer_types = fields.content.get("layer_types")
    if layer_types is None:
        # Qwen2 and Qwen3 let the first max_window_layers layers see everything (28 is transformers'
        # default).
        first = (
            fields.get("max_window_layers", (int,), "an integer", 28)
            if family.startswith("qwen")
            else 0
        )
        layer_types = [
            "full_attention" if layer < first else "sliding_attention"
            for layer in range(num_layers)
        ]
    elif (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(kind not in ("full_attention", "sliding_attention") for kind in layer_types)
    ):
        raise CheckpointError(
            f"{fields.file}: 'layer_types' must list full_attention or sliding_attention for each "
            f"of the "
            f"{num_layers} layers, not {layer_types!r}"
        )
    elif window is None and "sliding_attention" in layer_types:
        raise CheckpointError(
            f"{fields.file}: 'layer_types' has sliding_attention, but 'sliding_window' gives no "
            f"window"
        )
    if window is None:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Stop tokens of both files, each once: chat checkpoints often name <|im_end|> or <|eot_id|> in
    only one of them.
    """
    sources = [(folder / "config.json", raw)]
    if (folder / "generation_config.json").exists():
        sources.append(
            (folder / "generation_config.json", read_json(folder / "generation_config.json"))
        )
    found = []
    for file, content in sources:
        value = content.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int for token in ids):
            raise CheckpointError(
                f"{file}: 'eos_token_id' must be an integer or a list of integers, not {value!r}"
            )
        found += ids
    return tuple(dict.fromkeys(found))
