"""The training of models/tiny-hybrid: what it writes is what transformers and our loader read."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from lessons.l06_mla.deepseek import load_decoder
from models import networks, train, train_hybrid
from reference.features.states.generate import whole_sequence
from tests.training_cases import train_small_models

SMALL = dict(
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a small hybrid is trained for three steps."""
    train_small_models(monkeypatch, tmp_path)
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", rule)
    monkeypatch.setattr(networks, "HYBRID", SMALL)
    monkeypatch.setattr(train_hybrid, "HERE", tmp_path)
    monkeypatch.setattr(train_hybrid, "TOKENIZER", ())
    options = train.Options(million_tokens=0.006, tokens_per_step=2048, compiles=False)
    train_hybrid.train_mix("hybrid", options)
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule.keywords["chunk_size"] == 32
    return tmp_path / "tiny-hybrid"


def test_a_trained_mix_is_loaded_by_transformers_and_by_us(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_decoder(folder, dtype=torch.float32)
    tokens = torch.randint(4096, (70,))
    with torch.inference_mode():
        expected = theirs(input_ids=tokens[None]).logits[0]
        got = ours.logits(ours(tokens, whole_sequence(ours, len(tokens))))
    torch.testing.assert_close(got, expected, atol=2e-4 * float(expected.std()), rtol=0)
    facts = json.loads((folder / "training.json").read_text())
    assert facts["tokens_seen"] == 3 * 2048 and facts["steps"] == 3
    assert ours.config.state.layers == (0, 1, 2) and ours.config.state.attention_layers == (3,)


def test_mixes_differ_in_their_layers_alone():
    found = {name: networks.new_mix(name).config.to_dict() for name in networks.MIXES}
    kinds = [config.pop("layer_types") for config in found.values()]
    assert kinds == [list(mix) for mix in networks.MIXES.values()]
    assert found["hybrid"] == found["attention"] == found["states"] == found["slow"]


def test_slow_decays_begin_between_the_time_steps_of_the_paper():
    """And nothing else begins differently."""
    slow, plain = (dict(networks.new_mix(name).named_parameters()) for name in ("slow", "hybrid"))
    for name, bias in slow.items():
        if name.endswith("dt_bias"):
            steps = torch.nn.functional.softplus(bias)
            low, high = networks.SLOW
            assert low * 0.999 <= steps.min() and steps.max() <= high * 1.001
            assert steps.max() / steps.min() > 1.5
        else:
            assert torch.equal(bias, plain[name]), name
