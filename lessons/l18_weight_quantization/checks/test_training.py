"""QAT, QLoRA, and the harness that judges quality, on a small random decoder."""

import math

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l18_weight_quantization.lab import quality as lab
from lessons.l18_weight_quantization.lab.cases import numbers, small_decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.methods.qat import finished, prepared, straight_through
from lessons.l18_weight_quantization.methods.qlora import (
    LoraLinear,
    adapters,
    merged,
    with_adapters,
)
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest, to_mxfp4


def coarse(weight):
    return round_to_nearest(weight, 4, None)


def logits(model, tokens):
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def test_the_gradient_passes_the_rounding_as_it_is():
    weight, gradient = numbers(4, 32).requires_grad_(), numbers(4, 33)[:, :32]
    rounded = straight_through(weight, to_mxfp4)
    assert torch.allclose(rounded, to_mxfp4(weight).dequantize(), atol=1e-6)
    rounded.backward(gradient)
    assert torch.equal(weight.grad, gradient)


def test_qat_finds_weights_that_round_better():
    """A layer of 4 bits learns the outputs of a layer in full precision, and `finished` keeps
    them.
    """
    teacher = nn.Linear(32, 8).requires_grad_(False)
    teacher.weight.copy_(numbers(8, 32))
    x = numbers(256, 8) @ numbers(8, 32) / 8  # inputs that have much in common: errors can cancel
    student = prepared(nn.Sequential(teacher), coarse)
    losses = []
    for _ in range(60):
        loss = (student(x) - teacher(x)).square().mean()
        loss.backward()
        for weight in student.parameters():
            weight.data -= 0.03 * weight.grad
            weight.grad = None
        losses.append(loss.item())
    assert min(losses) < 0.6 * losses[0]
    model = finished(student, dequantize_matmul)
    assert isinstance(model[0], QuantizedLinear) and model[0].quantized.bits == 4
    assert torch.allclose(model(x), student(x), atol=1e-4)


def test_qat_leaves_the_model_and_its_head_alone():
    model = small_decoder().float()
    student = prepared(model, coarse)
    names = {name for name, part in student.named_modules() if type(part) is nn.Linear}
    assert names == {"lm_head"}
    student.layers[0].mlp.up_proj.weight.data.zero_()
    assert model.layers[0].mlp.up_proj.weight.any()


def adapted():
    """A quantized decoder with adapters that are not zero, and its base."""
    torch.manual_seed(0)
    base = quantized(
        small_decoder().float(), lambda _, linear: coarse(linear.weight), dequantize_matmul
    )
    model = with_adapters(base, rank=4, alpha=8)
    return base, model


def test_an_adapter_starts_from_the_quantized_model_and_learns_alone():
    base, model = adapted()
    tokens = torch.arange(9)
    assert torch.equal(logits(model, tokens), logits(base, tokens))
    learned = adapters(model)
    parts = [part for part in model.modules() if isinstance(part, LoraLinear)]
    shapes = [part.base.quantized.shape for part in parts]
    assert len(parts) == 14 and sum(x.numel() for x in learned) == sum(4 * sum(s) for s in shapes)
    assert {x for x in model.parameters() if x.requires_grad} == set(learned)
    logits(model, tokens).square().sum().backward()
    assert all(part.lora_b.grad.any() for part in parts)


def test_merging_changes_no_output():
    _, model = adapted()
    for weight in adapters(model):
        weight.data.normal_(std=0.2)
    tokens, one = torch.arange(9), merged(model)
    assert not any(isinstance(part, LoraLinear) for part in one.modules())
    wanted = logits(model, tokens).detach()
    assert torch.allclose(logits(one, tokens), wanted, atol=1e-3 * float(wanted.abs().max()))
    part = model.layers[0].mlp.up_proj
    correction = (part.lora_b @ part.lora_a) * 8 / 4
    assert torch.allclose(part.merged_weight(), part.base.quantized.dequantize() + correction)


