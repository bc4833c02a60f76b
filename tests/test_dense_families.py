"""The dense families and mixtures of tests/random_dense.py against transformers: would the tests
notice a slip, and what is refused.
"""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Cohere2Config,
    GemmaConfig,
    Glm4Config,
    GraniteConfig,
    Olmo3Config,
    PhiConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, RMSNorm
from lessons.l02_naive_attention.variants import glm4, granite, olmo, parallel, starcoder2
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.moe import WeighedMLP
from lessons.l07_kernel_fusion.fused_decoder import PARALLEL, FusedDecoder, fused
from lessons.l21_multi_lora.layers import merged
from lessons.l21_multi_lora.peft.adapters import load_adapter, save_adapter
from lessons.toolbox.model import places
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.config_parts import MoEConfig, Multipliers
from reference.engine.packed import packed
from tests.random_dense import FAMILIES, config_of, renamed
from tests.random_families import (
    check_logits,
    check_rungs,
    prompts_of,
    random_shape,
    saved_and_loaded,
)
from tests.test_deepseek import random_model
from tests.test_more_families import refusal

MODELS = 15  # of each family

pytestmark = pytest.mark.usefixtures("seed")


def saved(family: str, config, folder):
    theirs = random_model(config)
    theirs.save_pretrained(folder)
    if family == "kimi_k2":
        renamed(folder, family)
    return theirs


@pytest.mark.parametrize("number", range(MODELS))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(14)
def test_random_models_equal_transformers(family, number, tmp_path, monkeypatch):
    """At four lengths as loaded and fused, and with a cache on every rung and in the engine."""
    config = config_of(family)
    print(config)
    if family == "kimi_k2":
        theirs, ours = saved(family, config, tmp_path), load_decoder(tmp_path)
    else:
        theirs, ours = saved_and_loaded(config, tmp_path)
    assert ours.config.model_type == family
    prompts = prompts_of(ours)
    check_logits(theirs, ours, prompts)
    twin = fused(ours)
    assert isinstance(twin, FusedDecoder) == (ours.config.variant not in PARALLEL)
    for one in (twin, packed(twin)):
        check_logits(theirs, one, prompts[:2])
    check_rungs(theirs, ours, prompts, monkeypatch)


def test_norms_of_olmo_round_where_transformers_does():
    x = torch.randn(9, 64).bfloat16()
    theirs, ours, llamas = Olmo2RMSNorm(64, 1e-6), olmo.WideRMSNorm(64, 1e-6), RMSNorm(64, 1e-6)
    weight = torch.randn(64).bfloat16()
    for norm in (theirs, ours, llamas):
        norm.weight.data = weight
    assert torch.equal(ours(x), theirs(x))
    assert not torch.equal(llamas(x), theirs(x))


# ---------------------------------------------------------------- would these tests notice?

LAYERS = dict(num_hidden_layers=3)


def new_olmo3() -> Olmo3Config:
    """Four heads, a window in layers 0 and 2, and a stretched layer 1."""
    stretched = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16)
    heads = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    return Olmo3Config(
        **random_shape(**LAYERS, **heads, rope_parameters=None, tie_word_embeddings=False),
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling=stretched,
        rope_theta=500.0,
    )


def new_granite() -> GraniteConfig:
    return GraniteConfig(
        **random_shape(**LAYERS),
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.6,
        logits_scaling=2.0,
    )


def new_smollm3() -> SmolLM3Config:
    """Layer 1 does not rotate, and has a window."""
    return SmolLM3Config(
        **random_shape(**LAYERS),
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=5,
    )


def new_glm4() -> Glm4Config:
    return Glm4Config(**random_shape(**LAYERS, head_dim=16), attention_bias=True)


def new_gemma() -> GemmaConfig:
    return GemmaConfig(**random_shape(**LAYERS), head_dim=12)


def new_starcoder2() -> Starcoder2Config:
    return Starcoder2Config(**with_eps(norm_epsilon=1e-2))


