"""What the tests of this lesson share: a small DeepSeek with random weights, and its tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l06_mla.deepseek import DeepseekDecoder
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.model.config import MLAConfig, ModelConfig, MoEConfig, RopeScaling

DEVICE = default_device()  # without a GPU the kernel runs in Triton's interpreter
RANK, ROPE = 32, 16
CONFIG = ModelConfig(
    "deepseek_v3",
    vocab_size=61,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=24,
    intermediate_size=40,
    max_position_embeddings=256,
    v_head_dim=12,
    mla=MLAConfig(20, RANK, 8, ROPE, 12),
    rope_scaling=RopeScaling(
        "yarn", 8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0
    ),
    moe=MoEConfig(
        8,
        2,
        24,
        1,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
)
EVERY_TOKEN = SamplingParams(temperature=0, ignore_eos=True)


@torch.no_grad()
def new_model(dtype: torch.dtype = torch.float64, **changes) -> DeepseekDecoder:
    """Random weights, norms and biases included, with attention sharp enough that a slip changes
    the tokens.
    """
    model = DeepseekDecoder(replace(CONFIG, **changes)).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.4 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            parameter.add_(1)
        if "q_b_proj" in name or "q_proj" in name:
            parameter.mul_(2)
    return model.eval().requires_grad_(False)


def random_prompts(*lengths: int) -> list[list[int]]:
    """Token ids, a prompt of each length."""
    return [torch.randint(0, 61, (n,)).tolist() for n in lengths]


def hidden_of(model, tokens: Tensor) -> Tensor:
    """Without any cache. tokens: [T] -> [T, hidden_size]."""
    return model(tokens, whole_sequence(model, len(tokens)))