def test_rank_is_refused():
    base, _ = adapted()
    with pytest.raises(ValueError, match="rank: got 0; accepted: a whole number"):
        with_adapters(base, rank=0)


# ---------------------------------------------------------------- quality


def test_a_model_beside_itself():
    model, windows = small_decoder().float(), torch.randint(50, (4, 13))
    found = lab.quality(model, windows, lab.predictions(model, windows))
    for measure in (found.added_loss, found.kl, found.flips):
        assert measure.low == measure.mean == measure.high == 0
    losses = [
        nn.functional.cross_entropy(logits(model, row[:-1]), row[1:]).item() for row in windows
    ]
    assert found.loss.mean == pytest.approx(sum(losses) / 4, abs=1e-5)
    assert found.perplexity.mean == pytest.approx(math.exp(found.loss.mean))
    assert min(losses) <= found.loss.low <= found.loss.mean <= found.loss.high <= max(losses)


def test_the_measures_are_those_of_their_definitions(monkeypatch):
    """On two distributions over two tokens, by hand."""
    p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.25, 0.75]])
    monkeypatch.setattr(lab, "predictions", lambda model, windows: [q.log()] * len(windows))
    found = lab.quality(None, torch.tensor([[0, 1], [1, 1]]), [p.log(), p.log()])
    assert found.kl.mean == pytest.approx(0.5 * math.log(3), abs=1e-6)
    assert found.flips.mean == 1
    assert found.loss.mean == pytest.approx(-math.log(0.75), abs=1e-6)
    assert found.added_loss.mean == pytest.approx(-math.log(3), abs=1e-6)


def test_an_interval_holds_95_percent_of_resampled_means():
    """Of many values it is the normal one: mean ± 1.96 σ / √N."""
    values = torch.linspace(0, 1, 400, dtype=torch.float64)
    found = lab.interval(values)
    half = 1.96 * float(values.std()) / 20
    assert found.mean == pytest.approx(0.5)
    assert found.high - 0.5 == pytest.approx(half, rel=0.1)
    assert 0.5 - found.low == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize(
    "answer, share", [([1, 2, 3, 4], 1), ([1, 2, 9, 4], 0.5), ([9, 2, 3, 4], 0)]
)
def test_agreement_ends_at_the_first_other_token(answer, share):
    assert lab.agreed(answer, [1, 2, 3, 4]) == share


def test_bits_of_a_model_count_its_linear_layers():
    model = small_decoder().float()
    assert lab.bits_per_weight(model) == 32
    twin = quantized(model, lambda _, x: round_to_nearest(x.weight, 4, 16, True), dequantize_matmul)
    assert lab.bits_per_weight(twin) == 5
    half = quantized(
        model,
        lambda name, x: round_to_nearest(x.weight, 8, 16, True) if "mlp" in name else None,
        dequantize_matmul,
    )
    numbers = {"mlp": 3 * 32 * 64, "rest": 32 * (32 + 16 + 16 + 32)}
    expected = (9 * numbers["mlp"] + 32 * numbers["rest"]) / sum(numbers.values())
    assert lab.bits_per_weight(half) == pytest.approx(expected)


def test_held_out_windows_are_spread_over_all_texts(monkeypatch):
    class Letters:  # its rule begins every text with 0
        def __call__(self, text, add_special_tokens=True, **_):
            return {"input_ids": [0] * add_special_tokens + list(text.encode())}

    texts = ["ab", "cdefgh"]
    monkeypatch.setattr(lab, "corpus", lambda: (["seen in training"], texts))
    stream = [0, *b"ab", 0, *b"cdefgh"]
    found = lab.held_out_windows(Letters(), 2, 4)
    assert found.tolist() == [stream[:5], stream[5:]]
    with pytest.raises(ValueError, match="count: got 3; accepted: at most 2 windows of 4 tokens"):
        lab.held_out_windows(Letters(), 3, 4)
