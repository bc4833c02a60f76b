"""Whichever process dies, and whenever: every request ends with one clear line, and every process
is gone.
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lessons.l20_parallelism.processes.launch import RankError
from reference import AsyncLLMEngine, SamplingParams
from reference.engine.async_engine import EngineDeadError
from reference.engine.llm import LLM
from tests.parallel_cases import (
    answers,
    assert_all_gone,
    parallel_engine,
    pids_of_workers,
    requests,
    serve,
    small_args,
    workers_of,
    write_checkpoint,
)

SECONDS = 60.0  # after which an end counts as a hang; it takes tenths on an idle machine
GREEDY = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
SHARED = dict(enable_expert_parallel=True)
MESHES = [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)]


@pytest.fixture
def model(tmp_path, seed) -> str:
    return write_checkpoint(tmp_path / "model", "llama", seed)


class Fast:
    """A block that must end soon."""

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, *error):
        assert time.monotonic() - self.start < SECONDS, "it hung"


def llm_over(engine) -> LLM:
    """LLM's interface over an engine without a tokenizer."""
    llm = LLM.__new__(LLM)
    llm.engine, llm.counter = engine, iter(range(10**6))
    return llm


def at_run(engine, number: int, what) -> None:
    """Let what() happen right after the `number`-th order to run a step."""
    talk, count = engine.runner.talk, []
    tell = talk.tell

    def watched(method, *arguments):
        tell(method, *arguments)
        if method == "run":
            count.append(1)
            if len(count) == number:
                what()

    talk.tell = watched


@pytest.mark.parametrize("mesh", MESHES, ids=["shards", "stages"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["load", "idle", "prefill", "decode"])
@pytest.mark.sample(1)
def test_a_worker_that_is_killed(model, mesh, rank, when, monkeypatch):
    started = pids_of_workers(monkeypatch, killed=rank if when == "load" else None)
    said = rf"^rank {rank} died \(signal 9\)$"
    if when == "load":
        with Fast(), pytest.raises(RankError, match=said):
            parallel_engine(small_args(model, **mesh))
        assert_all_gone(started)
        return
    engine = parallel_engine(small_args(model, **mesh))
    llm = llm_over(engine)

    def kill() -> None:
        os.kill(started[rank], signal.SIGKILL)

    if when == "idle":
        kill()
        assert_all_gone(started)  # before a request asks
    else:
        at_run(engine, dict(prefill=1, decode=6)[when], kill)
    prompts = [[1, 2, 3] * 9, [4], [5]]
    for _ in range(2):  # who comes later is told the same
        with Fast(), pytest.raises(RankError, match=said):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert not engine.requests and engine.scheduler.is_idle
    assert_all_gone(started)
    llm.shutdown()


@pytest.mark.sample(1, of="parallel faults")
def test_a_worker_that_raises(model):
    engine = parallel_engine(small_args(model, tensor_parallel_size=2, preemption_mode="swap"))
    pids = [process.pid for process in workers_of(engine)]
    at_run(engine, 4, lambda: engine.runner.talk.tell("forget", "unknown"))
    with Fast(), pytest.raises(RankError) as error:
        llm_over(engine).generate([[1, 2], [3]], GREEDY, use_tqdm=False)
    assert str(error.value) in [f"rank {rank} raised KeyError: 'unknown'" for rank in (0, 1)]
    assert_all_gone(pids)


@pytest.mark.sample(1, of="parallel faults")
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_waiting_reader_is_told(model, replicas):
    """In an event loop, also of requests that another replica serves."""
    engine = parallel_engine(small_args(model, tensor_parallel_size=2, data_parallel_size=replicas))
    pids = [process.pid for process in workers_of(engine)]
    served = AsyncLLMEngine(engine)
    failing = getattr(engine, "engines", [engine])[-1]
    at_run(failing, 3, lambda: os.kill(pids[-1], signal.SIGKILL))

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
    # its rank within its replica; which of the two depends on who hears of it first
    said = [f"{kind}: rank 1 died (signal 9)" for kind in ("RankError", "WorkersDied")]
    told = set(found) - {"finished"}  # on a busy machine another replica ends its answers before
    assert len(told) == 1 and told <= set(said) and (replicas > 1 or "finished" not in found)
    assert late == "the engine has ended: rank 1 died (signal 9)"
    served.shutdown()
    assert_all_gone(pids)


@pytest.mark.sample(1, of="parallel faults")
@pytest.mark.parametrize("changes", [{}, SHARED], ids=["replicas", "shared experts"])
def test_a_death_is_heard_of_while_no_request_is_there(changes, tmp_path, seed):
    """Or /health would say yes until a client's request has failed."""
    model = write_checkpoint(tmp_path, "mixtral", seed)
    engine = parallel_engine(small_args(model, data_parallel_size=2, **changes))
    pids = [process.pid for process in workers_of(engine)]
    served = AsyncLLMEngine(engine)
    assert asyncio.run(count_tokens(served)) == 16 and served.is_ready
    os.kill(pids[1], signal.SIGKILL)
    with Fast():
        while served.failure is None:
            time.sleep(0.01)
        served.thread.join()
    assert not served.is_ready
    with pytest.raises(EngineDeadError, match=r"the engine has ended: rank [01] died \(signal 9\)"):
        asyncio.run(count_tokens(served))
    served.shutdown()
    assert_all_gone(pids)


async def count_tokens(served: AsyncLLMEngine) -> int:
    """Of one request's answer."""
    outputs = [output async for output in served.generate([1, 2, 3], GREEDY, "one")]
    return len(outputs[-1].outputs[0].token_ids)


@pytest.mark.sample(1, of="parallel faults")
@pytest.mark.parametrize("how", ["shutdown", "forgotten"])
def test_workers_end_with_their_engine(model, how):
    engine = parallel_engine(small_args(model, data_parallel_size=2))
    llm = llm_over(engine)
    [output] = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16
    pids = [process.pid for process in workers_of(engine)]
    if how == "shutdown":
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(
            RuntimeError, match=r"^the engine's workers were ended by shutdown\(\)$"
        ):
            llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    else:
        del engine, llm
        gc.collect()
    assert_all_gone(pids)


@pytest.mark.sample(1, of="parallel faults")
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_the_middle_of_a_step(model, presses, seed):
    """The workers do not hear it. What they were told is done, and they go on with who comes
    next.
    """
    engine = parallel_engine(small_args(model, tensor_parallel_size=2))
    llm = llm_over(engine)

    def press() -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)

    at_run(engine, 5, press)
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outputs = llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"] * 2
    assert {len(o.outputs[0].token_ids) for o in outputs} == {6 - presses}
    assert len(answers(serve(engine, requests(seed)))) == 6, "and it goes on answering"
    llm.shutdown()


# No `if __name__ == "__main__"`, as in most scripts that use vLLM.
SCRIPT = """
from reference import LLM, SamplingParams
llm = LLM(dtype="float32", device="cpu", max_model_len=256, tensor_parallel_size=2)
print(*[process.pid for process, _ in llm.engine.runner.talk.workers.ranks], flush=True)
while True:
    llm.generate(["def f("], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    print("served", flush=True)
"""


@pytest.mark.sample(3, of="processes")
def test_a_program_that_is_killed_leaves_no_worker(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[1])
    with subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict(PYTHONPATH=root),
    ) as program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        served = program.stdout.readline()
        program.kill()
        assert served == "served\n" and len(pids) == 2, program.stderr.read()
        assert_all_gone(pids, SECONDS)
