"""Mamba-2 hybrids, Granite 4, Bamba and Nemotron-H: what their layers compute, and what the loader
says to configs that do not fit. tests/test_more_families.py compares random models of them with
transformers', tests/test_hybrid_engine.py serves them.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import relu, silu

from lessons.l01_roofline.planner.plan import make_plan
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.variants.granite import GraniteDecoder
from lessons.l06_mla.deepseek import decoder_class, load_decoder
from lessons.l06_mla.mamba import mamba2, nemotron_h
from lessons.l06_mla.mamba.bamba import BambaDecoder
from lessons.l06_mla.mamba.granite_hybrid import GraniteHybridDecoder
from lessons.l07_kernel_fusion.fused_decoder import fused
from lessons.l23_experts.grouped import GroupedMoE, grouped
from lessons.l27_states.stand_ins import wrappers
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config_json import CheckpointError
from lessons.toolbox.model.mamba_config import MambaConfig
from reference.features.states import rules
from reference.features.states.generate import from_beginning, whole_sequence
from reference.features.states.layers import StatePool, conv_weights
from reference.features.states.shapes import GRANITE_4_SMALL as SHAPE_SMALL
from reference.features.states.shapes import NEMOTRON_H_8B as SHAPE_8B
from tests.random_families import (
    FAMILIES,
    check_16_bits,
    check_logits,
    check_rungs,
    choosing_all_experts,
    prompts_of,
    saved_and_loaded,
)
from tests.test_qwen3_next import in_random_chunks, random_lengths

pytestmark = pytest.mark.usefixtures("seed")
BOTH = ("granitemoehybrid", "nemotron_h")


def telling_config(family: str):
    """A random one in which every part counts: two groups of two heads, biases, limits, two experts
    or more.
    """
    config = FAMILIES[family](chosen=2)
    if family == "nemotron_h":
        sizes = dict(mamba_num_heads=4, n_groups=2, use_conv_bias=True, time_step_min=0.3)
        kinds = ["linear_attention", "mlp", "full_attention", "moe"]
        sizes |= dict(time_step_limit=(0.3, float("inf")), layers_block_type=kinds)
    else:
        config.hidden_size = 24 * config.num_attention_heads
        width = config.mamba_expand * config.hidden_size // 4
        sizes = dict(mamba_n_heads=4, mamba_n_groups=2, mamba_d_head=width, mamba_conv_bias=True)
        sizes |= dict(time_step_limit=(0.3, 1.0), num_local_experts=4, num_experts_per_tok=2)
        sizes |= dict(layer_types=["linear_attention", "full_attention", "linear_attention"])
    for name, value in sizes.items():
        setattr(config, name, value)
    return config


# ---------------------------------------------------------------- would these tests notice?


def not_limited(self, dt):
    return nn.functional.softplus(dt + self.dt_bias.to(dt.dtype))


def norm_first(self, x, gate):
    parts = x.unflatten(-1, (self.groups, -1))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
    return self.weight * normed.flatten(-2) * silu(gate)


def heads_in_turns(x, config):
    """Neighbouring heads read the B and C of different groups."""
    return x.unflatten(-1, (config.mamba_n_groups, -1)).repeat(1, config.heads_per_group, 1)


def without(place: int):
    """The rule with one of what the layer hands over as if it were zero."""

    def rule(config, y, run, *inputs):
        inputs = list(inputs)
        inputs[place] = torch.zeros_like(inputs[place])
        return rules.mamba2(config, y, run, *inputs)

    return rules.RULES, MambaConfig, rule


def b_and_c_swapped(config, y, run, *inputs):
    def swapped(rule, q, k, *rest):
        return run(rule, k, q, *rest)

    return rules.mamba2(config, y, swapped, *inputs)


def all_together(size, eps, groups):
    return right_norm(size, eps, 1)


right_norm = mamba2.GatedNorm
NORM = (mamba2.GatedNorm, "forward", norm_first)
SLIPS = {
    "time steps without limits": (BOTH, (mamba2.Mamba2, "time_steps", not_limited)),
    "softplus without its bias": (BOTH, (mamba2, "softplus", lambda x: relu(x))),
    "the norm before the gate": (BOTH, NORM),
    "all groups normed together": (BOTH[1:], (mamba2, "GatedNorm", all_together)),
    "groups dealt in turns": (BOTH, (rules, "of_each_head", heads_in_turns)),
    "no SiLU after the convolution": (BOTH, (rules, "silu", lambda x: x)),
    "nothing is forgotten": (BOTH, without(0)),
    "no bias of the convolution": (BOTH, without(2)),
    "no D": (BOTH, without(3)),
    "B and C in each other's place": (BOTH, (rules.RULES, MambaConfig, b_and_c_swapped)),
    "the ReLU not squared": (BOTH[1:], (nemotron_h, "relu", lambda x: relu(x).sqrt())),
    "the residual joins whole": (
        BOTH[:1],
        ("lessons.l06_mla.mamba.granite_hybrid.GraniteMamba2.forward", mamba2.Mamba2.forward),
    ),
}
CASES = [(name, family) for name, (families, _) in SLIPS.items() for family in families]


@pytest.mark.parametrize("slip, family", CASES)
def test_a_slip_is_noticed(slip, family, tmp_path, monkeypatch):
    theirs, right = saved_and_loaded(telling_config(family), tmp_path)
    prompts = prompts_of(right, lengths=(1, 9))
    check_logits(theirs, right, prompts)
    planted = SLIPS[slip][1]
    (monkeypatch.setitem if planted[0] is rules.RULES else monkeypatch.setattr)(*planted)
    wrong = load_decoder(tmp_path, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, wrong, prompts)


# ---------------------------------------------------------------- the layer


def as_published(x, B, C, dt, A, D):
    """Dao and Gu, equation 1 with the discretization of Mamba: h ← exp(dt · A) h + dt · x Bᵀ, y = h
    C + D · x, head by head. x: [T, H, P], B, C: [T, groups, N], dt: [T, H] -> [T, H, P].
    """
    out, share = torch.empty_like(x), x.shape[1] // B.shape[1]
    for head in range(x.shape[1]):
        h = x.new_zeros(x.shape[2], B.shape[2])
        for t in range(len(x)):
            b, c = B[t, head // share], C[t, head // share]
            h = (dt[t, head] * A[head]).exp() * h + dt[t, head] * torch.outer(x[t, head], b)
            out[t, head] = h @ c + D[head] * x[t, head]
    return out


def test_the_rule_is_the_published_recurrence():
    """As lesson 27's decayed linear attention, with k = B, v = dt · x and q = C."""
    kinds = ("linear_attention", "full_attention")
    config = MambaConfig(kinds, 6, 5, 4, 3, 2)
    y, bias = torch.randn(9, config.conv_dim).double(), torch.randn(config.conv_dim).double()
    dt, A, D = torch.rand(9, 6).double(), -torch.rand(6).double(), torch.randn(6).double()
    got = rules.after_convolution(config, y, from_beginning, dt * A, dt, bias, D)
    x, B, C = silu(y + bias).split([30, 12, 12], dim=-1)
    wanted = as_published(*(part.unflatten(-1, (n, -1)) for part, n in ((x, 6), (B, 3), (C, 3))),
                          dt, A, D)  # fmt: skip
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


