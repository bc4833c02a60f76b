"""The engine's arguments for several processes: what is refused, who gets which request, what a
worker holds; and the interfaces that users know.
"""

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lessons.l20_parallelism.checks.test_planner import shape_of
from lessons.l20_parallelism.lab.testing import links_of
from lessons.l20_parallelism.optimized import new_part, shard
from lessons.l20_parallelism.planner.shares import Layout, shares
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError
from lessons.l20_parallelism.processes.mesh import Links, Mesh
from lessons.l20_parallelism.shards.sharding import local_config
from lessons.l21_multi_lora.batch import AdapterContext
from lessons.l21_multi_lora.layers import adapter_layers, with_adapter_slots
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from reference import LLM, BeamSearchParams, SamplingParams
from reference.engine.cache_memory import bytes_per_token
from reference.engine.engine_args import EngineArgs
from reference.parallel.engine import devices_for
from reference.parallel.replicas import SLACK, Router
from tests.engine_cases import new_model
from tests.parallel_cases import (
    answers,
    assert_all_gone,
    parallel_engine,
    requests,
    serve,
    small_args,
    whole_engine,
    write_checkpoint,
)
from tests.test_parallel_faults import GREEDY, llm_over

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = str(REPOSITORY / "models/tiny")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(tensor_parallel_size=4), "tensor_parallel_size: got 4; num_attention_heads: got 6"),
        (dict(tensor_parallel_size=0), "tensor_parallel_size: got 0; accepted: a whole number, 1"),
        (dict(pipeline_parallel_size=7), "pipeline_parallel_size: got 7; num_stages: got 7"),
        (dict(data_parallel_size="2"), "data_parallel_size: got '2'"),
        (dict(enable_expert_parallel=True, tensor_parallel_size=2), "which has no experts"),
        (dict(distributed_executor_backend="uni"), "got 'uni'; accepted: None, mp, ray"),
        (
            dict(
                data_parallel_size=2,
                speculative_config=dict(
                    method="eagle", model="models/tiny-eagle", num_speculative_tokens=2
                ),
            ),
            "accepted: None where the model is in other processes",
        ),
        (dict(tensor_parallel_size=2, batch_invariant=True), "batch_invariant: got True"),
        (dict(pipeline_parallel_size=2, model=f"{TINY}-vision"), "a model that reads text alone"),
        (dict(tensor_parallel_size=2, max_model_len=4096), "max_model_len: got 4096"),
        (dict(pipeline_parallel_size=2, model="no/such"), "unknown model 'no/such'"),
        (dict(data_parallel_size=2, tokenizer="no/such"), "unknown model 'no/such'"),
    ],
)
def test_arguments_that_cannot_work_start_no_process(arguments, said, monkeypatch):
    def fails(*arguments):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("reference.parallel.engine.new_workers", fails)
    with pytest.raises(ValueError) as error:
        LLM(**dict(model=TINY, device="cpu") | arguments)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_each_worker_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    sizes = dict(tensor_parallel_size=2, pipeline_parallel_size=2, device="cuda")
    assert devices_for(EngineArgs(**sizes)) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    with pytest.raises(ValueError) as error:
        devices_for(EngineArgs(**sizes, data_parallel_size=3))
    assert "got 2 × 2 × 3; accepted: at most 4 in all" in str(error.value)
    with pytest.raises(ValueError, match="a GPU of its own"):
        devices_for(EngineArgs(**sizes | dict(device="cuda:1")))
    assert devices_for(EngineArgs(device="cuda:1", distributed_executor_backend="mp")) == ["cuda:1"]


