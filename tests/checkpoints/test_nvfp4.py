"""NVFP4 in the layouts of compressed-tensors and ModelOpt, and ModelOpt's FP8: number by number,
against compressed-tensors' own code, and as whole models.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.linear import QuantizedLinear
from lessons.l18_weight_quantization.methods import nvfp4
from lessons.l18_weight_quantization.methods.nvfp4 import to_nvfp4
from lessons.l18_weight_quantization.naive import to_float8
from lessons.l18_weight_quantization.weights import E2M1_VALUES
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.proof.planted import with_bug
from reference.checkpoints import nvfp4_layouts
from reference.checkpoints.float_layouts import float_quantized
from reference.checkpoints.quantized_checkpoint import load_quantized
from tests.checkpoints.test_layouts import assert_same
from tests.test_deepseek import random_model
from tests.test_quantized_checkpoints import CONFIGS, compressed, logits_of, store, with_config

pytestmark = pytest.mark.usefixtures("seed")

N, K = 16, 64
FOUR = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
LAYOUTS = {
    "compressed-tensors": (
        nvfp4_layouts.nvfp4_pack_quantized(),
        compressed("nvfp4-pack-quantized", FOUR),
    ),
    "modelopt": (nvfp4_layouts.modelopt_nvfp4(), MODELOPT),
}


def plain_loop(parts: dict, divides: bool) -> torch.Tensor:
    """[N, K] float64 from the tensors of a file, by the definition of the layout. divides: the
    scale of the matrix divides.
    """
    codes = parts["weight_packed" if divides else "weight"]
    whole = parts["weight_global_scale" if divides else "weight_scale_2"].double().item()
    found = torch.empty(N, K, dtype=torch.float64)
    for n in range(N):
        for k in range(K):
            code = int(codes[n, k // 2]) >> (4 if k % 2 else 0) & 15
            scale = parts["weight_scale"][n, k // 16].double().item()
            found[n, k] = E2M1_VALUES[code] * (scale / whole if divides else scale * whole)
    return found


def check_layouts(layouts) -> None:
    """A matrix written and read again is the same, to the last bit, and what the file means."""
    made = {True: layouts.nvfp4_pack_quantized(), False: layouts.modelopt_nvfp4()}
    for divides, layout in made.items():
        for size in (1.0, 1e-4, 3e4):
            weight = to_nvfp4(size * torch.randn(N, K))
            parts = layout.write(weight)
            assert_same(layout.read(parts, (N, K)), weight)
            wanted = plain_loop(parts, divides)
            torch.testing.assert_close(weight.dequantize().double(), wanted, rtol=3e-7, atol=0)


def test_a_matrix_is_written_and_read_to_the_last_bit():
    check_layouts(nvfp4_layouts)


@pytest.mark.parametrize(
    "right, wrong",
    [
        (
            "return Nvfp4Weight(codes, scales, 1 / divisor)",
            "return Nvfp4Weight(codes, scales, divisor)",
        ),
        ('"weight_global_scale": 1 / weight', '"weight_global_scale": weight'),
        (
            '"weight_scale_2": weight.tensor_scale[0],',
            '"weight_scale_2": 1 / weight.tensor_scale[0],',
        ),
    ],
)
def test_a_slip_in_a_layout_is_seen(right, wrong, tmp_path):
    with pytest.raises(AssertionError):
        check_layouts(with_bug(nvfp4_layouts, tmp_path, right, wrong))


def test_compressed_tensors_makes_the_same_bytes():
    """Its scales, its codes and its numbers, of the same matrix and the same scale of the matrix;
    in bfloat16 the numbers that it unpacks are ours rounded to bfloat16 twice.
    """
    reason = "NOT RUN: compressed-tensors is not installed"
    pytest.importorskip("compressed_tensors.compressors.nvfp4", reason=reason)
    from compressed_tensors.compressors.nvfp4.helpers import (
        pack_fp4_to_uint8,
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    ours = to_nvfp4(torch.randn(N, K))
    numbers = unpack_fp4_from_uint8(ours.codes, N, K, torch.float32)
    scales = ours.scales.float().repeat_interleave(16, 1)
    assert torch.equal(numbers * scales * ours.tensor_scale, ours.dequantize())
    assert torch.equal(pack_fp4_to_uint8(numbers), ours.codes)
    # every tie between two codes, and what is beyond the largest
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 0.26, 4.99, 5.01, 0.1])
    edges = torch.cat([edges, -edges])
    codes = nvfp4.to_e2m1(edges)
    assert torch.equal(torch.tensor(E2M1_VALUES)[codes.int()], cast_to_fp4(edges.clone()))


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "mixtral", "deepseek_v3"])
def test_a_checkpoint_is_the_model_of_its_numbers(family, name, tmp_path):
    """Scales of inputs and of the cache are there as in published files, and change nothing."""
    layout, config = LAYOUTS[name]
    (tmp_path / "source").mkdir()
    torch.manual_seed(0)
    random_model(CONFIGS[family]).save_pretrained(tmp_path / "source")
    store(tmp_path / "source", tmp_path, to_nvfp4, layout, config)
    add_scales_of_activations(tmp_path / "quantized", name == "modelopt")
    ours, plain = load_quantized(tmp_path / "quantized"), load_decoder(tmp_path / "plain")
    layers = [part for part in ours.modules() if isinstance(part, QuantizedLinear)]
    assert len(layers) >= 8
    tokens = torch.randint(97, (19,))
    expected = logits_of(plain, tokens)
    assert expected.std() > 0.1, "the model under test must say something"
    torch.testing.assert_close(logits_of(ours, tokens), expected, atol=1e-5, rtol=1e-5)


def add_scales_of_activations(folder, is_modelopt: bool) -> None:
    """As the libraries write them, beside every quantized layer; ModelOpt also for an FP8 cache."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        layer = name.removesuffix("weight_scale")
        scale = torch.tensor(0.01)
        tensors[layer + "input_scale" if is_modelopt else layer + "input_global_scale"] = (
            scale if is_modelopt else scale.view(1)
        )
        if is_modelopt and layer.endswith(("k_proj.", "v_proj.")):
            tensors[f"{layer}{layer[-7]}_scale"] = scale.clone()
    save_file(tensors, file)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_fp8_of_modelopt(per, tmp_path):
    """Its scale of a matrix is a number without dimensions, that of rows has one."""
    layout = float_quantized()

    def write(weight):
        return {
            name: x.squeeze() if "scale" in name else x for name, x in layout.write(weight).items()
        }

    algorithm = "FP8" if per == "tensor" else "FP8_PER_CHANNEL_PER_TOKEN"
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "kv_cache_scheme": {"num_bits": 8},
    }
    (tmp_path / "source").mkdir()
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path / "source")
    quantize = partial(to_float8, per=per)
    store(tmp_path / "source", tmp_path, quantize, replace(layout, write=write), config)
    add_scales_of_activations(tmp_path / "quantized", True)
    ours, plain = load_quantized(tmp_path / "quantized"), load_decoder(tmp_path / "plain")
    tokens = torch.randint(97, (9,))
    expected = logits_of(plain, tokens)
    torch.testing.assert_close(logits_of(ours, tokens), expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- the older file, and refusals


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvfp4")
    (folder / "source").mkdir()
    random_model(CONFIGS["llama"]).save_pretrained(folder / "source")
    store(folder / "source", folder, to_nvfp4, *LAYOUTS["modelopt"])
    return folder / "quantized"


def test_older_files_of_modelopt_say_it_in_a_file_of_their_own(stored, tmp_path):
    for file in stored.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with_config(tmp_path, quantization_config=None)
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    said |= {"exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": said}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    tokens = torch.randint(97, (9,))
    ours, same = (load_quantized(folder) for folder in (tmp_path, stored))
    assert torch.equal(logits_of(ours, tokens), logits_of(same, tokens))


@pytest.mark.parametrize(
    "config, said",
    [
        (MODELOPT | dict(quant_algo="W4A8_AWQ"), "quant_algo: got 'W4A8_AWQ'; accepted: fp8 or"),
        (MODELOPT | dict(group_size=32), "group_size: got 32; accepted: 16"),
        (MODELOPT | dict(quantized_layers={}), "and no reader knows this key"),
        (MODELOPT | dict(quant_algo="FP8"), "layer .*: weight: got uint8"),
        (compressed("nvfp4-pack-quantized", FOUR | dict(group_size=32)), "group_size: got 32"),
        (compressed("nvfp4-pack-quantized", FOUR | dict(num_bits=8)), "num_bits: got 8"),
    ],
)
def test_what_a_config_asks_for_in_vain_is_one_line(config, said, stored, tmp_path):
    for file in stored.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with_config(tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError, match=said) as error:
        load_quantized(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_that_do_not_fit_are_one_line_that_names_them(name):
    layout, _ = LAYOUTS[name]
    parts = layout.write(to_nvfp4(torch.randn(N, K)))
    codes = "weight_packed" if "weight_packed" in parts else "weight"
    whole = next(end for end in parts if end in ("weight_global_scale", "weight_scale_2"))
    changes = {
        f"{codes}: got uint8": {codes: torch.zeros(N, K, dtype=torch.uint8)},
        "weight_scale: got float32": {"weight_scale": torch.ones(N, K // 16)},
        "weight_scale is missing": {"weight_scale": None},
        f"{whole} is missing": {whole: None},
        f"{whole}: got float32": {whole: torch.ones(3)},
        f"{whole}: got 0.0; accepted: a finite": {whole: torch.zeros(1)},
    }
    for said, change in changes.items():
        wrong = {end: x for end, x in (parts | change).items() if x is not None}
        with pytest.raises(ValueError, match=said):
            layout.read(wrong, (N, K))
    with pytest.raises(ValueError, match="got 40 columns; accepted: multiples of 16"):
        layout.read(parts, (N, 40))
    with pytest.raises(ValueError, match="got Float8Weight; accepted: Nvfp4Weight"):
        layout.write(to_float8(torch.randn(N, K)))
