"""Layers of experts in two tensors equal lesson 6's loop, and can be captured."""

import pytest
import torch
from torch import nn

from lessons.l02_naive_attention.naive import generate
from lessons.l06_mla.lab.testing import EVERY_TOKEN, new_model, random_prompts
from lessons.l06_mla.moe import MoE
from lessons.l11_cuda_graphs.optimized import CudaGraphs, can_be_captured
from lessons.l11_cuda_graphs.simulator import CaptureError, SimulatedGraphs
from lessons.l20_parallelism.shards.layers import Elsewhere, OwnExperts
from lessons.l23_experts import grouped as grouped_module
from lessons.l23_experts import optimized
from lessons.l23_experts.grouped import GroupedMoE, grouped, stacked
from lessons.l23_experts.kernels import down_kernel, gate_up_kernel
from lessons.l23_experts.lab.moe_cases import DEVICE
from lessons.l23_experts.lab.moe_ranks import (
    CONFIGS,
    Case,
    assert_equal,
    new_moe,
    tokens_of,
)
from lessons.toolbox.proof.numerics import assert_close_to_oracle

pytestmark = pytest.mark.usefixtures("seed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_grouped_layer_is_lesson_6s(config, dtype, seed):
    check_grouped(Case("one", config, seed, dtype))


@pytest.mark.sample(1)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_grouped_layer_with_the_kernels(config, seed, proof, monkeypatch):
    monkeypatch.setattr(grouped_module, "ops_for", lambda *_: optimized)
    errors = check_grouped(Case("one", config, seed))
    proof.record(gate_up_kernel, errors)
    proof.record(down_kernel, errors)


@torch.no_grad()
def check_grouped(case):
    """In lesson 6's budgets, and in float64 equal."""
    x, config = tokens_of(case).to(DEVICE), CONFIGS[case.config]
    moe = new_moe(config, case.seed, case.dtype).to(DEVICE)
    wide = new_moe(config, case.seed, case.dtype).to(DEVICE).double()
    eager, ref64 = moe(x), wide(x.double())
    # 16 bits: the routers of both dtypes agree, because float64 reads the rounded numbers, but for
    # ties
    same = (moe.gate(x)[1] == wide.gate(x.double())[1]).all(-1)
    assert same.float().mean() > 0.8
    return assert_close_to_oracle(GroupedMoE(moe)(x)[same], eager[same], ref64[same])


def test_a_model_and_its_twin_share_memory_and_tokens():
    model = new_model()
    prompts = random_prompts(3, 1, 9)
    expected = generate(model, prompts, 5, EVERY_TOKEN)
    twin = grouped(model)
    assert generate(twin, prompts, 5, EVERY_TOKEN) == expected
    assert generate(model, prompts, 5, EVERY_TOKEN) == expected
    assert type(model.layers[1].mlp) is MoE and type(twin.layers[1].mlp) is GroupedMoE
    places = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert {weight.untyped_storage().data_ptr() for weight in twin.parameters()} == places


@torch.no_grad()
def test_a_ranks_part_is_grouped_as_well(seed):
    """What lesson 20 leaves on a rank: its own experts, and others that are Elsewhere."""
    case = Case("one", "deepseek_v3", seed, torch.float64)
    x = tokens_of(case)
    for rank in range(2):
        moe = new_moe(CONFIGS[case.config], seed, case.dtype)
        for index in range(8 * (1 - rank), 8 * (1 - rank) + 8):
            moe.experts[index] = Elsewhere()
        part = nn.Sequential(OwnExperts(moe, rank, 2))
        expected, twin = part(x), grouped(part)
        assert type(twin[0]) is GroupedMoE and type(part[0]) is OwnExperts
        assert_equal(case, twin(x), expected)


def test_what_cannot_be_stacked_stays():
    """Quantized matrices, biases; a model without experts is returned as it is."""
    model = new_model()
    model.layers[1].mlp.experts[3].up_proj = nn.Linear(48, 24, bias=True)
    assert grouped(model) is model
    with pytest.raises(ValueError, match=r"experts: got 8 of Linear; accepted: [^\n]*$"):
        stacked(model.layers[1].mlp.experts)
    dense = new_model(moe=None)
    assert grouped(dense) is dense


@torch.inference_mode()
def test_a_graph_records_a_grouped_layer(seed, monkeypatch):
    """Its replays follow the router's new choices."""
    monkeypatch.setattr(grouped_module, "ops_for", lambda *_: optimized)
    case = Case("one", "deepseek_v3", seed, split=(3,))
    moe = new_moe(CONFIGS[case.config], seed, case.dtype).to(DEVICE)
    layer, x = GroupedMoE(moe), tokens_of(case).to(DEVICE)
    on_gpu = DEVICE.type == "cuda"
    graphs = CudaGraphs(DEVICE) if on_gpu else SimulatedGraphs(warm_ups=0)
    graph, out = graphs.capture(lambda: layer(x))
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_equal(case, out, moe(x))


@torch.inference_mode()
def test_lesson_6s_layer_is_refused_by_a_graph(seed):
    case = Case("one", "mixtral", seed)
    moe, x = new_moe(CONFIGS[case.config], seed, case.dtype), tokens_of(case)
    with pytest.raises(CaptureError, match="waits for the GPU"):
        SimulatedGraphs(warm_ups=0).capture(lambda: moe(x))


def test_which_models_can_be_captured():
    model = new_model()
    assert not can_be_captured(model) and can_be_captured(grouped(model))
    assert can_be_captured(new_model(moe=None))
