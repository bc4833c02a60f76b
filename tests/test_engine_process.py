"""The engine at the other end of a pipe: the same tokens, the same refusals, the same end; and what
happens when its process dies.
"""

import asyncio
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l20_parallelism.processes.launch import PRELOAD
from lessons.l22_serving.admission import Limits, Overloaded
from reference.engine.async_engine import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    DeadlineExceeded,
    Draining,
    EngineDeadError,
    EngineInfo,
)
from reference.engine.llm import LLM
from reference.engine.outputs import CompletionOutput, Logprob, RequestOutput
from reference.engine.process.client import WARM, AsyncProcessEngine, CoreClient
from reference.engine.process.core import Core
from reference.engine.process.messages import Outbox, Raised, with_news
from reference.engine.request import by_user
from reference.engine.sampling_params import SamplingParams
from reference.server.embeddings import embed
from tests import parallel_cases  # which says first what all processes import
from tests.engine_cases import (
    assert_clean,
    leave_at_random,
    new_engine,
    new_model,
    random_prompts,
)
from tests.paces import for_commands, step_when
from tests.server.paths import MODEL
from tests.server.soak import processes_of

PRELOAD.append(WARM)
SOON_S = 60.0  # it takes tenths on an idle machine


@pytest.fixture(scope="module")
def model():
    return new_model()


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@contextmanager
def at_a_pipe(model, limits=None, **how):
    """(a client, the AsyncLLMEngine at the other end, which is a thread of this process). At the
    end everything is free.
    """
    engine = new_engine(model, how.pop("num_blocks", 60), 4, cache=HashBlocks, **how)
    served = AsyncLLMEngine(engine, limits)
    near, far = Pipe()
    core = Core(served, far)

    def serve():
        core.serve()
        far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    client = CoreClient(near, None, EngineInfo.of(engine))
    try:
        yield client, served
    finally:
        client.shutdown()
        thread.join(SOON_S)
    assert not thread.is_alive() and not client.thread.is_alive()
    assert_clean(engine)
    assert not served.waiters and not client.readers and not client.replies


async def read(stream) -> list[list[int]]:
    return [output.outputs[0].token_ids async for output in stream]


# ---------------------------------------------------------------- what is sent


def longer(answer: CompletionOutput, is_last: bool) -> CompletionOutput:
    """The same answer, some tokens later."""
    new = [random.randrange(1000) for _ in range(random.randint(0, 3))]
    text = answer.text + "".join(random.choice("aé€ ") for _ in new)
    if answer.logprobs is None:
        logprobs = None
    else:
        logprobs = answer.logprobs + [{token: Logprob(-random.random(), 1)} for token in new]
    reason = random.choice([None, "stop"]) if not is_last else "length"
    total = None if logprobs is None else random.random()
    ids = answer.token_ids + new
    return CompletionOutput(
        answer.index, text, ids, total, logprobs, reason, "x" if reason else None
    )


def test_the_other_side_has_every_output_again(seed):
    """Of several answers, with and without logprobs, and of outputs that were never told."""
    for _ in range(20):
        scored, count = random.random() < 0.5, random.randint(1, 3)
        answers = [
            CompletionOutput(at, "", [], None, [] if scored else None) for at in range(count)
        ]
        output = RequestOutput("a", None, [1, 2], answers, False)
        box, told = Outbox(7, whole=False), None
        for step in range(12):
            is_last = step == 11
            answers = [longer(one, is_last) for one in output.outputs]
            output = RequestOutput("a", None, [1, 2], answers, is_last)
            box.put(output)
            if random.random() < 0.3 and not is_last:
                continue  # a newer one comes before the reader is woken
            number, news = box.change()
            told = news if isinstance(news, RequestOutput) else with_news(told, news)
            assert number == 7 and told == output


def test_only_what_is_new_is_sent():
    box = Outbox(0, whole=False)
    sent = 0
    for count in range(1, 400):
        answer = CompletionOutput(0, "x" * count, list(range(count)))
        box.put(RequestOutput("a", None, [1], [answer], False))
        _, news = box.change()
        sent += len((news.outputs if isinstance(news, RequestOutput) else news)[0].token_ids)
    assert sent == 399


