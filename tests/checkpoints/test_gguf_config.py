"""Proves that a mixture gives each tensor llama.cpp's format, and that a file that asks for
something else than the decoder does is refused.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lessons.l18_weight_quantization.gguf.gguf_mixture import MIXTURES, format_of, gets_more_bits
from lessons.l18_weight_quantization.lab import gguf_sizes
from lessons.l18_weight_quantization.lab.gguf_models import CONFIGS, logits_of, new_model, packed_of
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.rope_scaling import RopeScaling
from reference.checkpoints.gguf.gguf_config import config_of
from reference.checkpoints.gguf.gguf_file import read_gguf, write_gguf
from reference.checkpoints.gguf.gguf_model import load_gguf, save_gguf


def changed(path: Path, **values: Any) -> Path:
    """The file with other metadata; a value of None takes the key away. Dots are written as __."""
    file = read_gguf(path)
    new = {key.replace("__", "."): value for key, value in values.items()}
    metadata = {k: v for k, v in (file.metadata | new).items() if v is not None}
    tensors = {name: (file.read(name), info.shape) for name, info in file.tensors.items()}
    write_gguf(path, metadata, tensors)
    return path


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


def test_the_record_is_what_is_counted():
    """And what is known of the file that people download: Llama 3 8B in Q4_K_M has 4.92 GB."""
    record = json.loads(gguf_sizes.RECORD.read_text())
    assert record == gguf_sizes.counted()
    assert record["mixtures"]["llama-3-8b"]["Q4_K_M"]["bytes"] == pytest.approx(4.92e9, rel=0.003)


def test_a_file_has_the_bytes_that_are_counted(tmp_path, seed):
    config = CONFIGS["llama, tied"]
    save_gguf(tmp_path / "x.gguf", new_model(config), None, "Q4_K_M")
    sizes = [info.size for info in read_gguf(tmp_path / "x.gguf").tensors.values()]
    assert sum(sizes) == gguf_sizes.count("Q4_K_M", config)["bytes"]


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
