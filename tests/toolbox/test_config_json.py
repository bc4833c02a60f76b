"""What is read from config.json, what is refused, and that each refusal is one line that names the
culprit.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import dataclasses
import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from lessons.toolbox.model.checkpoint import REPOSITORY
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
        (dict(vocab_size=True), "'vocab_size' expected int, got bool (value: True)"),
        (dict(vocab_size=31.0), "31.0"),
        (dict(rms_norm_eps=float("nan")), "nan"),
        (dict(rope_theta=0), "'rope_theta'"),
        (dict(tie_word_embeddings="no"), "'tie_word_embeddings'"),
        (dict(attention_bias=1), "'attention_bias'"),
        (dict(eos_token_id="</s>"), "'eos_token_id'"),
        (dict(hidden_size=25), "hidden size (25) is not a multiple of the number of attention"),
        (
            dict(num_key_value_heads=4),
            "num_attention_heads (6) must be a multiple of num_key_value_heads (4)",
        ),
        (dict(head_dim=5), "head_dim must be even"),
        (dict(model_type="qwen2", head_dim="4"), "'head_dim' must be a positive number"),
        (dict(model_type="qwen2", head_dim=4.0), "head_dim: got 4.0; accepted: a whole number"),
        (dict(model_type="qwen2", hidden_size=4), "hidden_size (4) must be a multiple of num_att"),
        (dict(model_type="qwen2", hidden_size=18), "head_dim must be even"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(quantization_config="fp8"), "quantization_config: got 'fp8'; accepted: None, or an"),
        (dict(quantization_config=dict(bits=4)), "quantization_config: got {'bits': 4}"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(rope_scaling="linear"), "'rope_scaling'"),
        (dict(rope_scaling=dict(type="linear")), "Missing required keys in `rope_parameters`"),
        (dict(rope_scaling=dict(type="linear", factor=None)), "{'factor'}"),
        (dict(rope_parameters=dict(rope_type="llama3", factor=8.0)), "'low_freq_factor'"),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            "'rope_parameters.full_attention'",
        ),
        (
            dict(
                rope_scaling=dict(
                    rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=3.0
                )
            ),
            "high_freq_factor",
        ),
        (dict(model_type="mistral", layer_types=["full_attention"]), "`layer_types` (1)"),
        (dict(model_type="mistral", layer_types=["chunked_attention"] * 2), "'layer_types'"),
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
        (dict(model_type="mistral", sliding_window=None, layer_types=["full_attention"] * 2), ()),
        (dict(model_type="qwen2", sliding_window=9, max_window_layers=1), ()),
        (
            dict(
                model_type="qwen2", sliding_window=9, max_window_layers=1, use_sliding_window=True
            ),
            (None, 9),
        ),
        # all layers are before max_window_layers, 28 if it is absent
        (dict(model_type="qwen2", sliding_window=9, use_sliding_window=True), ()),
        # transformers' default for sliding_window
        (dict(model_type="qwen2", use_sliding_window=True, max_window_layers=1), (None, 4096)),
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
    for text in ("{", '{"eos_token_id": "</s>"}'):
        (tmp_path / "generation_config.json").write_text(text)
        assert "generation_config.json" in refusal(tmp_path)


def test_a_refusal_is_one_short_line_even_if_its_cause_is_not():
    assert str(CheckpointError("two\n  lines\n")) == "two lines"
    long = str(CheckpointError("start " + "x" * 10**6 + " end"))
    assert len(long) < 500 and long.startswith("start") and long.endswith("end")
    assert str(CheckpointError("clear \x1b[2J half \ud800")) == r"clear \x1b[2J half \ud800"


# ---------------------------------------------------------------- keys that are not read


UNREAD = [
    (dict(is_causal=False), "'is_causal' must be True, not False"),
    (dict(use_mrope=True), "'use_mrope' must be False"),
    (dict(sliding_window=9), "'sliding_window' is 9"),
    (dict(layer_types=["full_attention"] * 2), "'layer_types'"),
    (dict(logit_scale=0.5), "'logit_scale' is 0.5"),
    (dict(is_encoder_decoder=True), "'is_encoder_decoder' must be False"),
    (dict(per_layer_config={"0": {}}), "'per_layer_config'"),
    (dict(compression_config=dict(bits=4)), "'compression_config'"),
    (dict(original_max_position_embeddings=16), "'original_max_position_embeddings'"),
    (dict(rope_scaling=dict(rope_type="linear", factor=2.0, mscale_all_dim=1.0)), "mscale_all_dim"),
    (dict(rope_scaling=dict(rope_type="default", factor=2.0)), "'rope_scaling.factor'"),
    (dict(rope_scaling=dict(type="yarn", factor=2.0, attn_factor=0.9)), "attn_factor' is 0.9"),
    (dict(rope_scaling=dict(type="yarn", factor=2.0, attention_factor=0.0)), "attention_factor'"),
    (dict(rope_scaling=dict(type="yarn", factor=2.0, truncate=0)), "truncate' must be a positive"),
    (dict(rope_parameters=dict(rope_type=False)), "'rope_parameters.rope_type' False"),
    (dict(rope_parameters=dict(rope_type=["yarn"])), "'rope_parameters.rope_type' ['yarn']"),
    (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor' must be 1"),
    (dict(model_type="qwen2", dual_chunk_attention_config=dict(chunk_size=8)), "'dual_chunk_att"),
    (dict(model_type="qwen2", attention_bias=True), "'attention_bias' must be False"),
    (dict(model_type="mistral", mlp_bias=True), "'mlp_bias' must be False"),
]


@pytest.mark.parametrize("changes, named", UNREAD)
def test_a_key_that_would_be_ignored_is_refused(changes, named, tmp_path):
    write(tmp_path, **changes)
    assert named in refusal(tmp_path)


# What config.json files of the hub hold, the metadata of their writers included.
PUBLISHED = json.loads((REPOSITORY / "tests/toolbox/published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_load_with_all_that_they_hold(name, tmp_path):
    published = PUBLISHED[name]
    # as a library that writes every default would
    full = dict(temperature=1.0, top_k=50, add_cross_attention=False, pruned_heads={})
    for content in (published, published | full):
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = read_config(tmp_path)
        assert config.model_type == published["model_type"]
        assert config.rope_theta == published["rope_theta"]
        assert config.rms_norm_eps == published["rms_norm_eps"]
        assert (config.rope_scaling is None) == (not published.get("rope_scaling"))
        window = {"Mistral-7B": 4096, "Phi-3-mini": 2047}.get(name)
        windows = (window,) * 32 if window else ()
        if name == "Gemma-3-1B":  # every sixth layer has none
            windows = (*((512,) * 5 + (None,)) * 4, 512, 512)
        if name == "Gemma-2-2B":
            windows = (4096, None) * 13
        assert config.sliding_windows == windows
        assert config.qkv_bias == (name == "Qwen2.5") and config.qk_norm == name.startswith(
            ("Qwen3", "Gemma-3")
        )
    if config.moe and not config.mla:
        assert config.moe.has_experts(0) and config.moe.norm_topk_prob
        assert config.moe.moe_intermediate_size == (768 if "Qwen" in name else 14336)
    if config.mla:
        assert config.moe.n_group == (8 if name == "DeepSeek-V3" else 1)
        assert config.rope_scaling.mscale_all_dim == 0.707 and config.mla.latent_dim == 576


# Keys that may say anything, listed here again so that a key becomes harmless only on purpose.
TRAINING = """architectures attention_dropout bos_token_id dtype embd_pdrop id2label
    initializer_range label2id num_mtp_layers output_hidden_states output_router_logits
    pad_token_id pretraining_tp
    problem_type resid_pdrop return_dict router_aux_loss_coef
    transformers_version use_cache"""
NOT_IN_USE = {
    # max_window_layers counts all layers, so no layer would have the window
    "Qwen2.5": "use_sliding_window sliding_window max_window_layers",
    "Qwen3": "use_sliding_window sliding_window max_window_layers",
    "DeepSeek-V2-Lite": "n_group topk_group",
    # LongRoPE would read it
    "Phi-3-mini": "original_max_position_embeddings",
    # a window takes both
    "Qwen3-30B-A3B": "use_sliding_window sliding_window",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_of_the_family_matters_or_is_refused(name, tmp_path):
    """Each key that transformers' class knows, changed, gives another config or a refusal."""
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    usual, ignored = read_config(tmp_path), set()
    for field in dataclasses.fields(type(AutoConfig.for_model(published["model_type"]))):
        key = field.name
        before = published.get(key, field.default)
        other = {bool: not before, int: 62, float: 0.25, str: "gelu"}.get(type(before), 62)
        (tmp_path / "config.json").write_text(json.dumps(published | {key: other}))
        try:
            if read_config(tmp_path) == usual:
                ignored.add(key)
        except CheckpointError as error:
            # transformers' own words, where hidden_size and num_attention_heads do not fit
            assert key in str(error) or "hidden size" in str(error)
    assert ignored <= {*TRAINING.split(), *NOT_IN_USE.get(name, "").split()}


# ---------------------------------------------------------------- numbers that no model has


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_hidden_layers=100_000),
        dict(num_hidden_layers=10**12),
        dict(vocab_size=2**70),
        dict(hidden_size=2**64),
        dict(max_position_embeddings=10**9),
        dict(intermediate_size=10**400),
        dict(rope_theta=10**400),
        dict(rope_theta=float("inf")),
        dict(eos_token_id=2**70),
        dict(hidden_size="x" * 10**6),
        dict(rope_scaling="x" * 10**6),
        dict(rope_theta=1.0, rope_scaling=dict(type="yarn", factor=2.0)),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_absurd_values_are_one_short_line(changes, model_type, tmp_path):
    write(tmp_path, model_type=model_type, **changes)
    assert next(iter(changes)) in refusal(tmp_path)


def test_a_megabyte_of_key_is_one_short_line(tmp_path):
    write(tmp_path, **{"x" * 10**6: 1})
    assert "'xxx" in refusal(tmp_path)


def test_the_decoder_is_imported_without_transformers():
    """It would make every import of a lesson seconds slower."""
    code = (
        "import sys, lessons.l02_naive_attention.decoder; "
        "sys.exit('transformers' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


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