OPS = {  # what computes, in which dtype and where, and how close it has to come
    "in float64": (torch.float64, "cpu", 1e-11),
    "stand-ins": (torch.float32, "cpu", 1e-4),
    "kernels": (torch.float32, default_device(), 1e-4),  # interpreted where there is no GPU
}


class OneLayer:
    """A layer's state in a pool, to which each step hands what is of its tokens."""

    def __init__(self, pool: StatePool, bias, skip):
        self.pool, self.windows, self.of_layer = pool, pool.windows, (bias, skip)

    def attend(self, layer, mixed, log_decay, dt, step):
        return self.pool.attend(layer, mixed, log_decay, dt, *self.of_layer, step=step)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("ops", OPS)
def test_any_cut_of_prompts_leaves_the_same_states(ops, family, tmp_path):
    """Several sequences in slots of any order, each in random chunks beside the others: the outputs
    are those of the whole prompts, and no other slot is touched.
    """
    config = telling_config(family)
    if family == "granitemoehybrid":
        config.mamba_n_groups = 1  # as published: all heads read the same rows of B and C
    _, model = saved_and_loaded(config, tmp_path)
    dtype, device, tolerance = OPS[ops]
    model, longest = model.to(device, dtype), 12 if ops == "kernels" else 40
    state, layer, slots = model.config.state, 0, torch.randperm(7)[:4].tolist()
    pool = StatePool(state, conv_weights(model), 7, dtype, device)
    pool.ops = wrappers(torch.device("cuda")) if ops == "kernels" else pool.ops
    for held in (pool.windows, pool.matrices):
        held.fill_(torch.nan)  # what a slot held before is not read
    mixer = model.layers[layer].self_attn
    inputs = []
    for length in random_lengths(longest):
        mixed, dt = torch.randn(length, state.conv_dim), torch.rand(length, state.mamba_n_heads)
        inputs.append(tuple(each.to(device, dtype) for each in (mixed, -2 * dt, dt)))
    one = OneLayer(pool, mixer.conv1d.bias, mixer.D)
    attend = whole_sequence(model, 0)
    for got, whole in zip(in_random_chunks(one, layer, inputs, slots), inputs):
        wanted = attend(layer, *whole, *one.of_layer)
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    others = [slot for slot in range(7) if slot not in slots]
    assert pool.matrices[:, others].isnan().all() and not pool.matrices[0, slots].isnan().any()


