"""The decoder's logits against transformers', for every family and dialect that the checkpoint
loader reads.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import inspect
import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lessons.l02_naive_attention import rope as rope_module
from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.checkpoint import (
    EMBEDDED_MODELS,
    REPOSITORY,
    load_config,
    load_tokenizer,
)
from lessons.toolbox.model.config import ModelConfig, RopeScaling

TOLERANCE = 1e-4  # of logits whose size is about 1, float32; of larger ones in proportion

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN_ROPE = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16
)

CASES = {
    "llama": LlamaConfig(**SMALL),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, as many KV heads as query heads": LlamaConfig(**SMALL | dict(num_key_value_heads=6)),
    "llama, 3 KV heads of 9": LlamaConfig(
        **SMALL | dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    ),
    "llama, one layer, one head": LlamaConfig(
        **SMALL | dict(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    ),
    "llama, head_dim 20": LlamaConfig(**SMALL, head_dim=20),
    "llama, attention_bias": LlamaConfig(**SMALL, attention_bias=True),
    "llama, mlp_bias": LlamaConfig(**SMALL, mlp_bias=True),
    "llama, theta 500000": LlamaConfig(
        **SMALL, rope_parameters=dict(rope_type="default", rope_theta=500000.0)
    ),
    "llama, linear": LlamaConfig(
        **SMALL, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
    ),
    "llama, llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama, yarn": LlamaConfig(**SMALL, rope_parameters=YARN_ROPE),
    "llama, yarn with all its keys": LlamaConfig(
        **SMALL,
        rope_parameters=YARN_ROPE
        | dict(beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3, truncate=False),
    ),
    "qwen2, yarn": Qwen2Config(**SMALL, rope_parameters=YARN_ROPE | dict(attention_factor=1.5)),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "mistral, window 7": MistralConfig(**SMALL, sliding_window=7),
    "mistral, window 1": MistralConfig(**SMALL, sliding_window=1),
    "mistral, head_dim 16": MistralConfig(**SMALL, head_dim=16, sliding_window=None),
    "ministral, layer_types": MinistralConfig(
        **SMALL,
        head_dim=8,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2, window from layer 1": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen2, window not in use": Qwen2Config(
        **SMALL, use_sliding_window=False, sliding_window=5, max_window_layers=0
    ),
    "qwen2, layer_types": Qwen2Config(
        **SMALL,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3, head_dim 20": Qwen3Config(**SMALL, head_dim=20),
    "qwen3 tied, attention_bias": Qwen3Config(
        **SMALL, head_dim=8, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen3, window from layer 2": Qwen3Config(
        **SMALL, head_dim=8, use_sliding_window=True, sliding_window=3, max_window_layers=2
    ),
}


pytestmark = pytest.mark.usefixtures("seed")


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' model with every parameter random: it would start norms at 1 and biases at 0,
    where a loader's slip hides.
    """
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                std=0.4 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            )
            if name.endswith("norm.weight"):
                parameter.add_(1)
        for layer in model.model.layers:
            # because flat attention weights would hide a wrong rotation
            layer.self_attn.q_proj.weight.mul_(2)
    return model


def plain_attend(config):
    """An `attend` of its own, so that this file tests the decoder and the loader alone. All tokens
    are one sequence.
    """

    def attend(layer, q, k, v):
        rotate = rope_module.rotation(config, torch.arange(len(q)), q.dtype)
        q, k = rotate(q), rotate(k)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.softmax_scale
        index = torch.arange(len(q))
        distance = index[:, None] - index[None, :]
        window = config.sliding_window(layer) or len(q)
        scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    return attend


@torch.no_grad()
def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(model(tokens, plain_attend(model.config)))


@torch.no_grad()
def theirs_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[None]).logits[0]