def new_cohere2() -> Cohere2Config:
    """A window in layers 0 and 2, no rotation in layer 1."""
    return Cohere2Config(
        **with_eps(layer_norm_eps=1e-2),
        logit_scale=0.25,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


def new_phi() -> PhiConfig:
    return PhiConfig(**with_eps(layer_norm_eps=1e-2))


def with_eps(**eps: float) -> dict:
    """A shape with heads of 12, under the name that a family gives its eps."""
    shape = random_shape(**LAYERS, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    del shape["rms_norm_eps"]
    return shape | eps


NEW = dict(olmo3=new_olmo3, granite=new_granite, smollm3=new_smollm3, glm4=new_glm4)
NEW |= dict(gemma=new_gemma, starcoder2=new_starcoder2, cohere2=new_cohere2, phi=new_phi)
CONFIG = "lessons.toolbox.model.config.ModelConfig"
VARIANTS = "lessons.l02_naive_attention.variants"
PLACES = "lessons.toolbox.model.places"


def per_head(self, x):
    """The slip: a norm of each head with its part of the weight."""
    wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return self.weight.view(x.shape[-2:]) * wide


def in_halves(name, tensor, config):
    """The slip: rotary coordinates last, and still in pairs."""
    if not name.endswith(places.OF_Q_AND_K):
        return tensor
    heads = tensor.unflatten(0, (-1, config.head_dim))
    return heads.roll(-config.rope_dim, dims=1).flatten(0, 1)


def matrices_alone(name, tensor, config):
    """The slip: biases stay where they are."""
    return tensor if name.endswith("bias") else TURNED(name, tensor, config)


class WithoutMean(torch.nn.LayerNorm):
    """The slip: an RMSNorm with a bias."""

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return normed + self.bias


def with_norms(kind) -> SimpleNamespace:
    """torch.nn for one module of ours, so that transformers keeps its LayerNorm."""
    return SimpleNamespace(**vars(torch.nn) | dict(LayerNorm=kind))


def in_series(self, x, attend):
    """The slip: the MLP reads what attention has added."""
    x = x + self.self_attn(self.input_layernorm(x), attend)
    return x + self.mlp(self.input_layernorm(x))


TURNED = places.turning_last
LOADED = "lessons.toolbox.model.checkpoint.turning_last"
SLIPS = {
    "a norm of each head": ("olmo3", f"{VARIANTS}.olmo.NormOverHeads.forward", per_head),
    "a norm before attention, too": (
        "olmo3",
        f"{VARIANTS}.olmo.NoNorm.forward",
        lambda self, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
    ),
    "no norm after attention": (
        "olmo3",
        f"{VARIANTS}.norms_after.AttentionThenNorm.forward",
        Attention.forward,
    ),
    "no norm after the MLP": (
        "glm4",
        f"{VARIANTS}.norms_after.MLPThenNorm.forward",
        MLP.forward,
    ),
    "layers with a window stretched": (
        "olmo3",
        f"{CONFIG}.has_local_rope",
        lambda self, layer: False,
    ),
    "embeddings not multiplied": (
        "granite",
        f"{VARIANTS}.granite.MultipliedEmbedding.forward",
        torch.nn.Embedding.forward,
    ),
    "logits not divided": (
        "granite",
        f"{VARIANTS}.granite.DividedLinear.forward",
        torch.nn.Linear.forward,
    ),
    "attention joins whole": (
        "granite",
        f"{VARIANTS}.granite.GraniteAttention.forward",
        Attention.forward,
    ),
    "the MLP joins whole": ("granite", f"{VARIANTS}.granite.GraniteMLP.forward", MLP.forward),
    "the scale of head_dim": (
        "granite",
        f"{CONFIG}.softmax_scale",
        property(lambda self: self.head_dim**-0.5),
    ),
    "every layer rotates": ("smollm3", f"{CONFIG}.has_local_rope", lambda self, layer: False),
    "no layer rotates": ("smollm3", f"{CONFIG}.has_local_rope", lambda self, layer: True),
    "the window everywhere": ("smollm3", f"{CONFIG}.sliding_window", lambda self, layer: 5),
    "pairs taken for halves": ("glm4", LOADED, in_halves),
    "biases of q and k not moved": ("glm4", LOADED, matrices_alone),
    "weight in place of 1 + weight": (
        "gemma",
        f"{VARIANTS}.gemma.GemmaRMSNorm.forward",
        RMSNorm.forward,
    ),
    "SiLU in place of GELU": ("gemma", f"{VARIANTS}.gemma.GeluMLP.forward", MLP.forward),
    "no GELU": (
        "starcoder2",
        f"{VARIANTS}.starcoder2.FeedForward.forward",
        lambda self, x: self.down_proj(torch.relu(self.up_proj(x))),
    ),
    "a norm without the mean": (
        "starcoder2",
        f"{VARIANTS}.starcoder2.nn",
        with_norms(WithoutMean),
    ),
    "another eps": (
        "cohere2",
        f"{VARIANTS}.parallel.nn",
        with_norms(lambda size, eps, **bias: torch.nn.LayerNorm(size, 1e-5, **bias)),
    ),
    "one after the other": ("cohere2", f"{VARIANTS}.parallel.ParallelLayer.forward", in_series),
    "layers without a window rotate": (
        "cohere2",
        f"{CONFIG}.has_local_rope",
        lambda self, layer: False,
    ),
    "rotary coordinates first": ("phi", LOADED, lambda name, tensor, config: tensor),
    "no bias of the last matrix": (
        "phi",
        "lessons.l02_naive_attention.decoder.Decoder.logits",
        lambda self, hidden: hidden @ self.lm_head.weight.T,
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    family, *change = SLIPS[slip]
    theirs = saved(family, NEW[family](), tmp_path)
    prompts = prompts_of(load_decoder(tmp_path), lengths=(40,))
    check_logits(theirs, load_decoder(tmp_path), prompts)
    monkeypatch.setattr(*change)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, load_decoder(tmp_path), prompts)


def test_a_shared_expert_without_its_gate_is_noticed(tmp_path, monkeypatch):
    config = FAMILIES["qwen2_moe"]()
    config.decoder_sparse_step, config.mlp_only_layers = 1, []
    theirs = saved("qwen2_moe", config, tmp_path)
    prompts = prompts_of(load_decoder(tmp_path))
    check_logits(theirs, load_decoder(tmp_path), prompts)
    monkeypatch.setattr(WeighedMLP, "forward", MLP.forward)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, load_decoder(tmp_path), prompts)


def test_norms_of_q_and_k_move_with_their_coordinates(tmp_path, monkeypatch):
    config = FAMILIES["glm4_moe"]()
    config.use_qk_norm, config.head_dim = True, 16
    config.rope_parameters["partial_rotary_factor"] = 0.5
    theirs = saved("glm4_moe", config, tmp_path)
    prompts = prompts_of(load_decoder(tmp_path))
    check_logits(theirs, load_decoder(tmp_path), prompts)
    monkeypatch.setattr(
        LOADED, lambda name, x, config: x if "norm" in name else TURNED(name, x, config)
    )
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, load_decoder(tmp_path), prompts)


def test_a_cache_that_grows_keeps_layers_without_rotation(tmp_path):
    new_smollm3().save_pretrained(tmp_path)
    config = load_config(tmp_path)
    pool = KVPool(config, 1, 8, LESSON_03_TORCH)
    for _ in range(2):
        cos, sin = pool.cos_sin_cache_of(1).chunk(2, dim=-1)
        assert bool((cos == 1).all()) and not sin.any()
        assert pool.cos_sin_cache_of(0) is pool.cos_sin_cache_of(2) is pool.cos_sin_cache
        pool.reserve(70)
    assert len(pool.cos_sin_cache_of(1)) == 128


@pytest.mark.parametrize("family", ["glm4", "cohere2", "granite"])
def test_an_adapter_is_in_the_order_of_the_checkpoint(family, tmp_path):
    """Merged into ours as PEFT merges it into theirs."""
    theirs, pairs = saved(family, NEW[family](), tmp_path), {}
    for name in ("q_proj", "k_proj", "o_proj"):
        matrix = theirs.get_submodule(f"model.layers.1.self_attn.{name}").weight
        # small, because scores far apart make of a rounding another choice
        a, b = torch.randn(4, matrix.shape[1]), 0.05 * torch.randn(matrix.shape[0], 4)
        pairs[f"layers.1.self_attn.{name}"] = a, b
        with torch.no_grad():
            matrix += 2 * b @ a
    save_adapter(tmp_path / "adapter", pairs, lora_alpha=8)
    ours = merged(load_decoder(tmp_path), load_adapter(tmp_path / "adapter"))
    check_logits(theirs, ours, prompts_of(ours))


# ---------------------------------------------------------------- what is refused


def test_each_decoder_names_the_other(tmp_path):
    random_model(new_granite()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="Decoder lacks: load it with load_decoder"):
        Decoder.from_pretrained(tmp_path)
    plain = ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16)
    kinds = [granite.GraniteDecoder, glm4.Glm4Decoder, olmo.OlmoDecoder]
    for kind in (*kinds, starcoder2.Starcoder2Decoder, parallel.CohereDecoder, parallel.PhiDecoder):
        with pytest.raises(ValueError, match="config: got model_type 'llama'; accepted: one"):
            kind(plain)


