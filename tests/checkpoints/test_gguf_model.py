"""Proves that a model read from a GGUF file is the model that transformers reads from it, that ours
comes back as it went, and that a file that asks for something else is refused.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.gguf.gguf_blocks import FORMATS, GgufWeight
from lessons.l18_weight_quantization.gguf.gguf_encode import to_gguf
from lessons.l18_weight_quantization.lab.gguf_models import CONFIGS, logits_of, new_model, packed_of
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.weights import GroupedInt
from lessons.toolbox.measure.device import default_device, has_triton
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.rope_scaling import RopeScaling
from reference.checkpoints.gguf import gguf_model
from reference.checkpoints.gguf.gguf_config import ROPE_FACTORS
from reference.checkpoints.gguf.gguf_file import read_gguf
from reference.checkpoints.gguf.gguf_linear import (
    GgufEmbedding,
    as_grouped,
    gguf_matmul,
    with_kernels,
)
from reference.checkpoints.gguf.gguf_model import (
    load_gguf,
    quantizer,
    row_order,
    save_gguf,
)

LLAMA_3 = RopeScaling("llama3", 4.0, 1.0, 4.0, original_max_position_embeddings=32)


# ---------------------------------------------------------------- against transformers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family, mixture",
    [("llama", "Q4_K_M"), ("llama, tied", "F32"), ("qwen2", "Q8_0"), ("qwen3", "Q5_K_M")],
)
def test_logits_of_transformers(family, mixture, tmp_path, seed):
    """Of the same file, which transformers decodes with the gguf package."""
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    model, tokens = new_model(CONFIGS[family]), torch.randint(96, (19,))
    save_gguf(tmp_path / "x.gguf", model, None, mixture)
    ours = load_gguf(tmp_path / "x.gguf")
    assert ours.config == CONFIGS[family]
    options = dict(gguf_file="x.gguf", dtype=torch.float32, attn_implementation="eager")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    assert 0.3 < expected.std() < 30, "the model under test must say something"
    torch.testing.assert_close(logits_of(ours, tokens), expected, atol=2e-4, rtol=0)
    same = torch.equal(logits_of(ours, tokens), logits_of(model, tokens))
    assert same == (mixture == "F32")


def swapped_halves(name: str, config: ModelConfig) -> Tensor | None:
    """The inverse order, a usual slip: it is right only where a head has four rows."""
    order = row_order(name, config)
    return None if order is None else order.argsort()


def not_permuted(name: str, config: ModelConfig) -> None:
    """As if llama.cpp rotated halves."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", [swapped_halves, not_permuted])
def test_a_wrong_order_of_rows_is_noticed(wrong, tmp_path, seed, monkeypatch):
    """Reader and writer agree with each other, and still not with transformers."""
    pytest.importorskip("gguf")
    monkeypatch.setattr(gguf_model, "row_order", wrong)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_logits_of_transformers("llama", "F32", tmp_path, seed)


def test_the_order_of_rows_by_hand():
    config = replace(CONFIGS["llama"], head_dim=4, v_head_dim=0, num_attention_heads=2)
    assert row_order("layers.0.self_attn.q_proj.weight", config).tolist() == [
        0,
        2,
        1,
        3,
        4,
        6,
        5,
        7,
    ]
    assert row_order("layers.0.self_attn.v_proj.weight", config) is None
    assert row_order("layers.0.self_attn.q_proj.weight", CONFIGS["qwen2"]) is None


# ---------------------------------------------------------------- what is loaded


def test_matrices_stay_quantized_in_memory(tmp_path, seed):
    """What the modules hold are the file's bytes; the embedding and the logits share theirs."""
    save_gguf(tmp_path / "x.gguf", new_model(CONFIGS["llama, tied"]), None, "Q4_K_M")
    file, model = read_gguf(tmp_path / "x.gguf"), load_gguf(tmp_path / "x.gguf")
    kinds = (QuantizedLinear, GgufEmbedding)
    held = {id(m.quantized): m.quantized for m in model.modules() if isinstance(m, kinds)}
    matrices = [info for info in file.tensors.values() if len(info.shape) == 2]
    assert sum(weight.nbytes for weight in held.values()) == sum(info.size for info in matrices)
    assert model.lm_head.quantized is model.embed_tokens.quantized
    assert sum(parameter.numel() for parameter in model.parameters()) == 5 * 256  # the norms
    down = {weight.format for name, weight in packed_of(model).items() if "down_proj" in name}
    assert down == {"Q4_K", "Q6_K"}


