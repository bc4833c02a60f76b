"""Replicas that share experts: the tokens of one process, whatever each replica has to do; and what
cannot be shared is refused.
"""

import asyncio
import copy
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lessons.l02_naive_attention.decoder import MLP
from lessons.l06_mla.deepseek import load_decoder
from lessons.l20_parallelism.optimized import shard
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.mesh import Links, Mesh
from lessons.l20_parallelism.shards.loading import load_sharded
from lessons.l23_experts.grouped import stacked
from lessons.toolbox.model.checkpoint import load_config
from reference import LLM, AsyncLLMEngine, BeamSearchParams, SamplingParams
from reference.engine.engine_args import CHOICES, EngineArgs
from reference.features.structured import StructuredOutputsParams
from reference.parallel import lockstep
from reference.parallel.experts import FORMS
from reference.parallel.looped import LoopedExperts
from reference.server.metrics import EngineCollector
from tests.engine_cases import CONFIG as SMALL_CONFIG
from tests.parallel_cases import (
    answers,
    assert_all_gone,
    parallel_engine,
    requests,
    serve,
    small_args,
    whole_engine,
    workers_of,
    write_checkpoint,
)
from tests.test_parallel_faults import GREEDY

NAMES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
NGRAM = dict(method="ngram", num_speculative_tokens=2)
CASES = [
    ("mixtral", (1, 1, 2), {}),
    ("mixtral", (2, 1, 2), dict(preemption_mode="swap")),
    ("mixtral", (1, 1, 2), dict(async_scheduling=True)),
    ("mixtral", (1, 1, 4), dict(enable_prefix_caching=False)),
    ("qwen2_moe", (2, 1, 2), {}),
    ("qwen2_moe", (1, 1, 4), dict(kv_cache_dtype="int8")),
    ("deepseek_v3", (1, 2, 2), {}),
    ("deepseek_v3", (1, 1, 4), dict(speculative_config=NGRAM)),
    ("deepseek_v3", (2, 1, 2), dict(async_scheduling=True)),
    ("deepseek_v3", (2, 1, 2), dict(decode_context_parallel_size=2, block_size=2)),
    ("gpt_oss", (2, 1, 2), {}),
    ("mixtral", (2, 1, 2), dict(quantization="int8")),
    *(("qwen2_moe", (1, 1, 2), dict(all2all_backend=name)) for name in FORMS),
]


def shared_args(model: str, *sizes: int, **how) -> EngineArgs:
    sizes = dict(zip(NAMES, sizes or (1, 1, 2)))
    return small_args(model, enable_expert_parallel=True, **sizes | how)


def named(case) -> str:
    family, sizes, how = case
    return "-".join([family, "x".join(map(str, sizes)), *how, *map(str, how.values())])


@pytest.mark.parametrize("family, sizes, how", CASES, ids=map(named, CASES))
@pytest.mark.sample(2, of="shared experts")
def test_tokens_are_those_of_one_process(family, sizes, how, tmp_path, seed):
    """With chunks of prompts beside decoding, preemption, a prefix cache, forks, scores, and a
    client that gives up; then one request, while the other replicas have none.
    """
    wide = dict(hidden_size=64, intermediate_size=64) if "quantization" in how else {}
    model = write_checkpoint(tmp_path, family, seed, **wide)
    args = shared_args(model, *sizes, **how)
    asked, alone = requests(seed), whole_engine(args)
    want, later = serve(alone, asked), serve(alone, asked[:1])
    engine = parallel_engine(args)
    try:
        pids = [process.pid for process in workers_of(engine)]
        assert len(pids) == sizes[0] * sizes[1] * sizes[2]
        got = serve(engine, asked, {9: "1"})
        assert answers(serve(engine, asked[:1])) == answers(later)
        rounds = {each.runner.num_steps for each in engine.engines}
        assert len(rounds) == 1, "a replica has run fewer steps than another"
        loads = engine.expert_loads()
    finally:
        engine.close()
    assert_all_gone(pids)
    del got["1"], want["1"]
    assert answers(got) == answers(want)
    config = load_config(model)
    layers = [at for at in range(config.num_hidden_layers) if config.moe.has_experts(at)]
    assert list(loads) == layers
    assert len({sum(load.counts) for load in loads.values()}) == 1, "a layer has other pairs"


