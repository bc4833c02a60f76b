"""Random models of odd shapes of the families that lessons/toolbox/model/dense_families.py reads,
and of the mixtures that came with them. tests/random_families.py has the others.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
import random
from pathlib import Path

from transformers import (
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GraniteConfig,
    Olmo2Config,
    Olmo3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tests.random_families import random_experts, random_shape

KINDS = ["sliding_attention", "full_attention"]


def any_head_dim() -> dict:
    """Sometimes another one than hidden_size / heads, under a key that the classes do not name."""
    return random.choice([{}, {}, dict(head_dim=12)])


def yarn(**theta: float) -> dict:
    return dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16) | theta


def olmo2() -> Olmo2Config:
    shape = random_shape(attention_bias=random.random() < 0.3)
    if random.random() < 0.3:
        shape["rope_parameters"] = dict(rope_type="linear", rope_theta=1e4, factor=3.0)
    return Olmo2Config(**shape, **any_head_dim())


def olmo3() -> Olmo3Config:
    shape = random_shape(attention_bias=random.random() < 0.3)
    theta = shape.pop("rope_parameters")["rope_theta"]
    plain = dict(rope_type="default", rope_theta=theta)
    layers = shape["num_hidden_layers"]
    return Olmo3Config(
        **shape,
        **any_head_dim(),
        sliding_window=random.choice([3, 6, 40]),
        layer_types=random.choice([None, random.choices(KINDS, k=layers)]),
        rope_parameters=dict(
            full_attention=random.choice([plain, yarn(rope_theta=theta, attention_factor=1.2)]),
            sliding_attention=dict(rope_type="default", rope_theta=random.choice([theta, 100.0])),
        ),
    )


def granite() -> GraniteConfig:
    return GraniteConfig(
        **random_shape(),
        **any_head_dim(),
        attention_bias=random.random() < 0.3,
        mlp_bias=random.random() < 0.3,
        embedding_multiplier=random.choice([1.0, 12, 0.3]),
        residual_multiplier=random.choice([1.0, 0.22, 1.7]),
        attention_multiplier=random.choice([1.0, 0.05, 0.4]),
        logits_scaling=random.choice([1.0, 3, 0.7]),
    )


def smollm3() -> SmolLM3Config:
    shape = random_shape(attention_bias=random.random() < 0.3, mlp_bias=random.random() < 0.3)
    if random.random() < 0.4:
        shape["rope_parameters"] = yarn(rope_theta=5000.0)
    layers = shape["num_hidden_layers"]
    return SmolLM3Config(
        **shape,
        **any_head_dim(),
        no_rope_layers=random.choice([None, random.choices([0, 1], k=layers)]),
        no_rope_layer_interval=random.choice([1, 2, 3, 4]),
        use_sliding_window=random.random() < 0.5,
        sliding_window=random.choice([3, 6]),
    )


def partial_rope(shape: dict) -> dict:
    """The share of a head's coordinates that turn is a key of its RoPE object."""
    share = dict(partial_rotary_factor=random.choice([0.5, 0.25, 1.0]))
    return dict(
        head_dim=random.choice([8, 16, 24]), rope_parameters=shape.pop("rope_parameters") | share
    )


def glm() -> GlmConfig:
    shape = random_shape()
    partial = partial_rope(shape)
    return GlmConfig(**shape, **partial, attention_bias=random.random() < 0.7)


def glm4() -> Glm4Config:
    shape = random_shape()
    partial = partial_rope(shape)
    return Glm4Config(**shape, **partial, attention_bias=random.random() < 0.7)


def glm4_moe(chosen: int | None = None) -> Glm4MoeConfig:
    shape, group = random_shape(), random.randint(2, 4)
    groups = random.choice([1, 1, 3])
    partial, kept = partial_rope(shape), random.randint(1, groups)
    return Glm4MoeConfig(
        **shape,
        **partial,
        attention_bias=random.random() < 0.7,
        use_qk_norm=random.random() < 0.5,
        moe_intermediate_size=random.randint(5, 30),
        n_routed_experts=groups * group,
        num_experts_per_tok=chosen or random.randint(1, kept * group),
        n_group=groups,
        topk_group=kept,
        n_shared_experts=random.choice([1, 2]),
        first_k_dense_replace=random.choice([0, 1]),
        norm_topk_prob=random.random() < 0.7,
        routed_scaling_factor=random.choice([1.0, 2.5]),
    )


