"""Proves the formats: bit for bit against loops over plain numbers, errors within half a step, and
bytes as lesson 1 counts them.
"""

import math
from dataclasses import replace

import pytest
import torch

from lessons.l01_roofline.calculators import kv_bytes_per_token as kv_bytes_of_shape
from lessons.l01_roofline.planner.models import find_model
from lessons.l12_paged_kv.lab.testing import CONFIG, new_deepseek
from lessons.l19_kv_quantization.formats import FORMATS, kv_bytes_per_token, row_bytes
from lessons.l19_kv_quantization.pool import QuantizedLatentPool, QuantizedPool
from lessons.l19_kv_quantization.runner import quantized_rung_of, quantized_runner
from lessons.toolbox.proof.numerics import assert_same_bits

E4M3_CODES = torch.arange(256, dtype=torch.uint8)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def e4m3(code: int) -> float:
    """A number of 8 bits by the definition: 1 sign, 4 bits of exponent, 3 of mantissa."""
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2**-6
    return sign * (1 + mantissa / 8) * 2 ** (exponent - 7)


def rows_of(dtype, seed: int):
    """Ordinary rows, a loud channel, tiny and huge rows, equal numbers, zeros: [7, 1, 32]."""
    x = torch.randn(7, 1, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[1, :, 5] = 60
    x[2] *= 1e-4
    x[3] *= 3000
    x[4] = -2.5
    x[5] = 0
    x[6] = x[6].abs() + 40
    return x.to(dtype)


def test_e4m3_has_the_numbers_that_its_bits_say():
    want = torch.tensor([e4m3(code) for code in range(256)])
    got = FORMATS["fp8"].dequantize(E4M3_CODES[None], torch.ones(1, 1))[0]
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)
    assert got.nan_to_num().max() == 448


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rounds_to_the_nearest_and_never_beyond_448(dtype, seed):
    """The nearest of all 254 numbers, by looking at each of them."""
    x = rows_of(dtype, seed)
    codes, scales = FORMATS["fp8"].quantize(x)
    numbers = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    numbers = numbers[numbers.isfinite()]
    ratio = (x.double() / scales.double()).clamp(-448, 448)
    got = FORMATS["fp8"].dequantize(codes, torch.ones_like(scales, dtype=torch.float64))
    best = (ratio[..., None] - numbers).abs().amin(-1)
    assert got.isfinite().all() and scales.dtype == dtype
    # 1e-6, because the ratio itself is rounded to float32
    assert ((ratio - got).abs() <= best + 1e-6 * ratio.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_whole_numbers_are_wrong_by_half_a_step_at_most(name, dtype, seed):
    x, format = rows_of(dtype, seed), FORMATS[name]
    codes, scales = format.quantize(x)
    exact = format.dequantize(codes, scales.double())
    step, info = scales[..., :1].double(), torch.finfo(dtype)
    # Rounding scale and low to the dtype may leave the row's ends a little outside of the codes.
    ulp = (info.eps * step).clamp(min=info.smallest_normal * info.eps)
    lowest = info.eps * x.double().abs().amax(-1, keepdim=True)
    granted = 0.5 * step + 2**format.bits / 2 * ulp + lowest
    assert ((exact - x.double()).abs() <= granted).all()
    assert_same_bits(format.dequantize(codes, scales)[5], torch.zeros_like(x[5]))


def test_int4_bytes_hold_two_neighbours(seed):
    x, format = rows_of(torch.float32, seed), FORMATS["int4"]
    codes, scales = format.quantize(x)
    assert codes.shape == (7, 1, 16) and scales.shape == (7, 1, 2)
    for row, packed, (scale, low) in zip(x[:, 0], codes[:, 0], scales[:, 0]):
        for at, value in enumerate(row.tolist()):
            want = round(max(0.0, min(15.0, float((value - low) / scale))))
            assert int(packed[at // 2]) >> (4 * (at % 2)) & 15 == want


def test_a_row_s_codes_depend_on_no_other_row(seed):
    """What paging, chunks, prefix caching and rewinding rely on."""
    x = rows_of(torch.float32, seed)
    for format in FORMATS.values():
        together = format.quantize(x)
        for at in range(len(x)):
            for one, all_ in zip(format.quantize(x[at : at + 1]), together):
                assert_same_bits(one, all_[at : at + 1])


# ---------------------------------------------------------------- bytes


def test_llama_2_70b_by_lesson_1():
    """A sequence of 4096 tokens: 1.34 GB in 16 bits, 0.67 GB in 8; with a scale of 16 bits for each
    128 numbers 0.68, and 0.36 in 4 bits with two of them.
    """
    shape = find_model("Llama-2-70B")
    sixteen, eight = (4096 * kv_bytes_of_shape(shape, bits) for bits in (16, 8))
    assert (round(sixteen / 1e9, 2), round(eight / 1e9, 2)) == (1.34, 0.67)
    values = shape.kv_values_per_token
    for name, gigabytes in (("fp8", 0.68), ("int8", 0.68), ("int4", 0.36)):
        bits = 8 * row_bytes(FORMATS[name], 128, 2) / 128
        assert round(4096 * values * bits / 8 / 1e9, 2) == gigabytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_pool_is_as_large_as_was_computed(name):
    runner = quantized_runner(new_deepseek(), name, 5, 3, 32)
    config = runner.model.config
    assert runner.pool.bytes_per_token == kv_bytes_per_token(config, FORMATS[name], 8)


def test_what_is_refused(seed):
    model = new_deepseek()
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'fp6'; accepted: auto, fp8, int8"):
        quantized_rung_of(model, "fp6")
    odd = replace(model.config, mla=replace(model.config.mla, kv_lora_rank=19))
    with pytest.raises(ValueError, match="kv_cache_dtype: got 'int4'; accepted: 8 bits"):
        ops = quantized_rung_of(model, "int4").stand_ins
        QuantizedLatentPool(FORMATS["int4"], odd, 2, 4, ops, max_context_len=8)
    pool = QuantizedPool(FORMATS["int8"], CONFIG, 2, 4, quantized_rung_of(model, "auto").stand_ins)
    with pytest.raises(ValueError, match="tokens: got 5; accepted: at most 4"):
        pool.reserve(5)
