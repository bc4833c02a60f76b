"""Proves products of 8 bits on both sides, SmoothQuant, and that outliers can be moved anywhere."""

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l09_flash_attention.tiles import has_e4m3
from lessons.l12_paged_kv.lab.testing import CONFIG, DEVICE, new_model
from lessons.l18_weight_quantization.linear import quantized
from lessons.l19_kv_quantization.activations import w8a8
from lessons.l19_kv_quantization.activations.outliers import (
    channel_ratio,
    with_loud_activations,
    with_loud_keys,
)
from lessons.l19_kv_quantization.activations.smoothquant import (
    activation_maxima,
    smoothed,
    smoothing_scales,
)
from lessons.l19_kv_quantization.activations.w8a8 import (
    quantize_tokens,
    quantize_tokens_by_kernel,
    scaled_product,
    to_eight_bits,
    w8a8_by_numbers,
    w8a8_kernel,
    w8a8_matmul,
)
from lessons.l19_kv_quantization.lab.testing import skip_where
from lessons.l19_kv_quantization.optimized import writes_e4m3
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug

SMALL = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32)


def operands(name, seed, tokens=21, inputs=70, outputs=33):
    """Codes and scales of tokens, a weight and a bias. No size is a multiple of a tile."""
    x = torch.randn(tokens, inputs, device=DEVICE)
    x[3] = 0
    weight = to_eight_bits(torch.randn(outputs, inputs, device=DEVICE), name)
    return *quantize_tokens(x, name), weight, torch.randn(outputs, device=DEVICE)


