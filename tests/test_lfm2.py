"""LFM2: what its convolutions compute, and the older names of its config's keys.
tests/test_more_families.py compares random models of it with transformers'.
"""

import json

import pytest

from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.variants import lfm2
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config_json import CheckpointError
from reference.features.states import generate as rungs
from reference.features.states import layers
from tests.random_families import check_logits, prompts_of, saved_and_loaded
from tests.random_families import lfm2 as random_config

pytestmark = pytest.mark.usefixtures("seed")
NEWER = dict(
    model_type="lfm2",
    vocab_size=65536,
    hidden_size=2048,
    intermediate_size=12288,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=128000,
    norm_eps=1e-5,
    rope_theta=1000000.0,
    conv_bias=False,
    conv_L_cache=3,
    block_multiple_of=256,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=True,
    layer_types=["conv", "conv", "full_attention", "conv"],
    tie_word_embeddings=True,
)
# written by the first versions, beside those above or in their place
OLDER = dict(
    block_dim=2048,
    block_ff_dim=12288,
    block_norm_eps=1e-5,
    block_mlp_init_scale=1.0,
    block_out_init_scale=1.0,
    block_use_swiglu=True,
    block_use_xavier_init=True,
    conv_dim=2048,
    conv_dim_out=2048,
    conv_use_xavier_init=True,
    num_heads=32,
    tie_embedding=True,
    use_pos_enc=True,
)


def read(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder)


def test_older_names_of_keys_mean_the_same(tmp_path):
    config = read(tmp_path, NEWER)
    assert config.intermediate_size == 8192  # 2/3 of it, to a multiple of 256
    assert config.state.layers == (0, 1, 3) and config.state.conv_shape == (2048, 2)
    assert config.state.bytes_per_sequence(2) == 3 * 2048 * 2 * 2
    assert read(tmp_path, NEWER | OLDER) == config
    replaced = ("intermediate_size", "norm_eps", "tie_word_embeddings")
    alone = {key: value for key, value in NEWER.items() if key not in replaced}
    assert read(tmp_path, alone | OLDER) == config


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(conv_bias=True), "'conv_bias' must be False"),
        (dict(conv_dim=1024), "'conv_dim' (1024) must be 'hidden_size' (2048)"),
        (dict(block_use_swiglu=False), "'block_use_swiglu' must be True"),
        (dict(conv_L_cache=1), "conv_L_cache: got 1"),
        (dict(layer_types=["conv"] * 4), "layer_types: got"),
        (dict(conv_scale=2.0), "do not read this key"),
    ],
)
def test_wrong_value_is_named(changes, named, tmp_path):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, NEWER | changes)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def gates_swapped(self, x, attend):
    before, after, x = self.in_proj(x).chunk(3, dim=-1)
    return self.out_proj(before * attend(after * x, None, None))


def newest_first(model):
    return {layer: weight.flip(1) for layer, weight in layers.conv_weights(model).items()}


@pytest.mark.parametrize(
    "slip",
    [(lfm2.ShortConv, "forward", gates_swapped), (rungs, "conv_weights", newest_first)],
    ids=["gates in each other's place", "the newest input first"],
)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    theirs, right = saved_and_loaded(random_config(), tmp_path)
    prompts = prompts_of(right, lengths=(9,))
    check_logits(theirs, right, prompts)
    monkeypatch.setattr(*slip)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, load_decoder(tmp_path, dtype=right.dtype), prompts)
