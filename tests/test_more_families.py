"""Families beside Llama's and DeepSeek's: random models of odd shapes against transformers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, Phi3Config

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.rope import new_cos_sin_cache
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.moe import MoEDecoder
from lessons.l12_paged_kv import runner
from lessons.toolbox.model import families
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig, MoEConfig, RopeScaling
from lessons.toolbox.model.config_json import CheckpointError
from tests.random_families import (
    FAMILIES,
    check_logits,
    check_rungs,
    on_one_side,
    prompts_of,
    random_shape,
    saved_and_loaded,
)
from tests.test_deepseek import random_model

ROPE = "lessons.toolbox.model.rope_scaling.RopeScaling"
MODELS = 15  # of each family
REPOSITORY = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("seed")


@pytest.mark.parametrize("number", range(MODELS))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(14)
def test_random_models_equal_transformers(family, number, tmp_path, monkeypatch):
    """At four lengths as loaded, and with a cache on every rung and in the engine."""
    config = FAMILIES[family]()
    print(config)
    theirs, ours = saved_and_loaded(config, tmp_path)
    prompts = prompts_of(ours)
    check_logits(theirs, ours, prompts)
    check_rungs(theirs, ours, on_one_side(ours, prompts), monkeypatch)


# ---------------------------------------------------------------- would these tests notice?


def misread(family: str, **changes):
    """The family's own reader, but that some fields of its MoEConfig are others."""

    right = families.FAMILIES[family].fields

    def reader(config):
        fields = right(config)
        return fields | dict(moe=replace(fields["moe"], **changes))

    return dict(fields=reader)


SWAPPED = dict(mlp="block_sparse_moe", gate_proj="w3", down_proj="w2", up_proj="w1")
SLIPS = {
    "gate and up in each other's place": ("mixtral", dict(stored_as=SWAPPED)),
    "weights not normed": ("mixtral", misread("mixtral", norm_topk_prob=False)),
    "one expert fewer": ("qwen3_moe", misread("qwen3_moe", num_experts_per_tok=1)),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    family, changes = SLIPS[slip]
    config = FAMILIES[family](chosen=2)
    if family == "qwen3_moe":
        config.decoder_sparse_step, config.mlp_only_layers = 1, []  # experts in every layer
    wrong = families.FAMILIES[family]._replace(**changes)
    monkeypatch.setitem(families.FAMILIES, family, wrong)
    theirs, ours = saved_and_loaded(config, tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, ours, prompts_of(ours))


def test_a_rung_that_slips_is_noticed(tmp_path, monkeypatch):
    """The paged rungs run with another softmax scale."""
    theirs, ours = saved_and_loaded(FAMILIES["mixtral"](), tmp_path)
    right = runner.PAGED.stand_ins

    def decode(q, *rest):
        return right.decode(2 * q, *rest)

    wrong = replace(runner.PAGED, stand_ins=right._replace(decode=decode))
    monkeypatch.setattr(runner, "PAGED", wrong)
    with pytest.raises(AssertionError, match="12 paged cache"):
        check_rungs(theirs, ours, prompts_of(ours), monkeypatch)


LONG = [4.0, 2.0, 1.5, 8.0]
PHI3 = random_shape(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
PHI3 |= dict(original_max_position_embeddings=20)
PHI3_LONG = dict(rope_type="longrope", rope_theta=500.0, short_factor=[1.0] * 4, long_factor=LONG)
TURNED = "lessons.toolbox.model.checkpoint.turning_last"


def in_their_order(name, tensor, config):
    """The loader's slip: rotary coordinates stay first, as Phi-3's checkpoints hold them."""
    return tensor


@pytest.mark.parametrize(
    "slip, attribute, wrong",
    [
        ("rotary coordinates first", TURNED, in_their_order),
        ("always the short factors", f"{ROPE}.is_long", lambda self, length: False),
        ("the long factors too early", f"{ROPE}.is_long", lambda self, length: length >= 20),
        ("cos and sin not stretched", f"{ROPE}.magnitude", 1.0),
    ],
)
def test_a_slip_in_phi3_is_noticed(slip, attribute, wrong, tmp_path, monkeypatch):
    config = Phi3Config(**PHI3 | dict(rope_parameters=PHI3_LONG | dict(partial_rotary_factor=1.0)))
    if "first" in slip:
        config.rope_parameters = dict(
            rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5
        )
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path)
    monkeypatch.setattr(attribute, wrong)
    ours = load_decoder(tmp_path)
    prompts = prompts_of(ours, lengths=(19, 20, 21, 50))
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, ours, prompts)
    monkeypatch.undo()
    check_logits(theirs, load_decoder(tmp_path), prompts)


