"""Which models the course reads, and how each family's config becomes fields of ModelConfig.

A new family is one row of FAMILIES and one function that gives the fields of its own. The functions
get transformers' config, whose defaults and types are already in place.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config import MLAConfig, MoEConfig

MLA_SIZES = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
MOE_SIZES = "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts"
MOE_SIZES += " first_k_dense_replace"


class Family(NamedTuple):
    """How the config.json of one model_type is read. Keys stand in one string, between blanks.

    fields: from transformers' config, the fields of ModelConfig that are the family's own. needs
    and reads: keys that the file must and may hold, beside those of every family. fixed: the one
    supported value of keys that transformers does not know. read_as: the model_type whose class
    reads the file, if it is another one.
    """

    fields: Callable[[Any], dict[str, Any]]
    needs: str = ""
    reads: str = ""
    fixed: dict[str, Any] | None = None
    read_as: str = ""


def _llama(config) -> dict[str, Any]:
    bias = config.attention_bias
    return dict(qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(config) -> dict[str, Any]:
    return dict(sliding_windows=_windows(config))


def _qwen2(config) -> dict[str, Any]:
    return dict(qkv_bias=True, sliding_windows=_windows(config))


def _qwen3(config) -> dict[str, Any]:
    bias = config.attention_bias
    return dict(qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=_windows(config))


def _windows(config) -> tuple[int | None, ...]:
    """Per layer, how many keys a query sees (itself included), or None for all of them. Empty: all
    of them in every layer.
    """
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    kinds = set(config.layer_types)
    if not kinds <= set(windows):
        raise ValueError(
            f"'layer_types' must list {' or '.join(windows)}, not {shown(sorted(kinds))}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if config.sliding_window is None:
        raise ValueError("'layer_types' has sliding_attention, but 'sliding_window' is null")
    return tuple(windows[kind] for kind in config.layer_types)


def _deepseek_v2(config) -> dict[str, Any]:
    method = config.topk_method
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"'topk_method' must be greedy or group_limited_greedy in deepseek_v2, "
            f"not {shown(method)}"
        )
    # V2-Lite names groups and does not use them
    groups = "" if method == "greedy" else "n_group topk_group"
    return _deepseek(config, groups, True, scoring_func="softmax", topk_method=method)


def _deepseek_v3(config) -> dict[str, Any]:
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


WINDOWS = "use_sliding_window sliding_window max_window_layers layer_types"
MISTRAL = "head_dim sliding_window layer_types"
DEEPSEEK = f"q_lora_rank {MLA_SIZES} {MOE_SIZES}"

FAMILIES = {
    "llama": Family(_llama, reads="head_dim attention_bias mlp_bias"),
    # With layer_types a mistral is a ministral to transformers; without them they are the same.
    "mistral": Family(_mistral, "num_key_value_heads", MISTRAL, read_as="ministral"),
    "ministral": Family(_mistral, "num_key_value_heads", MISTRAL),
    "qwen2": Family(_qwen2, "num_key_value_heads", f"head_dim {WINDOWS}"),
    "qwen3": Family(_qwen3, "num_key_value_heads head_dim", f"attention_bias {WINDOWS}"),
    "deepseek_v2": Family(
        _deepseek_v2,
        DEEPSEEK,
        "attention_bias routed_scaling_factor n_group topk_group topk_method",
        # DeepSeek's code divides by the sum that norm_topk_prob asks for, transformers does not
        fixed=dict(scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False),
    ),
    "deepseek_v3": Family(
        _deepseek_v3,
        f"{DEEPSEEK} n_group topk_group",
        "attention_bias routed_scaling_factor norm_topk_prob rope_interleave",
        fixed=dict(scoring_func="sigmoid", moe_layer_freq=1, topk_method="noaux_tc"),
    ),
}
