"""Which models the course reads, and how each family's config becomes fields of ModelConfig.

A new family is one row of FAMILIES and one function that gives the fields of its own. The functions
get transformers' config, whose defaults and types are already in place.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from lessons.toolbox.model.arguments import shown
from lessons.toolbox.model.config import MoEConfig

MLA_SIZES = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
MOE_SIZES = "n_routed_experts num_experts_per_tok moe_intermediate_size n_shared_experts"
MOE_SIZES += " first_k_dense_replace"


class Family(NamedTuple):
    """How the config.json of one model_type is read. Keys stand in one string, between blanks.

    fields: from transformers' config, the fields of ModelConfig that are the family's own. needs
    and reads: keys that the file must and may hold, beside those of every family. fixed: the one
    supported value of keys that transformers does not know. read_as: the model_type whose class
    reads the file, if it is another one. rope_types: those that its RoPE object may have.
    also_called: {another name of a key: the key}. stored_as: {part of a tensor's name in the
    decoder: the same part in the checkpoints}. rope_by_layer: whether its rope_parameters hold one
    object for the layers with a window, and one for the others.
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


def _found_in(module: str, name: str) -> Callable[[Any], dict[str, Any]]:
    """A function of a module beside this one, which is imported when a file asks for it."""

    def fields(config) -> dict[str, Any]:
        return getattr(import_module(f"lessons.toolbox.model.{module}"), name)(config)

    return fields


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


def _mixtral(config) -> dict[str, Any]:
    moe = MoEConfig(
        n_routed_experts=config.num_local_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
    )
    return dict(moe=moe, sliding_windows=_same_windows(config))


def _qwen3_moe(config) -> dict[str, Any]:
    layers, step = range(config.num_hidden_layers), config.decoder_sparse_step
    mlp_only = set(config.mlp_only_layers)
    moe = MoEConfig(
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        norm_topk_prob=config.norm_topk_prob,
        # + 1, because every step-th layer has experts, and layer 0 is the first
        dense_layers=tuple(i for i in layers if i in mlp_only or (i + 1) % step),
    )
    bias, windows = config.attention_bias, _same_windows(config)
    if windows and getattr(config, "max_window_layers", 0):
        raise ValueError(
            f"'max_window_layers' must be 0 where qwen3_moe has a window, because versions of "
            f"transformers differ in what it means there, not {shown(config.max_window_layers)}"
        )
    own = dict(moe=moe, qk_norm=True, sliding_windows=windows)
    return own | dict(qkv_bias=bias, o_bias=bias)


def _phi3(config) -> dict[str, Any]:
    share = config.rope_parameters["partial_rotary_factor"]
    return dict(sliding_windows=_same_windows(config), partial_rotary_factor=share)


def _gpt_oss(config) -> dict[str, Any]:
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
    bias, windows = config.attention_bias, _windows(config)
    own = dict(moe=moe, attention_sinks=True, sliding_windows=windows)
    return own | dict(qkv_bias=bias, o_bias=bias)


def _gemma2(config) -> dict[str, Any]:
    bias, windows = config.attention_bias, _windows(config)
    numbers = {key: getattr(config, key) for key in GEMMA2_NUMBERS.split()}
    return numbers | dict(norms_after=True, qkv_bias=bias, o_bias=bias, sliding_windows=windows)


def _gemma3(config) -> dict[str, Any]:
    rope = config.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        given = shown(rope["rope_type"])
        raise ValueError(f"'rope_parameters.sliding_attention' must be default, not {given}")
    bias = config.attention_bias
    own = dict(
        norms_after=True,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
        final_logit_softcapping=config.final_logit_softcapping,
        rope_local_base_freq=rope["rope_theta"],
        sliding_windows=_windows(config),
    )
    return own | dict(qkv_bias=bias, o_bias=bias, qk_norm=True)


def _same_windows(config) -> tuple[int | None, ...]:
    """As `_windows`, for a family whose window is that of every layer."""
    window = config.sliding_window
    return () if window is None else (window,) * config.num_hidden_layers


