"""The layouts whose codes are bytes, to the last bit, against bitsandbytes and transformers; and
what is said of parts that do not fit, of any layout.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from lessons.l18_weight_quantization.naive import to_float8, to_mxfp4, to_nf4
from lessons.l18_weight_quantization.weights import E2M1_VALUES
from reference.checkpoints.float_layouts import (
    NF4_STATE,
    bnb_int8,
    bnb_nf4,
    float_quantized,
    int_quantized,
    mxfp4,
)
from reference.checkpoints.layouts import awq, gptq, pack_quantized
from tests.checkpoints.test_layouts import GROUP, K, N, assert_same, random_ints

pytestmark = pytest.mark.usefixtures("seed")


# ---------------------------------------------------------------- bytes


def test_float8_and_its_three_kinds_of_scales():
    weight = torch.randn(256, 384)
    for per, layout in (
        ("row", float_quantized()),
        ("tensor", float_quantized()),
        ("block", float_quantized("weight_scale_inv", tile=True)),
    ):
        stored = to_float8(weight, per=per)
        parts = layout.write(stored)
        assert_same(layout.read(parts, (256, 384)), stored)
        if per != "block":  # files also have a scale as [N], [1] or []
            parts["weight_scale"] = parts["weight_scale"].squeeze()
            assert_same(layout.read(parts, (256, 384)), stored)
            parts["weight_scale"] = parts["weight_scale"].bfloat16()
            assert layout.read(parts, (256, 384)).scales.dtype == torch.bfloat16


def test_int8_by_rows_and_by_matrix():
    codes, scales = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N, 1)
    read = int_quantized().read
    stored = read(dict(weight=codes, weight_scale=scales), (N, K))
    assert torch.equal(stored.dequantize(), codes.float() * scales)
    zeros = torch.randint(-128, 128, (N, 1), dtype=torch.int8)
    parts = dict(weight=codes, weight_scale=scales, weight_zero_point=zeros)
    assert torch.equal(read(parts, (N, K)).dequantize(), (codes.float() - zeros) * scales)
    stored = read(dict(weight=codes, weight_scale=torch.tensor([0.5])), (N, K))
    assert torch.equal(stored.dequantize(), codes.float() * 0.5)
    largest = torch.rand(N)
    stored = bnb_int8().read(dict(weight=codes, SCB=largest), (N, K))
    assert torch.equal(stored.dequantize(), codes.float() * (largest[:, None] / 127))


@pytest.mark.parametrize("double", [False, True])
def test_nf4_reads_back(double):
    weight = to_nf4(torch.randn(96, 192), double)
    assert_same(bnb_nf4().read(bnb_nf4().write(weight), (96, 192)), weight)


def test_mxfp4_number_by_number():
    weight = to_mxfp4(torch.randn(N, K))
    parts = dict(blocks=weight.codes.view(N, K // 32, 16), scales=weight.exponents)
    stored = mxfp4(parts, (N, K))
    assert_same(stored, weight)
    plain = torch.empty(N, K)
    for n in range(N):
        for k in range(K):
            byte = int(parts["blocks"][n, k // 32, k % 32 // 2])
            code = byte >> 4 if k % 2 else byte & 15
            plain[n, k] = E2M1_VALUES[code] * 2.0 ** (int(parts["scales"][n, k // 32]) - 127)
    assert torch.equal(stored.dequantize(), plain)


@pytest.mark.parametrize("double", [False, True])
def test_bitsandbytes_reads_and_writes_the_same_nf4(double):
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="NOT RUN: bitsandbytes is not installed"
    )
    weight = torch.randn(192, 128)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
    parts = {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    ours = bnb_nf4().read(parts | {"weight": codes}, (192, 128))
    theirs = functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(ours.dequantize(), theirs, atol=0, rtol=3e-7)
    written = bnb_nf4().write(ours)
    packed = {name.removeprefix("weight."): x for name, x in written.items() if "." in name}
    state = functional.QuantState.from_dict(packed, torch.device("cpu"))
    assert torch.equal(functional.dequantize_4bit(written["weight"], state), theirs)


def test_bitsandbytes_int8():
    bnb = pytest.importorskip("bitsandbytes", reason="NOT RUN: bitsandbytes is not installed")
    layer = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(N, K), requires_grad=False)
    layer.to("cpu")
    parts = dict(layer.state_dict())
    theirs = bnb.functional.int8_vectorwise_dequant(layer.weight.data, parts["SCB"])
    ours = bnb_int8().read(parts, (N, K)).dequantize()
    torch.testing.assert_close(ours, theirs.float(), atol=0, rtol=3e-7)


def test_transformers_fine_grained_float8():
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    weight, layout = torch.randn(256, 384), float_quantized("weight_scale_inv", tile=True)
    parts = Fp8Quantize(quantizer).convert({"weight": weight})
    parts = {name.removeprefix("."): x for name, x in parts.items()}
    ours = layout.read(parts, (256, 384))
    tiles = ours.values.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    expected = tiles * parts["weight_scale_inv"][:, None, :, None]
    assert torch.equal(ours.dequantize(), expected.flatten(2).flatten(0, 1))
    written = layout.write(to_float8(weight, per="block"))
    keys = {"weight$": [written["weight"]], "weight_scale_inv": [written["weight_scale_inv"]]}
    theirs = Fp8Dequantize(quantizer).convert(keys, full_layer_name="weight")
    (theirs,) = theirs.values()
    theirs = theirs[0] if isinstance(theirs, list) else theirs
    ours = to_float8(weight, per="block").dequantize()
    torch.testing.assert_close(theirs.float(), ours.to(theirs.dtype).float(), atol=0, rtol=0)


def test_transformers_mxfp4():
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    weights = [to_mxfp4(torch.randn(N, K)) for _ in range(3)]
    blocks = torch.stack([weight.codes.view(N, K // 32, 16) for weight in weights])
    scales = torch.stack([weight.exponents for weight in weights])
    theirs = convert(blocks, scales, dtype=torch.float32)  # [E, K, N]
    ours = torch.stack([weight.dequantize().T for weight in weights])
    assert torch.equal(theirs, ours)


# ---------------------------------------------------------------- what does not fit


def ints(layout, **changes):
    parts = layout.write(random_ints(4)) | changes
    return layout, {name: x for name, x in parts.items() if x is not None}


def nf4(**changes):
    parts = bnb_nf4().write(to_nf4(torch.randn(N, K)))
    state = json.loads(bytes(parts[NF4_STATE].tolist())) | changes
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return bnb_nf4(), parts | {NF4_STATE: text}


def test_parts_that_do_not_fit_are_one_line_that_names_them():
    half = torch.zeros(3, N).half()
    twice = torch.zeros(K, dtype=torch.int32)
    wrong = [
        (
            ints(gptq(4, GROUP), scales=half),
            r"scales: got float16 \[3, 16\]; accepted: .*\[4, 16\]",
        ),
        (ints(gptq(4, GROUP), scales=None), "scales is missing"),
        (ints(gptq(4, GROUP), qweight=half), "qweight: got float16"),
        (ints(gptq(4, GROUP), g_idx=twice), "g_idx: got a group of 64 columns; accepted: 16"),
        (ints(gptq(4, GROUP), g_idx=twice - 1), "g_idx: got a group -1, or one below 0"),
        ((gptq(4, 48), {}), "group_size: got 48; accepted: a divisor of the layer's 64"),
        (ints(awq(GROUP), qzeros=None), "qzeros is missing"),
        ((pack_quantized(4, 0), {}), "group_size: got 0"),
        (ints(pack_quantized(4, GROUP), weight_packed=half), "weight_packed: got float16"),
        (
            (float_quantized(), dict(weight=half)),
            r"weight: got float16 \[3, 16\]; accepted: float8",
        ),
        ((bnb_int8(), dict(weight=torch.zeros(N, K, dtype=torch.int8))), "SCB is missing"),
        (nf4(quant_type="fp4"), "quant_type: got 'fp4'; accepted: nf4"),
        (nf4(blocksize=128), "blocksize: got 128; accepted: 64"),
        (nf4(shape=[K, N]), r"shape: got \[64, 16\]; accepted: \[16, 64\]"),
        (nf4(nested_offset="1"), "nested_offset: got '1'"),
        ((bnb_nf4(), {}), "is missing or no text"),
    ]
    for (layout, parts), said in wrong:
        with pytest.raises(ValueError, match=said) as error:
            layout.read(parts, (N, K))
        assert "\n" not in str(error.value)
    layout, parts = nf4()
    parts["weight.quant_map"] = parts["weight.quant_map"].flip(0)
    with pytest.raises(ValueError, match="another code book"):
        layout.read(parts, (N, K))
    with pytest.raises(ValueError, match="blocks: got 48 columns"):
        mxfp4({}, (N, 48))


def test_formats_that_a_layout_cannot_hold():
    for layout, weight, said in [
        (gptq(4, GROUP), random_ints(8), "gptq: got GroupedInt, 8 bits; accepted: 4 bits"),
        (gptq(4, GROUP), to_nf4(torch.randn(N, K)), "no whole numbers"),
        (pack_quantized(4, GROUP), random_ints(4, ordered=True), "another order"),
        (float_quantized(), random_ints(8), "got GroupedInt; accepted: Float8Weight"),
        (float_quantized(tile=True), to_float8(torch.randn(256, 8)), r"got scales \[256, 1\]"),
        (bnb_nf4(), random_ints(4), "got GroupedInt; accepted: Nf4Weight"),
    ]:
        with pytest.raises(ValueError, match=said):
            layout.write(weight)
