"""Families of which some layers keep a state in the place of K and V. families.py has the
others.
"""

from lessons.toolbox.model.expert_families import QWEN2_SHARED, QWEN3_DENSE, QWEN3_EXPERTS
from lessons.toolbox.model.families import Family
from lessons.toolbox.model.state_config import lfm2, qwen3_next

SIZES = "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
OF_STATES = "in_proj_qkvz in_proj_ba conv1d dt_bias A_log norm out_proj"
QWEN3_NEXT = {f"self_attn.{x}": f"linear_attn.{x}" for x in OF_STATES.split()} | QWEN2_SHARED
# out_proj, of a convolution, before o_proj, because attention calls that out_proj
LFM2 = {
    "self_attn.in_proj": "conv.in_proj",
    "self_attn.conv1d": "conv.conv",
    "self_attn.out_proj": "conv.out_proj",
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "norm": "embedding_norm",
}
LFM2_ALSO = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), "hidden_size")
LFM2_ALSO |= dict.fromkeys(("norm_eps", "block_norm_eps"), "rms_norm_eps")
LFM2_ALSO |= dict(num_heads="num_attention_heads", block_ff_dim="intermediate_size")
LFM2_ALSO |= dict(tie_embedding="tie_word_embeddings")
LFM2_INIT = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")

FAMILIES = {
    "qwen3_next": Family(
        qwen3_next,
        f"{QWEN3_EXPERTS} head_dim shared_expert_intermediate_size linear_conv_kernel_dim {SIZES}",
        f"attention_bias norm_topk_prob {QWEN3_DENSE} partial_rotary_factor layer_types "
        "full_attention_interval",
        stored_as=QWEN3_NEXT,
        left_out="mtp.",
    ),
    "lfm2": Family(
        lfm2,
        "num_key_value_heads conv_L_cache",
        "layer_types full_attn_idxs block_auto_adjust_ff_dim block_ffn_dim_multiplier "
        "block_multiple_of",
        fixed=dict(block_use_swiglu=True, use_pos_enc=True, conv_use_xavier_init=True)
        | dict.fromkeys(LFM2_INIT, 1),
        also_called=LFM2_ALSO,
        stored_as=LFM2,
    ),
}
