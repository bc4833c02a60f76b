"""The fields of ModelConfig of families that are mixtures of experts, out of transformers' config.
DeepSeek's have latents, too.
"""

from typing import Any

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config_parts import MLAConfig, MoEConfig
from lessons.toolbox.model.family_windows import layer_windows, same_windows

MLA_SIZES = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
MOE_SIZES = "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts"
MOE_SIZES += " first_k_dense_replace"


def mixtral(config) -> dict[str, Any]:
    """Mixtral."""
    moe = MoEConfig(
        n_routed_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
    )
    return dict(moe=moe, sliding_windows=same_windows(config))


def qwen3_moe(config) -> dict[str, Any]:
    """Qwen3-MoE."""
    moe = MoEConfig(
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
        dense_layers=sparse_step_dense_layers(config),
    )
    bias, windows = config.attention_bias, same_windows(config)
    if windows and getattr(config, "max_window_layers", 0):
        raise ValueError(
            f"'max_window_layers' must be 0 where qwen3_moe has a window, because versions of "
            f"transformers differ in what it means there, not {shown(config.max_window_layers)}"
        )
    own = dict(moe=moe, qk_norm=True, sliding_windows=windows)
    return own | dict(qkv_bias=bias, o_bias=bias)


def gpt_oss(config) -> dict[str, Any]:
    """gpt-oss."""
    moe = MoEConfig(
        n_routed_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        are_stacked=True,
    )
    initial = getattr(config, "initial_context_length", None)
    original = config.rope_parameters.get("original_max_position_embeddings", initial)
    if initial is not None and initial != original:
        raise ValueError(f"'initial_context_length' must be {original}, not {shown(initial)}")
    bias, windows = config.attention_bias, layer_windows(config)
    own = dict(moe=moe, attention_sinks=True, sliding_windows=windows)
    return own | dict(qkv_bias=bias, o_bias=bias)


def deepseek_v2(config) -> dict[str, Any]:
    method = config.topk_method
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"'topk_method' must be greedy or group_limited_greedy in deepseek_v2, "
            f"not {shown(method)}"
        )
    # V2-Lite names groups and does not use them
    groups = "" if method == "greedy" else "n_group topk_group"
    return _deepseek(config, groups, True, scoring_func="softmax", topk_method=method)


def deepseek_v3(config) -> dict[str, Any]:
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


def glm4_moe(config) -> dict[str, Any]:
    """GLM-4.5 and its successors of the same shape."""
    sizes = {key: getattr(config, key) for key in f"{MOE_SIZES} n_group topk_group".split()}
    moe = MoEConfig(
        **sizes,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
    )
    share = config.rope_parameters["partial_rotary_factor"]
    own = dict(moe=moe, partial_rotary_factor=share, qkv_bias=config.attention_bias)
    return own | dict(qk_norm=config.use_qk_norm)


def qwen2_moe(config) -> dict[str, Any]:
    """Qwen1.5-MoE and Qwen2-MoE: one shared expert, with a gate of its own."""
    moe = MoEConfig(
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
        shared_expert_intermediate_size=config.shared_expert_intermediate_size,
        dense_layers=sparse_step_dense_layers(config),
    )
    return dict(moe=moe, qkv_bias=config.qkv_bias, sliding_windows=layer_windows(config))


def sparse_step_dense_layers(config) -> tuple[int, ...]:
    """The layers of a Qwen mixture that have an ordinary MLP."""
    layers, step = range(config.num_hidden_layers), config.decoder_sparse_step
    mlp_only = set(config.mlp_only_layers)
    # + 1, because every step-th layer has experts, and layer 0 is the first
    return tuple(i for i in layers if i in mlp_only or (i + 1) % step)