def _windows(config) -> tuple[int | None, ...]:
    """Per layer, how many keys a query sees (itself included), or None for all of them. Empty: all
    of them in every layer.
    """
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    kinds = set(config.layer_types)
    if not kinds <= set(windows):
        listed = " or ".join(windows)
        raise ValueError(f"'layer_types' must list {listed}, not {shown(sorted(kinds))}")
    if "sliding_attention" not in kinds:
        return ()
    if config.sliding_window is None:
        raise ValueError("'layer_types' has sliding_attention, but 'sliding_window' is null")
    return tuple(windows[kind] for kind in config.layer_types)


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
EXPERTS = "num_key_value_heads num_experts_per_tok"
QWEN3_DENSE = "decoder_sparse_step mlp_only_layers"
QWEN3_WINDOW = "use_sliding_window sliding_window max_window_layers"
QWEN3_EXPERTS = f"{EXPERTS} num_experts moe_intermediate_size"
STATES = "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
OF_STATES = "in_proj_qkvz in_proj_ba conv1d dt_bias A_log norm out_proj"
QWEN3_NEXT = {f"self_attn.{x}": f"linear_attn.{x}" for x in OF_STATES.split()}
QWEN3_NEXT |= {"shared_experts.output_gate": "shared_expert_gate.weight"}
QWEN3_NEXT |= {"shared_experts": "shared_expert"}
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
DEEPSEEK = f"q_lora_rank {MLA_SIZES} {MOE_SIZES}"

FAMILIES = {
    "llama": Family(_llama, reads="head_dim attention_bias mlp_bias"),
    # With layer_types a mistral is a ministral to transformers; without them they are the same.
    "mistral": Family(_mistral, "num_key_value_heads", MISTRAL, read_as="ministral"),
    "ministral": Family(_mistral, "num_key_value_heads", MISTRAL),
    "qwen2": Family(_qwen2, "num_key_value_heads", f"head_dim {WINDOWS}"),
    "qwen3": Family(_qwen3, "num_key_value_heads head_dim", f"attention_bias {WINDOWS}"),
    "mixtral": Family(
        _mixtral,
        f"{EXPERTS} num_local_experts",
        "head_dim sliding_window",
        fixed=dict(router_jitter_noise=0.0),
        also_called=dict(num_experts="num_local_experts"),
        stored_as=dict(mlp="block_sparse_moe", gate_proj="w1", down_proj="w2", up_proj="w3"),
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        QWEN3_EXPERTS,
        f"head_dim attention_bias norm_topk_prob {QWEN3_DENSE} {QWEN3_WINDOW}",
        also_called=dict(num_local_experts="num_experts"),
    ),
    "qwen3_next": Family(
        _found_in("state_config", "qwen3_next"),
        f"{QWEN3_EXPERTS} head_dim shared_expert_intermediate_size linear_conv_kernel_dim {STATES}",
        f"attention_bias norm_topk_prob {QWEN3_DENSE} partial_rotary_factor layer_types "
        "full_attention_interval",
        stored_as=QWEN3_NEXT,
    ),
    "lfm2": Family(
        _found_in("state_config", "lfm2"),
        "num_key_value_heads conv_L_cache",
        "layer_types full_attn_idxs block_auto_adjust_ff_dim block_ffn_dim_multiplier "
        "block_multiple_of",
        fixed=dict(block_use_swiglu=True, use_pos_enc=True, conv_use_xavier_init=True)
        | dict.fromkeys(LFM2_INIT, 1),
        also_called=LFM2_ALSO,
        stored_as=LFM2,
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
        _gpt_oss,
        f"{EXPERTS} num_local_experts head_dim sliding_window",
        "attention_bias layer_types initial_context_length",
        fixed=dict(swiglu_limit=7.0),
        also_called=dict(num_experts="num_local_experts", experts_per_token="num_experts_per_tok"),
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
        _found_in("deepseek_families", "deepseek_v2"),
        DEEPSEEK,
        "attention_bias routed_scaling_factor n_group topk_group topk_method",
        # DeepSeek's code divides by the sum that norm_topk_prob asks for, transformers does not
        fixed=dict(scoring_func="softmax", moe_layer_freq=1, norm_topk_prob=False),
    ),
    "deepseek_v3": Family(
        _found_in("deepseek_families", "deepseek_v3"),
        f"{DEEPSEEK} n_group topk_group",
        "attention_bias routed_scaling_factor norm_topk_prob rope_interleave",
        fixed=dict(scoring_func="sigmoid", moe_layer_freq=1, topk_method="noaux_tc"),
    ),
}
