"""Decode steps over states as CUDA graphs: what is replayed, and that it changes no tokens. Without
a GPU on simulated graphs, whose kernels are interpreted.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import NemotronHConfig, Qwen3NextConfig

from lessons.l11_cuda_graphs.optimized import can_be_captured
from lessons.l11_cuda_graphs.simulator import CaptureError, SimulatedGraphs
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l27_states.stand_ins import wrappers
from lessons.toolbox.measure.device import has_triton
from reference.engine.assembly import replays
from reference.engine.engine_args import EngineArgs
from reference.features.states.generate import generate as alone
from reference.features.states.graphs import StateGraphs
from reference.features.states.slots import SlotTable
from tests.engine_cases import greedy
from tests.hybrid_cases import LFM2, SIZES, VOCAB, Known, assert_all_returned, guesses, new_engine
from tests.random_families import saved_and_loaded

needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
pytestmark = pytest.mark.usefixtures("seed")
# none with experts, which Python would ask for
DENSE_NEXT = Qwen3NextConfig(
    **SIZES,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    layer_types=["linear_attention", "full_attention"] * 2,
    mlp_only_layers=[0, 1, 2, 3],
)
DENSE_NEMOTRON = NemotronHConfig(
    **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"},
    head_dim=8,
    mamba_num_heads=4,
    mamba_head_dim=5,
    n_groups=2,
    ssm_state_size=6,
    layers_block_type=["linear_attention", "mlp", "full_attention"],
)
MODELS = {"qwen3_next": DENSE_NEXT, "lfm2": LFM2, "nemotron_h": DENSE_NEMOTRON}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return saved_and_loaded(MODELS[request.param], folder)[1].float()


def simulated_engine(model, kind=StateGraphs, **how):
    """An engine on the CPU whose kernels are interpreted, and whose decode steps are recorded."""
    engine, replayed = new_engine(model, max_num_seqs=3, max_model_len=24, **how), []
    runner = engine.runner
    runner.pool.ops = LESSON_12
    runner.pool.states.ops = wrappers(torch.device("cuda"))

    class Noted(kind):
        def __call__(self, chunks, *args):
            replayed.append([len(new) for new, _ in chunks])
            return super().__call__(chunks, *args)

    runner.captured = Noted(runner.model, runner.pool, SimulatedGraphs(1), [1, 3], 24)
    return engine, replayed


def serve(model, engine) -> tuple[list, list]:
    """Two requests, the second one step later, and what they have to get."""
    prompts, limits = [random.choices(range(VOCAB), k=k) for k in (5, 1)], [6, 3]
    answers = [alone(model, [prompt], limit)[0] for prompt, limit in zip(prompts, limits)]
    if engine.speculation is not None:
        known = [Known(*pair, [pair[1]]) for pair in zip(prompts, answers)]
        engine.speculation.proposer.lookup = guesses(known)
    outputs = {}
    for at, (prompt, limit) in enumerate(zip(prompts, limits)):
        engine.add_request(str(at), prompt, greedy(limit))
        outputs |= {out.request_id: out for out in engine.step()}
    while engine.has_unfinished_requests:
        outputs |= {out.request_id: out for out in engine.step()}
    assert_all_returned(engine)
    return [outputs[str(at)].outputs[0].token_ids for at in range(2)], answers


@needs_triton
def test_replayed_steps_give_the_same_tokens(model):
    """The unused slots hold NaN, so a slot that is wrong, or that padding reads, shows."""
    engine, replayed = simulated_engine(model)
    got, want = serve(model, engine)
    assert got == want
    assert [1, 1] in replayed and [1] in replayed, "a batch with padding, and one without"
    states = engine.runner.pool.states
    # sequences have had slots 0 and 1
    assert states.windows[:, 2].isnan().all() and states.matrices[:, 2].isnan().all()


@needs_triton
def test_steps_with_drafts_stay_eager(model):
    config = dict(method="ngram", num_speculative_tokens=2)
    engine, replayed = simulated_engine(model, speculative_config=config)
    got, want = serve(model, engine)
    assert got == want and all(set(counts) == {1} for counts in replayed)


class Stale(StateGraphs):
    """The slots of the first replay stay."""

    def copy_in(self, bucket, inputs, table, slots):
        super().copy_in(bucket, inputs, table)


class ZeroPads(StateGraphs):
    """Padding has the first slot."""

    def filled(self, *args):
        *found, slots = super().filled(*args)
        return *found, slots.clamp(min=0)


class BeginsToo(StateGraphs):
    """A prompt of one token is replayed."""

    def fits(self, chunks):
        return all(len(new) == 1 for new, _ in chunks)


@needs_triton
@pytest.mark.parametrize("wrong", [Stale, ZeroPads, BeginsToo])
def test_a_wrong_graph_is_found(model, wrong):
    try:
        got, want = serve(model, simulated_engine(model, wrong)[0])
    except (ValueError, CaptureError):
        return  # a row that is not finite, or slots twice
    assert got != want


def test_only_steps_that_go_on_are_replayed():
    graphs = StateGraphs.__new__(StateGraphs)
    graphs.buckets, graphs.most_each = [1, 2], 1
    assert graphs.fits([([5], 3)]) and graphs.fits([([5], 3), ([6], 1)])
    assert not graphs.fits([([5], 0)]) and not graphs.fits([([5], 3), ([6], 0)])
    assert not graphs.fits([([5, 6], 3)]) and not graphs.fits([([5], 3)] * 3)


def test_padding_has_no_slot():
    graphs = StateGraphs.__new__(StateGraphs)
    graphs.max_model_len, graphs.pool = 8, SimpleNamespace(block_size=4)
    *_, slots = graphs.filled(4, [([5], 3), ([6], 1)], [SlotTable([0], 7), SlotTable([1], 2)], [])
    assert slots.tolist() == [7, 2, -1, -1]


def test_which_models_are_captured(model, monkeypatch):
    """On a GPU all whose step asks Python for nothing; float64 has no kernels for states."""
    assert can_be_captured(model)
    args = EngineArgs(device="cpu")
    assert not replays(args, model), "a CPU launches nothing"
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert replays(args, model) and not replays(EngineArgs(enforce_eager=True), model)
    monkeypatch.setattr(type(model), "dtype", torch.float64)
    assert not replays(args, model)
