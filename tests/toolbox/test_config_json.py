"""What is read from config.json, what is refused, and that each refusal is one line that names the
culprit.
"""

import json

import pytest

from lessons.toolbox.model.config import ModelConfig, RopeScaling
from lessons.toolbox.model.config_json import CheckpointError, read_config

LLAMA = dict(
    model_type="llama",
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    tie_word_embeddings=False,
    eos_token_id=2,
)


def write(folder, remove=(), **changes) -> None:
    """A config.json in `folder`, some keys changed or left out."""
    raw = {key: value for key, value in (LLAMA | changes).items() if key not in remove}
    (folder / "config.json").write_text(json.dumps(raw))


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_config(folder)
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_needed_key_is_named(key, tmp_path):
    write(tmp_path, remove=[key])
    assert f"'{key}'" in refusal(tmp_path)
    write(tmp_path, **{key: None})
    assert f"'{key}'" in refusal(tmp_path)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(hidden_size=0), "'hidden_size'"),
        (dict(hidden_size=-8), "-8"),
        (dict(hidden_size="24"), "'24'"),
        (dict(vocab_size=True), "'vocab_size' must be a positive integer, not True"),
        (dict(vocab_size=31.0), "31.0"),
        (dict(rms_norm_eps=float("nan")), "nan"),
        (dict(rope_theta=0), "'rope_theta'"),
        (dict(tie_word_embeddings="no"), "'tie_word_embeddings'"),
        (dict(attention_bias=1), "'attention_bias'"),
        (dict(eos_token_id="</s>"), "'eos_token_id'"),
        (dict(hidden_size=25), "hidden_size (25) must be a multiple of num_attention_heads (6)"),
        (
            dict(num_key_value_heads=4),
            "num_attention_heads (6) must be a multiple of num_key_value_heads (4)",
        ),
        (dict(head_dim=5), "head_dim must be even"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(quantization_config=dict(quant_method="fp8")), "quantized"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(rope_scaling="linear"), "'rope_scaling'"),
        (dict(rope_scaling=dict(type="linear")), "'rope_scaling.factor'"),
        (
            dict(rope_parameters=dict(rope_type="llama3", factor=8.0)),
            "'rope_parameters.low_freq_factor'",
        ),
        (dict(rope_parameters=dict(full_attention=dict(rope_type="default"))), "layer type"),
        (
            dict(
                rope_scaling=dict(
                    rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0
                )
            ),
            "high_freq_factor",
        ),
        (dict(model_type="mistral", layer_types=["full_attention"]), "'layer_types'"),
        (
            dict(model_type="qwen2", layer_types=["full_attention", "sliding_attention"]),
            "'sliding_window'",
        ),
        (dict(model_type="mistral", sliding_window=0), "'sliding_window'"),
        (dict(model_type="qwen3"), "'head_dim'"),
    ],
)
def test_wrong_value_is_named(changes, named, tmp_path):
    write(tmp_path, **changes)
    message = refusal(tmp_path)
    assert named in message and "config.json" in message


def test_unsupported_lists_the_supported(tmp_path):
    write(tmp_path, model_type="gpt2")
    assert all(name in refusal(tmp_path) for name in ("gpt2", "llama", "mistral", "qwen2", "qwen3"))
    write(tmp_path, rope_scaling=dict(rope_type="longrope", factor=4.0))
    assert all(
        name in refusal(tmp_path) for name in ("longrope", "default", "linear", "llama3", "yarn")
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "null", '{"model_type": "llama",}', "[" * 100_000, "\xff\xfe"]
)
def test_malformed_json_names_the_file(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_folder_without_config(tmp_path):
    assert "config.json" in refusal(tmp_path)


def test_defaults_of_absent_keys(tmp_path):
    # as Llama 1 had it
    write(
        tmp_path,
        remove=["num_key_value_heads", "rope_theta", "tie_word_embeddings", "eos_token_id"],
    )
    config = read_config(tmp_path)
    assert (config.num_key_value_heads, config.rope_theta, config.tie_word_embeddings) == (
        6,
        10000.0,
        False,
    )
    assert config.eos_token_ids == () and config.sliding_window(1) is None and config.head_dim == 4
    write(tmp_path, model_type="qwen2", remove=["num_key_value_heads"])
    assert "'num_key_value_heads'" in refusal(tmp_path)  # because transformers would take 32


def test_original_context_of_llama3_scaling_defaults_to_the_context(tmp_path):
    write(
        tmp_path,
        rope_scaling=dict(rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4),
    )
    assert read_config(tmp_path).rope_scaling == RopeScaling(
        "llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=64
    )


@pytest.mark.parametrize(
    "changes, windows",
    [
        # transformers' default; since v0.2 checkpoints say null
        (dict(model_type="mistral"), (4096, 4096)),
        (dict(model_type="mistral", sliding_window=None), ()),
        (dict(model_type="mistral", sliding_window=9), (9, 9)),
        (dict(model_type="llama", sliding_window=9), ()),
        (dict(model_type="qwen2", sliding_window=9, max_window_layers=1), ()),
        (
            dict(
                model_type="qwen2", sliding_window=9, max_window_layers=1, use_sliding_window=True
            ),
            (None, 9),
        ),
        (dict(model_type="qwen2", sliding_window=9, use_sliding_window=True), (None, None)),
        (
            dict(
                model_type="mistral",
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention"],
            ),
            (9, None),
        ),
    ],
)
def test_sliding_windows(changes, windows, tmp_path):
    write(tmp_path, **changes)
    assert read_config(tmp_path).sliding_windows == windows


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, [7, 2], (2, 7)),
        (None, 7, (7,)),
        (None, None, ()),
        (0, 0, (0,)),
    ],
)
def test_stop_tokens_of_both_files(config, generation, expected, tmp_path):
    write(tmp_path, eos_token_id=config)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=generation)))
    assert read_config(tmp_path).eos_token_ids == expected
    (tmp_path / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(tmp_path)


def test_a_refusal_is_one_line_even_if_its_cause_is_not():
    assert str(CheckpointError("two\n  lines\n")) == "two lines"


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(num_key_value_heads=4), "num_key_value_heads"),
        (dict(head_dim=3), "head_dim"),
        (dict(sliding_windows=(1,)), "layers"),
    ],
)
def test_model_config_refuses_sizes_that_do_not_fit(changes, named):
    sizes = dict(
        model_type="llama",
        vocab_size=5,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=2,
        intermediate_size=4,
        max_position_embeddings=8,
    )
    assert ModelConfig(**sizes).kv_bytes_per_token(2) == 2 * 2 * 2 * 2 * 2
    with pytest.raises(ValueError, match=named):
        ModelConfig(**sizes | changes)
