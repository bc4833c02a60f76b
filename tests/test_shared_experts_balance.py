"""enable_eplb: experts that move, and copies of busy ones, change no token."""

from concurrent.futures import Future
from queue import SimpleQueue

import pytest
import torch
from safetensors.torch import load_file, save_file

from lessons.l06_mla.deepseek import load_decoder
from lessons.l20_parallelism.processes.launch import RankError
from lessons.l23_experts.ranks.load import Load
from lessons.l23_experts.ranks.placement import moved
from lessons.toolbox.model.checkpoint import load_config
from reference.engine.engine_args import EngineArgs
from reference.engine.expert_arguments import EPLBConfig
from reference.parallel import lockstep
from reference.parallel.balance import Balance, first_placements, read_experts
from tests.composition_cases import ARGUMENTS, WEIGHTS, check
from tests.parallel_cases import answers, parallel_engine, requests, serve, write_checkpoint
from tests.parallel_cases import whole_engine as one_process
from tests.test_shared_experts import shared_args

OFTEN = dict(step_interval=6, window_size=4)
CASES = [
    ("mixtral", (1, 1, 2), 0, {}),
    ("mixtral", (2, 1, 2), 4, dict(all2all_backend="deepep_high_throughput")),
    ("qwen2_moe", (1, 1, 2), 4, dict(all2all_backend="deepep_low_latency")),
    ("qwen2_moe", (2, 1, 2), 8, {}),
    ("deepseek_v3", (1, 2, 2), 2, dict(async_scheduling=True)),
    ("deepseek_v3", (1, 1, 4), 0, dict(all2all_backend="deepep_low_latency")),
]


def balanced_args(model: str, *sizes: int, copies: int, **how) -> EngineArgs:
    config = dict(num_redundant_experts=copies, **OFTEN)
    return shared_args(model, *sizes, enable_eplb=True, eplb_config=config, **how)


def skewed_checkpoint(folder, seed: int) -> str:
    """Of which all tokens choose the experts 0 and 1."""
    model = write_checkpoint(folder, "deepseek_v3", seed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:2] += 100
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("family, sizes, copies, how", CASES)
@pytest.mark.sample(2, of="balanced experts")
def test_tokens_are_those_of_one_process(family, sizes, copies, how, tmp_path, seed):
    """While experts move several times."""
    model = write_checkpoint(tmp_path, family, seed)
    args, asked = balanced_args(model, *sizes, copies=copies, **how), requests(seed)
    want = answers(serve(one_process(args), asked))
    engine = parallel_engine(args)
    try:
        first = engine.round.placements
        assert answers(serve(engine, asked)) == want
        last = engine.round.placements
        assert sum(moved(first[layer], last[layer]) for layer in first) > 0, "no expert has moved"
        assert answers(serve(engine, asked)) == want
    finally:
        engine.close()


@pytest.mark.sample(2, of="balanced experts")
def test_copies_even_out_a_skewed_load(tmp_path, seed):
    model, asked = skewed_checkpoint(tmp_path, seed), requests(seed)
    args = balanced_args(model, copies=2)
    want = answers(serve(one_process(args), asked))
    engine = parallel_engine(args)
    try:
        assert answers(serve(engine, asked)) == want
        engine.note_imbalance()
        assert engine.expert_imbalance == 1
        for placement in engine.round.placements.values():
            assert {0, 1} <= set(placement.of_rank(0)) and {0, 1} <= set(placement.of_rank(1))
    finally:
        engine.close()


@pytest.mark.sample(2, of="balanced experts")
def test_a_replica_that_is_not_told_is_seen(tmp_path, seed, monkeypatch):
    begin = lockstep.begin
    monkeypatch.setattr(
        lockstep, "begin", lambda round, queues, talks: begin(round, queues, talks[:1])
    )
    model, asked = write_checkpoint(tmp_path, "mixtral", seed), requests(seed)
    args = balanced_args(model, copies=2)
    want = answers(serve(one_process(args), asked))
    engine = parallel_engine(args)
    try:
        got = answers(serve(engine, asked))
    except RankError:
        got = None
    finally:
        engine.close()
    assert got != want


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_experts_are_read_alone(family, tmp_path, seed):
    model = write_checkpoint(tmp_path, family, seed)
    whole, wanted = load_decoder(model), {1: {0, 3}, 2: {2}}
    if family == "qwen2_moe":
        wanted = {1: {0, 7}}  # its other layers are dense
    found = read_experts(model, wanted, torch.device("cpu"), torch.float32)
    assert {layer: set(experts) for layer, experts in found.items()} == wanted
    for layer, experts in found.items():
        for expert, mlp in experts.items():
            want = whole.layers[layer].mlp.experts[expert].state_dict()
            assert mlp.state_dict().keys() == want.keys()
            assert all(torch.equal(mlp.state_dict()[name], want[name]) for name in want)


