"""Qwen3-Next: what its layers with a state compute, and what the loader says to configs that do not
fit. tests/test_more_families.py compares random models of it with transformers'.
"""

import lessons  # isort: skip  # noqa: F401 (before transformers, which imports triton)

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from lessons.l01_roofline.planner.plan import make_plan
from lessons.l02_naive_attention.decoder import RMSNorm
from lessons.l02_naive_attention.naive import generate as lesson_2
from lessons.l02_naive_attention.naive import whole_sequence as lesson_2_sequence
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH
from lessons.l06_mla import moe
from lessons.l06_mla.deepseek import load_decoder
from lessons.l06_mla.variants import qwen3_next
from lessons.l11_cuda_graphs.optimized import can_be_captured
from lessons.l12_paged_kv.runner import PagedRunner
from lessons.l15_chunked_prefill.generate import generate as lesson_15
from lessons.l20_parallelism.planner.shares import Layout, check_layout
from lessons.l27_states.stand_ins import wrappers
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model import places
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config_json import CheckpointError
from reference.checkpoints.write_checkpoint import save_quantized
from reference.features.states import generate as rungs
from reference.features.states import layers as states
from reference.features.states import rules
from reference.features.states.layers import new_state_step
from reference.features.states.pool import HybridPool
from reference.features.states.rules import heads_of
from reference.features.states.shapes import QWEN3_NEXT
from reference.ladder.rungs import left_out, rungs_of
from reference.weights.quantization import quantize_model
from tests.random_families import check_logits, prompts_of, saved_and_loaded
from tests.random_families import qwen3_next as random_config

pytestmark = pytest.mark.usefixtures("seed")
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


def telling_config():
    """A random one in which every part counts: two experts or more, heads that share a key, a part
    of a head that turns, more than one head.
    """
    config = random_config(chosen=2)
    config.num_hidden_layers, config.layer_types = 3, LAYERS
    config.decoder_sparse_step, config.mlp_only_layers = 1, []
    config.linear_num_key_heads, config.linear_num_value_heads = 2, 4
    config.head_dim = 16
    config.rope_parameters["partial_rotary_factor"] = 0.5
    return config


def with_all_turned(name, tensor, config):
    """The loader's slip: gates are moved with the heads of q."""
    if config.state is None or not name.endswith(places.OF_Q_AND_K):
        return tensor
    return tensor.unflatten(0, (-1, config.head_dim)).roll(-config.rope_dim, 1).flatten(0, 1)


def with_norms_left(name, tensor, config):
    """The loader's slip: the weights of the norms stay where they are."""
    return tensor if "norm" in name else places.turning_last(name, tensor, config)


def not_scaled(y, config):
    q, k, v = heads_of(y, config)
    return q * config.linear_key_head_dim**0.5, k, v


def as_groups(y, config):
    """The heads of v take turns with the keys, where neighbours share one."""
    q, k, v = heads_of(y, config)
    order = torch.arange(q.shape[1]).view(-1, config.values_per_key).T.flatten()
    return q[:, order], k[:, order], v


def newest_first(model):
    return {layer: weight.flip(1) for layer, weight in states.conv_weights(model).items()}


def ungated(self, x, attend):
    q, _ = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
    k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
    return self.o_proj(attend(self.q_norm(q), self.k_norm(k), v).flatten(-2))


def not_weighed(self, x):
    return moe.MLP.forward(self, x)


