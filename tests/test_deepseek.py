"""DeepseekDecoder's logits against transformers', for DeepSeek-V2 and V3 in every dialect of their
configs; and in every form.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from lessons.l02_naive_attention import rope
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import generate
from lessons.l06_mla import deepseek as module
from lessons.l06_mla.deepseek import DeepseekDecoder, absorbed, load_decoder
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import MLAConfig, ModelConfig, MoEConfig, RopeScaling, yarn_mscale
from lessons.toolbox.model.config_json import CheckpointError
from reference.engine.assembly import engine_over
from reference.engine.engine_args import EngineArgs
from tests.test_families import (
    TOLERANCE,
    assert_same_logits,
    logits_of,
    theirs_of,
    to_older_dialect,
)

SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=2,
    first_k_dense_replace=1,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=8,
    v_head_dim=12,
    max_position_embeddings=256,
    eos_token_id=None,
)
LITE = SMALL | dict(q_lora_rank=None)
FULL = SMALL | dict(q_lora_rank=20)
GROUPS = dict(
    n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=1, routed_scaling_factor=2.5
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
)
AS_LITE = YARN | dict(mscale=0.707, mscale_all_dim=0.707)
BOTH = YARN | dict(mscale=1.3, mscale_all_dim=0.7)
INDEXED = FULL | GROUPS | dict(index_topk=64, index_n_heads=3, index_head_dim=24)

CASES = {
    "v2 lite": DeepseekV2Config(**LITE),
    "v2": DeepseekV2Config(**FULL),
    "v2, yarn": DeepseekV2Config(**LITE, rope_parameters=AS_LITE),
    "v2, yarn, two factors": DeepseekV2Config(**FULL, rope_parameters=BOTH),
    "v2, yarn, no factors": DeepseekV2Config(**FULL, rope_parameters=YARN),
    "v2, groups": DeepseekV2Config(**FULL | GROUPS, topk_method="group_limited_greedy"),
    "v2, groups named and not used": DeepseekV2Config(
        **LITE | dict(n_group=1, topk_group=1, topk_method="greedy")
    ),
    "v2, experts everywhere": DeepseekV2Config(**LITE | dict(first_k_dense_replace=0)),
    "v2, no experts": DeepseekV2Config(**LITE | dict(first_k_dense_replace=9)),
    "v2, attention_bias, tied": DeepseekV2Config(
        **FULL, attention_bias=True, tie_word_embeddings=True
    ),
    "v3": DeepseekV3Config(**FULL | GROUPS),
    "v3, one group": DeepseekV3Config(**FULL | GROUPS | dict(n_group=1, topk_group=1)),
    "v3, weights as they are": DeepseekV3Config(**FULL | GROUPS, norm_topk_prob=False),
    "v3, no q_lora": DeepseekV3Config(**LITE | GROUPS),
    "v3, halves rotate": DeepseekV3Config(**FULL | GROUPS, rope_interleave=False),
    "v3, yarn": DeepseekV3Config(
        **FULL | GROUPS, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)
    ),
    "v3, yarn, two factors": DeepseekV3Config(**FULL | GROUPS, rope_parameters=BOTH),
    "v3, attention_bias, tied": DeepseekV3Config(
        **FULL | GROUPS, attention_bias=True, tie_word_embeddings=True
    ),
    "v3, v wider than q": DeepseekV3Config(**FULL | GROUPS | dict(v_head_dim=40)),
    "v3.2": DeepseekV32Config(**INDEXED),
    "v3.2, yarn": DeepseekV32Config(
        **INDEXED, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)
    ),
    "v3, first layers dense": DeepseekV3Config(
        **FULL | GROUPS | dict(first_k_dense_replace=2, rms_norm_eps=1e-3)
    ),
}

pytestmark = pytest.mark.usefixtures("seed")


# eager experts, because the grouped products of the others ask for rows of 16 bytes
PLAIN = dict(attn_implementation="eager", experts_implementation="eager")


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' model with every parameter and buffer that is stored random: norms, biases, the
    router's bias included.
    """
    model = AutoModelForCausalLM.from_config(config, **PLAIN).eval().float()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.normal_(std=0.4 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5)
            if name.endswith("norm.weight"):
                tensor.add_(1)
            if "q_proj" in name or "q_b_proj" in name or name.endswith("mlp.gate.weight"):
                tensor.mul_(2)  # because flat attention or flat routing would hide a slip
    return model


