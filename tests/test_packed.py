"""Packed and merged matrices give the plain ones' logits, to rounding, and the same tokens."""

import copy

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention_per_head, generate, whole_sequence
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l17_tree_speculation.heads.heads import MedusaHeads
from lessons.l17_tree_speculation.lab.testing import random_heads
from lessons.toolbox.model.config import ModelConfig
from reference.engine import packed as module
from reference.engine.engine import Engine
from reference.engine.model_runner import ModelRunner
from reference.engine.packed import PackedLinear, can_pack, packed, packed_heads, rounded_up
from reference.engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.usefixtures("seed"),
    pytest.mark.skipif(not can_pack(torch.float32), reason="NOT RUN: no oneDNN in this PyTorch"),
]

SHAPE = ("llama", 61, 48, 2, 6, 2, 8, 64, 96)
CASES = {
    "llama": {},
    "tied": dict(tie_word_embeddings=True),
    "qwen2, biases of q, k and v": dict(qkv_bias=True),
    "biases everywhere": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen3, norms of q and k": dict(qk_norm=True),
}
ODD = ModelConfig("llama", 37, 30, 1, 3, 1, 10, 19, 96)  # no width is a multiple of 8


def random_model(config: ModelConfig) -> Decoder:
    """Every parameter random, norms around 1."""
    model = Decoder(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
        if "norm" in name:
            parameter.add_(1)
    return model


def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        attend = whole_sequence(model, len(tokens), attention_per_head)
        return model.logits(model(tokens, attend)).double()


def size(errors: torch.Tensor) -> torch.Tensor:
    """Root of the mean square: the largest of a thousand errors hangs on one unlucky logit."""
    return errors.square().mean().sqrt()


def assert_as_exact(plain: Decoder, twin: Decoder, lengths=(1, 2, 33)) -> None:
    """The twin's error is at most twice the plain model's, both against float64. Raises
    AssertionError.
    """
    oracle = copy.deepcopy(plain).double()
    for length in lengths:
        tokens = torch.randint(0, plain.config.vocab_size, (length,))
        truth = logits_of(oracle, tokens)
        allowed = 2 * size(logits_of(plain, tokens) - truth) + 1e-6 * size(truth)
        error = size(logits_of(twin, tokens) - truth)
        if not error <= allowed:
            raise AssertionError(f"{length} tokens: {error:.3g}, allowed {allowed:.3g}")


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_plain_ones_to_rounding(name):
    plain = random_model(ModelConfig(*SHAPE, **CASES[name]))
    twin = packed(fused(plain))
    assert isinstance(twin.layers[0].self_attn, module.PackedAttention)
    assert isinstance(twin.layers[0].mlp, module.PackedMLP)
    assert isinstance(twin.lm_head, PackedLinear)
    assert_as_exact(plain, twin)


def test_odd_widths():
    plain = random_model(ODD)
    assert_as_exact(plain, packed(fused(plain)))


@pytest.mark.parametrize("slip", ["no bias", "k and v change places"])
def test_a_slip_in_merging_is_seen(slip):
    plain = random_model(ModelConfig(*SHAPE, qkv_bias=True))
    twin = packed(fused(plain))
    attention, merged = twin.layers[0].self_attn, plain.layers[0].self_attn
    if slip == "no bias":
        attention.qkv_proj.bias = None
    else:
        attention.qkv_proj = PackedLinear(merged.q_proj, merged.v_proj, merged.k_proj)
    with pytest.raises(AssertionError, match="allowed"):
        assert_as_exact(plain, twin)


def made_by(heads, config: ModelConfig, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What heads make of embeddings and features: [2, T, hidden_size] -> logits, or what the
    target's last matrix reads: [N, …].
    """
    if isinstance(heads, MedusaHeads):
        made = heads(inputs[0]).flatten(0, 1)
    else:
        attend = whole_sequence(Decoder(config), len(inputs[0]), attention_per_head)
        made = heads.hidden(heads(*inputs, lambda q, k, v: attend(0, q, k, v)))
    return made if heads.lm_head is None else heads.lm_head(made)


def assert_heads_as_exact(plain, twin, config: ModelConfig) -> None:
    """As `assert_as_exact`."""
    oracle = copy.deepcopy(plain).double()
    for length in (1, 2, 33):
        inputs = torch.randn(2, length, config.hidden_size)
        truth = made_by(oracle, config, inputs.double())
        allowed = 2 * size(made_by(plain, config, inputs) - truth) + 1e-6 * size(truth)
        error = size(made_by(twin, config, inputs) - truth)
        if not error <= allowed:
            raise AssertionError(f"{length} tokens: {error:.3g}, allowed {allowed:.3g}")


@pytest.mark.parametrize("kind", ["medusa", "eagle", "mtp", "eagle3"])
@pytest.mark.parametrize("name", ["llama", "biases everywhere", "qwen3, norms of q and k"])
def test_heads_draft_as_before_to_rounding(kind, name):
    config = ModelConfig(*SHAPE, **CASES[name])
    plain = random_heads(random_model(config), kind, guessed=range(7))
    before = [type(part) for part in plain.modules()]
    twin = packed_heads(plain)
    assert any(isinstance(part, PackedLinear) for part in twin.modules())
    assert not any(isinstance(part, torch.nn.Linear) for part in twin.modules())
    assert [type(part) for part in plain.modules()] == before
    assert_heads_as_exact(plain, twin, config)


def test_a_slip_in_merging_a_drafts_matrices_is_seen():
    config = ModelConfig(*SHAPE)
    plain = random_heads(random_model(config), "eagle")
    twin, parts = packed_heads(plain), plain.layer.self_attn
    twin.layer.self_attn.qkv_proj = PackedLinear(parts.q_proj, parts.v_proj, parts.k_proj)
    with pytest.raises(AssertionError, match="allowed"):
        assert_heads_as_exact(plain, twin, config)


def test_heads_that_cannot_be_packed_are_returned_as_they_are():
    heads = random_heads(random_model(ModelConfig(*SHAPE)), "eagle").double()
    assert packed_heads(heads) is heads


def test_the_model_that_is_packed_stays_as_it_was():
    plain = random_model(ModelConfig(*SHAPE))
    twin = fused(plain)
    kinds = [type(part) for part in twin.modules()]
    assert packed(twin) is not twin
    assert [type(part) for part in twin.modules()] == kinds


def test_what_cannot_be_packed_is_returned_as_it_is(monkeypatch):
    twin = fused(random_model(ModelConfig(*SHAPE)).double())
    assert packed(twin) is twin  # oneDNN multiplies no float64
    monkeypatch.setattr(module, "can_pack", lambda dtype: False)
    twin = fused(random_model(ModelConfig(*SHAPE)))
    assert packed(twin) is twin


def test_inference_mode_or_not_at_any_time():
    """Made inside of it and used outside, and the other way round."""
    linear = torch.nn.Linear(5, 7).requires_grad_(False)
    x, made = torch.randn(3, 5), []
    made.append(PackedLinear(linear))
    with torch.inference_mode():
        made.append(PackedLinear(linear))
        inside = [layer(torch.randn(3, 5)).shape for layer in made]
    assert inside == [(3, 7)] * 2
    for layer in made:
        torch.testing.assert_close(layer(x), linear(x), atol=1e-6, rtol=1e-5)


def test_the_engine_gives_the_tokens_of_the_plain_model():
    config = ModelConfig(*SHAPE, qkv_bias=True, tie_word_embeddings=True)
    model = random_model(config)
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in (1, 7, 20)]
    runner = ModelRunner(model, 40, 4, 64)
    assert isinstance(runner.model.lm_head, PackedLinear)
    engine = Engine(runner, ChunkedScheduler(BlockManager(40, 4)), None, 64)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(temperature=0, max_tokens=9))
    answers = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            answers[int(output.request_id)] = output.outputs[0].token_ids
    assert [answers[i] for i in range(3)] == generate(model, prompts, 9)


def test_few_numbers_of_rows_reach_onednn(monkeypatch):
    """It keeps code for each, half a megabyte a matrix, so a server would grow for hours."""
    layer, seen = PackedLinear(nn.Linear(8, 24)), set()
    multiply = torch.ops.mkldnn._linear_pointwise

    def spy(x, *more):
        seen.add(len(x))
        return multiply(x, *more)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", spy)
    with torch.inference_mode():
        for rows in range(1, 2049):
            assert layer(torch.zeros(rows, 8)).shape == (rows, 24)
    assert len(seen) <= 72 and all(
        rounded_up(rows) <= max(4, 1.125 * rows) for rows in range(1, 2049)
    )
    assert {*range(4, 16), 64, 512, 2048} <= seen, "whole batches and budgets are not padded"
