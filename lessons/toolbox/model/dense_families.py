"""The fields of ModelConfig of dense families that came after families.py was full, out of
transformers' config.
"""

from typing import Any

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config_parts import Multipliers
from lessons.toolbox.model.family_windows import layer_windows, local_rope


def olmo2(config) -> dict[str, Any]:
    """OLMo 2."""
    bias = config.attention_bias
    return dict(variant="olmo", qkv_bias=bias, o_bias=bias, qk_norm=True)


def olmo3(config) -> dict[str, Any]:
    """OLMo 3: windows, in whose layers nothing is stretched."""
    rope = local_rope(config)
    own = dict(rope_local_base_freq=rope["rope_theta"], sliding_windows=layer_windows(config))
    return olmo2(config) | own


def granite(config) -> dict[str, Any]:
    """Granite 3."""
    multipliers = Multipliers(
        embedding_multiplier=config.embedding_multiplier,
        residual_multiplier=config.residual_multiplier,
        attention_multiplier=config.attention_multiplier,
        logits_scaling=config.logits_scaling,
    )
    bias = config.attention_bias
    return dict(multipliers=multipliers, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def smollm3(config) -> dict[str, Any]:
    """SmolLM3."""
    flags, layers = config.no_rope_layers, config.num_hidden_layers  # 1: the layer rotates
    if len(flags) != layers or not set(flags) <= {0, 1}:
        raise ValueError(
            f"'no_rope_layers' must hold 0 or 1 for each of {layers} layers, not {shown(flags)}"
        )
    windows = layer_windows(config)
    if windows and not config.use_sliding_window:
        raise ValueError(
            "'use_sliding_window' must be true where 'layer_types' has sliding_attention, not false"
        )
    bias = config.attention_bias
    own = dict(no_rope_layers=tuple(i for i in range(layers) if not flags[i]))
    own |= dict(sliding_windows=windows, mlp_bias=config.mlp_bias)
    return own | dict(qkv_bias=bias, o_bias=bias)


def glm4(config) -> dict[str, Any]:
    """GLM-4."""
    share = config.rope_parameters["partial_rotary_factor"]
    return dict(variant="glm4", qkv_bias=config.attention_bias, partial_rotary_factor=share)