SLIPS = {
    "gates are moved": ("lessons.toolbox.model.checkpoint.turning_last", with_all_turned),
    "norms are not": ("lessons.toolbox.model.checkpoint.turning_last", with_norms_left),
    "q is not scaled": (rules, "heads_of", not_scaled),
    "keys are dealt in turns": (rules, "heads_of", as_groups),
    "lengths as they are": (rules, "unit", lambda x: x),
    "the newest input first": (rungs, "conv_weights", newest_first),
    "no gate of the shared expert": (moe.WeighedMLP, "forward", not_weighed),
    "norms not shifted": (qwen3_next.GemmaRMSNorm, "forward", RMSNorm.forward),
    "no gate after attention": (qwen3_next.GatedAttention, "forward", ungated),
    "the norm without its gate": (qwen3_next, "silu", torch.ones_like),
    "decay without its bias": (qwen3_next, "softplus", lambda x: nn.functional.softplus(x - 1)),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, tmp_path, monkeypatch):
    theirs, right = saved_and_loaded(telling_config(), tmp_path)
    prompts = prompts_of(right, lengths=(1, 9))
    check_logits(theirs, right, prompts)
    monkeypatch.setattr(*SLIPS[slip])
    wrong = load_decoder(tmp_path, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(theirs, wrong, prompts)


# ---------------------------------------------------------------- any cut of a prompt


OPS = {  # what computes, in which dtype and where, and how close it has to come
    "in float64": (torch.float64, "cpu", 1e-11),
    "stand-ins": (torch.float32, "cpu", 1e-4),
    "kernels": (torch.float32, default_device(), 1e-4),  # interpreted where there is no GPU
}


@pytest.mark.parametrize("ops", OPS)
def test_any_cut_of_prompts_leaves_the_same_states(ops, tmp_path):
    """Several sequences in slots of any order, each in random chunks beside the others: the outputs
    are those of the whole prompts, and no other slot is touched.
    """
    _, model = saved_and_loaded(telling_config(), tmp_path)
    dtype, device, tolerance = OPS[ops]
    model, longest = model.to(device, dtype), 12 if ops == "kernels" else 40
    state, layer, slots = model.config.state, 2, torch.randperm(7)[:4].tolist()
    pool = states.StatePool(state, states.conv_weights(model), 7, dtype, device)
    pool.ops = wrappers(torch.device("cuda")) if ops == "kernels" else pool.ops
    for held in (pool.windows, pool.matrices):
        held.fill_(torch.nan)  # what a slot held before is not read
    inputs = [layer_inputs(state, length, dtype, device) for length in random_lengths(longest)]
    outs = in_random_chunks(pool, layer, inputs, slots)
    attend = rungs.whole_sequence(model, 0)
    for got, whole in zip(outs, inputs):
        torch.testing.assert_close(got, attend(layer, *whole), atol=tolerance, rtol=tolerance)
    others = [slot for slot in range(7) if slot not in slots]
    assert pool.matrices[:, others].isnan().all() and pool.matrices[0].isnan().all()
    assert not pool.matrices[1, slots].isnan().any()


def random_lengths(longest: int) -> list[int]:
    return torch.randint(1, longest, (4,)).tolist()


def layer_inputs(state, length: int, dtype, device) -> tuple:
    heads = state.linear_num_value_heads
    x, (decay, beta) = torch.randn(length, state.conv_dim), torch.rand(2, length, heads)
    return tuple(each.to(device, dtype) for each in (x, -decay, beta))


def in_random_chunks(pool, layer: int, inputs: list[tuple], slots: list[int]) -> list:
    """The layer's outputs of each sequence, computed in steps of random parts of some of them."""
    device, done, outs = pool.windows.device, [0] * len(inputs), [[] for _ in inputs]
    while left := [b for b, whole in enumerate(inputs) if done[b] < len(whole[0])]:
        chosen = random.sample(left, random.randint(1, len(left)))
        most = [len(inputs[b][0]) - done[b] for b in chosen]
        counts = [random.choice([1, random.randint(1, each)]) for each in most]
        held, own = [done[b] for b in chosen], [slots[b] for b in chosen]
        step = new_state_step(counts, held, own, device)
        parts = [
            [x[done[b] : done[b] + count] for x in inputs[b]] for b, count in zip(chosen, counts)
        ]
        out = pool.attend(layer, *map(torch.cat, zip(*parts)), step=step)
        for b, piece in zip(chosen, out.split(counts)):
            outs[b].append(piece)
            done[b] += len(piece)
    return [torch.cat(pieces) for pieces in outs]


def test_a_prompt_of_one_token_is_no_decode():
    """It has no state to read, although it runs one token."""
    step = new_state_step([1, 1, 1, 5], [9, 0, 3, 2], [4, 0, 1, 2], "cpu")
    assert step.num_decodes == 1 and step.decode_slots.tolist() == [4]
    assert step.slots.tolist() == [0, 1, 2] and step.has_state.tolist() == [False, True, True]
    assert step.cu_seqlens.tolist() == [0, 1, 2, 7] and step.max_seqlen == 5


# ---------------------------------------------------------------- what it counts, what is refused

PUBLISHED = dict(  # Qwen/Qwen3-Next-80B-A3B-Instruct
    architectures=["Qwen3NextForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151645,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=5120,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    model_type="qwen3_next",
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_hidden_layers=48,
    num_key_value_heads=2,
    output_router_logits=False,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=10000000,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)


def read(folder, **changes):
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return load_config(folder)


def test_the_published_config_and_its_bytes(tmp_path):
    config = read(tmp_path)
    assert len(config.state.layers) == 36 and config.state.attention_layers[:2] == (3, 7)
    assert config.rope_dim == 64 and config.moe.shared_expert_intermediate_size == 512
    assert config.kv_bytes_per_token(2) == 12 * 2 * 2 * 256 * 2
    windows, matrices = 36 * 8192 * 3 * 2, 36 * 32 * 128 * 128 * 4
    assert config.state.bytes_per_sequence(2) == windows + matrices


def test_a_pool_allocates_what_the_config_counts(tmp_path):
    _, model = saved_and_loaded(telling_config(), tmp_path)
    pool = HybridPool.for_model(model, 3, 8, LESSON_03_TORCH)
    assert pool.states.nbytes == 3 * model.config.state.bytes_per_sequence(8)
    assert pool.bytes_per_token == model.config.kv_bytes_per_token(8)
    assert pool.allocated_bytes == pool.states.nbytes + pool.k_slots.nbytes + pool.v_slots.nbytes


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(layer_types=["full_attention"] * 48), "layer_types: got"),
        (dict(layer_types=["linear_attention"] * 48), "layer_types: got"),
        (dict(layer_types=LAYERS), "layer"),
        (dict(linear_num_value_heads=24), "linear_num_value_heads (24) must be a multiple"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim: got 1"),
        (dict(partial_rotary_factor=0.003), "partial_rotary_factor"),
        (dict(linear_key_head_dim=None), "linear_key_head_dim"),
        (dict(use_sliding_window=True), "'use_sliding_window' must be False"),
        (dict(hidden_act="gelu"), "'hidden_act' must be 'silu'"),
        (dict(linear_gate=True), "do not read this key"),
    ],
)
def test_wrong_value_is_named(changes, named, tmp_path):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, **changes)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_layers_that_predict_further_are_left_out(tmp_path):
    saved_and_loaded(telling_config(), tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, file)
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        raw = json.loads(index.read_text())
        raw["weight_map"]["mtp.fc.weight"] = file.name
        index.write_text(json.dumps(raw))
    load_decoder(tmp_path)


