"""AWQ: folding changes no output, the search is never worse than rounding, and whole models come
out.
"""

import copy

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.variants.gemma import GemmaRMSNorm
from lessons.l18_weight_quantization.lab.cases import small_decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear, dequantized, quantized
from lessons.l18_weight_quantization.methods import awq
from lessons.l18_weight_quantization.methods.calibration import output_error
from lessons.l18_weight_quantization.methods.gptq import gptq
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest
from lessons.toolbox.proof.planted import with_bug


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def folded(module, model: Decoder) -> Decoder:
    """The model with random scales folded into every place where they can be."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        for fold in module.folds_of(layer):
            parts = [layer.get_submodule(name) for name in fold.after]
            repeats = module.repeats_of(layer, fold)
            scales = module.shared(torch.rand(parts[0].in_features).double() * 3 + 0.2, repeats)
            module.fold_scales(layer.get_submodule(fold.before), parts, scales, repeats)
    return model


def check_folding(awq):
    """Outputs stay what they were, although every linear layer's matrix has changed."""
    model, tokens = small_decoder(), torch.randint(50, (7,))
    twin = folded(awq, model)
    changed = [
        name
        for name, value in twin.state_dict().items()
        if not torch.allclose(value, model.state_dict()[name])
    ]
    assert len(changed) == 2 * (7 + 2 + 1)  # matrices, norms, and v's bias, in both layers
    assert torch.allclose(logits(twin, tokens), logits(model, tokens), atol=1e-9)


def check_search(awq):
    """A column whose inputs are large gets a larger scale, and no choice is worse than rounding."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(32, 64, generator=generator, dtype=torch.float64)
    gram = torch.eye(64, dtype=torch.float64)
    gram[5, 5] = 400
    mean_abs = gram.diagonal().sqrt()
    scales = awq.search([weight[:16], weight[16:]], gram, mean_abs, 4, 32)
    assert scales[5] > 2 * scales[6]
    for group_size in (32, 64):
        plain = round_to_nearest(weight, 4, group_size).dequantize() - weight
        scales = awq.search([weight], gram, mean_abs, 4, group_size)
        scaled = round_to_nearest(weight * scales, 4, group_size).dequantize() / scales - weight
        assert output_error(scaled, gram) <= output_error(plain, gram)
    cut = awq.clipped(weight, gram, 4, 32)
    assert not torch.equal(cut.double(), weight)
    change = round_to_nearest(cut, 4, 64).dequantize() - weight
    finer = round_to_nearest(cut, 4, 32).dequantize() - weight
    plain = round_to_nearest(weight, 4, 32).dequantize() - weight
    assert output_error(finer, gram) < output_error(plain, gram) < output_error(change, gram)


def test_awq():
    check_folding(awq)
    check_search(awq)


def test_gemmas_norm_stores_the_difference_from_one():
    norm, linear = GemmaRMSNorm(8, 1e-6).double(), nn.Linear(8, 3).double()
    norm.weight.data.normal_()
    x = torch.randn(4, 8).double()
    before = linear(norm(x))
    awq.fold_scales(norm, [linear], torch.rand(8).double() + 0.5)
    assert torch.allclose(linear(norm(x)), before)


AWQ_BUGS = {
    "scales on one side only": (
        "linear.weight *= scales.to(linear.weight.dtype)",
        "linear.weight *= 1",
    ),
    "the bias before is forgotten": ("if before.bias is not None:", "if False:"),
    "a scale for each copy of a head": ("heads.mean(1, keepdim=True).expand_as(heads)", "heads"),
    "scales by small inputs": (
        ".clamp(min=seen.min()) ** alpha",
        ".clamp(min=seen.min()) ** -alpha",
    ),
    "the error without the inputs": (
        "return float(output_error(torch.cat(changes), gram))",
        "return float(torch.cat(changes).square().sum())",
    ),
    "always cut": ("error < least, cut, best", "error < torch.inf, cut, best"),
}


@pytest.mark.parametrize("name", AWQ_BUGS)
def test_wrong_versions_of_awq_are_rejected(name, tmp_path):
    wrong = with_bug(awq, tmp_path, *AWQ_BUGS[name])
    with pytest.raises(AssertionError):
        check_folding(wrong)
        check_search(wrong)


@pytest.mark.parametrize("method", [gptq, awq.awq])
def test_a_whole_model(method):
    """Every linear layer but lm_head is quantized, and with 8 bits the logits hardly move."""
    model, windows = small_decoder().float(), torch.arange(36).view(3, 12)
    twin = method(model, windows, bits=8, group_size=16)
    kinds = [
        type(part) for part in twin.modules() if isinstance(part, (nn.Linear, QuantizedLinear))
    ]
    assert kinds.count(QuantizedLinear) == 2 * 7 and kinds.count(nn.Linear) == 1
    tokens = windows[0]
    wanted = logits(model, tokens)
    assert torch.allclose(logits(twin, tokens), wanted, atol=0.03 * float(wanted.abs().max()))
    assert torch.allclose(logits(dequantized(twin), tokens), logits(twin, tokens), atol=1e-4)


def test_quantized_offers_every_linear_layer_but_the_head():
    model, names = small_decoder(), []
    twin = quantized(model, lambda name, linear: names.append(name), dequantize_matmul)
    assert twin is model and len(names) == 14 and "layers.1.mlp.down_proj" in names
