"""Which models the course reads, and how each family's config becomes fields of ModelConfig.

A new family is one row of FAMILIES and one function that gives the fields of its own. The functions
get transformers' config, whose defaults and types are already in place. dense_families.py,
expert_families.py and state_families.py have more of both.
"""

from typing import Any

from lessons.toolbox.model.dense_families import DENSE
from lessons.toolbox.model.expert_families import (
    MLA_SIZES,
    MOE_SIZES,
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    mixtral,
    qwen2_moe,
    qwen3_moe,
)
from lessons.toolbox.model.family import Family
from lessons.toolbox.model.family_windows import layer_windows, local_rope, same_windows
from lessons.toolbox.model.state_families import STATES


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
# in this order, because the second name is part of the first
QWEN2_SHARED = {
    "shared_experts.output_gate": "shared_expert_gate.weight",
    "shared_experts": "shared_expert",
}
EXPERTS = "num_key_value_heads num_experts_per_tok"
QWEN3_DENSE = "decoder_sparse_step mlp_only_layers"
QWEN3_WINDOW = "use_sliding_window sliding_window max_window_layers"
QWEN3_EXPERTS = f"{EXPERTS} num_experts moe_intermediate_size"
DEEPSEEK_V3_READS = "attention_bias routed_scaling_factor norm_topk_prob rope_interleave"
DEEPSEEK_V3_ROUTER = dict(scoring_func="sigmoid", moe_layer_freq=1, topk_method="noaux_tc")
DEEPSEEK = f"q_lora_rank {MLA_SIZES} {MOE_SIZES}"

FAMILIES = (
    {
        "llama": Family(_llama, reads="head_dim attention_bias mlp_bias"),
        # With layer_types a mistral is a ministral to transformers; without them they are the same.
        "mistral": Family(_mistral, "num_key_value_heads", MISTRAL, read_as="ministral"),
        "ministral": Family(_mistral, "num_key_value_heads", MISTRAL),
        "qwen2": Family(_qwen2, "num_key_value_heads", f"head_dim {WINDOWS}"),
        "qwen3": Family(_qwen3, "num_key_value_heads head_dim", f"attention_bias {WINDOWS}"),
        "mixtral": Family(
            mixtral,
            f"{EXPERTS} num_local_experts",
            "head_dim sliding_window",
            fixed=dict(router_jitter_noise=0.0),
            also_called=dict(num_experts="num_local_experts"),
            stored_as=dict(mlp="block_sparse_moe", gate_proj="w1", down_proj="w2", up_proj="w3"),
        ),
        "qwen3_moe": Family(
            qwen3_moe,
            QWEN3_EXPERTS,
            f"head_dim attention_bias norm_topk_prob {QWEN3_DENSE} {QWEN3_WINDOW}",
            also_called=dict(num_local_experts="num_experts"),
        ),
        "phi3": Family(
            _phi3,
            "num_key_value_heads",
            "sliding_window partial_rotary_factor original_max_position_embeddings",
            rope_types="default longrope",
            fixed=dict(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False),  # Phi-4's
            stored_as=PHI3_MERGED,
        ),
        "gpt_oss": Family(
            gpt_oss,
            f"{EXPERTS} num_local_experts head_dim sliding_window",
            "attention_bias layer_types initial_context_length",
            fixed=dict(swiglu_limit=7.0),
            also_called=dict(
                num_experts="num_local_experts", experts_per_token="num_experts_per_tok"
            ),
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
        "qwen2_moe": Family(
            qwen2_moe,
            f"{QWEN3_EXPERTS} shared_expert_intermediate_size",
            f"head_dim qkv_bias norm_topk_prob layer_types {QWEN3_DENSE} {QWEN3_WINDOW}",
            also_called=dict(num_local_experts="num_experts"),
            stored_as=QWEN2_SHARED,
            may_be_zero="sliding_window",  # as transformers writes a window that is not in use
        ),
    }
    | DENSE
    | STATES
)
