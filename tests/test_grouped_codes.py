"""gpt-oss' experts on a GPU: their codes are multiplied in three launches, with the results of the
loop over dequantized matrices.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import pytest
import torch

from lessons.l06_mla.gpt_oss import StackedMoE
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l18_weight_quantization.weights import Mxfp4Weight
from lessons.l23_experts.lab.moe_cases import DEVICE
from lessons.l23_experts.more.mxfp4 import GroupedMxfp4
from lessons.toolbox.proof.numerics import assert_close_to_oracle
from reference.checkpoints.quantized_checkpoint import load_quantized
from reference.checkpoints.quantized_experts import QuantizedExperts
from reference.engine import model as engine_model
from reference.weights.experts import with_grouped_codes
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


def layers_of(model, kind):
    return [part for part in model.modules() if type(part) is kind]


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
    eager, tokens = loaded(published), torch.randint(97, (19,), device=DEVICE)
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


def test_who_gets_them(published):
    """A GPU's model in bfloat16, whose layers then wait for no value; a CPU's and other types are
    as they were.
    """
    eager = loaded(published)
    assert engine_model.finished(eager, torch.device("cpu")) is eager
    twin = engine_model.finished(eager, torch.device("cuda"))
    assert len(layers_of(twin, GroupedMxfp4)) == 2 and not layers_of(twin, StackedMoE)
    assert any(waits(part) for part in fused(eager).modules())
    assert not any(waits(part) for part in twin.modules())
    half = loaded(published, torch.float16)
    assert with_grouped_codes(half) is half
