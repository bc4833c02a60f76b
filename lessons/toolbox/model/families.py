"""Which models the course reads, and how each family's config becomes fields of ModelConfig.

A new family is one row of FAMILIES and one function that gives the fields of its own. The functions
get transformers' config, whose defaults and types are already in place. The rows of ELSEWHERE are
in modules of their own, which are imported when a file asks for them.
"""

from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

from lessons.toolbox.model.arguments import shown


class Family(NamedTuple):
    """How the config.json of one model_type is read. Keys stand in one string, between blanks.

    fields: from transformers' config, the fields of ModelConfig that are the family's own. needs
    and reads: keys that the file must and may hold, beside those of every family. fixed: the one
    supported value of keys that transformers does not know. read_as: the model_type whose class
    reads the file, if it is another one. rope_types: those that its RoPE object may have.
    also_called: {another name of a key: the key}. stored_as: {part of a tensor's name in the
    decoder: the same part in the checkpoints}. rope_by_layer: whether its rope_parameters hold one
    object for the layers with a window, and one for the others. rope_in_pairs: whether the rotary
    coordinates of a head are stored in pairs (2i, 2i + 1). predicts_further: whether layers may
    stand behind the last one, which predict tokens further ahead. left_out: parts of the
    names of tensors that are not read: of such layers, where they are no layers, of an indexer, or
    of eyes. may_be_zero: keys at which 0 says that there is none. eps: the key of what is added to
    a variance. experts_from_right: whether the stacked matrices of experts multiply from the right,
    [E, in, out]. reworded: from a file's content, one name for each key, the same under the keys
    that `needs` and `reads` have.
    """

    fields: Callable[[Any], dict[str, Any]]
    needs: str = ""
    reads: str = ""
    fixed: dict[str, Any] | None = None
    read_as: str = ""
    rope_types: str = "default linear llama3 yarn"
    also_called: dict[str, str] | None = None
    stored_as: dict[str, str] | None = None
    rope_by_layer: bool = False
    rope_in_pairs: bool = False
    predicts_further: bool = False
    left_out: str = ""
    may_be_zero: str = ""
    eps: str = "rms_norm_eps"
    experts_from_right: bool = False
    reworded: Callable[[dict[str, Any]], dict[str, Any]] = dict


# ---------------------------------------------------------------- windows, by the config


def same_windows(config) -> tuple[int | None, ...]:
    """As `layer_windows`, for a family whose window is that of every layer."""
    window = config.sliding_window
    return () if window is None else (window,) * config.num_hidden_layers


