"""Shapes of the embedded models, and random weights to begin their training with."""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from models.tokenizer import VOCAB_SIZE

SHAPES = {  # ratio of query to KV heads: 3 (no power of two, as in Qwen2's 6 and 7) and 2
    "tiny": dict(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1024,
    ),
    "draft": dict(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=512,
    ),
}
SHARED = dict(
    vocab_size=VOCAB_SIZE,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=None,
    initializer_range=0.02,
)
HYBRID = dict(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=704,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
)
STATE, CACHE = "linear_attention", "full_attention"
MIXES = {  # of layers: Qwen3-Next's three and one, and what it is compared with
    "hybrid": (STATE, STATE, STATE, CACHE),
    "attention": (CACHE,) * 4,
    "states": (STATE,) * 4,
    "slow": (STATE, STATE, STATE, CACHE),  # as hybrid, but its states fade slowly at first
}
SLOW = (0.001, 0.1)  # the range of time steps that Mamba-2 and Gated DeltaNet begin with


def new_model(name: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            **SHAPES[name],
            **SHARED,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
        )
    )


def new_mix(name: str) -> Qwen3NextForCausalLM:
    """A model with layers of one of MIXES; all else is the same. MLPs are dense, which Qwen3-Next
    has for layers that its config names.
    """
    torch.manual_seed(0)
    half = dict(partial_rotary_factor=0.5)  # of a head's coordinates; in both places of the config
    unused = dict(moe_intermediate_size=8, shared_expert_intermediate_size=8)
    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SHARED,
            **HYBRID,
            layer_types=list(MIXES[name]),
            mlp_only_layers=list(range(HYBRID["num_hidden_layers"])),
            num_experts=1,
            num_experts_per_tok=1,
            **unused,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0) | half,
            **half,
        )
    )
    if name == "slow":
        begin_slowly(model)
    return model


@torch.no_grad()
def begin_slowly(model: Qwen3NextForCausalLM) -> None:
    """Biases with which a state's decay begins as those of the Gated DeltaNet paper's authors do: a
    time step between the two of SLOW, evenly by its logarithm. transformers begins with softplus(1)
    = 1.3, so that exp(-A · 1.3) of a state is left after a token, and A is up to 16.
    """
    low, high = map(math.log, SLOW)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            bias = layer.linear_attn.dt_bias
            steps = (low + (high - low) * torch.rand_like(bias)).exp()
            bias.copy_(steps.expm1().log())  # the way back of softplus