def test_what_holds_no_states_says_so_in_one_line(tmp_path):
    _, model = saved_and_loaded(telling_config(), tmp_path)
    config = model.config
    for call in (
        lambda: lesson_2(model, [[1]], 1),
        lambda: lesson_2_sequence(model, 1),
        lambda: lesson_15(model, [[1]], 1),
        lambda: KVPool(config, 1, 8, LESSON_03_TORCH),
        lambda: ConcatCache(config, 8),
        lambda: PagedRunner.for_model(model, 4, 8, 16),
    ):
        with pytest.raises(ValueError, match="accepted: one whose layers all attend") as refused:
            call()
        assert "\n" not in str(refused.value)
    assert not can_be_captured(model)
    assert [rung.lesson for rung in rungs_of(config)] == ["27", "27", "12-27"]
    assert "qwen3_next" in left_out(config)


def test_the_planners_shape_is_the_published_model():
    """Its elements against transformers' model on the meta device; its bytes against the config."""
    config = Qwen3NextConfig(**PUBLISHED)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built = sum(p.numel() for p in model.parameters())
    assert QWEN3_NEXT.params == pytest.approx(built, rel=1e-5)  # norms and small gates are left out
    assert round(QWEN3_NEXT.params / 1e9) == 80 and round(QWEN3_NEXT.active_params / 1e9) == 4


def test_a_plan_counts_both_memories(tmp_path):
    config, chip = read(tmp_path), lookup("H200")
    assert QWEN3_NEXT.kv_values_per_token * 2 == config.kv_bytes_per_token(2)
    assert QWEN3_NEXT.state_bytes == config.state.bytes_per_sequence(2)
    plan = make_plan(QWEN3_NEXT, chip, batch=8, context=32768, gpus=2)
    each = 32768 * config.kv_bytes_per_token(2) + config.state.bytes_per_sequence(2)
    left = plan.usable_bytes - plan.weight_bytes - plan.activation_bytes
    assert plan.sequences == left // each
    with pytest.raises(ValueError, match="no state is cut"):
        check_layout(QWEN3_NEXT, Layout(2))


def test_a_model_whose_rows_move_is_not_written_in_fewer_bits(tmp_path):
    _, model = saved_and_loaded(telling_config(), tmp_path / "plain")
    codes = quantize_model(model, "int8", None)
    with pytest.raises(CheckpointError, match="hold the coordinates of q and k in another order"):
        save_quantized(codes, str(tmp_path / "plain"), tmp_path / "codes", "gptq")