@pytest.mark.sample(2, of="shared experts")
def test_random_histories(tmp_path, seed):
    """Requests that come and give up at any step. Who is served gets the tokens of one process."""
    model = write_checkpoint(tmp_path, "qwen2_moe", seed)
    alone, engine = whole_engine(shared_args(model)), parallel_engine(shared_args(model))
    try:
        for _ in range(6):
            count = random.randint(1, 6)
            prompts = [random.choices(range(60), k=random.randint(1, 20)) for _ in range(count)]
            come = {str(i): random.randint(0, 12) for i in range(count)}
            gone = {
                id: at + random.randint(0, 9) for id, at in come.items() if random.random() < 0.4
            }
            got, step = {}, 0
            while engine.has_unfinished_requests or step <= max(come.values()):
                for index, (id, at) in enumerate(come.items()):
                    if at == step:
                        engine.add_request(id, prompts[index], GREEDY)
                    if gone.get(id) == step:
                        engine.abort_request(id)
                for output in engine.step():
                    got[output.request_id] = output
                step += 1
            want = serve(alone, [(prompt, GREEDY) for prompt in prompts])
            for id, output in got.items():
                tokens = output.outputs[0].token_ids
                assert tokens == answers(want)[id][0][: len(tokens)]
                assert output.finished or id in gone, "a request was forgotten"
    finally:
        engine.close()


@pytest.mark.sample(2, of="shared experts")
def test_readers_in_an_event_loop(tmp_path, seed, monkeypatch):
    """One leaves early, one comes late; and the imbalance is told to who monitors."""
    monkeypatch.setattr(lockstep, "COUNTED_EVERY", 4)
    model = write_checkpoint(tmp_path, "mixtral", seed)
    prompts = [[index + 1] * (3 + 5 * index) for index in range(4)]
    want = answers(serve(whole_engine(shared_args(model)), [(p, GREEDY) for p in prompts]))
    served = AsyncLLMEngine(parallel_engine(shared_args(model)))

    async def ask(id: int, most: int = 100) -> list[int]:
        tokens: list[int] = []
        async for output in served.generate(prompts[id], GREEDY, str(id)):
            tokens = output.outputs[0].token_ids
            if len(tokens) >= most:
                break
        return tokens

    async def all_readers() -> list[list[int]]:
        found = await asyncio.gather(ask(0), ask(1, most=3), ask(2))
        return [*found, await ask(3)]  # when all have been idle

    try:
        found = asyncio.run(all_readers())
        assert 1 <= served.stats().expert_imbalance <= 2
        [metric] = [
            one
            for one in EngineCollector(served, ["tiny", "0"]).collect()
            if one.name == "engine_expert_imbalance"
        ]
        assert metric.samples[0].value == served.stats().expert_imbalance
    finally:
        served.shutdown()
    for index, tokens in enumerate(found):
        assert tokens == want[str(index)][0][: len(tokens)]
        assert len(tokens) == 16 or index == 1


@pytest.mark.sample(2, of="shared experts")
def test_structures_beams_and_forks(tmp_path, seed):
    """Through LLM, with a tokenizer."""
    model = write_checkpoint(tmp_path, "mixtral", seed, vocab_size=4096, eos_token_id=0)
    how = dict(tokenizer="models/tiny", device="cpu", dtype="float32", kv_cache_memory_bytes=10**6)
    regex = StructuredOutputsParams(regex="[a-f]{3,9};")
    params = [
        SamplingParams(temperature=0, max_tokens=12, structured_outputs=regex),
        SamplingParams(seed=1, max_tokens=9, n=3),
        SamplingParams(temperature=0, max_tokens=9),
    ]
    beams, found = BeamSearchParams(beam_width=3, max_tokens=5), []
    for sizes in ({}, dict(data_parallel_size=2, enable_expert_parallel=True)):
        llm = LLM(model, **how, **sizes)
        prompts = ["def f(", "import os", "class Stack"]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        searched = llm.beam_search(["x = 1", "y"], beams)
        again = llm.generate(prompts, params, use_tqdm=False)
        tokens = [[answer.token_ids for answer in out.outputs] for out in (*outputs, *again)]
        tokens += [[beam.tokens for beam in out.sequences] for out in searched]
        found.append((tokens, outputs[0].outputs[0].text))
        llm.shutdown()
    assert found[0] == found[1]
    assert set(found[1][1]) <= set("abcdef;")


