"""DeepSeek's fields of ModelConfig, out of transformers' config."""

from typing import Any

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config import MLAConfig, MoEConfig
from lessons.toolbox.model.families import MLA_SIZES, MOE_SIZES


def deepseek_v2(config) -> dict[str, Any]:
    """DeepSeek-V2."""
    method = config.topk_method
    if method not in ("greedy", "group_limited_greedy"):
        either = "greedy or group_limited_greedy in deepseek_v2"
        raise ValueError(f"'topk_method' must be {either}, not {shown(method)}")
    # V2-Lite names groups and does not use them
    groups = "" if method == "greedy" else "n_group topk_group"
    return _deepseek(config, groups, True, scoring_func="softmax", topk_method=method)


def deepseek_v3(config) -> dict[str, Any]:
    """DeepSeek-V3."""
    interleave = bool(config.rope_interleave)
    router = dict(scoring_func="sigmoid", topk_method="noaux_tc")
    return _deepseek(config, "n_group topk_group", interleave, **router)


def _deepseek(config, groups: str, interleave: bool, **router: str) -> dict[str, Any]:
    """groups: the keys of the router's groups, if it has any."""
    heads = config.num_attention_heads
    if config.num_key_value_heads != heads:
        raise ValueError(
            f"'num_key_value_heads' must be num_attention_heads ({heads}), because the heads share "
            f"latents instead, not {config.num_key_value_heads}"
        )
    sizes = {key: getattr(config, key) for key in f"{MLA_SIZES} {MOE_SIZES} {groups}".split()}
    for key, value in sizes.items():
        if value is None:
            raise ValueError(f"'{key}' must be a whole number, not null")
    mla_sizes = {key: sizes.pop(key) for key in MLA_SIZES.split()}
    mla = MLAConfig(config.q_lora_rank, **mla_sizes, rope_interleave=interleave)
    moe = MoEConfig(
        **sizes,
        **router,
        norm_topk_prob=bool(config.norm_topk_prob),
        routed_scaling_factor=config.routed_scaling_factor,
    )
    bias = config.attention_bias
    # transformers' head_dim is qk_rope_head_dim
    own = dict(head_dim=mla.qk_head_dim, v_head_dim=mla.v_head_dim, mla=mla, moe=moe)
    return own | dict(qkv_bias=bias, o_bias=bias)
