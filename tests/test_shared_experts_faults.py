"""Replicas that share experts end together, in one line that names who was at fault; and planted
bugs of their exchange are seen.
"""

import asyncio
import gc
import os
import signal
import threading
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from lessons.l06_mla.moe import MoE
from lessons.l20_parallelism.lab.testing import random_model
from lessons.l20_parallelism.processes.group import Group
from lessons.l20_parallelism.processes.launch import RankError, run_ranks
from lessons.l20_parallelism.processes.mesh import Mesh, new_links, share_experts
from lessons.toolbox.model.checkpoint import load_config
from lessons.toolbox.model.config import ModelConfig
from reference import AsyncLLMEngine
from reference.engine.async_engine import EngineDeadError
from reference.parallel import experts, processes
from reference.parallel.experts import FORMS, SharedExperts
from reference.parallel.lockstep import LockstepEngine
from tests.parallel_cases import (
    answers,
    assert_all_gone,
    parallel_engine,
    pids_of_workers,
    requests,
    serve,
    whole_engine,
    workers_of,
    write_checkpoint,
)
from tests.test_parallel_faults import GREEDY, Fast, at_run, llm_over
from tests.test_shared_experts import shared_args


@pytest.fixture
def model(tmp_path, seed) -> str:
    return write_checkpoint(tmp_path / "model", "mixtral", seed)


# ---------------------------------------------------------------- workers that end


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["load", "idle", "step"])
@pytest.mark.sample(1, of="shared faults")
def test_a_worker_that_is_killed(model, rank, when, monkeypatch):
    """Also one whose replica has no request, in the middle of another one's step."""
    started = pids_of_workers(monkeypatch, killed=rank if when == "load" else None)
    said = rf"^rank {rank} died \(signal 9\)$"
    if when == "load":
        with Fast(), pytest.raises(RankError, match=said):
            parallel_engine(shared_args(model))
        assert_all_gone(started)
        return
    engine = parallel_engine(shared_args(model))
    if when == "idle":
        os.kill(started[rank], signal.SIGKILL)
        assert_all_gone(started)
    else:
        at_run(engine.engines[0], 3, lambda: os.kill(started[rank], signal.SIGKILL))
    llm = llm_over(engine)
    for prompts in ([[1, 2, 3]], [[4], [5], [6]]):  # who comes later is told the same
        with Fast(), pytest.raises(RankError, match=said):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not engine.requests and all(each.scheduler.is_idle for each in engine.engines)
    assert_all_gone(started)
    llm.shutdown()


@pytest.mark.sample(1, of="shared faults")
@pytest.mark.parametrize("fault", ["dies", "raises"])
def test_every_waiting_reader_is_told(model, fault):
    """The same line, whichever replica serves it."""
    engine = parallel_engine(shared_args(model, 2, 1, 2))
    pids = [process.pid for process in workers_of(engine)]
    served, failing = AsyncLLMEngine(engine), engine.engines[1]

    def fail() -> None:
        if fault == "dies":
            os.kill(pids[2], signal.SIGKILL)
        else:
            failing.runner.talk.tell("forget", "unknown")

    at_run(failing, 3, fail)

    async def ask(id: str) -> str:
        try:
            async for _ in served.generate([int(id) + 1] * 5, GREEDY, id):
                pass
        except EngineDeadError as error:
            return str(error)
        return "finished"

    async def all_readers() -> list[str]:
        found = await asyncio.gather(*(ask(str(i)) for i in range(4)))
        return [*found, await ask("9")]

    with Fast():
        *found, late = asyncio.run(all_readers())
    dead = ["died (signal 9)"] if fault == "dies" else ["raised KeyError: 'unknown'"]
    lines = {f"rank {rank} {what}" for rank in (2, 3) for what in dead}
    [line] = set(found)
    kind, _, line = line.partition(": ")  # which of the two heard of it first
    assert kind in ("RankError", "WorkersDied") and line in lines
    assert late == f"the engine has ended: {line}"
    served.shutdown()
    assert_all_gone(pids)