def layer_windows(config) -> tuple[int | None, ...]:
    """Per layer, how many keys a query sees (itself included), or None for all of them. Empty: all
    of them in every layer.
    """
    of_kind = {"full_attention": None, "sliding_attention": config.sliding_window}
    kinds = set(config.layer_types)
    if not kinds <= set(of_kind):
        raise ValueError(
            f"'layer_types' must list {' or '.join(of_kind)}, not {shown(sorted(kinds))}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if config.sliding_window is None:
        raise ValueError("'layer_types' has sliding_attention, but 'sliding_window' is null")
    if config.sliding_window == 0:  # transformers' word for one that is not in use
        raise ValueError("'layer_types' has sliding_attention, but 'use_sliding_window' is false")
    return tuple(of_kind[kind] for kind in config.layer_types)


def local_rope(config) -> dict[str, Any]:
    """What the layers with a window rotate by. Raises ValueError for a stretched one."""
    rope = config.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        given = shown(rope["rope_type"])
        raise ValueError(f"'rope_parameters.sliding_attention' must be default, not {given}")
    return rope


def unrotated_layers(config) -> tuple[int, ...]:
    """The layers that 'no_rope_layers' marks by 0. Raises ValueError unless it marks each."""
    flags, layers = config.no_rope_layers, config.num_hidden_layers  # 1: the layer rotates
    if len(flags) != layers or not set(flags) <= {0, 1}:
        raise ValueError(
            f"'no_rope_layers' must hold 0 or 1 for each of {layers} layers, not {shown(flags)}"
        )
    return tuple(i for i in range(layers) if not flags[i])


# ---------------------------------------------------------------- fields


def _llama(config) -> dict[str, Any]:
    bias = config.attention_bias
    return dict(qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(config) -> dict[str, Any]:
    return dict(sliding_windows=layer_windows(config))


def _qwen2(config) -> dict[str, Any]:
    return dict(qkv_bias=True, sliding_windows=layer_windows(config))


def _qwen3(config) -> dict[str, Any]:
    bias = config.attention_bias
    return dict(qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=layer_windows(config))


def _phi3(config) -> dict[str, Any]:
    share = config.rope_parameters["partial_rotary_factor"]
    return dict(sliding_windows=same_windows(config), partial_rotary_factor=share)


def _gemma2(config) -> dict[str, Any]:
    bias, windows = config.attention_bias, layer_windows(config)
    numbers = {key: getattr(config, key) for key in GEMMA2_NUMBERS.split()}
    return numbers | dict(norms_after=True, qkv_bias=bias, o_bias=bias, sliding_windows=windows)


def _gemma3(config) -> dict[str, Any]:
    rope = local_rope(config)
    bias = config.attention_bias
    own = dict(
        norms_after=True,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
        final_logit_softcapping=config.final_logit_softcapping,
        rope_local_base_freq=rope["rope_theta"],
        sliding_windows=layer_windows(config),
    )
    return own | dict(qkv_bias=bias, o_bias=bias, qk_norm=True)


# ---------------------------------------------------------------- rows

WINDOWS = "use_sliding_window sliding_window max_window_layers layer_types"
MISTRAL = "head_dim sliding_window layer_types"
GEMMA2_NUMBERS = "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
# in this order, because the first name is that of another norm in the checkpoints
GEMMA_NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "self_attn.norm_after": "post_attention_layernorm",
    "mlp.norm_after": "post_feedforward_layernorm",
}
# q, k and v are one matrix, and so are gate and up
PHI3_MERGED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
PHI3_MERGED |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")

HERE = {
    "llama": Family(_llama, reads="head_dim attention_bias mlp_bias"),
    # With layer_types a mistral is a ministral to transformers; without them they are the same.
    "mistral": Family(_mistral, "num_key_value_heads", MISTRAL, read_as="ministral"),
    "ministral": Family(_mistral, "num_key_value_heads", MISTRAL),
    "qwen2": Family(_qwen2, "num_key_value_heads", f"head_dim {WINDOWS}"),
    "qwen3": Family(_qwen3, "num_key_value_heads head_dim", f"attention_bias {WINDOWS}"),
    "phi3": Family(
        _phi3,
        "num_key_value_heads",
        "sliding_window partial_rotary_factor original_max_position_embeddings",
        rope_types="default longrope",
        fixed=dict(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False),  # Phi-4's
        stored_as=PHI3_MERGED,
    ),
    "gemma2": Family(
        _gemma2,
        f"num_key_value_heads head_dim sliding_window {GEMMA2_NUMBERS}",
        "attention_bias layer_types",
        fixed=dict(hidden_act="gelu_pytorch_tanh"),
        stored_as=GEMMA_NORMS,
    ),
    "gemma3_text": Family(
        _gemma3,
        "num_key_value_heads head_dim query_pre_attn_scalar sliding_window",
        "attention_bias final_logit_softcapping rope_local_base_freq sliding_window_pattern "
        "layer_types",
        rope_types="default linear",
        stored_as=GEMMA_NORMS,
        rope_by_layer=True,
    ),
}
ELSEWHERE = {
    "dense_families": "cohere cohere2 gemma glm glm4 granite olmo2 olmo3 phi smollm3 starcoder2",
    "expert_families": "mixtral qwen2_moe qwen3_moe gpt_oss deepseek_v2 deepseek_v3 deepseek_v32 "
    "kimi_k2 glm4_moe llama4_text",
    "state_families": "qwen3_next lfm2",
    "mamba_families": "granitemoehybrid bamba nemotron_h",
}
# what the decoders lack for families that are asked for
LACKING = {
    "falcon_h1": "attention and a Mamba-2 side by side in a layer",
    "jamba": "Mamba-1 layers",
    "kimi_linear": "states that fade by a factor for each channel",
    "mamba": "Mamba-1 layers, and none with attention",
    "mamba2": "no layer with attention",
    "zamba2": "one attention layer that many share",
}


# under which key the config.json of a model with eyes describes its decoder
DECODER_IN = {"llama4": "text_config"}


def of_decoder(raw: dict[str, Any], part: str | None) -> dict[str, Any]:
    """What a config.json says of the decoder: its object `part`, or that of DECODER_IN, in which
    the quantization is the file's; else all of it.
    """
    if part is not None:
        return raw[part]
    model_type = raw.get("model_type")
    inner = raw.get(DECODER_IN.get(model_type)) if isinstance(model_type, str) else None
    if not isinstance(inner, dict):
        return raw
    return dict(quantization_config=raw.get("quantization_config")) | inner


class Families(MutableMapping):
    """{model_type: Family} of all families; those elsewhere are imported when one is asked for."""

    def __init__(self):
        self.rows = dict(HERE)
        self.module_of = {name: at for at, names in ELSEWHERE.items() for name in names.split()}

    def __getitem__(self, model_type: str) -> Family:
        if model_type not in self.rows and model_type in self.module_of:
            module = import_module(f"lessons.toolbox.model.{self.module_of[model_type]}")
            self.rows = module.FAMILIES | self.rows
        return self.rows[model_type]

    def __setitem__(self, model_type: str, family: Family) -> None:
        self.rows[model_type] = family

    def __delitem__(self, model_type: str) -> None:
        del self.rows[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*HERE, *self.module_of, *self.rows]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES = Families()


def with_method(said: Any, method: str) -> Any:
    """What an older file says of quantized weights, with the quant_method that it leaves out; what
    is no object stays, and is refused later.
    """
    return {"quant_method": method} | said if isinstance(said, dict) else said
