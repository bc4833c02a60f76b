"""Gemma: would its tests notice a slip, and what is refused. tests/test_more_families.py compares
random models of it with transformers.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig

from lessons.l02_naive_attention.decoder import MLP, Attention, Decoder, RMSNorm
from lessons.l02_naive_attention.naive import causal_mask
from lessons.l02_naive_attention.variants import gemma, score_rules
from lessons.l02_naive_attention.variants.gemma import GemmaDecoder
from lessons.l03_kv_cache import score_rules as pool_rules
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l06_mla.deepseek import load_decoder
from lessons.l07_kernel_fusion.fused_decoder import FusedDecoder, fused
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from reference.engine.packed import packed
from reference.ladder.rungs import left_out, rungs_of
from tests.random_families import FAMILIES, check_logits, check_rungs, prompts_of, random_shape
from tests.test_deepseek import random_model
from tests.test_more_families import refusal

pytestmark = pytest.mark.usefixtures("seed")


def new_gemma3() -> Gemma3TextConfig:
    """A window in layers 0 and 2, and a stretched layer 1."""
    return Gemma3TextConfig(
        **random_shape(num_hidden_layers=3, rope_parameters=None),
        head_dim=12,
        query_pre_attn_scalar=30,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=4.0,
        rope_scaling=dict(rope_type="linear", factor=4.0),
        rope_theta=500.0,
        rope_local_base_freq=100.0,
    )


def new_gemma2() -> Gemma2Config:
    """A window in layer 0, none in layer 1."""
    return Gemma2Config(
        **random_shape(num_hidden_layers=2),
        head_dim=12,
        query_pre_attn_scalar=4,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
    )


CONFIG = "lessons.toolbox.model.config.ModelConfig"
MODULE = "lessons.l02_naive_attention.variants.gemma"
SLIPS = {
    "weight in place of 1 + weight": (f"{MODULE}.GemmaRMSNorm.forward", RMSNorm.forward),
    "no norm after attention": (f"{MODULE}.GemmaAttention.forward", Attention.forward),
    "an MLP with SiLU and no norm after": (f"{MODULE}.GemmaMLP.forward", MLP.forward),
    "embeddings not scaled": (f"{MODULE}.ScaledEmbedding.forward", torch.nn.Embedding.forward),
    "logits not capped": (f"{MODULE}.CappedLinear.forward", torch.nn.Linear.forward),
    "one theta for all layers": (f"{CONFIG}.has_local_rope", lambda self, layer: False),
    "the local theta for all layers": (f"{CONFIG}.has_local_rope", lambda self, layer: True),
    "the scale of head_dim": (f"{CONFIG}.softmax_scale", 12**-0.5),
    "no windows": (f"{CONFIG}.sliding_window", lambda self, layer: (99, None, 99)[layer]),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    theirs = random_model(new_gemma3())
    theirs.save_pretrained(tmp_path)
    prompts = prompts_of(load_decoder(tmp_path), lengths=(40,))
    check_logits(theirs, load_decoder(tmp_path), prompts)
    monkeypatch.setattr(*SLIPS[slip])
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, load_decoder(tmp_path), prompts)


def cap_of_another_size(*arguments, cap, **options):
    return CAPPED(*arguments, cap=2 * cap, **options)


def masked_first(q, k, v, softmax_scale, window=None, *, cap, sinks):
    """The slip: tanh makes -cap of what the mask hides, and every query sees it a little."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    sees = causal_mask(len(q), len(k), window)
    scores = cap * torch.tanh((scores * softmax_scale).masked_fill(~sees, -torch.inf) / cap)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


CAPPED = score_rules.ruled_attention


@pytest.mark.parametrize("wrong", [cap_of_another_size, masked_first])
def test_a_slip_of_the_cap_is_noticed(wrong, tmp_path, monkeypatch):
    theirs = random_model(new_gemma2())
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    prompts = prompts_of(ours, lengths=(30,))
    check_logits(theirs, ours, prompts)
    check_rungs(theirs, ours, prompts, monkeypatch)
    monkeypatch.setattr(score_rules, "ruled_attention", wrong)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, ours, prompts)
    monkeypatch.undo()
    # no rung reaches another attention than the one that caps
    monkeypatch.setattr(pool_rules, "ruled_attention", wrong)
    with pytest.raises(AssertionError, match="03 KV cache, preallocated"):
        check_rungs(theirs, ours, prompts, monkeypatch)