def test_the_last_window_decides(tmp_path):
    """What came before it is taken away, and a layer without tokens stays."""
    model = write_checkpoint(tmp_path, "mixtral", 0)
    args = balanced_args(model, copies=2)
    first = first_placements(args, load_config(model))
    assert first.keys() == {0, 1, 2}
    assert all(len(placement.experts) == 6 for placement in first.values())
    balance = Balance(args.eplb_config, {0: Load((90, 0, 0, 0)), 1: Load((5, 5, 5, 5))})
    now = {0: Load((91, 40, 2, 2)), 1: Load((5, 5, 5, 5)), 2: Load((0, 0, 0, 30))}
    found = balance.next_placements(now, first)
    assert len(found[0].slots_of[1]) == 3, "the old load of expert 0 counts no more"
    assert found[1] == first[1]
    assert len(found[2].slots_of[3]) == 3


def test_a_round_that_is_put_again_begins_once():
    """As after Ctrl-C. All workers hear of new placements before any step."""
    told, rounds, queues = [], SimpleQueue(), [SimpleQueue(), SimpleQueue()]
    steps, moves = [Future(), Future()], dict(placements={0: "there"}, has_moved=True)

    class Heard:
        def tell(self, *order):
            assert all(queue.empty() for queue in queues)
            told.append(order)

    for item in (*[lockstep.Round(3, steps, {}, **moves)] * 2, None):
        rounds.put(item)
    lockstep.begin_rounds(rounds, queues, [Heard(), Heard()])
    assert told == [("place_experts", {0: "there"})] * 2
    assert [queue.get() for queue in queues] == steps
    assert all(queue.empty() for queue in queues)


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(enable_eplb=True), "enable_eplb: got True; accepted: False without enable_expert_"),
        (dict(eplb_config={}), "eplb_config: got {}; accepted: None without enable_eplb"),
    ],
)
def test_arguments_that_need_others(how, said):
    with pytest.raises(ValueError) as error:
        EngineArgs("models/tiny", **how)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "config, said",
    [
        (dict(num_redundant_experts=-1), "num_redundant_experts: got -1; accepted: a whole number"),
        (dict(step_interval=5), "eplb_config window_size: got 1000; accepted: at most step_interv"),
        (dict(policy="default"), "eplb_config: got 'policy'; accepted: num_redundant_experts, "),
        ("{}", "eplb_config: got '{}'; accepted: None, or a dict of"),
    ],
)
def test_what_is_no_config(config, said):
    with pytest.raises(ValueError) as error:
        EPLBConfig.read(config)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_example_of_vllm_s_page_is_read():
    """Its "Expert Parallel Deployment" logs the balance, and a newer version moves experts beside
    steps.
    """
    said = dict(window_size=1000, step_interval=3000, num_redundant_experts=2)
    more = dict(log_balancedness=True, log_balancedness_interval=20, use_async=True)
    assert EPLBConfig.read(said | more) == EPLBConfig(2, 3000, 1000)


def test_copies_have_to_fill_the_ranks(tmp_path):
    model = write_checkpoint(tmp_path, "mixtral", 0)
    with pytest.raises(ValueError, match="replicas whose 2 ranks divide 4 experts and 1 copies"):
        parallel_engine(balanced_args(model, copies=1))


# ---------------------------------------------------------------- beside other features

TOGETHER = [
    *("LoRA", "structured", "n > 1", "draft", "parallel draft", "suffix", "async", "swap"),
    *("int8", "FP8", "MXFP4", "W4A8", "GPTQ", "AWQ", "int4 KV", "prefix cache", "chunked prefill"),
]


@pytest.mark.parametrize("feature", TOGETHER)
@pytest.mark.sample(2, of="shared experts with others")
def test_a_feature_beside_shared_experts(feature, monkeypatch):
    """As tests/test_composition.py has it for replicas alone. Experts move if they can."""
    arguments = ARGUMENTS["data parallel"] | dict(enable_expert_parallel=True)
    if feature not in WEIGHTS:
        arguments |= dict(enable_eplb=True, eplb_config=dict(num_redundant_experts=2, **OFTEN))
    monkeypatch.setitem(ARGUMENTS, "data parallel", arguments)
    check(frozenset({"MoE", "data parallel", feature}))
