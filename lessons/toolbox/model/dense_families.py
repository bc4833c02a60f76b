"""Families without experts that differ from Llama in more than sizes and windows. families.py has
the others.
"""

from typing import Any

from lessons.toolbox.model.config_parts import Multipliers
from lessons.toolbox.model.families import (
    Family,
    layer_windows,
    local_rope,
    same_windows,
    unrotated_layers,
)


def _olmo2(config) -> dict[str, Any]:
    bias = config.attention_bias
    return dict(variant="olmo", qkv_bias=bias, o_bias=bias, qk_norm=True)


def _olmo3(config) -> dict[str, Any]:
    """OLMo 3: windows, in whose layers nothing is stretched."""
    rope = local_rope(config)
    own = dict(rope_local_base_freq=rope["rope_theta"], sliding_windows=layer_windows(config))
    return _olmo2(config) | own


def _granite(config) -> dict[str, Any]:
    multipliers = Multipliers(
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        attention_multiplier=config.attention_multiplier,
        logits_scaling=config.logits_scaling,
    )
    bias = config.attention_bias
    return dict(multipliers=multipliers, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def _smollm3(config) -> dict[str, Any]:
    windows = layer_windows(config)
    if windows and not config.use_sliding_window:
        raise ValueError(
            "'use_sliding_window' must be true where 'layer_types' has sliding_attention, not false"
        )
    bias = config.attention_bias
    own = dict(no_rope_layers=unrotated_layers(config))
    own |= dict(sliding_windows=windows, mlp_bias=config.mlp_bias)
    return own | dict(qkv_bias=bias, o_bias=bias)


def _glm(config) -> dict[str, Any]:
    share = config.rope_parameters["partial_rotary_factor"]
    return dict(qkv_bias=config.attention_bias, partial_rotary_factor=share)


def _glm4(config) -> dict[str, Any]:
    return _glm(config) | dict(variant="glm4")


def _gemma(config) -> dict[str, Any]:
    bias = config.attention_bias
    return dict(variant="gemma", qkv_bias=bias, o_bias=bias)


def _starcoder2(config) -> dict[str, Any]:
    bias = config.use_bias
    own = dict(variant="starcoder2", sliding_windows=same_windows(config))
    return own | dict(qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _cohere(config) -> dict[str, Any]:
    head_dim = config.hidden_size // config.num_attention_heads or 1  # ModelConfig refuses a 0
    multipliers = Multipliers(
        attention_multiplier=head_dim**-0.5, logits_scaling=1 / config.logit_scale
    )
    bias = config.attention_bias
    return dict(variant="cohere", multipliers=multipliers, qkv_bias=bias, o_bias=bias)


def _cohere2(config) -> dict[str, Any]:
    """Cohere 2: layers without a window do not rotate."""
    windows, layers = layer_windows(config), range(config.num_hidden_layers)
    unrotated = tuple(i for i in layers if not windows or windows[i] is None)
    return _cohere(config) | dict(sliding_windows=windows, no_rope_layers=unrotated)


def _phi(config) -> dict[str, Any]:
    share = config.rope_parameters["partial_rotary_factor"]
    own = dict(variant="phi", partial_rotary_factor=share)
    return own | dict(qkv_bias=True, o_bias=True, mlp_bias=True)


# what the published files say beside the keys that transformers reads
COHERE2_FIXED = dict(
    layer_switch=4,
    order_of_interleaved_layers="local_attn_first",
    position_embedding_type="rope_gptj",
    rotary_pct=1.0,
    use_embedding_sharing=True,
    use_gated_activation=True,
    use_parallel_block=True,
    use_parallel_embedding=False,
    use_qk_norm=False,
)
GATE_UP = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
GLM4_STORED = GATE_UP | {
    "self_attn.norm_after": "post_self_attn_layernorm",
    "mlp.norm_after": "post_mlp_layernorm",
}
MULTIPLIERS = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
OLMO_NORMS = {
    "self_attn.norm_after": "post_attention_layernorm",
    "mlp.norm_after": "post_feedforward_layernorm",
}

FAMILIES = {
    "cohere": Family(
        _cohere, "logit_scale", "attention_bias", rope_in_pairs=True, eps="layer_norm_eps"
    ),
    "cohere2": Family(
        _cohere2,
        "sliding_window logit_scale",
        "attention_bias sliding_window_pattern layer_types",
        fixed=COHERE2_FIXED,
        rope_in_pairs=True,
        eps="layer_norm_eps",
    ),
    "gemma": Family(
        _gemma,
        "num_key_value_heads head_dim",
        "attention_bias",
        fixed=dict(hidden_activation="gelu_pytorch_tanh"),
    ),
    "glm": Family(
        _glm,
        "num_key_value_heads head_dim",
        "attention_bias partial_rotary_factor",
        stored_as=GATE_UP,
        rope_in_pairs=True,
    ),
    "glm4": Family(
        _glm4,
        "num_key_value_heads head_dim",
        "attention_bias partial_rotary_factor",
        stored_as=GLM4_STORED,
        rope_in_pairs=True,
    ),
    "granite": Family(_granite, MULTIPLIERS, "head_dim attention_bias mlp_bias"),
    "olmo2": Family(_olmo2, "", "head_dim attention_bias", stored_as=OLMO_NORMS),
    "olmo3": Family(
        _olmo3,
        "sliding_window",
        "head_dim attention_bias layer_types",
        rope_types="default yarn",
        stored_as=OLMO_NORMS,
        rope_by_layer=True,
    ),
    "phi": Family(
        _phi,
        "",
        "head_dim partial_rotary_factor",
        stored_as=dict(o_proj="dense", up_proj="fc1", down_proj="fc2", norm="final_layernorm"),
        eps="layer_norm_eps",
    ),
    "smollm3": Family(
        _smollm3,
        "num_key_value_heads",
        "head_dim attention_bias mlp_bias no_rope_layers no_rope_layer_interval use_sliding_window "
        "sliding_window max_window_layers layer_types",
    ),
    "starcoder2": Family(
        _starcoder2,
        "num_key_value_heads",
        "head_dim sliding_window use_bias",
        fixed=dict(mlp_type="default", norm_type="layer_norm", activation_function="gelu"),
        stored_as=dict(up_proj="c_fc", down_proj="c_proj"),
        eps="norm_epsilon",
    ),
}
