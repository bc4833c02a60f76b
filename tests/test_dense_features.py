"""The engine's features with the families of tests/random_dense.py: each gives the tokens of the
model without it, as tests/test_composition.py asks of the families that it has.
"""

import random
from functools import partial

import pytest

from lessons.toolbox.model.config_json import CheckpointError
from reference.checkpoints.write_checkpoint import save_quantized
from reference.engine.model import load_model
from reference.features.composition import are_apart
from reference.weights.quantization import Settings, quantize_model
from tests import composition_cases as cases

HALF = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
MIXED = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
LAYER_NORM = dict(rms_norm_eps=None, head_dim=None)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
FAMILIES = {
    "cohere2": LAYER_NORM | MIXED | dict(layer_norm_eps=1e-5, logit_scale=0.25),
    "cohere": LAYER_NORM | dict(layer_norm_eps=1e-5, logit_scale=0.25),
    "gemma": dict(hidden_act="gelu_pytorch_tanh"),
    "glm4": HALF | dict(attention_bias=True),
    "glm4_moe": HALF
    | EXPERTS
    | dict(
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "granite": dict(
        head_dim=None,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "olmo2": dict(head_dim=None),
    "olmo3": MIXED
    | dict(
        head_dim=None,
        rope_parameters=None,
        rope_theta=5e5,
        rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "phi": LAYER_NORM | HALF | dict(layer_norm_eps=1e-5, hidden_act="gelu_new"),
    "qwen2_moe": EXPERTS
    | dict(
        head_dim=None,
        num_experts=4,
        shared_expert_intermediate_size=64,
    ),
    "smollm3": dict(head_dim=None, no_rope_layers=[0, 1]),
    "starcoder2": LAYER_NORM | dict(norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh"),
}
FEW = 10  # of all layers, for two beams of a model with windows
FEATURES = [
    "int8",
    "int4",
    "FP8",
    "fp8 KV",
    "int8 KV",
    "LoRA",
    "draft",
    "ngram",
    "tensor parallel",
    "pipeline parallel",
    "prefix cache",
    "recompute",
    "swap",
    "offloading",
    "chunked prefill",
    "async",
    "structured",
    "n > 1",
    "beams",
]


@pytest.fixture
def family(request, monkeypatch):
    """What the cases are made of in place of a Llama."""
    name = request.param
    monkeypatch.setitem(cases.FAMILIES, name, dict(model_type=name) | FAMILIES[name])
    monkeypatch.setattr(cases, "family_of", lambda features: name)
    if "sliding_window" in FAMILIES[name]:  # whose blocks come back, so fewer are enough
        for feature in ("recompute", "swap"):
            few = cases.ARGUMENTS[feature] | dict(num_gpu_blocks_override=FEW)
            monkeypatch.setitem(cases.ARGUMENTS, feature, few)
    cases.expected.cache_clear()  # it is kept by features alone
    yield name
    cases.expected.cache_clear()


@pytest.mark.sample(6)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_a_feature_changes_no_token(family, feature):
    cases.check(frozenset({feature}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_features_together(family, seed):
    draw = random.Random(seed)
    while True:
        features = set(draw.sample(FEATURES, 3))
        if not are_apart(frozenset(features)):
            return cases.check(frozenset(features))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen2_moe", "starcoder2"], indirect=True)
@pytest.mark.sample(1)
def test_ranks_cut_the_biases_of_quantized_matrices(family, weights):
    cases.check(frozenset({weights, "tensor parallel"}))


@pytest.mark.parametrize("family", ["cohere2", "glm4", "glm4_moe", "phi"], indirect=True)
def test_rows_in_another_order_are_not_written(family, tmp_path):
    folder = cases.folder_of(family)
    model = quantize_model(load_model(folder, "cpu"), "int4", None, Settings(group_size=32))
    with pytest.raises(CheckpointError, match="cannot be written: its checkpoints"):
        save_quantized(model, str(folder), tmp_path / "out", "gptq")


@pytest.mark.parametrize("family", ["granite", "olmo3", "starcoder2"], indirect=True)
def test_what_is_written_loads_again(family, tmp_path):
    folder = cases.folder_of(family)
    model = quantize_model(load_model(folder, "cpu"), "int4", None, Settings(group_size=32))
    save_quantized(model, str(folder), tmp_path / "out", "gptq")
    answer = partial(cases.plain_answer, eyes=cases.eyes_of(), prompt=cases.prompts_of(())[0])
    assert answer(load_model(tmp_path / "out", "cpu"), count=6) == answer(model, count=6)