def test_capped_attention_against_float64():
    q, k, v = torch.randn(5, 6, 8) * 3, torch.randn(9, 2, 8) * 3, torch.randn(9, 2, 7)
    got = CAPPED(q, k, v, 0.4, 3, cap=1.5, sinks=None)
    for head in range(6):
        for i in range(5):
            keys = range(max(0, i + 4 - 2), i + 5)  # query i has position i + 4
            scores = [
                1.5 * math.tanh(float(q[i, head] @ k[j, head // 3]) * 0.4 / 1.5) for j in keys
            ]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            want = sum(w * v[j, head // 3].double() for w, j in zip(weights, keys))
            torch.testing.assert_close(got[i, head].double(), want, atol=1e-5, rtol=1e-5)


def test_rungs_without_the_cap_are_left_out_in_one_line(tmp_path):
    new_gemma2().save_pretrained(tmp_path)
    config = load_config(tmp_path)
    names = [step.name for step in rungs_of(config)]
    line = left_out(config)
    assert "\n" not in line and all(name in line for name in ("FlashAttention", "fused softmax"))
    assert not set(names) & set(line.split(": ")[1].split("; ")[0].split(", "))
    assert names[-1] == "the engine" and config.has_score_rules
    without = replace(config, attn_logit_softcapping=None)
    assert not without.has_score_rules and left_out(without) is None
    assert len(rungs_of(without)) == len(names) + 5


def test_its_fused_and_packed_twins_share_its_logits(tmp_path):
    """The kernels know nothing of its norms and its MLP: these stay, additions move."""
    theirs = random_model(new_gemma3())
    theirs.save_pretrained(tmp_path)
    model = load_decoder(tmp_path)
    twin = fused(model)
    assert isinstance(model, GemmaDecoder) and isinstance(twin, FusedDecoder)
    prompts = prompts_of(model, lengths=(9,))
    for one in (twin, packed(twin)):
        check_logits(theirs, one, prompts)
        assert type(one.lm_head) is gemma.CappedLinear


def test_a_cache_that_grows_rotates_both_kinds_of_layers(tmp_path):
    new_gemma3().save_pretrained(tmp_path)
    config = load_config(tmp_path)
    pool = KVPool(config, 1, 8, LESSON_03_TORCH)
    before = [pool.cos_sin_cache_of(layer) for layer in (0, 1, 2)]
    assert before[0] is before[2] and not torch.allclose(before[0], before[1])
    pool.reserve(70)
    for layer, old in enumerate(before):
        table = pool.cos_sin_cache_of(layer)
        assert len(table) == 128 and torch.equal(table[:8], old)


def test_each_decoder_names_the_other(tmp_path):
    random_model(new_gemma3()).save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match="or norms that Decoder lacks: load it with load_decoder"
    ):
        Decoder.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="config: got model_type 'llama'; accepted: one with norms"
    ):
        GemmaDecoder(ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16))


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(attn_logit_softcapping=50.0), "'attn_logit_softcapping' is 50.0"),
        (dict(use_bidirectional_attention=True), "'use_bidirectional_attention' must be False"),
        (dict(hidden_activation="silu"), "'hidden_activation' must be 'gelu_pytorch_tanh'"),
        (dict(query_pre_attn_scalar=0), "'query_pre_attn_scalar'"),
        (dict(final_logit_softcapping=-1.0), "'final_logit_softcapping'"),
        (dict(rope_parameters=dict(rope_theta=5.0)), "must hold full_attention and sliding"),
        (
            dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0))),
            "'rope_parameters.sliding_attention' must be default, not 'linear'",
        ),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="yarn", factor=2.0))),
            "'rope_parameters.full_attention.rope_type' 'yarn' is not supported",
        ),
        (dict(layer_types=["chunked_attention"] * 3), "'layer_types'"),
    ],
)
def test_wrong_value_is_named(changes, named, tmp_path):
    new_gemma3().save_pretrained(tmp_path)
    load_config(tmp_path)
    assert named in refusal(tmp_path, **changes)


def test_older_dialect_reads_the_same(tmp_path):
    """A pattern in place of a list of layers, and a local theta beside the other one."""
    FAMILIES["gemma3_text"]().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw |= dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention"] * 2)
    raw["layer_types"] = raw["layer_types"][:3]
    raw["rope_parameters"]["full_attention"] = dict(rope_type="linear", rope_theta=5e5, factor=2.0)
    local = raw["rope_parameters"]["sliding_attention"]["rope_theta"]
    file.write_text(json.dumps(raw))
    newer = load_config(tmp_path)
    del raw["rope_parameters"], raw["layer_types"]
    raw |= dict(rope_theta=5e5, rope_local_base_freq=local, sliding_window_pattern=2)
    raw |= dict(rope_scaling=dict(rope_type="linear", factor=2.0))
    file.write_text(json.dumps(raw))
    assert load_config(tmp_path) == newer


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(attn_logit_softcapping=0.0), "'attn_logit_softcapping'"),
        (dict(attn_logit_softcapping="50"), "attn_logit_softcapping"),
        (dict(hidden_act="silu"), "'hidden_act' must be 'gelu_pytorch_tanh', not 'silu'"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (dict(sliding_window=None), "'sliding_window' is null"),
    ],
)
def test_wrong_value_of_gemma2_is_named(changes, named, tmp_path):
    new_gemma2().save_pretrained(tmp_path)
    load_config(tmp_path)
    assert named in refusal(tmp_path, **changes)
