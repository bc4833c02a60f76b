"""Proves that a model read from a GGUF file is the model that transformers reads from it, that ours
comes back as it went, and that a file that asks for something else is refused.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l18_weight_quantization import gguf_model
from lessons.l18_weight_quantization.gguf_blocks import GgufWeight
from lessons.l18_weight_quantization.gguf_config import ROPE_FACTORS, config_of
from lessons.l18_weight_quantization.gguf_encode import to_gguf
from lessons.l18_weight_quantization.gguf_file import read_gguf, write_gguf
from lessons.l18_weight_quantization.gguf_linear import GgufEmbedding
from lessons.l18_weight_quantization.gguf_mixture import MIXTURES, format_of, gets_more_bits
from lessons.l18_weight_quantization.gguf_model import load_gguf, row_order, save_gguf
from lessons.l18_weight_quantization.linear import QuantizedLinear, quantized
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.rope_scaling import RopeScaling

SMALL = dict(
    vocab_size=96,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=512,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    eos_token_ids=(7,),
)
CONFIGS = {
    "llama": ModelConfig("llama", **SMALL),
    "llama, tied": ModelConfig("llama", **SMALL, tie_word_embeddings=True),
    "qwen2": ModelConfig("qwen2", **SMALL | dict(head_dim=64), qkv_bias=True, rope_theta=1e6),
    # 128, because transformers does not read this size from a qwen3's file, and takes its default
    "qwen3": ModelConfig("qwen3", **SMALL | dict(head_dim=128), qk_norm=True),
}
LLAMA_3 = RopeScaling("llama3", 4.0, 1.0, 4.0, original_max_position_embeddings=32)


@torch.no_grad()
def new_model(config: ModelConfig) -> Decoder:
    """A model of random numbers whose logits differ from token to token."""
    model = Decoder(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
        if name.endswith("norm.weight"):
            parameter.add_(1)
    return model


@torch.no_grad()
def logits_of(model: Decoder, tokens: Tensor) -> Tensor:
    return model.logits(model(tokens, whole_sequence(model, len(tokens))))


def changed(path: Path, **values: Any) -> Path:
    """The file with other metadata; a value of None takes the key away. Dots are written as __."""
    file = read_gguf(path)
    new = {key.replace("__", "."): value for key, value in values.items()}
    metadata = {k: v for k, v in (file.metadata | new).items() if v is not None}
    tensors = {name: (file.read(name), info.shape) for name, info in file.tensors.items()}
    write_gguf(path, metadata, tensors)
    return path


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


def packed_of(model: Decoder) -> dict[str, GgufWeight]:
    parts = model.named_modules()
    return {name: part.quantized for name, part in parts if isinstance(part, QuantizedLinear)}


def test_the_same_as_quantizing_in_place(tmp_path, seed):
    """A file changes nothing beyond its blocks: the model with the same matrices, never written."""
    config = CONFIGS["qwen3"]
    model, tokens = new_model(config), torch.randint(96, (9,))
    save_gguf(tmp_path / "x.gguf", model, None, "Q8_0")
    twin = quantized(model, lambda name, linear: to_gguf(linear.weight, "Q8_0"), dequantize_matmul)
    twin.embed_tokens = GgufEmbedding(to_gguf(model.embed_tokens.weight, "Q8_0"), torch.float32)
    twin.lm_head = QuantizedLinear(to_gguf(model.lm_head.weight, "Q8_0"), None, dequantize_matmul)
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


# ---------------------------------------------------------------- which tensor gets how many bits


def test_half_of_the_layers_get_more_bits():
    """llama.cpp's rule for 32 layers; of the embedded model's six, the third and the last."""
    better = [layer for layer in range(32) if gets_more_bits(layer, 32)]
    assert better == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [layer for layer in range(6) if gets_more_bits(layer, 6)] == [2, 5]


@pytest.mark.parametrize(
    "mixture, name, columns, is_tied, expected",
    [
        ("Q4_K_M", "blk.0.attn_q", 4096, False, "Q4_K"),
        ("Q4_K_M", "blk.0.attn_v", 4096, False, "Q6_K"),
        ("Q4_K_M", "blk.4.attn_v", 4096, False, "Q4_K"),
        ("Q4_K_M", "blk.6.ffn_down", 4096, False, "Q6_K"),
        ("Q4_K_M", "blk.6.attn_output", 4096, False, "Q4_K"),
        ("Q4_K_M", "output", 4096, False, "Q6_K"),
        ("Q4_K_M", "token_embd", 4096, False, "Q4_K"),
        ("Q4_K_M", "token_embd", 4096, True, "Q6_K"),
        ("Q5_K_M", "blk.31.ffn_down", 4096, False, "Q6_K"),
        ("Q5_K_M", "blk.5.ffn_down", 4096, False, "Q5_K"),
        ("Q4_K_S", "blk.3.attn_v", 4096, False, "Q5_K"),
        ("Q4_K_S", "blk.4.ffn_down", 4096, False, "Q4_K"),
        ("Q2_K", "blk.9.attn_v", 4096, False, "Q4_K"),
        ("Q2_K", "blk.9.ffn_down", 4096, False, "Q3_K"),
        ("Q3_K_M", "blk.1.attn_v", 4096, False, "Q5_K"),
        ("Q8_0", "output", 4096, False, "Q8_0"),
        ("F16", "output", 4096, False, "F16"),
        # rows of 384 or 40 hold no block of 256, or none of 32
        ("Q4_K_M", "blk.4.attn_q", 384, True, "Q5_0"),
        ("Q5_K_M", "blk.4.attn_q", 384, True, "Q5_1"),
        ("Q4_K_M", "blk.0.attn_v", 384, True, "Q8_0"),
        ("Q2_K", "blk.0.ffn_up", 384, True, "Q4_0"),
        ("Q4_0", "token_embd", 384, True, "Q8_0"),
        ("Q4_K_M", "token_embd", 384, True, "Q8_0"),
        ("Q8_0", "blk.4.attn_q", 40, True, "F16"),
    ],
)
def test_mixtures(mixture, name, columns, is_tied, expected):
    assert format_of(mixture, name, columns, 32, 4, is_tied) == expected


def test_mixtures_are_written_and_read(tmp_path, seed, request):
    """Three of them here, all with --all."""
    gguf = pytest.importorskip("gguf")
    model = new_model(CONFIGS["llama"])
    wanted = model.layers[1].mlp.up_proj.weight
    for mixture in MIXTURES if request.config.getoption("--all") else ("BF16", "Q2_K", "Q4_1"):
        save_gguf(tmp_path / "x.gguf", model, None, mixture)
        number = read_gguf(tmp_path / "x.gguf").metadata["general.file_type"]
        name = f"ALL_{mixture}" if mixture == "F32" else f"MOSTLY_{mixture}"
        assert gguf.LlamaFileType(number).name == name
        again = load_gguf(tmp_path / "x.gguf")
        weight = packed_of(again).get("layers.1.mlp.up_proj")
        found = again.layers[1].mlp.up_proj.weight if weight is None else weight.dequantize()
        error = float((found - wanted).square().mean().sqrt() / wanted.std())
        assert error < (0.35 if mixture == "Q2_K" else 0.2), mixture


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def small(tmp_path) -> Path:
    save_gguf(tmp_path / "x.gguf", new_model(CONFIGS["llama"]), None, "Q8_0")
    return tmp_path / "x.gguf"


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(general__architecture="mamba"), "'mamba'; supported: llama, qwen2, qwen3"),
        (dict(general__architecture=None), "general.architecture is None"),
        (dict(general__type="adapter"), "it holds 'adapter'"),
        (dict(split__count=3), "in 3 files; accepted: a model in one file"),
        (dict(llama__block_count=None), "the key llama.block_count is missing"),
        (dict(llama__block_count=2**31), "llama.block_count must be a whole number up to 10000"),
        (dict(llama__block_count="2"), "llama.block_count must be a whole number"),
        (dict(llama__block_count=9000), "holds 21 tensors, too few for 9000 layers"),
        (dict(llama__block_count=1), "the tensor blk.1.attn_k.weight .* has no place"),
        (dict(llama__block_count=3), r"lacks the tensor blk.2.attn_norm.weight \(shape \[256\]\)"),
        (dict(llama__embedding_length=128), "has shape .* its metadata ask for"),
        (dict(llama__attention__head_count=0), "llama.attention.head_count must be a whole"),
        (dict(llama__attention__head_count=3), "multiple of num_key_value_heads"),
        (dict(llama__attention__head_count_kv=[2, 1]), r"must be a whole number .* not \[2, 1\]"),
        (dict(llama__attention__layer_norm_rms_epsilon=-1.0), "must be positive, not -1.0"),
        (
            dict(llama__rope__freq_base=float("nan")),
            "llama.rope.freq_base must be positive, not nan",
        ),
        (dict(llama__rope__dimension_count=16), "llama.rope.dimension_count must be 32, not 16"),
        (dict(llama__rope__scaling__type="longrope"), "'longrope' without rope_freqs.weight"),
        (dict(llama__expert_count=8), "llama.expert_count is 8, and the decoder does not read"),
        (dict(llama__attention__sliding_window=4), "llama.attention.sliding_window is 4"),
        (dict(llama__attn_logit_softcapping=50.0), "llama.attn_logit_softcapping is 50.0"),
        (dict(llama__attention__causal=False), "llama.attention.causal is False"),
    ],
)
def test_refuses_in_one_line(small, values, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        load_gguf(changed(small, **values))
    assert str(small) in str(raised.value) and "\n" not in str(raised.value)


def test_reads_what_changes_nothing(small, seed):
    """Keys of other beginnings, and keys of the architecture at the value that they have anyway."""
    tokens = torch.randint(96, (9,))
    expected = logits_of(load_gguf(small), tokens)
    values = dict(
        llama__expert_count=0,
        llama__attention__causal=True,
        llama__attention__head_count_kv=[2, 2],
        llama__rope__scaling__type="none",
        llama__attention__key_length=None,
        llama__attention__value_length=None,
        llama__rope__dimension_count=None,
        llama__embedding_length=256,
        quantize__imatrix__entries_count=224,
        tokenizer__ggml__eot_token_id=9,
    )
    values["llama__attention__key_length"] = 32
    again = load_gguf(changed(small, **values))
    assert torch.equal(logits_of(again, tokens), expected)
    assert again.config.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="phi3"), "model_type: got 'phi3'; accepted: llama, mistral"),
        (dict(model_type="mistral", sliding_windows=(4, 4)), "sliding window"),
        (
            dict(rope_scaling=RopeScaling("yarn", 2.0, truncate=False)),
            "yarn of gpt-oss or DeepSeek",
        ),
    ],
)
def test_refuses_to_write(changes, message, tmp_path):
    model = new_model(CONFIGS["llama"])
    model.config = replace(model.config, **changes)
    with pytest.raises(ValueError, match=message):
        save_gguf(tmp_path / "x.gguf", model, None, "Q8_0")


def test_refuses_to_write_twice_quantized(small, tmp_path):
    with pytest.raises(ValueError, match="model: got a quantized one"):
        save_gguf(tmp_path / "y.gguf", load_gguf(small), None, "Q8_0")
    with pytest.raises(ValueError, match=r"^mixture: got 'Q4'; accepted: F32, F16"):
        save_gguf(tmp_path / "y.gguf", new_model(CONFIGS["llama"]), None, "Q4")


def test_random_metadata_raises_one_line(small, seed, request):
    """Whatever a key says, a model comes out, or CheckpointError."""
    keys = [key for key in read_gguf(small).metadata if key != "general.quantization_version"]
    values = [0, 1, 2, 3, 2**31, 2**40, -1, 0.0, 1e30, float("inf"), "", "x", True, [1], ["a"]]
    for _ in range(500 if request.config.getoption("--all") else 30):
        key, value = random.choice(keys), random.choice(values)
        file = read_gguf(small)
        file.metadata[key] = value
        try:
            config_of(file)
        except CheckpointError as error:
            assert "\n" not in str(error), key