def random_tokens(length: int = 41) -> torch.Tensor:
    return torch.randint(0, SMALL["vocab_size"], (length,))


def saved(name: str, folder, **save) -> PreTrainedModel:
    theirs = random_model(CASES[name])
    theirs.save_pretrained(folder, **save)
    return theirs


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, tmp_path):
    """In both forms: k and v expanded for every head, and absorbed into one KV head."""
    theirs = saved(name, tmp_path)
    ours = DeepseekDecoder.from_pretrained(tmp_path)
    for length in (1, 2, 41):
        tokens = random_tokens(length)
        expected = theirs_of(theirs, tokens)
        assert 0.3 < expected.std() < 30, "the model under test must say something"
        for form in (ours, absorbed(ours)):
            assert_same_logits(logits_of(form, tokens), expected)


def test_a_context_ends_where_an_indexer_begins_to_choose(tmp_path):
    """Up to index_topk tokens V3.2 attends to all, and one token more is refused. transformers
    shows why: there the first token that is not chosen changes the logits.
    """
    theirs, tokens = (
        random_model(DeepseekV32Config(**INDEXED | dict(index_topk=8))),
        random_tokens(),
    )
    theirs.save_pretrained(tmp_path)
    ours = DeepseekDecoder.from_pretrained(tmp_path)
    assert ours.config.max_position_embeddings == 8
    expected, got = theirs_of(theirs, tokens), logits_of(ours, tokens)
    assert_same_logits(got[:8], expected[:8])
    with pytest.raises(AssertionError):
        assert_same_logits(got, expected)
    prompt = tokens.tolist()
    assert len(generate(ours, [prompt[:6]], 2)[0]) == 2
    with pytest.raises(ValueError, match=r"accepted: at most 8 \(max_position_embeddings\)"):
        generate(ours, [prompt[:6]], 3)
    with pytest.raises(ValueError, match="max_model_len: got 9; accepted: at most 8, the model's"):
        engine_over(ours, None, EngineArgs(device="cpu", max_model_len=9))


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(index_topk=0), "'index_topk' must be a positive number"),
        (dict(mlp_layer_types=["sparse"] * 3), "'mlp_layer_types' must be sparse after"),
        (dict(layer_types=["full_attention"] * 3), "'layer_types' must be"),
    ],
)
def test_what_differs_in_an_indexed_config_is_named(changes, named, tmp_path):
    DeepseekV32Config(**INDEXED).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError) as refused:
        load_config(tmp_path)
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["v2, yarn", "v3, yarn, two factors"])
def test_far_beyond_the_original_context(name, tmp_path):
    theirs, tokens = saved(name, tmp_path), random_tokens(250)
    assert_same_logits(
        logits_of(DeepseekDecoder.from_pretrained(tmp_path), tokens), theirs_of(theirs, tokens)
    )