def test_exceptions_are_the_same_on_the_other_side():
    """Draining takes no arguments, and Overloaded keeps a number."""
    for error in (Draining(), Overloaded("the queue is full", 7), ValueError("n: got 0")):
        again = pickle.loads(pickle.dumps(Raised.of(error))).error()
        assert type(again) is type(error) and str(again) == str(error)
        assert vars(again) == vars(error)


# ---------------------------------------------------------------- the interface


def test_the_same_tokens_as_without_a_pipe(model, seed):
    prompts = random_prompts(12, shared=9)
    engine = new_engine(model, 60, 4, cache=HashBlocks)
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, params(9))
    alone = {}
    while engine.has_unfinished_requests:
        alone |= {one.request_id: one.outputs[0].token_ids for one in engine.step()}
    with at_a_pipe(model, num_blocks=20, max_num_seqs=4) as (client, served):
        steps = []
        client.observers.append(steps.append)

        async def everything():
            streams = [
                await client.add_request(str(at), prompt, params(9))
                for at, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*map(read, streams))

        for at, outputs in enumerate(asyncio.run(everything())):
            assert outputs[-1] == alone[str(at)]
            assert [len(tokens) for tokens in outputs] == sorted({len(t) for t in outputs})
        stats = client.stats()
        assert stats == served.stats() and stats.generation_tokens == 9 * 12
        assert not client.readers and not client.replies
        assert sum(step.num_generation_tokens for step in steps) == 9 * 12
        assert sum(len(step.finished_requests) for step in steps) == 12


def test_disconnects_at_random_moments_leak_nothing(model, seed):
    prompts = random_prompts(12)
    with at_a_pipe(model, num_blocks=20, max_num_seqs=4, order=by_user) as (client, _):

        async def one(at):
            answer = client.generate(
                random.choice(prompts), params(12), str(at % 100), user=random.choice("ab")
            )
            async for _ in answer:
                pass

        async def everything():
            found = await leave_at_random(one)
            others = {type(one) for one in found} - {type(None), asyncio.CancelledError}
            assert others <= {ValueError}, "two of one name, and nothing else"
            await client.drain()
            assert not client.readers, "no reader waits, and one is remembered"

        asyncio.run(everything())


class Collects:
    """A pipe's end at which garbage is collected whenever something is sent."""

    def __init__(self, pipe):
        self.pipe = pipe

    def send_bytes(self, message):
        gc.collect()
        self.pipe.send_bytes(message)

    def __getattr__(self, name):
        return getattr(self.pipe, name)


def test_a_dropped_stream_is_heard_wherever_it_is_collected(model):
    """Also by the thread that is sending something just then: it does not wait for itself."""
    with at_a_pipe(model) as (client, served):
        is_open = for_commands(served)

        async def everything():
            dropped = [await client.add_request("dropped", [1, 2], params(60))]
            dropped.append(dropped)  # a circle, which only the collector finds
            client.pipe = Collects(client.pipe)
            del dropped
            other = await client.add_request("other", [1], params(2))
            is_open.set()
            assert len((await read(other))[-1]) == 2
            client.pipe = client.pipe.pipe
            while client.readers:
                await asyncio.sleep(0.001)
            assert await client.drain() == 0
            assert client.stats().generation_tokens < 60

        gc.collect()
        gc.disable()  # or it may be found sooner
        try:
            asyncio.run(asyncio.wait_for(everything(), SOON_S))
        finally:
            gc.enable()