def assert_same_logits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order in which float32 sums are taken."""
    # Twice, because the worst of 200 random models came to 0.6 of it, and a rare one a little
    # above.
    torch.testing.assert_close(
        got, expected, atol=2 * TOLERANCE * max(1.0, float(expected.std())), rtol=0
    )


def check_logits(case: PreTrainedConfig, folder, lengths=(1, 2, 41), **save) -> None:
    """Save a random model, load it, and compare the logits over prompts of these lengths."""
    theirs = random_model(case)
    theirs.save_pretrained(folder, **save)
    ours = Decoder.from_pretrained(folder)
    for length in lengths:
        tokens = torch.randint(0, case.vocab_size, (length,))
        expected = theirs_of(theirs, tokens)
        assert 0.3 < expected.std() < 30, "the model under test must say something"
        assert_same_logits(logits_of(ours, tokens), expected)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    check_logits(CASES[name], tmp_path)


@pytest.mark.parametrize(
    "name", ["llama, llama3", "llama, linear", "llama, yarn", "llama, yarn with all its keys"]
)
def test_far_beyond_the_original_context(name, tmp_path):
    """250 tokens where RoPE was stretched from a context of 16."""
    check_logits(CASES[name], tmp_path, lengths=(250,))


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "qwen3, head_dim 20"])
def test_sharded_checkpoint(name, tmp_path):
    check_logits(CASES[name], tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()


def test_rope_of_llama_3_1_at_its_real_positions():
    """cos and sin equal transformers' up to position 131071, where the original context was
    8192.
    """
    shape = SMALL | dict(hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072)
    scaling = LLAMA3_ROPE | dict(original_max_position_embeddings=8192)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**shape, rope_parameters=scaling | dict(rope_theta=500000.0))
    )
    del scaling["rope_theta"]
    ours = ModelConfig(
        model_type="llama",
        **shape,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(**scaling),
    )
    positions = torch.tensor([0, 1, 8191, 8192, 50_000, 131_071])
    expected = theirs(torch.zeros(1), positions[None])
    for got, want in zip(rope_module.rope_tables(ours, positions, torch.float32), expected):
        torch.testing.assert_close(got[:, 0], want[0], atol=1e-4, rtol=0)
    rows = rope_module.new_cos_sin_cache(ours, 131_072)[positions]
    for got, want in zip(rows.chunk(2, dim=-1), expected):
        # theirs is there twice, once for each half of the coordinates
        torch.testing.assert_close(got, want[0, :, :64], atol=1e-4, rtol=0)


def to_older_dialect(file) -> None:
    """Rewrite a config.json as transformers wrote it before version 5 (and `type` for `rope_type`,
    as before 4.43).
    """
    raw = json.loads(file.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    raw["rope_scaling"] = None if rope["type"] == "default" else rope
    raw["torch_dtype"] = raw.pop("dtype")
    raw.pop("layer_types", None)
    file.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "name",
    [
        "llama, theta 500000",
        "llama, linear",
        "llama, llama3",
        "llama, yarn",
        "mistral, window 7",
        "qwen2, window from layer 1",
        "qwen2, window not in use",
        "qwen3, window from layer 2",
    ],
)
def test_older_dialect_reads_the_same(name, tmp_path):
    random_model(CASES[name]).save_pretrained(tmp_path)
    newer = load_config(tmp_path)
    to_older_dialect(tmp_path / "config.json")
    assert load_config(tmp_path) == newer


def test_checkpoint_in_bfloat16_arrives_in_the_dtype_asked_for(tmp_path):
    random_model(CASES["llama tied"]).bfloat16().save_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (19,))
    assert Decoder.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = Decoder.from_pretrained(tmp_path)
    assert_same_logits(logits_of(ours, tokens), theirs_of(theirs, tokens))


# ---------------------------------------------------------------- would these tests notice?


def interleaved_rope(x, cos, sin, apply_rope=rope_module.apply_rope):
    """The other layout: coordinate 2i turns with 2i + 1, as in Meta's own weights."""
    half = x.shape[-1] // 2
    order = torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten()
    return apply_rope(x[..., order.argsort()], cos, sin)[..., order]