@pytest.mark.parametrize(
    "family, changes, named",
    [
        ("olmo2", dict(hidden_act="gelu"), "'hidden_act' must be 'silu', not 'gelu'"),
        ("olmo2", dict(sliding_window=4), "'sliding_window' is 4"),
        ("olmo3", dict(sliding_window=None), "'sliding_window' is null"),
        ("olmo3", dict(layer_types=["chunked_attention"] * 3), "'layer_types'"),
        (
            "olmo3",
            dict(rope_parameters=dict(sliding_attention=dict(rope_type="yarn", factor=2.0))),
            "rope_parameters",
        ),
        ("granite", dict(logits_scaling=0), "'logits_scaling' must be a positive number"),
        ("granite", dict(residual_multiplier=-1.0), "'residual_multiplier' must be a positive"),
        ("granite", dict(attention_multiplier=None), "attention_multiplier"),
        ("smollm3", dict(no_rope_layers=[1, 0]), "'no_rope_layers' must hold 0 or 1 for each of 3"),
        ("smollm3", dict(no_rope_layers=[1, 2, 0]), "'no_rope_layers' must hold 0 or 1"),
        ("smollm3", dict(use_sliding_window=False), "'use_sliding_window' must be true"),
        ("glm4", dict(rope_parameters=dict(partial_rotary_factor=0.2)), "partial_rotary_factor"),
        ("glm4", dict(mlp_bias=True), "'mlp_bias' must be False, not True"),
        ("glm4_moe", dict(n_group=5), "n_routed_experts"),
        ("glm4_moe", dict(scoring_func="softmax"), "do not read this key"),
        (
            "qwen2_moe",
            dict(shared_expert_intermediate_size=None),
            "shared_expert_intermediate_size",
        ),
        ("qwen2_moe", dict(layer_types=["chunked_attention"]), "layer_types"),
        ("gemma", dict(hidden_act="gelu"), "'hidden_act' must be 'gelu_pytorch_tanh', not 'gelu'"),
        ("gemma", dict(hidden_activation="gelu"), "'hidden_activation' must be 'gelu_pytorch"),
        ("gemma", dict(use_bidirectional_attention=True), "'use_bidirectional_attention'"),
        ("starcoder2", dict(norm_type="rms_norm"), "'norm_type' must be 'layer_norm'"),
        ("starcoder2", dict(norm_epsilon=None), "norm_epsilon"),
        ("starcoder2", dict(hidden_act="silu"), "'hidden_act' must be 'gelu_pytorch_tanh'"),
        ("cohere", dict(use_qk_norm=True), "'use_qk_norm' must be False, not True"),
        ("cohere2", dict(logit_scale=0.0), "'logit_scale' must be a positive number"),
        ("cohere2", dict(use_qk_norm=True), "'use_qk_norm' must be False, not True"),
        ("cohere2", dict(head_dim=8), "'head_dim' must be 12, not 8"),
        (
            "cohere2",
            dict(hidden_size=1, head_dim=None),
            "head_dim: got 0; accepted: a whole number",
        ),
        ("phi", dict(qk_layernorm=True), "'qk_layernorm' must be False, not True"),
        ("phi", dict(hidden_act="gelu"), "'hidden_act' must be 'gelu_new', not 'gelu'"),
        ("kimi_k2", dict(topk_method="greedy"), "'topk_method' must be 'noaux_tc', not 'greedy'"),
        ("kimi_k2", dict(scoring_func="softmax"), "'scoring_func' must be 'sigmoid'"),
    ],
)
def test_wrong_value_is_named(family, changes, named, tmp_path):
    (NEW.get(family) or partial(config_of, family))().save_pretrained(tmp_path)
    if family == "kimi_k2":
        renamed(tmp_path, family)
    load_config(tmp_path)
    assert named in refusal(tmp_path, **changes)