@pytest.mark.parametrize("family", BOTH)
def test_a_fused_model_with_grouped_experts_computes_the_same(family, tmp_path):
    """As a GPU runs it. Experts without a gate stay lesson 6's loop."""
    _, model = saved_and_loaded(telling_config(family), tmp_path)
    tokens = torch.tensor(prompts_of(model, lengths=(9,))[0])
    model = model.float()
    wanted = model(tokens, whole_sequence(model, 9))
    twin = grouped(fused(model))
    found = any(isinstance(part, GroupedMoE) for part in twin.modules())
    assert found == (family == "granitemoehybrid")
    torch.testing.assert_close(twin(tokens, whole_sequence(twin, 9)), wanted, atol=1e-4, rtol=1e-4)


def test_granite_with_attention_alone_is_an_ordinary_model(tmp_path, monkeypatch):
    """As Granite 4.0 Micro is: on every rung."""
    config = FAMILIES["granitemoehybrid"]()
    config.layer_types = ["full_attention"] * 3
    config.num_local_experts = config.num_experts_per_tok = 0
    config.position_embedding_type = "rope"
    theirs, ours = saved_and_loaded(config, tmp_path)
    assert ours.config.state is None and type(ours) is GraniteDecoder
    prompts = prompts_of(ours)
    check_logits(theirs, ours, prompts)
    check_rungs(theirs, ours, prompts, monkeypatch)


@pytest.mark.parametrize("family", BOTH)
def test_16_bits_lose_no_more_than_in_transformers(family, tmp_path):
    theirs, ours = saved_and_loaded(choosing_all_experts(telling_config(family)), tmp_path)
    check_16_bits(theirs, prompts_of(ours, lengths=(40,))[0], tmp_path)


# ---------------------------------------------------------------- configs

PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_H_8B = dict(  # in the words of nvidia/Nemotron-H-8B-Base-8K, before transformers 5
    model_type="nemotron_h",
    architectures=["NemotronHForCausalLM"],
    attention_bias=False,
    attention_head_dim=128,
    chunk_size=128,
    conv_kernel=4,
    eos_token_id=2,
    expand=2,
    hidden_dropout=0.0,
    hidden_size=4096,
    hybrid_override_pattern=PATTERN,
    initializer_range=0.02,
    intermediate_size=21504,
    layer_norm_epsilon=1e-05,
    mamba_head_dim=64,
    mamba_hidden_act="silu",
    mamba_num_heads=128,
    mamba_proj_bias=False,
    max_position_embeddings=8192,
    mlp_bias=False,
    mlp_hidden_act="relu2",
    n_groups=8,
    num_attention_heads=32,
    num_hidden_layers=52,
    num_key_value_heads=8,
    num_logits_to_keep=1,
    rescale_prenorm_residual=True,
    residual_in_fp32=False,
    rms_norm_eps=1e-05,
    sliding_window=None,
    ssm_state_size=128,
    tie_word_embeddings=False,
    time_step_floor=0.0001,
    time_step_limit=[0.0, float("inf")],
    time_step_max=0.1,
    time_step_min=0.001,
    time_step_rank=256,
    use_bias=False,
    use_cache=True,
    use_conv_bias=True,
    use_mamba_kernels=True,
    vocab_size=131072,
)
GRANITE_4_SMALL = dict(  # in the words of ibm-granite/granite-4.0-h-small
    model_type="granitemoehybrid",
    architectures=["GraniteMoeHybridForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    attention_multiplier=0.0078125,
    embedding_multiplier=12,
    eos_token_id=100257,
    hidden_act="silu",
    hidden_size=4096,
    init_method="mup",
    initializer_range=0.1,
    intermediate_size=768,
    layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    logits_scaling=16,
    mamba_chunk_size=256,
    mamba_conv_bias=True,
    mamba_d_conv=4,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=128,
    mamba_proj_bias=False,
    max_position_embeddings=131072,
    normalization_function="rmsnorm",
    num_attention_heads=32,
    num_experts_per_tok=10,
    num_hidden_layers=40,
    num_key_value_heads=8,
    num_local_experts=72,
    output_router_logits=False,
    position_embedding_type="nope",
    residual_multiplier=0.22,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=10000,
    router_aux_loss_coef=0.0,
    shared_intermediate_size=1536,
    tie_word_embeddings=True,
    vocab_size=100352,
)


def read(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return load_config(folder)


def test_the_published_configs_and_their_bytes(tmp_path):
    """A layer keeps 128 heads of 128 × 64 in float32, and 3 inputs of each channel."""
    nemotron, granite = read(tmp_path, NEMOTRON_H_8B), read(tmp_path, GRANITE_4_SMALL)
    for config, layers, groups in ((nemotron, 24, 8), (granite, 36, 1)):
        state = config.state
        assert len(state.layers) == layers and len(state.attention_layers) == 4
        kept = 128 * 128 * 64 * 4 + (128 * 64 + 2 * groups * 128) * 3 * 2
        assert state.bytes_per_sequence(2) == layers * kept
        assert config.kv_bytes_per_token(2) == 4 * 2 * 8 * 128 * 2
        assert config.rope_scaling.rope_type == "none"
    assert nemotron.moe is None and granite.moe.shared_width == 1536 == granite.intermediate_size


@pytest.mark.parametrize("raw, shape", [(NEMOTRON_H_8B, SHAPE_8B), (GRANITE_4_SMALL, SHAPE_SMALL)])
def test_the_planners_shapes_are_the_published_models(raw, shape, tmp_path):
    """Their elements against our decoder on the meta device; their bytes against the config."""
    config = read(tmp_path, raw)
    with torch.device("meta"):
        model = decoder_class(config)(config)
    built = sum(p.numel() for p in model.parameters())  # a tied head is one parameter
    assert shape.params == pytest.approx(built, rel=2e-4)  # norms and biases are left out
    assert f"{shape.params / 1e9:.0f}B" == shape.published
    assert shape.state_bytes == config.state.bytes_per_sequence(2)
    assert shape.kv_values_per_token * 2 == config.kv_bytes_per_token(2)
    plan = make_plan(shape, lookup("H200"), batch=8, context=32768)
    each = 32768 * config.kv_bytes_per_token(2) + shape.state_bytes
    left = plan.usable_bytes - plan.weight_bytes - plan.activation_bytes
    assert plan.sequences == left // each
    heads, rows, columns = config.state.matrix_shape
    states = 5 * len(config.state.layers) * heads * rows * columns
    attention = 8 * 32768 * 4 * 4 * 32 * 128
    assert plan.decode.flops == 8 * (2 * shape.active_params + states) + attention


def test_other_words_for_the_same_layers(tmp_path):
    config = read(tmp_path, NEMOTRON_H_8B)
    letters = {"M": "mamba", "-": "mlp", "*": "attention"}
    listed = [letters[letter] for letter in PATTERN]
    assert read(tmp_path, NEMOTRON_H_8B | dict(layers_block_type=listed)) == config
    words = dict(NEMOTRON_H_8B, layer_types=listed, head_dim=128, rope_theta=1e4)
    words |= dict(time_step_limit=[0.0, {"__float__": "Infinity"}])
    for key in ("hybrid_override_pattern", "num_hidden_layers", "attention_head_dim"):
        del words[key]
    assert read(tmp_path, words) == config


@pytest.mark.parametrize(
    "raw, changes, named",
    [
        (NEMOTRON_H_8B, dict(hybrid_override_pattern="M-*X"), "must have the letters M * - E"),
        (NEMOTRON_H_8B, dict(num_hidden_layers=51), "'num_hidden_layers' must be 52"),
        (NEMOTRON_H_8B, dict(layers_block_type=["mamba"]), "'layers_block_type' (['linear"),
        (NEMOTRON_H_8B, dict(hybrid_override_pattern="M-" * 26), "layer_types: got"),
        (NEMOTRON_H_8B, dict(n_groups=3), "mamba_n_heads (128) must be a multiple of"),
        (NEMOTRON_H_8B, dict(conv_kernel=1), "mamba_d_conv: got 1"),
        (NEMOTRON_H_8B, dict(mlp_hidden_act="silu"), "'mlp_hidden_act' must be 'relu2'"),
        (NEMOTRON_H_8B, dict(attention_bias=True), "'attention_bias' must be False"),
        (NEMOTRON_H_8B, dict(tie_word_embeddings=True), "'tie_word_embeddings' must be false"),
        (NEMOTRON_H_8B, dict(moe_latent_size=64), "do not read this key"),
        (NEMOTRON_H_8B, dict(n_shared_experts=2), "'n_shared_experts' must be 1"),
        (NEMOTRON_H_8B, dict(sliding_window=64), "do not read this key"),
        (NEMOTRON_H_8B, dict(time_step_limit=[1.0, 0.5]), "time_step_limit: got (1.0, 0.5)"),
        (GRANITE_4_SMALL, dict(time_step_limit=[0.0]), "time_step_limit"),
        (GRANITE_4_SMALL, dict(layer_types=["mamba"] * 40), "layer_types: got"),
        (GRANITE_4_SMALL, dict(layer_types=["attention"] * 40), "layer_types: got"),
        (GRANITE_4_SMALL, dict(layer_types=["sliding_attention"] * 40), "'layer_types' must list"),
        (GRANITE_4_SMALL, dict(layer_types=["mamba", "attention"]), "layer"),
        (GRANITE_4_SMALL, dict(mamba_d_head=32), "do not match"),
        (GRANITE_4_SMALL, dict(normalization_function="layernorm"), "must be 'rmsnorm'"),
        (GRANITE_4_SMALL, dict(hidden_act="gelu"), "'hidden_act' must be 'silu'"),
        (GRANITE_4_SMALL, dict(mamba_gate=True), "do not read this key"),
    ],
)
def test_wrong_value_is_named(raw, changes, named, tmp_path):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, raw | changes)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_half_of_bambas_heads_turn(tmp_path):
    """Its files say so in three ways, and no other share is supported."""
    FAMILIES["bamba"]().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    config, half = load_config(tmp_path), raw["hidden_size"] // raw["num_attention_heads"] // 2
    assert config.rope_dim == half
    assert read(tmp_path, raw | dict(attn_rotary_emb=half)) == config
    for changes in (dict(attn_rotary_emb=half + 2), dict(attn_layer_indices=[])):
        with pytest.raises(CheckpointError, match=r"half of a head must turn|layer_types: got"):
            read(tmp_path, raw | changes)


def test_decoders_name_what_they_accept(tmp_path):
    nemotron, granite = read(tmp_path, NEMOTRON_H_8B), read(tmp_path, GRANITE_4_SMALL)
    with torch.device("meta"):
        with pytest.raises(ValueError, match="accepted: one with multipliers and a MambaConfig"):
            GraniteHybridDecoder(nemotron)
        with pytest.raises(ValueError, match="accepted: one with a MambaConfig and no multipl"):
            BambaDecoder(granite)
        with pytest.raises(ValueError, match="accepted: one with variant nemotron_h"):
            nemotron_h.NemotronHDecoder(granite)
        with pytest.raises(CheckpointError, match="load it with load_decoder"):
            Decoder(nemotron)