def test_the_same_as_quantizing_in_place(tmp_path, seed):
    """A file changes nothing beyond its blocks: the model with the same matrices, never written."""
    config = CONFIGS["qwen3"]
    model, tokens = new_model(config), torch.randint(96, (9,))
    save_gguf(tmp_path / "x.gguf", model, None, "Q4_K_M")
    twin = quantized(model, quantizer("Q4_K_M", config), dequantize_matmul)
    assert {weight.format for weight in packed_of(twin).values()} == {"Q4_K", "Q6_K"}
    twin.embed_tokens = GgufEmbedding(to_gguf(model.embed_tokens.weight, "Q4_K"), torch.float32)
    twin.lm_head = QuantizedLinear(to_gguf(model.lm_head.weight, "Q6_K"), None, dequantize_matmul)
    found, expected = logits_of(load_gguf(tmp_path / "x.gguf"), tokens), logits_of(twin, tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    half = load_gguf(tmp_path / "x.gguf", dtype="bfloat16")
    assert half.dtype == logits_of(half, tokens).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 2.0),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=32),
        RopeScaling("yarn", 4.0, original_max_position_embeddings=32, attention_factor=1.5),
        LLAMA_3,
    ],
)
def test_rope_comes_back(scaling, tmp_path, seed):
    """Llama 3's as factors of each pair, because that is how a file holds it."""
    model = new_model(replace(CONFIGS["llama"], rope_scaling=scaling))
    tokens = torch.randint(96, (40,))
    save_gguf(tmp_path / "x.gguf", model, None, "F32")
    assert (ROPE_FACTORS in read_gguf(tmp_path / "x.gguf").tensors) == (scaling is LLAMA_3)
    found, expected = logits_of(load_gguf(tmp_path / "x.gguf"), tokens), logits_of(model, tokens)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    plain = logits_of(without_scaling(model), tokens)
    assert scaling is None or (plain - expected).abs().max() > 0.05


def without_scaling(model: Decoder) -> Decoder:
    twin = Decoder(replace(model.config, rope_scaling=None)).eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    return twin


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_K"])
def test_the_kernels_get_groups_with_the_same_numbers(format, seed):
    """Of every code, and of scales of both signs. Other formats stay blocks."""
    weight = GgufWeight(torch.randint(0, 256, (9, 5 * FORMATS[format].bytes)).byte(), format)
    numbers = weight.dequantize()
    grouped = as_grouped(weight)
    assert torch.equal(grouped.dequantize().nan_to_num(), numbers.nan_to_num())
    assert grouped.shape == weight.shape and grouped.nbytes == weight.nbytes
    assert isinstance(grouped, GgufWeight) == (format == "Q4_K")


def test_a_model_of_groups(tmp_path, seed):
    """Loaded for kernels, here for the naive product, which refuses nothing."""
    model, tokens = new_model(CONFIGS["llama"]), torch.randint(96, (9,))
    save_gguf(tmp_path / "x.gguf", model, None, "Q4_0")
    asked = []

    def kernels(x, weight, bias):
        asked.append(type(weight))
        return dequantize_matmul(x, weight, bias)

    options = dict(multiply=with_kernels(kernels), prepare=as_grouped)
    found = logits_of(load_gguf(tmp_path / "x.gguf", **options), tokens)
    expected = logits_of(load_gguf(tmp_path / "x.gguf"), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert asked == [GroupedInt] * 7 * 2  # the logits' matrix is Q6_K


@pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_K"])
def test_the_kernels_read_them(format, seed):
    """One product, on a GPU or interpreted, beside the one of the decoded matrix."""
    from lessons.l18_weight_quantization import optimized

    device = default_device()
    weight = to_gguf(torch.randn(16, 256), format).to(device)
    x = torch.randn(2, 256, device=device)
    found = with_kernels(optimized.matmul)(x, as_grouped(weight), None)
    torch.testing.assert_close(found, x @ weight.dequantize().T, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K", "Q6_K"])
def test_products_and_look_ups(format, seed, monkeypatch):
    """A product that decodes a few rows at a time; an embedding that decodes what is asked for."""
    monkeypatch.setattr("reference.checkpoints.gguf.gguf_linear.SLICE", 3 * 256)
    weight = to_gguf(torch.randn(random.choice([1, 7, 9]), 256), format)
    numbers = weight.dequantize()
    x, bias = torch.randn(5, 256), torch.randn(len(numbers))
    torch.testing.assert_close(gguf_matmul(x, weight, bias), x @ numbers.T + bias)
    assert gguf_matmul(x.bfloat16(), weight).dtype == torch.bfloat16
    tokens = torch.randint(len(numbers), (4,))
    looked_up = GgufEmbedding(weight, torch.float32)(tokens)
    assert torch.equal(looked_up, numbers[tokens])
    assert torch.equal(weight.to("cpu").rows(slice(0, 1)).dequantize(), numbers[:1])