def test_refusals_are_those_of_the_engine(model):
    with at_a_pipe(model, Limits(max_waiting_requests=0), max_num_seqs=1) as (client, served):
        is_open = for_commands(served)

        async def everything():
            for wishes in (dict(prompt=[]), dict(prompt=[1], timeout_s=0), dict(prompt=[99])):
                with pytest.raises(ValueError, match="got") as error:
                    await client.add_request("a", sampling_params=params(2), **wishes)
                assert "\n" not in str(error.value)
            first = await client.add_request("first", [1, 2], params(40))
            with pytest.raises(Overloaded) as refused:
                await client.add_request("more", [1], params(2))
            assert not isinstance(refused.value, Draining) and refused.value.retry_after_s >= 1
            with pytest.raises(ValueError, match="in use"):
                await client.add_request("first", [1, 2], params(4))
            assert client.stats().num_refused == 1
            client._send("forget", 10**6, "first")  # as a refused reader does when cancelled
            is_open.set()
            assert len((await read(first))[-1]) == 40, "a namesake that is refused ends no other"
            served.clock = lambda: time.monotonic() + 10**6
            with pytest.raises(DeadlineExceeded):
                await read(await client.add_request("late", [1], params(2), timeout_s=1))
            assert client.stats().num_timeouts == 1
            assert await client.drain() == 0 and not client.is_ready
            with pytest.raises(Draining):
                await client.add_request("b", [1], params(2))

        asyncio.run(everything())


def test_who_gives_up_before_the_reply_is_computed_no_further(model):
    with at_a_pipe(model) as (client, served):
        for_commands(served)

        async def everything():
            task = asyncio.create_task(client.add_request("a", [5, 6], params(60)))
            await asyncio.sleep(0)
            while not served.waiters:
                time.sleep(0.0005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.drain()

        asyncio.run(everything())
        assert client.stats().num_aborted == 1


def test_answers_that_change_places_are_told_whole(model, seed):
    """Of best_of answers the likeliest n are told, and which these are changes from step to
    step.
    """
    best = SamplingParams(
        temperature=1, seed=3, n=2, best_of=6, max_tokens=12, ignore_eos=True, detokenize=False
    )
    with at_a_pipe(model) as (client, served):
        step, made, told = served.step, [], []

        def noted_step():
            outputs = step()
            made.extend([one.token_ids for one in output.outputs] for output in outputs)
            return outputs

        served.step = noted_step
        step_when(served, lambda: len(told) == len(made))

        async def everything():
            async for output in client.generate([5, 6], best, "a"):
                told.append([one.token_ids for one in output.outputs])

        asyncio.run(everything())
        assert len(told) > 2 and told == made


def test_draining_does_not_wait_for_ever(model):
    with at_a_pipe(model) as (client, served):
        advance = served.engine.advance
        served.engine.advance = lambda: (time.sleep(0.02), advance())[1]

        async def everything():
            stream = await client.add_request("a", [7], params(60))
            return await client.drain(timeout_s=0.05), (await read(stream))[-1]

        aborted, tokens = asyncio.run(everything())
        assert aborted == 1 and len(tokens) < 60
        assert client.stats().num_aborted == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_raises_is_told_to_every_reader(model, waits):
    """waits: whether a reader does in the engine's process, when its step raises."""
    engine = new_engine(model, 30, 4)
    served = AsyncLLMEngine(engine)
    near, far = Pipe()
    threading.Thread(target=Core(served, far).serve, daemon=True).start()
    client = CoreClient(near, None, EngineInfo.of(engine))
    advance = engine.advance

    def step():
        if not engine.requests["a"].sequences[0].output:
            return advance()
        if not waits:
            served.waiters.clear()
        return 1 / 0

    engine.advance = step

    async def everything():
        stream = await client.add_request("a", [7], params(4))
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await asyncio.wait_for(read(stream), SOON_S)
        while client.failure is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError):
            await client.add_request("b", [7], params(4))

    asyncio.run(everything())
    assert not client.is_ready


# ---------------------------------------------------------------- a process


WISHES = [
    dict(max_tokens=24),
    dict(max_tokens=24, temperature=1, seed=5, n=3, logprobs=2),
    dict(max_tokens=16, temperature=1, seed=6, n=1, best_of=3),
    dict(max_tokens=40, stop=["\n"], prompt_logprobs=1),
    dict(max_tokens=30, structured_outputs=dict(regex="[a-z]{3,9} = [0-9]+")),
]


def all_wishes() -> list[SamplingParams]:
    return [SamplingParams(**{"temperature": 0, **wish}) for wish in WISHES]