# What the published files hold beside the shape: keys that the decoders need not read.
PUBLISHED = {
    "cohere2": dict(
        cache_implementation="hybrid",
        layer_switch=4,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=False,
        use_qk_norm=False,
    ),
    "gemma": dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh"),
    "glm4_moe": dict(num_nextn_predict_layers=1, rope_scaling=None),
    "kimi_k2": dict(
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        aux_loss_alpha=0.001,
        ep_size=1,
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
        pretraining_tp=1,
        scoring_func="sigmoid",
        seq_aux=True,
        topk_method="noaux_tc",
    ),
    "phi": dict(embd_pdrop=0.0, resid_pdrop=0.1, qk_layernorm=False),
    "qwen2_moe": dict(output_router_logits=False, router_aux_loss_coef=0.001),
    "smollm3": dict(max_window_layers=28, pretraining_tp=2, rope_scaling=None),
    "starcoder2": dict(
        activation_function="gelu",
        embedding_dropout=0.1,
        mlp_type="default",
        norm_type="layer_norm",
        residual_dropout=0.1,
    ),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_what_published_files_hold_beside_the_shape_changes_nothing(family, tmp_path):
    config_of(family).save_pretrained(tmp_path)
    if family == "kimi_k2":
        renamed(tmp_path, family)
    file = tmp_path / "config.json"
    raw, before = json.loads(file.read_text()), load_config(tmp_path)
    file.write_text(json.dumps(raw | PUBLISHED[family]))
    assert load_config(tmp_path) == before


def test_layers_that_predict_further_are_left_out(tmp_path):
    """GLM-4.5 has one behind its last layer."""
    theirs = saved("glm4_moe", config_of("glm4_moe"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, count = load_file(file), theirs.config.num_hidden_layers
    tensors[f"model.layers.{count}.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, file, metadata=dict(format="pt"))
    ours = load_decoder(tmp_path)
    check_logits(theirs, ours, prompts_of(ours, lengths=(9,)))


def test_older_dialect_of_olmo3_reads_the_same(tmp_path):
    new_olmo3().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw, newer = json.loads(file.read_text()), load_config(tmp_path)
    ropes = raw.pop("rope_parameters")
    full = ropes["full_attention"]
    raw |= dict(rope_theta=full.pop("rope_theta"), rope_scaling=full)
    file.write_text(json.dumps(raw))
    # transformers gives the layers with a window the theta of the published models
    older = replace(newer, rope_local_base_freq=5e5)
    assert load_config(tmp_path) == older


@pytest.mark.parametrize("layers", [(3,), (-1,), (0.0,), [0]])
def test_layers_without_rotation_are_layers(layers):
    with pytest.raises(ValueError, match="no_rope_layers"):
        ModelConfig("smollm3", 11, 8, 3, 1, 1, 4, 4, 16, no_rope_layers=layers)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(
        ValueError, match=r"no_rope_layers: got .* none beside rope_local_base_freq"
    ):
        ModelConfig(
            "olmo3", 11, 8, 1, 1, 1, 4, 4, 16, rope_local_base_freq=9.0, no_rope_layers=(0,)
        )
    with pytest.raises(ValueError, match="variant: got 'bert'; accepted: None, cohere, gem"):
        ModelConfig("olmo2", 11, 8, 1, 1, 1, 4, 4, 16, variant="bert")
    with pytest.raises(ValueError, match="logits_scaling"):
        Multipliers(logits_scaling=0.0)
    with pytest.raises(ValueError, match="n_shared_experts: got 1; accepted: 0 beside"):
        MoEConfig(4, 2, 8, n_shared_experts=1, shared_expert_intermediate_size=9)
