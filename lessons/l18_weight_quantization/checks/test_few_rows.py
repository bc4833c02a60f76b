"""A model that multiplies few rows by tensor_cores.cu and more rows as before."""

import logging

import pytest
import torch
from torch import nn

from lessons.l18_weight_quantization.kernels import few_rows
from lessons.l18_weight_quantization.kernels.few_rows import FewRows, with_tensor_cores
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.l18_weight_quantization.naive import dequantize_matmul, round_to_nearest, to_float8
from lessons.toolbox.kernels.cuda_cpp import CudaKernel
from lessons.toolbox.proof.numerics import draw

pytestmark = pytest.mark.cuda_cpp
INPUTS, OUTPUTS = 320, 40


def marked(x, weight, bias):
    """What multiplies more rows here: its results say so."""
    return dequantize_matmul(x, weight, bias) + 100


def model_of(seed: int, dtype: torch.dtype) -> nn.Module:
    """Layers of 4 bits, of 8 bits, of 4 bits in groups of 32, in FP8, and a plain one."""
    numbers = draw("normal", (OUTPUTS, INPUTS), seed=seed)
    bias = draw("normal", (OUTPUTS,), dtype=dtype, seed=seed + 1)
    made = dict(four=round_to_nearest(numbers, 4, 64), eight=round_to_nearest(numbers, 8, 64))
    made |= dict(short=round_to_nearest(numbers, 4, 32), fp8=to_float8(numbers))
    layers = {name: QuantizedLinear(weight, bias, marked) for name, weight in made.items()}
    return nn.ModuleDict(layers | {"plain": nn.Linear(INPUTS, OUTPUTS)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_choose_the_kernel(dtype, seed):
    model = model_of(seed, dtype)
    twin = with_tensor_cores(model)
    assert {name for name, part in twin.items() if part is not model[name]} == {"four"}
    assert isinstance(twin["four"].multiply, FewRows)
    layer = model["four"]
    x = draw("normal", (17, INPUTS), dtype=dtype, seed=seed + 2)
    for rows in (1, 8, 9, 16):
        expected = dequantize_matmul(x[:rows].double(), layer.quantized, layer.bias.double())
        found = twin["four"](x[:rows])
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.1)
    assert torch.equal(twin["four"](x), layer(x)), "17 rows go to the other kernel"
    assert torch.equal(twin["eight"](x[:1]), model["eight"](x[:1]))


def test_float32_goes_to_the_other_kernel(seed):
    model = model_of(seed, torch.float32)
    x = draw("normal", (2, INPUTS), seed=seed)
    assert torch.equal(with_tensor_cores(model)["four"](x), model["four"](x))


def refusing(self, *config, arguments):
    raise RuntimeError("no driver")


def doing_nothing(self, *config, arguments):
    pass


@pytest.mark.parametrize(
    "launch, reason", [(refusing, "no driver"), (doing_nothing, "its first product is wrong")]
)
def test_without_the_kernel_a_model_stays_as_it_is(launch, reason, seed, monkeypatch, caplog):
    model = model_of(seed, torch.float16)
    monkeypatch.setattr(CudaKernel, "launch", launch)
    with caplog.at_level(logging.WARNING, few_rows.__name__):
        assert with_tensor_cores(model) is model
    assert reason in caplog.text


def test_a_model_without_codes_of_4_bits_asks_for_no_compiler(monkeypatch, seed):
    monkeypatch.setattr(few_rows, "why_not_on", lambda device: pytest.fail("asked"))
    layers = model_of(seed, torch.float16)
    del layers["four"], layers["short"]
    assert with_tensor_cores(layers) is layers


def test_a_layer_that_rounds_its_inputs_keeps_its_product(seed):
    """A product of numbers would leave the rounding out."""
    model = model_of(seed, torch.bfloat16)
    weight = model["four"].quantized
    model["rounded"] = QuantizedLinear(weight, None, marked, rounds_inputs=True)
    twin = with_tensor_cores(model)
    assert twin["rounded"] is model["rounded"] and twin["four"] is not model["four"]
    only = nn.ModuleDict({"rounded": model["rounded"]})
    assert with_tensor_cores(only) is only