@pytest.mark.sample(2, of="shared experts")
def test_all_tokens_go_to_one_rank(tmp_path, seed):
    """The answers are right, and the loads say so."""
    model = write_checkpoint(tmp_path, "deepseek_v3", seed)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[:2] += 100  # one group of experts
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    asked = requests(seed)
    want = answers(serve(whole_engine(shared_args(model)), asked))
    engine = parallel_engine(shared_args(model))
    try:
        assert answers(serve(engine, asked)) == want
        engine.note_imbalance()
        assert engine.expert_imbalance == 2
        assert all(load.counts[0] == load.counts[1] > 0 for load in engine.expert_loads().values())
        assert all(sum(load.counts[2:]) == 0 for load in engine.expert_loads().values())
    finally:
        engine.close()


# ---------------------------------------------------------------- what a rank holds


def links_of(mesh: Mesh, rank: int) -> Links:
    """Of a rank that only asks who it is."""
    _, stage, shard_number = mesh.place(rank)
    tensor = Group(list(range(mesh.tp)), shard_number)
    [members] = [group for group in mesh.expert_groups() if rank in group]
    pipeline = Group(list(range(mesh.pp)), stage)
    return Links(mesh, rank, tensor, pipeline, Group(members, members.index(rank)))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(tp=2, dp=2), Mesh(pp=3, dp=2)], ids=str)
def test_each_expert_is_on_one_rank_and_whole(family, mesh, tmp_path, seed):
    model = write_checkpoint(tmp_path, family, seed)
    whole, found = load_decoder(model), {}
    for rank in range(mesh.size):
        part = load_sharded(model, links_of(mesh, rank), expert_parallel=True)
        cut = shard(whole, links_of(mesh, rank), expert_parallel=True).state_dict()
        for name, tensor in part.state_dict().items():
            assert torch.equal(tensor, cut[name])
            if ".experts." in name:
                assert found.setdefault(name, rank) == rank, "two ranks have an expert"
            if "experts." in name or ".gate." in name:
                assert torch.equal(tensor, whole.state_dict()[name])
    assert found.keys() == {name for name in whole.state_dict() if ".experts." in name}


@pytest.mark.parametrize("chosen", [[[0, 2], [1, 0]], [[-1, 5], [2, 2]], []], ids=str)
def test_experts_in_a_loop_are_those_of_the_stack(chosen, seed):
    """Also for experts that are elsewhere, and for no token."""
    chosen = torch.tensor(chosen, dtype=torch.int64).reshape(-1, 2)
    config = replace(SMALL_CONFIG, hidden_size=16)
    mlps = nn.ModuleList(MLP(config, 12).double() for _ in range(3)).requires_grad_(False)
    x = torch.randn(len(chosen), 16, dtype=torch.float64)
    weights = torch.rand(len(chosen), 2, dtype=torch.float64)
    looped = LoopedExperts(copy.deepcopy(mlps))
    stack = stacked(mlps)
    here = ((chosen >= 0) & (chosen < 3)).flatten()  # of the others a stack's rows may be anything
    assert torch.allclose(looped.rows(x, chosen)[here], stack.rows(x, chosen)[here], atol=1e-12)
    assert torch.allclose(looped(x, weights, chosen), stack(x, weights, chosen), atol=1e-12)


# ---------------------------------------------------------------- what is refused


def test_every_name_has_a_form():
    assert tuple(FORMS) == CHOICES["all2all_backend"]


@pytest.mark.parametrize(
    "family, how, said",
    [
        (
            "mixtral",
            dict(data_parallel_size=3),
            "data_parallel_size: got 3; accepted: replicas who",
        ),
        ("mixtral", dict(distributed_executor_backend="ray"), "got 'ray'; accepted: None or mp"),
        ("mixtral", dict(quantization="int8", enable_eplb=True), "False for experts that are no"),
        ("gpt_oss", dict(enable_eplb=True), "enable_eplb: got True; accepted: False for experts"),
        ("qwen2_moe", dict(enable_lora=True), "enable_lora: got True; accepted: False for a model"),
        (
            "mixtral",
            dict(all2all_backend="pplx"),
            "all2all_backend: got 'pplx'; accepted: naive or",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(family, how, said, tmp_path, seed, monkeypatch):
    def fails(*arguments):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("reference.parallel.engine.new_workers", fails)
    model = write_checkpoint(tmp_path, family, 0)
    with pytest.raises(ValueError) as error:
        parallel_engine(shared_args(model, **how))
    assert said in str(error.value) and "\n" not in str(error.value)
