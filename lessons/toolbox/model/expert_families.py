"""The fields of ModelConfig of families that are mixtures of experts, out of transformers' config.
DeepSeek's have latents, too.
"""

from typing import Any

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config_parts import MLAConfig, MoEConfig
from lessons.toolbox.model.families import Family, layer_windows, same_windows, unrotated_layers

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


def deepseek_v32(config) -> dict[str, Any]:
    """DeepSeek-V3.2, up to index_topk tokens: there its indexer chooses all keys, so attention is
    V3's. Its context ends there, because in a longer one each query attends to index_topk keys.
    """
    layers = config.num_hidden_layers
    dense = min(config.first_k_dense_replace, layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    if list(config.mlp_layer_types) != kinds:
        raise ValueError(
            f"'mlp_layer_types' must be sparse after the first {dense} (first_k_dense_replace), "
            f"not {shown(config.mlp_layer_types)}"
        )
    own = _deepseek(
        config, "n_group topk_group", True, scoring_func="sigmoid", topk_method="noaux_tc"
    )
    return own | dict(
        max_position_embeddings=min(config.max_position_embeddings, config.index_topk)
    )


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


def llama4_text(config) -> dict[str, Any]:
    """Llama 4's text model, in contexts of one chunk: there attention within chunks is attention to
    all. They are shorter yet where the queries of layers that do not rotate begin to grow.
    """
    layers, unrotated = range(config.num_hidden_layers), unrotated_layers(config)
    chunk = config.attention_chunk_size
    if chunk is None:
        raise ValueError("'attention_chunk_size' must be a whole number, not null")
    kinds = ("chunked_attention", "full_attention")
    if not set(config.layer_types) <= set(kinds):
        given = shown(config.layer_types)
        raise ValueError(f"'layer_types' must list {' or '.join(kinds)}, not {given}")
    longest = min(config.max_position_embeddings, chunk)
    if unrotated and config.attn_temperature_tuning:
        longest = min(longest, config.floor_scale - 1)
    moe = MoEConfig(
        n_routed_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        n_shared_experts=1,
        scoring_func="sigmoid",
        are_stacked=True,
        dense_layers=tuple(i for i in layers if i not in config.moe_layers),
    )
    bias = config.attention_bias
    own = dict(variant="llama4", moe=moe, no_rope_layers=unrotated, qk_norm=config.use_qk_norm)
    own |= dict(intermediate_size=config.intermediate_size_mlp, max_position_embeddings=longest)
    return own | dict(qkv_bias=bias, o_bias=bias)


# in this order, because the second name is part of the first
QWEN2_SHARED = {
    "shared_experts.output_gate": "shared_expert_gate.weight",
    "shared_experts": "shared_expert",
}
LLAMA4_STORED = {
    "mlp.gate": "feed_forward.router",
    "mlp.experts.gate_proj.weight": "feed_forward.experts.gate_up_proj",
    "mlp.experts.up_proj.weight": "feed_forward.experts.gate_up_proj",
    "mlp.experts.down_proj.weight": "feed_forward.experts.down_proj",
    "mlp.shared_experts": "feed_forward.shared_expert",
    "mlp": "feed_forward",
}
EXPERTS = "num_key_value_heads num_experts_per_tok"
QWEN3_DENSE = "decoder_sparse_step mlp_only_layers"
QWEN3_WINDOW = "use_sliding_window sliding_window max_window_layers"
QWEN3_EXPERTS = f"{EXPERTS} num_experts moe_intermediate_size"
DEEPSEEK_V3_READS = "attention_bias routed_scaling_factor norm_topk_prob rope_interleave"
DEEPSEEK_V3_ROUTER = dict(scoring_func="sigmoid", moe_layer_freq=1, topk_method="noaux_tc")
DEEPSEEK = f"q_lora_rank {MLA_SIZES} {MOE_SIZES}"

FAMILIES = {
    "mixtral": Family(
        mixtral,
        f"{EXPERTS} num_local_experts",
        "head_dim sliding_window",
        fixed=dict(router_jitter_noise=0.0),
        also_called=dict(num_experts="num_local_experts"),
        stored_as=dict(mlp="block_sparse_moe", gate_proj="w1", down_proj="w2", up_proj="w3"),
    ),
    "qwen2_moe": Family(
        qwen2_moe,
        f"{QWEN3_EXPERTS} shared_expert_intermediate_size",
        f"head_dim qkv_bias norm_topk_prob layer_types {QWEN3_DENSE} {QWEN3_WINDOW}",
        also_called=dict(num_local_experts="num_experts"),
        stored_as=QWEN2_SHARED,
        may_be_zero="sliding_window",  # as transformers writes a window that is not in use
    ),
    "qwen3_moe": Family(
        qwen3_moe,
        QWEN3_EXPERTS,
        f"head_dim attention_bias norm_topk_prob {QWEN3_DENSE} {QWEN3_WINDOW}",
        also_called=dict(num_local_experts="num_experts"),
    ),
    "gpt_oss": Family(
        gpt_oss,
        f"{EXPERTS} num_local_experts head_dim sliding_window",
        "attention_bias layer_types initial_context_length",
        fixed=dict(swiglu_limit=7.0),
        also_called=dict(num_experts="num_local_experts", experts_per_token="num_experts_per_tok"),
    ),
    "deepseek_v2": Family(
        deepseek_v2,
        DEEPSEEK,
        "attention_bias routed_scaling_factor n_group topk_group topk_method",
        # DeepSeek's code divides by the sum that norm_topk_prob asks for, transformers does not
        fixed=dict(scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False),
        predicts_further=True,
    ),
    "deepseek_v3": Family(
        deepseek_v3,
        f"{DEEPSEEK} n_group topk_group",
        DEEPSEEK_V3_READS,
        fixed=DEEPSEEK_V3_ROUTER,
        predicts_further=True,
    ),
    "deepseek_v32": Family(
        deepseek_v32,
        f"{DEEPSEEK} n_group topk_group index_topk",
        "attention_bias routed_scaling_factor norm_topk_prob mlp_layer_types index_head_dim "
        "index_n_heads",
        fixed=DEEPSEEK_V3_ROUTER,
        predicts_further=True,
        left_out="self_attn.indexer.",
    ),
    "kimi_k2": Family(
        deepseek_v3,
        f"{DEEPSEEK} n_group topk_group",
        DEEPSEEK_V3_READS,
        fixed=DEEPSEEK_V3_ROUTER,
        read_as="deepseek_v3",
        predicts_further=True,
    ),
    "glm4_moe": Family(
        glm4_moe,
        f"num_key_value_heads head_dim {MOE_SIZES}",
        "attention_bias partial_rotary_factor use_qk_norm n_group topk_group norm_topk_prob "
        "routed_scaling_factor",
        also_called=dict(num_local_experts="n_routed_experts"),
        predicts_further=True,
    ),
    "llama4_text": Family(
        llama4_text,
        f"{EXPERTS} head_dim num_local_experts intermediate_size_mlp attention_chunk_size",
        "attention_bias use_qk_norm interleave_moe_layer_step moe_layers no_rope_layers "
        "no_rope_layer_interval layer_types attn_temperature_tuning floor_scale attn_scale",
        rope_types="default llama3",  # yarn's factor would be lost in the norm after it
        fixed=dict(for_llm_compressor=False),
        stored_as=LLAMA4_STORED,
        rope_in_pairs=True,
        left_out="vision_model. multi_modal_projector.",
        experts_from_right=True,
    ),
}
