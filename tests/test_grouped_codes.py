"""Quantized experts on a GPU: their codes are multiplied in a few launches, with the results of the
loop over dequantized matrices.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import pytest
import torch

from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.gpt_oss import StackedMoE
from lessons.l06_mla.moe import MoE
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l18_weight_quantization.linear import quantized
from lessons.l18_weight_quantization.naive import to_float8
from lessons.l18_weight_quantization.weights import Mxfp4Weight
from lessons.l23_experts.lab.moe_cases import DEVICE
from lessons.l23_experts.more import naive_fp8
from lessons.l23_experts.more.fp8 import GroupedFp8
from lessons.l23_experts.more.mxfp4 import GroupedMxfp4
from lessons.toolbox.proof.numerics import assert_close_to_oracle
from reference.checkpoints.quantized_checkpoint import load_quantized
from reference.checkpoints.quantized_experts import QuantizedExperts
from reference.checkpoints.write_checkpoint import save_quantized
from reference.engine import model as engine_model
from reference.weights.experts import with_grouped_codes, with_grouped_fp8
from reference.weights.quantization import with_dense_latents
from tests.test_deepseek import random_model
from tests.test_quantized_checkpoints import CONFIGS, logits_of, publish_gpt_oss

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A random model of gpt-oss' form, in a folder as OpenAI publishes it."""
    source, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    random_model(CONFIGS["gpt_oss"]).save_pretrained(source)
    publish_gpt_oss(source, folder)
    return folder


def loaded(folder, dtype=torch.bfloat16):
    return load_quantized(folder, DEVICE, dtype)


DRAWS = 100  # of tokens; one or two are enough where the models agree


def layers_of(model, kind):
    return [part for part in model.modules() if type(part) is kind]


def routed_alike(*models):
    """Random tokens for which the models choose the same experts in every layer. Where two experts
    are nearly as good, a rounding before them chooses, and the logits are those of another.
    """
    for _ in range(DRAWS):
        tokens = torch.randint(97, (19,), device=DEVICE)
        first, *others = (choices(model, tokens) for model in models)
        if all(torch.equal(first, other) for other in others):
            return tokens
    raise AssertionError(f"{DRAWS} draws, and the models chose other experts in each")


def choices(model, tokens):
    """The experts of each layer, in the order of the router: [layers, T, k]."""
    chosen = []
    routers = [layer.mlp.router for layer in model.layers]
    hooks = [
        router.register_forward_hook(lambda _, __, found: chosen.append(found[1]))
        for router in routers
    ]
    logits_of(model, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen)


@torch.no_grad()
def test_a_layer_is_the_loop_over_its_numbers(published, seed):
    """In lesson 6's budgets: float64 over the same codes is the oracle."""
    eager, wide = loaded(published), loaded(published, torch.float64)
    twin = with_grouped_codes(eager)
    for index, layer in enumerate(twin.layers):
        assert type(layer.mlp) is GroupedMxfp4
        x = torch.randn(23, 64, dtype=torch.bfloat16, device=DEVICE) * 3
        plain, oracle = eager.layers[index].mlp, wide.layers[index].mlp
        same = (plain.router(x)[1] == oracle.router(x.double())[1]).all(-1)
        assert same.float().mean() > 0.8
        ref64 = oracle(x.double())[same]
        assert_close_to_oracle(layer.mlp(x)[same], plain(x)[same], ref64)


def test_the_model_gives_the_same_logits(published, seed):
    eager = loaded(published)
    tokens = routed_alike(eager, with_grouped_codes(eager))
    expected, found = (logits_of(m, tokens).float() for m in (eager, with_grouped_codes(eager)))
    assert (found - expected).norm() < 0.02 * expected.norm()
    exact = logits_of(loaded(published, torch.float32), tokens)
    assert (found - exact).norm() < 1.5 * (expected - exact).norm()


def test_codes_are_not_held_twice(published):
    """The matrices of the model that was given become views of the stacks."""
    eager = loaded(published)
    twin = with_grouped_codes(eager)
    (first, *_), (grouped, *_) = layers_of(eager, QuantizedExperts), layers_of(twin, GroupedMxfp4)
    for weights, stack in ((first.gate_up, grouped.gate_up), (first.down, grouped.down)):
        for index, weight in enumerate(weights):
            assert type(weight) is Mxfp4Weight
            assert weight.codes.data_ptr() == stack.codes[index].data_ptr()
            assert weight.exponents.data_ptr() == stack.exponents[index].data_ptr()


def waits(part):
    """Whether Python asks the GPU what to run, so that no CUDA graph records it."""
    return getattr(part, "waits_for_values", False)


def test_who_gets_them(published, monkeypatch):
    """A GPU's model in bfloat16, whose layers then wait for no value; a CPU's and other types are
    as they were.
    """
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    eager = loaded(published)
    assert engine_model.finished(eager, torch.device("cpu")) is eager
    twin = engine_model.finished(eager, torch.device("cuda"))
    assert len(layers_of(twin, GroupedMxfp4)) == 2 and not layers_of(twin, StackedMoE)
    assert any(waits(part) for part in fused(eager).modules())
    assert not any(waits(part) for part in twin.modules())
    half = loaded(published, torch.float16)
    assert with_grouped_codes(half) is half


# ---------------------------------------------------------------- DeepSeek's FP8


def in_fp8(folder, quantized_to, dtype=torch.bfloat16):
    """A random DeepSeek-V3 whose experts are stored in FP8 with a scale for each 128 x 128."""
    if not (quantized_to / "config.json").exists():
        torch.manual_seed(0)
        random_model(CONFIGS["deepseek_v3"]).save_pretrained(folder)
        plain = load_decoder(folder)
        rounded = quantized(plain, lambda name, linear: to_float8(linear.weight, per="block"), None)
        save_quantized(with_dense_latents(rounded, plain), folder, quantized_to, "fp8")
    return load_quantized(quantized_to, DEVICE, dtype)


@torch.no_grad()
def test_experts_in_fp8_are_the_loop_over_rounded_rows(tmp_path, seed, monkeypatch):
    """What the engine runs equals the loop whose rows are rounded, and shares its codes. A
    checkpoint that does not ask for FP8 inputs, and an A100, keep the loop.
    """
    eager = in_fp8(tmp_path / "plain", tmp_path / "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    twin = engine_model.finished(eager, torch.device("cuda"))
    (layer,) = layers_of(twin, GroupedFp8)
    (loop,) = layers_of(eager, MoE)
    x = torch.randn(23, 64, dtype=torch.bfloat16, device=DEVICE)
    weights, chosen = loop.gate(x)
    expected = naive_fp8.experts(x, weights, chosen, layer.gate_up, layer.down)
    expected += loop.shared_experts(x)
    assert (layer(x) - expected).float().norm() < 0.03 * expected.float().norm()
    unrounded = loop(x)  # its codes are views of the stack now
    assert (unrounded - expected).float().norm() < 0.1 * expected.float().norm()
    up = loop.experts[2].up_proj.quantized
    assert up.values.untyped_storage().data_ptr() == layer.gate_up.values.data_ptr()
    assert not any(waits(part) for part in twin.modules())

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert layers_of(engine_model.finished(eager, torch.device("cuda")), MoE)
    eager.config.quantization_config["activation_scheme"] = "static"
    assert with_grouped_fp8(eager) is eager
