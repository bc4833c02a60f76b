"""Families with Mamba-2 layers. families.py has the others."""

from lessons.toolbox.model.families import Family
from lessons.toolbox.model.mamba_config import (
    bamba,
    granitemoehybrid,
    nemotron_h,
    with_infinity,
    with_listed_layers,
)

MULTIPLIERS = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
MAMBA_READS = """mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_d_head mamba_expand
    mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit attention_bias"""
# In this order, because a mixture's shared experts are named as an MLP alone is. Gate and up are
# one matrix, and those of all experts are one stack.
GRANITE_STORED = {
    "mlp.mixture.gate": "block_sparse_moe.router.layer",
    "mlp.mixture.experts.gate_proj": "block_sparse_moe.input_linear",
    "mlp.mixture.experts.up_proj": "block_sparse_moe.input_linear",
    "mlp.mixture.experts.down_proj": "block_sparse_moe.output_linear",
    "mlp.mixture.shared_experts": "mlp",
    "mlp.gate_proj": "shared_mlp.input_linear",
    "mlp.up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "self_attn.gated_norm": "mamba.norm",
}
OF_MAMBA = "in_proj conv1d dt_bias A_log D out_proj"
STORED_IN_MAMBA = {f"self_attn.{x}": f"mamba.{x}" for x in OF_MAMBA.split()}
GRANITE_STORED |= STORED_IN_MAMBA
# norm, the last one, before the one that is called so there
BAMBA_STORED = dict(norm="final_layernorm", post_attention_layernorm="pre_ff_layernorm")
BAMBA_STORED |= dict(mlp="feed_forward") | {"self_attn.gated_norm": "mamba.norm"} | STORED_IN_MAMBA
# norm, the last one, before the norms that are called so there
NEMOTRON_STORED = dict(norm="norm_f", input_layernorm="norm", embed_tokens="embeddings")
NEMOTRON_STORED |= {"self_attn.gated_norm": "mixer.norm"}
NEMOTRON_STORED |= dict(self_attn="mixer", mlp="mixer")
NEMOTRON_SIZES = "ssm_state_size mamba_num_heads mamba_head_dim n_groups conv_kernel"
NEMOTRON_EXPERTS = """n_routed_experts moe_intermediate_size moe_shared_expert_intermediate_size
    num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob"""
# how weights were drawn, how a library computes, and further layers, which are left out
NEMOTRON_AT_REST = """time_step_min time_step_max time_step_floor time_step_rank chunk_size expand
    rescale_prenorm_residual use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep
    moe_shared_expert_overlap mtp_layers_block_type mtp_hybrid_override_pattern"""

FAMILIES = {
    "granitemoehybrid": Family(
        granitemoehybrid,
        f"num_key_value_heads shared_intermediate_size layer_types {MULTIPLIERS}",
        f"{MAMBA_READS} position_embedding_type num_local_experts num_experts_per_tok init_method",
        fixed=dict(normalization_function="rmsnorm"),
        also_called=dict(layers_block_type="layer_types"),
        stored_as=GRANITE_STORED,
        may_be_zero="num_local_experts num_experts_per_tok",
        reworded=with_infinity,
    ),
    "bamba": Family(
        bamba,
        "num_key_value_heads attn_layer_indices mamba_n_heads mamba_d_state",
        f"{MAMBA_READS} mlp_bias attn_rotary_emb partial_rotary_factor num_logits_to_keep "
        "z_loss_coefficient",
        stored_as=BAMBA_STORED,
        may_be_zero="z_loss_coefficient",
        reworded=with_infinity,
    ),
    "nemotron_h": Family(
        nemotron_h,
        f"num_key_value_heads head_dim layers_block_type {NEMOTRON_SIZES}",
        f"use_bias use_conv_bias mlp_bias time_step_limit {NEMOTRON_EXPERTS} {NEMOTRON_AT_REST}",
        also_called=dict(
            layer_types="layers_block_type",
            attention_head_dim="head_dim",
            rms_norm_eps="layer_norm_epsilon",
            norm_eps="layer_norm_epsilon",
        ),
        stored_as=NEMOTRON_STORED,
        left_out="mtp.",
        eps="layer_norm_epsilon",
        reworded=with_listed_layers,
    ),
}