def by_hand(codes, scales, weight, bias):
    """The definition in whatever the scales are: the oracle's float64, or float32."""
    numbers, matrix = codes.to(scales.dtype) * scales, weight.values.to(scales.dtype)
    return (numbers @ (matrix * weight.scales.to(scales.dtype)).T) + bias.to(scales.dtype)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_kernel_multiplies_codes(name, seed, proof):
    skip_where(name, has_e4m3)
    codes, scales, weight, bias = operands(name, seed)

    def fast(scales, bias):
        return scaled_product(codes, scales, weight, bias, torch.float32, SMALL)

    def plain(scales, bias):
        return by_hand(codes, scales, weight, bias)

    proof.record(w8a8_kernel, prove(fast, plain, (scales, bias)))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_every_way_to_the_product(name, seed):
    """Naive, PyTorch's int8 product, and the kernel: with and without a bias."""
    x, weight = torch.randn(17, 40, device=DEVICE), torch.randn(24, 40, device=DEVICE)
    weight = to_eight_bits(weight, name)
    for bias in (None, torch.randn(24, device=DEVICE)):
        want = w8a8_by_numbers(x, weight, bias)
        torch.testing.assert_close(w8a8_matmul(x, weight, bias), want, atol=2e-5, rtol=2e-5)
    exact = x @ weight.dequantize().T
    assert 1e-4 < (w8a8_by_numbers(x, weight) - exact).norm() / exact.norm() < 0.04


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_tokens_are_quantized_bit_for_bit(name, seed):
    skip_where(name, writes_e4m3)
    x = (
        torch.randn(5, 70, device=DEVICE)
        * torch.tensor([1, 0, 300, 1e-3, 5.0], device=DEVICE)[:, None]
    )
    codes, scales = quantize_tokens_by_kernel(x, name)
    want_codes, want_scales = quantize_tokens(x, name)
    assert_same_bits(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert_same_bits(scales, want_scales)


@pytest.mark.parametrize(
    "old, new",
    [
        ("* x_scale * w_scale\n", "* x_scale\n"),
        ("tl.load(w_scale_ptr + column, mask", "tl.load(w_scale_ptr + 0 * column, mask"),
        ("range(0, num_inputs, BLOCK_K)", "range(0, num_inputs - BLOCK_K + 1, BLOCK_K)"),
        ("acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)",
         "acc += tl.dot(x, tl.trans(w), out_dtype=tl.int32).to(tl.int8)"),
    ],
)  # fmt: skip
def test_a_wrong_product_is_found(old, new, seed, tmp_path):
    """A scale left out, one scale for all outputs, a tail left out, sums that overflow 8 bits."""
    buggy = with_bug(w8a8, tmp_path, old, new)
    codes, scales, weight, bias = operands("int8", seed)
    theirs = buggy.Int8Weight(weight.values, weight.scales)

    def fast(scales, bias):
        return buggy.scaled_product(codes, scales, theirs, bias, torch.float32, SMALL)

    def plain(scales, bias):
        return by_hand(codes, scales, weight, bias)

    with pytest.raises(NotEquivalent):
        prove(fast, plain, (scales, bias))


# ---------------------------------------------------------------- SmoothQuant and outliers


def logits_of(model, tokens):
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return new_model(num_hidden_layers=2).cpu()


@pytest.fixture(scope="module")
def tokens():
    return torch.arange(24) * 7 % CONFIG.vocab_size


def test_by_hand():
    """max |x| 16 and max |w| 1 at alpha 0.5: s = 4, so both sides become 4."""
    s = smoothing_scales(torch.tensor([16.0, 1.0, 0.0]), [torch.tensor([[-1.0, 4.0, 2.0]])], 0.5)
    torch.testing.assert_close(s, torch.tensor([4.0, 0.5, 1.0]))


@pytest.mark.parametrize("alpha", [0, 0.3, 0.5, 1])
def test_smoothing_changes_no_function(alpha, model, tokens):
    maxima = activation_maxima(model, lambda: logits_of(model, tokens))
    smooth = smoothed(model, maxima, alpha)
    want = logits_of(model, tokens)
    torch.testing.assert_close(logits_of(smooth, tokens), want, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(logits_of(model, tokens), want, atol=0, rtol=0)  # it is a twin


def test_alpha_1_makes_all_channels_equally_loud(model, tokens):
    loud = with_loud_activations(model, [3, 7], 50.0)
    maxima = activation_maxima(loud, lambda: logits_of(loud, tokens))
    smooth = smoothed(loud, maxima, 1)
    after = activation_maxima(smooth, lambda: logits_of(smooth, tokens))
    name = "layers.0.self_attn.q_proj"
    assert channel_ratio(maxima[name]) > 10
    assert channel_ratio(after[name]) == pytest.approx(1, rel=1e-4)


def test_loud_channels_change_no_function(model, tokens):
    want = logits_of(model, tokens)
    for loud in (with_loud_activations(model, [3, 7], 50.0), with_loud_keys(model, [1], 30.0)):
        torch.testing.assert_close(logits_of(loud, tokens), want, atol=1e-8, rtol=1e-8)


def test_smoothing_mends_what_loud_channels_break(model, tokens):
    """INT8 on both sides: the error grows with two loud channels, and smoothing takes most of it
    away.
    """
    want = logits_of(model, tokens)
    loud = with_loud_activations(model, [3, 7], 200.0)
    maxima = activation_maxima(loud, lambda: logits_of(loud, tokens))

    def error(twin):
        in_codes = quantized(
            twin, lambda name, linear: to_eight_bits(linear.weight, "int8"), w8a8_by_numbers
        )
        return float((logits_of(in_codes, tokens) - want).norm() / want.norm())

    assert error(loud) > 3 * error(model) and error(smoothed(loud, maxima, 0.5)) < 0.5 * error(loud)


def test_bad_input(model):
    with pytest.raises(ValueError, match=r"alpha: got 1.5; accepted: 0 to 1"):
        smoothed(model, {}, 1.5)
    with pytest.raises(ValueError, match="name: got 'int4'; accepted: int8 or fp8"):
        to_eight_bits(torch.randn(2, 2), "int4")
    with pytest.raises(ValueError, match="channels: got"):
        with_loud_keys(model, [99], 2.0)
    codes, scales = quantize_tokens(torch.randn(3, 8, device=DEVICE), "int8")
    with pytest.raises(ValueError, match="codes: got"):
        scaled_product(codes, scales, to_eight_bits(torch.randn(4, 8), "fp8"), None, torch.float32)