@pytest.mark.sample(1, of="shared faults")
def test_ctrl_c_and_then_forgotten(model, seed):
    """No replica waits for one that was not told, and no worker is left."""
    asked = requests(seed)
    want = answers(serve(whole_engine(shared_args(model)), asked))
    engine = parallel_engine(shared_args(model))
    llm, pids = llm_over(engine), [process.pid for process in workers_of(engine)]

    def press() -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    at_run(engine.engines[0], 5, press)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Fast():
            outputs = llm.generate([[1, 2], [3], [4]], GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    assert answers(serve(engine, asked)) == want, "and it goes on answering"
    del engine, llm
    gc.collect()
    assert_all_gone(pids)


@pytest.mark.sample(1, of="shared faults")
def test_a_step_that_raises_before_it_runs(model, seed, monkeypatch):
    """The others get their tokens, and all go on."""
    asked = requests(seed)
    want = answers(serve(whole_engine(shared_args(model)), asked))
    engine = parallel_engine(shared_args(model))
    scheduler, steps = engine.engines[0].scheduler, []
    schedule = scheduler.schedule

    def fails():
        steps.append(1)
        if len(steps) == 4:
            raise ValueError("planted")
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", fails)
    advance, raised = engine.advance, []

    def goes_on():
        try:
            return advance()
        except ValueError as error:
            raised.append(str(error))
            return []

    monkeypatch.setattr(engine, "advance", goes_on)
    try:
        with Fast():
            assert answers(serve(engine, asked)) == want
        assert raised == ["planted"]
        assert len({each.runner.num_steps for each in engine.engines}) == 1
    finally:
        engine.close()


# ---------------------------------------------------------------- ranks that are late


@pytest.mark.sample(1, of="shared faults")
def test_a_slow_rank(model):
    """Of a replica without requests: the others wait for it, and their answers are the same."""
    asked = [([1, 2, 3], GREEDY)]
    want = answers(serve(whole_engine(shared_args(model)), asked))
    engine = parallel_engine(shared_args(model))
    pids, pause_s = [process.pid for process in workers_of(engine)], 1.5

    def pause() -> None:
        os.kill(pids[1], signal.SIGSTOP)
        threading.Timer(pause_s, os.kill, (pids[1], signal.SIGCONT)).start()

    at_run(engine.engines[0], 4, pause)
    start = time.monotonic()
    try:
        assert answers(serve(engine, asked)) == want
        assert time.monotonic() - start > pause_s
    finally:
        engine.close()


@pytest.mark.sample(1, of="shared faults")
def test_a_replica_that_skips_its_empty_step_is_no_hang(model, monkeypatch):
    monkeypatch.setattr(processes, "COLLECTIVE_TIMEOUT_S", 20.0)
    advance = staticmethod(lambda engine: engine.advance())
    monkeypatch.setattr(LockstepEngine, "advance_one", advance)
    engine = parallel_engine(shared_args(model))
    pids = [process.pid for process in workers_of(engine)]
    with Fast(), pytest.raises(RankError) as error:
        llm_over(engine).generate([[1, 2]], GREEDY, use_tqdm=False)
    assert str(error.value).startswith("rank 0 raised RuntimeError: layer 0's exchange of experts")
    assert "\n" not in str(error.value) and "imed out" in str(error.value)
    assert_all_gone(pids)
    engine.close()


# ---------------------------------------------------------------- planted bugs of a layer


def neighbours_experts(moe: MoE, own: range):
    return moe.experts[own.stop :][: len(own)] or moe.experts[: len(own)]


class OtherShard(Group):
    """A rank that sends the part of its neighbour's tokens."""

    def __init__(self, group: Group):
        super().__init__(group.members, (group.rank + 1) % group.size, group.handle)


class Unordered(Group):
    """A rank that gathers in another order."""

    def all_gather(self, x, dim=-1):
        return super().all_gather(x, dim).flip(0)


SLIPS = {
    "owner": lambda: mock.patch.object(experts, "own_experts", neighbours_experts),
    "shard": lambda: mock.patch(f"{__name__}.tensor_group", OtherShard),
    "order": lambda: mock.patch(f"{__name__}.tensor_group", unordered),
}


def tensor_group(group: Group) -> Group:
    return group


def unordered(group: Group) -> Group:
    return Unordered(group.members, group.rank, group.handle)


def rank_error(
    world: Group, mesh: Mesh, config: ModelConfig, tokens: list[int], name: str, slip: str | None
) -> float:
    """The largest difference from lesson 6's layer. tokens: of each replica."""
    mlps = [layer.mlp for layer in random_model(config, 0, torch.float64).layers]
    moe = next(mlp for mlp in mlps if isinstance(mlp, MoE))
    links = share_experts(new_links(mesh))
    replica, _, _ = mesh.place(links.rank)
    draw = torch.Generator().manual_seed(replica)
    x = torch.randn(tokens[replica], config.hidden_size, generator=draw, dtype=torch.float64)
    with SLIPS[slip]() if slip else nullcontext(), torch.inference_mode():
        want = moe(x)
        layer = SharedExperts(moe, FORMS[name], links.experts, tensor_group(links.tensor), 0)
        found = layer(x)
    assert found.shape == x.shape
    return float((found - want).abs().max()) if len(x) else 0.0


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tokens", [(5, 3), (0, 4), (1, 0), (2, 9)], ids=str)
@pytest.mark.sample(2, of="shared layers")
def test_a_layer_is_lesson_6s(name, tokens, tmp_path, seed):
    """With any number of tokens on each replica, and two shards of it."""
    config = load_config(write_checkpoint(tmp_path, "qwen2_moe", seed))
    for mesh in (Mesh(dp=2), Mesh(tp=2, dp=2)):
        found = run_ranks(mesh.size, rank_error, mesh, config, tokens, name, None)
        assert max(found) < 1e-12


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.sample(2, of="shared layers")
def test_planted_bugs_are_seen(slip, tmp_path, seed):
    config = load_config(write_checkpoint(tmp_path, "mixtral", seed))
    name = next(iter(FORMS))
    found = run_ranks(4, rank_error, Mesh(tp=2, dp=2), config, (5, 4), name, slip)
    assert max(found) > 1e-3