def qwen2_moe(chosen: int | None = None) -> Qwen2MoeConfig:
    experts, chosen = random_experts(chosen)
    return Qwen2MoeConfig(
        **random_shape(),
        **any_head_dim(),
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=random.randint(5, 30),
        shared_expert_intermediate_size=random.randint(5, 30),
        norm_topk_prob=random.random() < 0.5,
        qkv_bias=random.random() < 0.7,
        decoder_sparse_step=random.choice([1, 1, 2]),
        mlp_only_layers=random.choice([None, [0], [1]]),
        use_sliding_window=random.random() < 0.3,
        max_window_layers=random.choice([0, 1, 9]),
        sliding_window=6,
    )


def kimi_k2() -> DeepseekV3Config:
    """DeepSeek-V3's shape under another name (`renamed`), and a ramp of YaRN without width."""
    heads = random.choice([2, 3])
    shape = random_shape(num_attention_heads=heads, num_key_value_heads=heads)
    stretched = yarn(rope_theta=5e4, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    shape["rope_parameters"] = random.choice([shape["rope_parameters"], stretched])
    experts, chosen = random_experts()
    return DeepseekV3Config(
        **shape,
        moe_intermediate_size=random.randint(5, 30),
        n_routed_experts=experts,
        num_experts_per_tok=chosen,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=random.choice([0, 1]),
        q_lora_rank=random.choice([None, 20]),
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=random.choice([4, 10]),
        v_head_dim=random.choice([4, 12]),
        routed_scaling_factor=2.827,
    )


def gemma() -> GemmaConfig:
    return GemmaConfig(
        **random_shape(), head_dim=2 * random.randint(3, 9), attention_bias=random.random() < 0.3
    )


def starcoder2() -> Starcoder2Config:
    shape = random_shape()
    return Starcoder2Config(
        norm_epsilon=shape.pop("rms_norm_eps"),
        **shape,
        **any_head_dim(),
        use_bias=random.random() < 0.7,
        sliding_window=random.choice([None, None, 5]),
    )


def cohere() -> CohereConfig:
    shape = random_shape(attention_bias=random.random() < 0.3)
    return CohereConfig(
        layer_norm_eps=shape.pop("rms_norm_eps"), **shape, logit_scale=random.choice([1.0, 0.3])
    )


def cohere2() -> Cohere2Config:
    shape = random_shape(attention_bias=random.random() < 0.3)
    layers = shape["num_hidden_layers"]
    return Cohere2Config(
        layer_norm_eps=shape.pop("rms_norm_eps"),
        **shape,
        logit_scale=random.choice([0.25, 0.0625, 1.3]) * 4,
        sliding_window=random.choice([3, 6, 40]),
        layer_types=random.choice([None, random.choices(KINDS, k=layers)]),
    )


def phi() -> PhiConfig:
    shape = random_shape()
    head_dim, share = random.choice([(8, 0.5), (16, 0.25), (20, 0.4), (12, 1.0)])
    shape["hidden_size"] = shape["num_attention_heads"] * head_dim
    rope = shape.pop("rope_parameters")
    return PhiConfig(
        layer_norm_eps=shape.pop("rms_norm_eps"),
        **shape,
        rope_parameters=rope | dict(partial_rotary_factor=share),
    )


def renamed(folder: Path, model_type: str) -> None:
    """The checkpoint in `folder` under another model_type, as its own code would write it."""
    file = folder / "config.json"
    raw: dict = json.loads(file.read_text())
    file.write_text(json.dumps(raw | dict(model_type=model_type)))


FAMILIES = {
    "olmo2": olmo2,
    "olmo3": olmo3,
    "granite": granite,
    "smollm3": smollm3,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "qwen2_moe": qwen2_moe,
    "kimi_k2": kimi_k2,
    "gemma": gemma,
    "starcoder2": starcoder2,
    "cohere": cohere,
    "cohere2": cohere2,
    "phi": phi,
}


def config_of(family: str) -> PreTrainedConfig:
    return FAMILIES[family]()
