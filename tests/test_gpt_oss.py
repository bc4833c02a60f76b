"""gpt-oss: would its tests notice a slip, and what is refused. tests/test_more_families.py compares
random models of it with transformers.
"""

import json

import pytest
import torch
from transformers import GptOssConfig

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.variants import score_rules
from lessons.l03_kv_cache import score_rules as pool_rules
from lessons.l06_mla import gpt_oss
from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.gpt_oss import GptOssDecoder
from lessons.l06_mla.moe import MoEDecoder, Router
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from reference.ladder.rungs import left_out
from tests.random_families import check_logits, check_rungs, prompts_of, random_shape
from tests.test_deepseek import random_model
from tests.test_more_families import refusal

pytestmark = pytest.mark.usefixtures("seed")

# The config.json of gpt-oss-20b, but for its list of layers' kinds, which is the default.
PUBLISHED = dict(
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    initializer_range=0.02,
    intermediate_size=2880,
    max_position_embeddings=131072,
    model_type="gpt_oss",
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    output_router_logits=False,
    pad_token_id=199999,
    quantization_config=dict(modules_to_not_convert=["lm_head"], quant_method="mxfp4"),
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    transformers_version="4.55.0.dev0",
    use_cache=True,
    vocab_size=201088,
)


def saved(folder):
    """A random model in `folder`, its experts' inputs so large that clamps matter."""
    config = GptOssConfig(
        **random_shape(num_hidden_layers=2, hidden_size=48),
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
    )
    theirs = random_model(config)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(4)
            layer.mlp.experts.down_proj.mul_(0.1)
    theirs.save_pretrained(folder)
    return theirs


RULED = score_rules.ruled_attention


def without_sinks(*arguments, sinks, **options):
    return RULED(*arguments, sinks=None, **options)


def halves(self, x, expert):
    """Gate in the first half of the columns, up in the second."""
    gate, up = (x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]).chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return inner @ self.down_proj[expert] + self.down_proj_bias[expert]


SLIPS = {
    "sinks forgotten": (score_rules, "ruled_attention", without_sinks),
    "router's bias forgotten": (gpt_oss.BiasedRouter, "logits", Router.logits),
    "gate and up as halves": (gpt_oss.StackedExperts, "forward", halves),
    "nothing clamped": (gpt_oss, "SWIGLU_LIMIT", 1e9),
    "silu's slope": (gpt_oss, "SWIGLU_ALPHA", 1.0),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    theirs = saved(tmp_path)
    ours = load_decoder(tmp_path)
    prompts = prompts_of(ours, lengths=(30,))
    check_logits(theirs, ours, prompts)
    monkeypatch.setattr(*SLIPS[slip])
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, ours, prompts)


def test_every_rung_sees_the_sinks(tmp_path, monkeypatch):
    theirs = saved(tmp_path)
    ours = load_decoder(tmp_path)
    prompts = prompts_of(ours, lengths=(3, 20))
    check_rungs(theirs, ours, prompts, monkeypatch)
    monkeypatch.setattr(pool_rules, "ruled_attention", without_sinks)
    with pytest.raises(AssertionError, match="03 KV cache, preallocated"):
        check_rungs(theirs, ours, prompts, monkeypatch)
    assert "gpt_oss" in left_out(ours.config)


def test_a_head_may_attend_to_nothing():
    """With a sink far above all scores the output is 0; far below, it is plain attention."""
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    high, low = (RULED(q, k, v, 0.3, cap=None, sinks=torch.full((4,), s)) for s in (99.0, -99.0))
    assert high.abs().max() < 1e-6
    torch.testing.assert_close(low, RULED(q, k, v, 0.3, cap=None, sinks=None))


def test_each_decoder_names_the_other(tmp_path):
    saved(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"'gpt_oss' has experts .*: load it with load_decoder"
    ):
        Decoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config: got model_type 'gpt_oss'"):
        MoEDecoder(load_config(tmp_path))
    with pytest.raises(ValueError, match="config: got model_type 'llama'; accepted: one with atte"):
        GptOssDecoder(ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16))


def test_published_weights_are_refused_and_name_their_reader(tmp_path):
    """What is refused is how the weights are stored; the same model in 16 bits is read."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PUBLISHED))
    assert load_config(tmp_path).quantization_config["quant_method"] == "mxfp4"
    with pytest.raises(CheckpointError, match=r"quant_method 'mxfp4'\): load them with load_model"):
        load_decoder(tmp_path)
    raw = PUBLISHED | dict(quantization_config=None)
    file.write_text(json.dumps(raw))
    config = load_config(tmp_path)
    assert config.moe.n_routed_experts == 32 and config.attention_sinks and config.qkv_bias
    assert config.sliding_windows == (128, None) * 12 and not config.rope_scaling.truncate
    assert "'initial_context_length' must be" in refusal(tmp_path, initial_context_length=99)
    file.write_text(json.dumps(raw))
    assert "'swiglu_limit' must be 7.0, not 5.0" in refusal(tmp_path, swiglu_limit=5.0)
    file.write_text(json.dumps(raw))
    assert "'experts_per_token' (3) must be" in refusal(tmp_path, experts_per_token=3)