def test_sharded_checkpoint_and_bfloat16(tmp_path):
    """The router's bias stays in 32 bits, as transformers keeps it."""
    theirs = saved("v3", tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours, narrow = (
        DeepseekDecoder.from_pretrained(tmp_path, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    tokens = random_tokens()
    assert_same_logits(logits_of(ours, tokens), theirs_of(theirs, tokens))
    gates = [model.layers[1].mlp.gate for model in (ours, narrow)]
    assert (
        torch.equal(*(gate.e_score_correction_bias for gate in gates))
        and gates[1].weight.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("name", ["v2, yarn", "v3, yarn, two factors"])
def test_older_dialect_reads_the_same(name, tmp_path):
    saved(name, tmp_path)
    newer = load_config(tmp_path)
    to_older_dialect(tmp_path / "config.json")
    assert load_config(tmp_path) == newer


def test_layers_that_predict_further_are_left_out(tmp_path):
    theirs = saved("v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {
        f"model.layers.3.{name}": torch.zeros(2)
        for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")
    }
    save_file(tensors | further, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens()
    assert_same_logits(
        logits_of(DeepseekDecoder.from_pretrained(tmp_path), tokens), theirs_of(theirs, tokens)
    )
    save_file(
        tensors | {"model.layers.2.extra.weight": torch.zeros(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"model.layers.2.extra.weight .* has no place"):
        DeepseekDecoder.from_pretrained(tmp_path)


# ---------------------------------------------------------------- would these tests notice?


def fill(suffix: str, value: float):
    """Parameters whose names end so are left at the value that they start with."""

    def change(decoder, monkeypatch):
        filled = [
            parameter.fill_(value)
            for name, parameter in decoder.named_parameters()
            if name.endswith(suffix)
        ]
        assert filled, f"no parameter ends in {suffix}"

    return change


def method(name: str, wrong):
    """MLAttention.name replaced; wrong(self, right, *arguments)."""

    def change(decoder, monkeypatch):
        right = getattr(module.MLAttention, name)
        monkeypatch.setattr(
            module.MLAttention, name, lambda self, *arguments: wrong(self, right, *arguments)
        )

    return change


def scaled(factor):
    """The softmax scale times factor(config)."""

    def change(decoder, monkeypatch):
        right = ModelConfig.softmax_scale.fget
        monkeypatch.setattr(
            ModelConfig, "softmax_scale", property(lambda config: right(config) * factor(config))
        )

    return change


def mscale(config) -> float:
    """What the published code multiplies q and k with, each."""
    return yarn_mscale(config.rope_scaling.factor, config.rope_scaling.mscale_all_dim)


def routed(**changes):
    """The routers' config misread."""

    def change(decoder, monkeypatch):
        for layer in decoder.layers[1:]:
            layer.mlp.gate.config = replace(layer.mlp.gate.config, **changes)

    return change


def without_latent_norm(decoder, monkeypatch):
    for layer in decoder.layers:
        layer.self_attn.kv_a_layernorm = nn.Identity()


def without_shared_experts(decoder, monkeypatch):
    for layer in decoder.layers[1:]:
        layer.mlp.shared_experts = None


def halves_rotate(self, right, x):
    return x


def k_alone_interleaved(self, right, x):
    """q keeps the order of the checkpoint and is rotated as halves, k is reordered."""
    q_nope, q_pe = self.split_query(right(self, x))
    half = torch.stack([torch.arange(8), torch.arange(8) + 8], dim=1).flatten()
    # `in_halves` has taken pairs apart: undone
    return torch.cat([q_nope, q_pe[..., half]], -1)


def turned(x, sign):
    """x: [T, H, 16] rotated as in a model without stretching; sign -1 turns it back."""
    config = ModelConfig("llama", 97, 48, 3, 4, 4, 16, 80, 256)
    table = rope.new_cos_sin_cache(config, len(x)) * torch.tensor([1.0] * 8 + [sign] * 8)
    return rope.rotate(x, torch.arange(len(x)), table)


def rotated_latent(self, right, x):
    c_kv, k_pe = right(self, x)
    return torch.cat([turned(c_kv[..., :16], 1), c_kv[..., 16:]], -1), k_pe


def unrotated_key(self, right, x):
    """Turned back beforehand, so that `attend` leaves it as it was projected."""
    c_kv, k_pe = right(self, x)
    return c_kv, turned(k_pe, -1)


def key_of_each_head(self, right, c_kv, k_pe):
    """As if every head had a rotary key of its own: here head h gets the key rolled by h."""
    k, v = right(self, c_kv, k_pe)
    heads = torch.stack([k_pe[:, 0].roll(h, -1) for h in range(self.num_heads)], dim=1)
    return torch.cat([k[..., :8], heads], -1), v


def all_nope_then_all_v(self, right, c_kv, k_pe):
    """kv_b_proj read as [all heads' W_UK | all heads' W_UV] in place of head by head."""
    both = self.kv_b_proj(c_kv).squeeze(1)
    k, v = both.split([self.num_heads * 8, self.num_heads * 12], -1)
    return torch.cat(
        [k.unflatten(-1, (self.num_heads, 8)), k_pe.expand(-1, self.num_heads, -1)], -1
    ), v.unflatten(-1, (self.num_heads, 12))


def v_before_k(self, right, c_kv, k_pe):
    both = self.kv_b_proj(c_kv).squeeze(1).unflatten(-1, (self.num_heads, -1))
    return torch.cat([both[..., 12:], k_pe.expand(-1, self.num_heads, -1)], -1), both[..., :12]


SLIPS = {
    "norm of the latent left at 1": ("v3", fill("kv_a_layernorm.weight", 1)),
    "norm of the latent left out": ("v3", without_latent_norm),
    "norm of q's latent left at 1": ("v3", fill("q_a_layernorm.weight", 1)),
    "bias of the latents dropped": ("v3, attention_bias, tied", fill("kv_a_proj_with_mqa.bias", 0)),
    "bias of q's latent dropped": ("v3, attention_bias, tied", fill("q_a_proj.bias", 0)),
    "latent rotated": ("v3", method("latents", rotated_latent)),
    "k_pe not rotated": ("v3", method("latents", unrotated_key)),
    "q rotated in another layout": ("v3", method("queries", k_alone_interleaved)),
    "halves rotated in place of pairs, V3": ("v3", method("in_halves", halves_rotate)),
    "halves rotated in place of pairs, V2": ("v2", method("in_halves", halves_rotate)),
    "one rope key per head": ("v3", method("expand", key_of_each_head)),
    "kv_b_proj read as W_UK, then W_UV": ("v3", method("expand", all_nope_then_all_v)),
    "v before k in kv_b_proj": ("v3", method("expand", v_before_k)),
    "scale from the latent's width": (
        "v3",
        scaled(lambda c: (c.mla.qk_head_dim / c.mla.latent_dim) ** 0.5),
    ),
    "scale from the part without position": (
        "v3",
        scaled(lambda c: (c.mla.qk_head_dim / c.mla.qk_nope_head_dim) ** 0.5),
    ),
    "mscale forgotten, V2": ("v2, yarn", scaled(lambda c: mscale(c) ** -2)),
    "mscale applied once, V2": ("v2, yarn", scaled(lambda c: mscale(c) ** -1)),
    "mscale forgotten, V3": ("v3, yarn", scaled(lambda c: mscale(c) ** -2)),
    "mscale applied once, V3": ("v3, yarn", scaled(lambda c: mscale(c) ** -1)),
    "router's bias dropped": ("v3", fill("e_score_correction_bias", 0)),
    "groups ignored, V3": ("v3", routed(topk_group=4)),
    "groups ignored, V2": ("v2, groups", routed(topk_group=4)),
    "groups by their best expert in V3": ("v3", routed(topk_method="group_limited_greedy")),
    "weights not normed": ("v3", routed(norm_topk_prob=False)),
    "weights normed in V2": ("v2", routed(norm_topk_prob=True)),
    "scaling of the routed experts forgotten": ("v3", routed(routed_scaling_factor=1.0)),
    "softmax in place of sigmoid": ("v3, weights as they are", routed(scoring_func="softmax")),
    "shared experts forgotten": ("v2", without_shared_experts),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    name, change = SLIPS[slip]
    theirs, tokens = saved(name, tmp_path), random_tokens(120)
    ours = DeepseekDecoder.from_pretrained(tmp_path)
    change(ours, monkeypatch)
    assert (logits_of(ours, tokens) - theirs_of(theirs, tokens)).abs().max() > 30 * TOLERANCE


# ---------------------------------------------------------------- what is refused

V3_JSON = dict(model_type="deepseek_v3", rms_norm_eps=1e-6, hidden_act="silu", **FULL | GROUPS)


def write_config(folder, remove: str = "", **changes) -> None:
    raw = {key: value for key, value in (V3_JSON | changes).items() if key != remove}
    (folder / "config.json").write_text(json.dumps(raw))


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_config(folder)
    message = str(caught.value)
    assert "\n" not in message and "config.json" in message
    return message


@pytest.mark.parametrize(
    "key",
    [
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_group",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "topk_group",
        "first_k_dense_replace",
    ],
)
def test_needed_key_is_named(key, tmp_path):
    write_config(tmp_path)
    assert load_config(tmp_path).mla.kv_lora_rank == 32
    write_config(tmp_path, remove=key)
    assert f"'{key}'" in refusal(tmp_path)


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(qk_rope_head_dim=15), "qk_rope_head_dim must be even, not 15"),
        (dict(q_lora_rank=0), "'q_lora_rank'"),
        (dict(num_key_value_heads=2), "'num_key_value_heads' must be num_attention_heads"),
        (dict(scoring_func="softmax"), "'scoring_func' must be 'sigmoid', not 'softmax'"),
        (dict(topk_method="greedy"), "'topk_method' must be 'noaux_tc', not 'greedy'"),
        (dict(moe_layer_freq=2), "'moe_layer_freq' must be 1, not 2"),
        (dict(n_group=None), "'n_group' must be a whole number, not null"),
        (dict(qk_head_dim=99), "'qk_head_dim' must be 24, not 99"),
        (dict(model_type="deepseek_v2", mlp_bias=True), "'mlp_bias' must be False, not True"),
        (
            dict(model_type="deepseek_v2", topk_method="noaux_tc"),
            "must be greedy or group_limited_greedy in deepseek_v2",
        ),
        (
            dict(model_type="deepseek_v2", norm_topk_prob=True),
            "'norm_topk_prob' must be False, not True",
        ),
        (dict(n_group=3), "n_routed_experts (8) must be a multiple of n_group (3)"),
        (dict(topk_group=5), "topk_group (5)"),
        (dict(num_experts_per_tok=5), "num_experts_per_tok (5) must be 1 to 4"),
        (dict(n_group=8, topk_group=4), "of two experts or more"),
        (dict(rope_interleave="yes"), "'rope_interleave'"),
        (
            dict(quantization_config=dict(quant_method=8)),
            "quantization_config: got {'quant_method': 8}; accepted: None, or an object with a "
            "quant",
        ),
    ],
)
def test_wrong_value_is_named(changes, named, tmp_path):
    write_config(tmp_path, **changes)
    assert named in refusal(tmp_path)


def test_experts_that_the_files_do_not_hold_are_not_built(tmp_path, monkeypatch):
    saved("v3", tmp_path)
    monkeypatch.delattr(DeepseekDecoder, "new_layer")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(n_routed_experts=200_000)))
    with pytest.raises(CheckpointError, match=r"400000 experts \(n_routed_experts\)"):
        DeepseekDecoder.from_pretrained(tmp_path)


def test_weights_in_8_bits_are_refused(tmp_path):
    saved("v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    save_file(
        tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=rf"tensor {name} in .* is F8_E4M3; supported"):
        DeepseekDecoder.from_pretrained(tmp_path)


def test_each_decoder_names_the_other(tmp_path):
    saved("v2 lite", tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"model_type 'deepseek_v2' has latent attention: load it with DeepseekDecoder",
    ):
        Decoder.from_pretrained(tmp_path)
    assert type(load_decoder(tmp_path)) is DeepseekDecoder
    llama = ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16)
    with pytest.raises(
        ValueError, match=r"config.mla: got None .*'llama'.*; accepted: an MLAConfig"
    ):
        DeepseekDecoder(llama)
    with pytest.raises(
        ValueError, match="model: got model_type 'llama'; accepted: one with latents"
    ):
        absorbed(Decoder(llama))


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(scoring_func="tanh"), "scoring_func: got 'tanh'"),
        (dict(topk_method="best"), "topk_method: got 'best'"),
        (dict(num_experts_per_tok=0), "num_experts_per_tok"),
        (dict(n_group=3), "n_group"),
        (dict(topk_group=0), "topk_group"),
    ],
)
def test_experts_config_refuses(changes, named):
    with pytest.raises(ValueError, match=named):
        MoEConfig(
            **dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=4) | changes
        )


def test_what_a_config_says_of_its_shapes():
    """DeepSeek-V3's published shape: 576 values a token and layer; the scale grows with the square
    of mscale.
    """
    rope = RopeScaling(
        "yarn", 40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    )
    v3 = ModelConfig(
        "deepseek_v3",
        129280,
        7168,
        61,
        128,
        128,
        192,
        18432,
        163840,
        v_head_dim=128,
        rope_scaling=rope,
        mla=MLAConfig(1536, 512, 128, 64, 128),
        moe=MoEConfig(256, 8, 2048, 1, first_k_dense_replace=3),
    )
    assert v3.kv_bytes_per_token(2) == 61 * (512 + 64) * 2 and v3.rope_dim == 64
    assert v3.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert [v3.moe.has_experts(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    assert not MoEConfig(8, 2, 4, moe_layer_freq=2).has_experts(1)
    with pytest.raises(ValueError, match=r"v_head_dim .* must be head_dim"):
        ModelConfig("llama", 11, 8, 1, 1, 1, 4, 4, 16, v_head_dim=2)