def fill(suffix: str, value: float):
    """A slip of the loader: parameters whose names end so are left at the value that they start
    with.
    """

    def change(decoder: Decoder) -> None:
        filled = [
            parameter.fill_(value)
            for name, parameter in decoder.named_parameters()
            if name.endswith(suffix)
        ]
        assert filled, f"no parameter ends in {suffix}"

    return change


def configure(**changes):
    """A slip in the config: a field that is not read, or misread. A function gets the config and
    returns the value.
    """

    def change(decoder: Decoder) -> None:
        values = {
            key: value(decoder.config) if callable(value) else value
            for key, value in changes.items()
        }
        decoder.config = replace(decoder.config, **values)

    return change


def yarn(**changes):
    return configure(rope_scaling=lambda config: replace(config.rope_scaling, **changes))


def without_k_norm(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.self_attn.k_norm = torch.nn.Identity()


SLIPS = {
    "norm weights left at 1": ("llama", fill("layernorm.weight", 1)),
    "final norm left at 1": ("llama", fill("norm.weight", 1)),
    "q, k, v bias dropped": ("qwen2", fill("_proj.bias", 0)),
    "v bias dropped": ("qwen2", fill("v_proj.bias", 0)),
    "o bias dropped": ("llama, attention_bias", fill("o_proj.bias", 0)),
    "mlp bias dropped": ("llama, mlp_bias", fill("down_proj.bias", 0)),
    "qk-norm weights left at 1": ("qwen3, head_dim 20", fill("k_norm.weight", 1)),
    "qk-norm left out": ("qwen3, head_dim 20", without_k_norm),
    "theta ignored": ("llama, theta 500000", configure(rope_theta=10000.0)),
    "linear scaling ignored": ("llama, linear", configure(rope_scaling=None)),
    "llama3 scaling ignored": ("llama, llama3", configure(rope_scaling=None)),
    "llama3 read as linear": (
        "llama, llama3",
        configure(rope_scaling=RopeScaling("linear", factor=8.0)),
    ),
    "yarn scaling ignored": ("llama, yarn", configure(rope_scaling=None)),
    "yarn without its magnitude": ("llama, yarn", yarn(attention_factor=1.0)),
    "yarn with the ramp of another beta": ("llama, yarn", yarn(beta_slow=0.2)),
    "window ignored": ("mistral, window 7", configure(sliding_windows=())),
    "window without the query itself": ("mistral, window 7", configure(sliding_windows=(8, 8, 8))),
    "max_window_layers ignored": (
        "qwen2, window from layer 1",
        configure(sliding_windows=(5, 5, 5)),
    ),
    "window in the first layers": (
        "qwen2, window from layer 1",
        configure(sliding_windows=(5, None, None)),
    ),
}


def difference_after(name: str, change, folder) -> float:
    theirs = random_model(CASES[name])
    theirs.save_pretrained(folder)
    ours = Decoder.from_pretrained(folder)
    change(ours)
    tokens = torch.randint(0, 97, (41,))
    return (logits_of(ours, tokens) - theirs_of(theirs, tokens)).abs().max().item()


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path):
    assert difference_after(*SLIPS[slip], tmp_path) > 30 * TOLERANCE


def test_the_other_rope_layout_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(rope_module, "apply_rope", interleaved_rope)
    assert difference_after("llama", lambda decoder: None, tmp_path) > 30 * TOLERANCE


# ---------------------------------------------------------------- the embedded models


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_embedded_model_on_real_text(name):
    """The trained checkpoints on Python source: transformers' logits, and a model that has learnt
    something.
    """
    folder = REPOSITORY / name
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"{name}/model.safetensors is not there: run `python -m models.train`")
    text = inspect.getsource(random.choice([inspect, json, random]))[:3000]
    tokens = torch.tensor(load_tokenizer(name)(text)["input_ids"])
    assert len(tokens) > 300
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    expected, got = theirs_of(theirs, tokens), logits_of(Decoder.from_pretrained(name), tokens)
    assert_same_logits(got, expected)
    right = (got[:-1].argmax(-1) == tokens[1:]).float().mean()
    assert right > 0.2, f"{name} predicts {right:.0%} of the next tokens: it is not trained"