def test_longrope_is_chosen_once_for_a_cache():
    """By the longest context of its table; a cache cannot grow past the switch, because the keys
    that it holds were turned otherwise.
    """
    rope = RopeScaling(
        "longrope",
        4.0,
        original_max_position_embeddings=64,
        short_factor=(1.0, 1.0),
        long_factor=(3.0, 5.0),
    )
    config = ModelConfig("phi3", 11, 8, 1, 2, 1, 4, 4, 256, rope_scaling=rope)
    short, long = (new_cos_sin_cache(config, length) for length in (64, 65))
    assert not torch.allclose(short, long[:64])
    pool = KVPool(config, 1, 64, LESSON_03_TORCH)
    assert torch.equal(pool.cos_sin_cache, short)
    with pytest.raises(
        ValueError, match="a context of 128; accepted: at most 64, because longrope"
    ):
        pool.reserve(65)
    assert pool.block_size == 64 and torch.equal(pool.cos_sin_cache, short)
    KVPool(config, 1, 100, LESSON_03_TORCH).reserve(200)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(short_factor=(1.0,)), "short_factor: got 1 factors; accepted: 2"),
        (dict(long_factor=[1.0, 1.0]), "long_factor"),
        (dict(long_factor=(1.0, 0.0)), "long_factor"),
        (dict(long_factor=()), "a factor for each pair with longrope"),
        (dict(original_max_position_embeddings=1), "2 or more with longrope"),
    ],
)
def test_factors_that_do_not_fit_are_named(changes, named):
    usual = dict(short_factor=(1.0, 1.0), long_factor=(1.0, 1.0))
    with pytest.raises(ValueError, match=named):
        rope = RopeScaling("longrope", 4.0, **usual | changes)
        ModelConfig("phi3", 11, 8, 1, 2, 1, 4, 4, 16, rope_scaling=rope)


# ---------------------------------------------------------------- what is refused


def refusal(folder, **changes) -> str:
    """What the loader says to the config.json in `folder` with some keys changed."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError) as caught:
        load_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


YARN = dict(rope_type="yarn", factor=2.0)
TOO_MUCH = dict(rope_type="default", partial_rotary_factor=2.0)
TOO_FEW = dict(rope_type="longrope", short_factor=[1.0], long_factor=[1.0])
NEGATIVE = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[-1.0] * 4)


@pytest.mark.parametrize(
    "family, changes, named",
    [
        ("mixtral", dict(num_experts=97), "'num_experts' (97) must be 'num_local_experts'"),
        ("mixtral", dict(num_local_experts=None), "num_local_experts"),
        ("mixtral", dict(num_experts_per_tok=99), "num_experts_per_tok (99) must be 1 to"),
        ("mixtral", dict(router_jitter_noise=0.5), "'router_jitter_noise' must be 0.0, not 0.5"),
        ("mixtral", dict(shared_expert_gate=True), "do not read this key"),
        ("qwen3_moe", dict(decoder_sparse_step=0), "'decoder_sparse_step'"),
        ("qwen3_moe", dict(mlp_only_layers=["0"]), "mlp_only_layers"),
        ("qwen3_moe", dict(topk_group=2), "do not read this key"),
        ("phi3", dict(rope_parameters=TOO_MUCH), "partial_rotary_factor: got 2.0"),
        (
            "phi3",
            dict(rope_parameters=YARN),
            "'yarn' is not supported; supported: default, longrope",
        ),
        ("phi3", dict(rope_parameters=TOO_FEW), "short_factor"),
        ("phi3", dict(rope_parameters=NEGATIVE), "long_factor"),
        ("phi3", dict(lm_head_bias=True), "'lm_head_bias' must be False, not True"),
        ("phi3", dict(head_dim=8), "'head_dim' is 8, and the decoders do not read this key"),
        (
            "qwen3_moe",
            dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
            "'max_window_layers' must be 0",
        ),
    ],
)
def test_wrong_value_is_named(family, changes, named, tmp_path):
    config = Phi3Config(**PHI3) if family == "phi3" else FAMILIES[family]()
    config.save_pretrained(tmp_path)
    load_config(tmp_path)
    assert named in refusal(tmp_path, **changes)


def test_the_experts_may_have_either_name(tmp_path):
    FAMILIES["qwen3_moe"]().save_pretrained(tmp_path)
    file, read = tmp_path / "config.json", load_config(tmp_path)
    raw = json.loads(file.read_text())
    other = {"num_local_experts": "num_experts", "num_experts": "num_local_experts"}
    file.write_text(json.dumps({other.get(key, key): value for key, value in raw.items()}))
    assert load_config(tmp_path) == read


def test_each_decoder_names_the_other(tmp_path):
    saved_and_loaded(FAMILIES["mixtral"](), tmp_path)
    with pytest.raises(CheckpointError, match=r"has experts .*: load it with load_decoder"):
        Decoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config: got model_type 'llama'; accepted: one with moe"):
        MoEDecoder(ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16))


@pytest.mark.parametrize("model_type", families.LACKING)
def test_what_a_family_has_that_decoders_lack_is_named(model_type, tmp_path):
    assert model_type in CONFIG_MAPPING and model_type not in families.FAMILIES
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type=model_type)))
    said = refusal(tmp_path)
    assert f"is not supported, because it has {families.LACKING[model_type]};" in said


def test_the_table_of_families_is_complete():
    text = (REPOSITORY / "reference/README.md").read_text(encoding="utf-8")
    table = text.partition("| a sequence keeps | families |")[2].partition("\n\n")[0]
    assert sorted(re.findall("`(.*?)`", table)) == sorted(families.FAMILIES)


def test_dense_layers_stand_anywhere():
    moe = MoEConfig(4, 2, 8, dense_layers=(1, 3))
    assert [moe.has_experts(layer) for layer in range(5)] == [True, False, True, False, True]
    with pytest.raises(ValueError, match="dense_layers"):
        MoEConfig(4, 2, 8, dense_layers=[1])