@pytest.mark.sample(2, of="parallel parts")
@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=900), "kv_cache_memory_bytes"),
        (dict(max_num_seqs=1), "tensor model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_what_a_worker_refuses_is_said_as_one_process_says_it(changes, said, tmp_path, seed):
    model = write_checkpoint(tmp_path, "llama", seed)
    if "tensor" in said:
        from safetensors.torch import load_file, save_file

        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.2.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        parallel_engine(small_args(model, pipeline_parallel_size=2, **changes))
    assert not isinstance(error.value, RankError)
    assert said in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- who gets which request


def test_a_router_keeps_prefixes_together_and_loads_equal(seed):
    router, loads = Router(block_size=4), [0, 0, 0]
    heads = [[head] * 12 for head in range(3)]
    homes = [router.choose([*head, 7, 7], loads) for head in heads[:1]]
    for head, others in ((heads[1], [1, 0, 0]), (heads[2], [1, 1, 0])):
        homes.append(router.choose([*head, 8], others))
    assert homes == [0, 1, 2], "an unknown prompt goes to the least loaded"
    for _ in range(20):
        index = random.randrange(3)
        loads = [random.randint(0, 2) for _ in range(3)]
        assert (
            router.choose([*heads[index], *random.choices(range(60), k=5)], loads) == homes[index]
        )
    assert router.choose([1, 2, 3], [5, 5, 4]) == 2, "a prompt without a whole block"
    assert router.choose(heads[0], [SLACK, 1, 0]) == 0
    assert router.choose(heads[0], [SLACK + 1, 1, 0]) == 2, "its home is too far ahead"
    assert router.choose(heads[0], [0, 0, 0]) == 2, "and it has moved"
    # the longest part that a replica knows decides
    assert router.choose([*heads[1][:8], *[9] * 8], [9, 9, 0]) == 2
    assert router.choose([*heads[1][:8], *[9] * 8, 3], [0, 0, 1]) == 2
    assert router.choose([*heads[1], 5], [0, 0, 1]) == 1


def test_a_router_forgets(monkeypatch):
    monkeypatch.setattr("reference.parallel.replicas.MOST_KNOWN", 5)
    router = Router(block_size=1)
    for token in range(50):
        router.choose([token], [0, 0])
        assert len(router.home) <= 5


@pytest.mark.sample(2, of="parallel parts")
def test_replicas_share_requests_and_a_prefix_cache_is_of_use(tmp_path, seed):
    """Answers of requests without a seed do not depend on who gave them."""
    model = write_checkpoint(tmp_path, "llama", seed)
    args = small_args(model, seed=5, data_parallel_size=2, num_gpu_blocks_override=64)
    hot = SamplingParams(temperature=1.3, max_tokens=6, detokenize=False, n=2)
    prompts = [[index % 2 + 1] * 8 + [index] for index in range(8)]

    def outputs_of(engine):
        return llm_over(engine).generate(prompts, hot, use_tqdm=False)

    want = outputs_of(whole_engine(args))
    engine = parallel_engine(args)
    try:
        steps = [each.runner for each in engine.engines]
        got = outputs_of(engine)
        assert [[a.token_ids for a in o.outputs] for o in got] == [
            [a.token_ids for a in o.outputs] for o in want
        ]
        assert [o.prompt_token_ids for o in got] == prompts, "in the order of the prompts"
        assert all(runner.num_steps > 5 for runner in steps), "one of the replicas did nothing"
        assert sum(output.num_cached_tokens for output in got) > 0
    finally:
        engine.close()


# ---------------------------------------------------------------- what a worker holds


@pytest.mark.sample(2, of="parallel parts")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "family, tp, pp, spread",
    [("llama", 4, 1, False), ("mixtral", 2, 3, True), ("deepseek_v3", 2, 2, True)],
)
def test_a_worker_holds_what_the_planner_says(
    family, tp, pp, spread, kv_cache_dtype, tmp_path, seed
):
    """Bytes of weights and of the cache; and as many blocks as fit beside them."""
    model = write_checkpoint(tmp_path, family, seed)
    args = small_args(
        model,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=spread,
        kv_cache_dtype=kv_cache_dtype,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=20_000,
    )
    engine = parallel_engine(args)
    held, pool, config = engine.runner.held, engine.runner.pool, load_config(model)
    engine.close()
    layout = Layout(tp, pp, ep=tp if spread else 1)
    planned = list(shares(shape_of(config), layout, 1, bits_per_weight=32, bits_per_kv=32))
    mesh = Mesh(tp, pp)
    for stage, share in enumerate(planned):
        found = held[mesh.rank(0, stage, 0)]
        # The planner counts matrices. Norms and biases of experts' scores are on every shard.
        assert found.weight_bytes == share.weight_bytes + vector_bytes(config, mesh, stage, spread)
        if kv_cache_dtype == "auto":
            assert found.bytes_per_token == share.kv_bytes_per_token
        local = local_config(config, 0, tp, spread)
        each = bytes_per_token(local, kv_cache_dtype, 4) // local.num_hidden_layers
        assert found.bytes_per_token == each * len(share.stage)
        # one slot is the spare one
        assert found.pool_bytes == found.bytes_per_token * (pool.num_blocks * pool.block_size + 1)
    assert pool.bytes_per_token == sum(each.bytes_per_token for each in held)
    most = max(each.bytes_per_token for each in held) * args.block_size
    assert pool.num_blocks == min(20_000 // most, args.max_num_seqs * 96 // args.block_size)
    assert pool.num_blocks < args.max_num_seqs * 96 // args.block_size or kv_cache_dtype != "auto"


def vector_bytes(config: ModelConfig, mesh: Mesh, stage: int, spread: bool) -> int:
    """Of the first shard of a stage."""
    tensor, pipe = Group(list(range(mesh.tp)), 0), Group(list(range(mesh.pp)), stage)
    part = new_part(config, Links(mesh, mesh.rank(0, stage, 0), tensor, pipe), spread)
    return sum(4 * weight.numel() for weight in part.parameters() if weight.dim() == 1)


def test_a_part_has_adapters_of_every_layer():
    """Also of those that a layer wraps which talks to other ranks."""
    model = new_model()
    whole = adapter_layers(with_adapter_slots(model, AdapterContext(), 1, 2))
    part = shard(model, links_of(Mesh(2), 0))
    found = adapter_layers(with_adapter_slots(part, AdapterContext(), 1, 2))
    assert {name.removesuffix(".linear") for name in found} == set(whole) and whole


# ---------------------------------------------------------------- what users call


@pytest.mark.sample(2, of="parallel parts")
def test_beams_are_searched_in_workers(tmp_path, seed):
    model = write_checkpoint(tmp_path, "llama", seed)
    args = small_args(model, tensor_parallel_size=2, num_gpu_blocks_override=40)
    params = BeamSearchParams(beam_width=3, max_tokens=7)
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4] * 17}]
    engine = parallel_engine(args)
    try:
        found = [llm_over(e).beam_search(prompts, params) for e in (whole_engine(args), engine)]
    finally:
        engine.close()
    tokens = [[[beam.tokens for beam in out.sequences] for out in outputs] for outputs in found]
    assert tokens[0] == tokens[1]