def test_a_process_answers_as_the_engine_does_and_its_death_is_told():
    """One test, because a process takes seconds to start."""
    args = AsyncEngineArgs(MODEL, kv_cache_memory_bytes=20_000_000, max_model_len=256)
    llm = LLM(MODEL, kv_cache_memory_bytes=20_000_000, max_model_len=256)
    offline = llm.generate(["def f("] * len(WISHES), all_wishes(), use_tqdm=False)
    engine = AsyncProcessEngine(args)

    async def last_of(name, wish):
        return [output async for output in engine.generate("def f(", wish, name)][-1]

    async def same():
        for wish in all_wishes():
            if wish.structure is not None:
                await engine.prepare(wish.structure)
        tasks = [last_of(str(at), wish) for at, wish in enumerate(all_wishes())]
        for told, alone in zip(await asyncio.gather(*tasks), offline):
            assert [one.token_ids for one in told.outputs] == [o.token_ids for o in alone.outputs]
            assert [one.text for one in told.outputs] == [o.text for o in alone.outputs]
            assert (told.prompt_logprobs is None) == (alone.prompt_logprobs is None)
        assert await engine.call(number_of_blocks) == llm.engine.scheduler.blocks.num_blocks
        vector = await engine.call(embed, [5, 6, 7])
        assert vector == pytest.approx(embed(llm.engine, [5, 6, 7]))
        with pytest.raises(ZeroDivisionError):
            await engine.call(divide, 0)

    async def dies():
        stream = await engine.add_request("a", "def f(", SamplingParams(max_tokens=250))
        os.kill(engine.process.pid, signal.SIGTERM)  # which is for the server to obey
        await stream.__anext__()
        os.kill(engine.process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"its process died \(signal 9\)"):
            await read(stream)
        assert time.monotonic() - begin < SOON_S
        with pytest.raises(EngineDeadError):
            await engine.add_request("b", "x", SamplingParams())

    try:
        asyncio.run(same())
        assert engine.stats().kv_cache_usage == 0 and engine.is_ready
        asyncio.run(dies())
        assert not engine.is_ready and engine.failure is not None
    finally:
        engine.shutdown()
    assert not engine.process.is_alive()


WAYS = [
    dict(tensor_parallel_size=2),
    dict(pipeline_parallel_size=2),
    dict(data_parallel_size=2),
    dict(speculative_config=dict(method="ngram", num_speculative_tokens=3)),
]


@pytest.mark.sample(1, of="ends of the server")
@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: processes are found in /proc")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "".join(way))
def test_a_model_in_workers_and_one_that_speculates(way):
    """The same tokens; and when the engine's process dies, its workers do."""
    size = dict(kv_cache_memory_bytes=20_000_000, max_model_len=256)
    prompts, wish = ["def f(", "import os\n", "x = "], SamplingParams(temperature=0, max_tokens=20)
    offline = LLM(MODEL, **size).generate(prompts, wish, use_tqdm=False)
    engine = AsyncProcessEngine(AsyncEngineArgs.read(model=MODEL, **size, **way))

    async def last_of(prompt):
        return [output async for output in engine.generate(prompt, wish, prompt)][-1]

    async def everything():
        return await asyncio.gather(*map(last_of, prompts))

    try:
        for told, alone in zip(asyncio.run(everything()), offline):
            assert told.outputs[0].token_ids == alone.outputs[0].token_ids
        family = processes_of(engine.process.pid)
        assert len(family) > 2 or "speculative_config" in way
        engine.kill()
        parallel_cases.assert_all_gone(family)
    finally:
        engine.shutdown()


def number_of_blocks(engine) -> int:
    return engine.scheduler.blocks.num_free


def divide(engine, number: int) -> float:
    return 1 / number


def test_arguments_that_cannot_work_are_one_line(tmp_path):
    begin = time.monotonic()
    for args in (AsyncEngineArgs(str(tmp_path)), AsyncEngineArgs(MODEL, max_model_len=10**9)):
        with pytest.raises(ValueError, match=r"config.json|max_model_len") as error:
            AsyncProcessEngine(args)
        assert "\n" not in str(error.value)
    assert time.monotonic() - begin < SOON_S