@pytest.mark.sample(3, of="processes")
@pytest.mark.parametrize("sizes", [dict(tensor_parallel_size=2), dict(data_parallel_size=2)])
def test_the_embedded_model_in_two_workers(sizes):
    """Its text, from its own tokenizer."""
    how = dict(dtype="float32", device="cpu", max_model_len=256, kv_cache_memory_bytes=10**7)
    prompts = ["def quicksort(", "import os\n", "class Stack:\n"]
    params = SamplingParams(temperature=0, max_tokens=12, stop="\n\n")
    found = []
    for changes in ({}, sizes):
        llm = LLM(TINY, **how, **changes)
        found.append(llm.generate(prompts, params, use_tqdm=False))
        llm.shutdown()
    texts = [[(o.prompt, o.outputs[0].text) for o in outputs] for outputs in found]
    assert texts[0] == texts[1] and all(text for _, text in texts[0])


@pytest.mark.sample(3, of="processes")
@pytest.mark.parametrize("after_s", [0, 1, 5])
def test_the_command_is_interrupted(after_s):
    """Ctrl-C goes to the command and its workers alike, while they start, load or serve. The
    command says so, and all of them end.
    """
    command = [sys.executable, "-m", "reference.generate", "def f(", "--max-tokens", "1900"]
    with subprocess.Popen(
        [*command, "--tensor-parallel-size", "2"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # because a shell starts what runs in the background deaf to it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:
        pids = wait_for_workers(program.pid)
        time.sleep(after_s)
        os.killpg(program.pid, signal.SIGINT)
        out, error = program.communicate(timeout=180)
    assert "Traceback" not in error, error
    assert out.startswith("def f(") or error == "generate: interrupted\n"
    assert_all_gone(pids)


def wait_for_workers(pid: int) -> list[int]:
    """The processes in a command's session, once there are two workers besides itself."""
    for _ in range(1200):
        time.sleep(0.1)
        mine = [other for other in pids_of_session(pid) if other != pid]
        if len(mine) >= 4:  # the server of forks, who tracks resources, and the workers
            return mine
    raise AssertionError("no workers were started")


def pids_of_session(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            name, _, values = path.read_text().rpartition(")")
            if int(values.split()[3]) == session:
                found.append(int(name.split()[0]))
    return found


def test_ray(request, tmp_path, seed):
    """Two actors on this machine: the same tokens, and one that is killed is named."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT RUN: needs ray")
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: Ray starts many processes, so it takes long; try --all")
    import ray

    model = write_checkpoint(tmp_path, "llama", seed)
    args = small_args(
        model,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        preemption_mode="swap",
    )
    want = serve(whole_engine(args), requests(seed))
    engine = parallel_engine(args)
    try:
        assert answers(serve(engine, requests(seed))) == answers(want)
        actors = engine.runner.talk.workers.actors
        pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in actors]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"^rank 1 died"):
            llm_over(engine).generate([[1, 2]], GREEDY, use_tqdm=False)
        assert_all_gone(pids)
    finally:
        engine.close()
        ray.shutdown()
