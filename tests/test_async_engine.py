"""The engine of an event loop: whom it turns away, what it drops, how it ends, and what it
counts.
"""

import asyncio
import random
import time
from contextlib import contextmanager

import pytest

from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l22_serving.admission import Limits, Overloaded
from reference.engine.async_engine import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    DeadlineExceeded,
    Draining,
    EngineDeadError,
)
from reference.engine.request import by_priority, by_user
from reference.engine.sampling_params import SamplingParams
from tests.engine_cases import (
    assert_clean,
    leave_at_random,
    new_engine,
    new_model,
    random_prompts,
)
from tests.paces import Gate


@pytest.fixture(scope="module")
def model():
    return new_model()


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@contextmanager
def serving(model, limits=None, gated=False, clock=None, num_blocks=60, **how):
    """(the async engine, its gate). At the end everything is free, however it was used."""
    engine = new_engine(model, num_blocks, 4, cache=HashBlocks, **how)
    served = AsyncLLMEngine(engine, limits)
    gate = Gate(served)
    if not gated:
        gate.let_all()
    served.clock = clock or served.clock
    try:
        yield served, gate
    finally:
        gate.let_all()
        served.shutdown()
    assert_clean(engine)
    assert not served.waiters and not served.counter.seen
    lines = {} if engine.fair is None else engine.fair.lines
    assert not any(line.tickets for line in lines.values())


async def read(stream) -> list[list[int]]:
    return [output.outputs[0].token_ids async for output in stream]


def test_a_request_too_many_for_the_queue_is_turned_away_at_once(model):
    with serving(model, Limits(max_waiting_requests=1), gated=True, max_num_seqs=1) as (
        served,
        gate,
    ):

        async def everything():
            first = await served.add_request("first", [1, 2], params(3))
            waits = asyncio.create_task(served.add_request("waits", [3], params(2)))
            refused = asyncio.create_task(served.add_request("refused", [4], params(2)))
            await asyncio.sleep(0)  # now both are among the commands
            gate.let_all()
            with pytest.raises(Overloaded) as error:
                await refused
            assert not isinstance(error.value, Draining)
            assert 1 <= error.value.retry_after_s <= 60
            assert "max_waiting_requests" in str(error.value) and "\n" not in str(error.value)
            assert len((await read(first))[-1]) == 3 and len((await read(await waits))[-1]) == 2
            # a name that was refused is free
            assert await read(await served.add_request("refused", [4], params(1)))

        asyncio.run(everything())
        assert served.stats().num_refused == 1


def test_a_mistake_is_no_overload(model):
    with serving(model, Limits(max_waiting_requests=0)) as (served, _):
        for wishes in (dict(prompt=[]), dict(prompt=[1], timeout_s=0), dict(prompt=[1], user=7)):
            with pytest.raises(ValueError, match="got") as error:
                asyncio.run(served.add_request("a", sampling_params=params(2), **wishes))
            assert "\n" not in str(error.value)
        assert served.stats().num_refused == 0


def test_what_cannot_come_in_time_is_dropped(model):
    now = [0.0]
    with serving(model, gated=True, clock=lambda: now[0], max_num_seqs=1) as (served, gate):

        async def everything():
            running = await served.add_request("running", [1, 2], params(30), timeout_s=10)
            adding = [
                asyncio.create_task(served.add_request(name, [3], params(30), timeout_s=limit))
                for name, limit in (("waits", 5), ("patient", 100), ("for ever", None))
            ]
            await asyncio.sleep(0)
            gate.passes.release()
            waits, patient, for_ever = [await task for task in adding]
            now[0] = 6.0
            gate.passes.release()
            with pytest.raises(DeadlineExceeded, match="waits"):
                await read(waits)
            assert not (await anext_of(running)).finished
            now[0] = 10.0
            gate.let_all()
            with pytest.raises(DeadlineExceeded, match="running"):
                await read(running)
            assert [len((await read(s))[-1]) for s in (patient, for_ever)] == [30, 30]

        asyncio.run(everything())
        stats = served.stats()
        assert (stats.num_timeouts, stats.num_aborted) == (2, 0)


def test_what_would_end_too_late_is_not_begun(model):
    """A step has taken 5 s lately, so 30 tokens take 150: after 250 of 400 s it is too late to
    begin.
    """
    now = [0.0]
    with serving(model, gated=True, clock=lambda: now[0], max_num_seqs=1) as (served, gate):
        served.rate.ran(1, 10.0)  # and one that takes no time follows

        async def everything():
            running = await served.add_request("running", [1, 2], params(3))
            adding = [
                asyncio.create_task(served.add_request(name, [3], params(30), timeout_s=limit))
                for name, limit in (("hopeless", 140), ("waits", 400))
            ]
            await asyncio.sleep(0)
            gate.passes.release()
            with pytest.raises(Overloaded, match="timeout"):
                await adding[0]
            waits = await adding[1]
            now[0] = 300.0
            gate.passes.release()
            with pytest.raises(DeadlineExceeded, match="waits"):
                await read(waits)
            gate.let_all()
            assert len((await read(running))[-1]) == 3

        asyncio.run(everything())


def test_a_namesake_that_is_refused_ends_no_other(model):
    """Cancelled when it was refused already, and not told so yet."""
    with serving(model, gated=True) as (served, gate):

        async def everything():
            stream = await served.add_request("a", [1, 2], params(9))
            task = asyncio.create_task(served.add_request("a", [1, 2], params(9)))
            await asyncio.sleep(0)
            gate.passes.release()
            while not served.commands.empty():
                time.sleep(0.0005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            gate.let_all()
            assert len((await read(stream))[-1]) == 9

        asyncio.run(everything())
        assert served.stats().num_aborted == 0


async def anext_of(stream):
    return await stream.__anext__()


def test_who_reads_slowly_skips_outputs_and_misses_no_token(model):
    with serving(model) as (served, _):

        async def everything():
            slow = await served.add_request("slow", [5, 6], params(40))
            fast = await served.add_request("fast", [5, 6], params(40))
            steps = await read(fast)
            while served.waiters:
                await asyncio.sleep(0)
            assert len(slow.mailbox.newest) == 1, "more than the newest is kept"
            (only,) = await read(slow)
            assert only == steps[-1] and len(only) == 40

        asyncio.run(everything())


async def is_forgotten(served, gate):
    """A step has to end before the engine hears that a reader left."""
    while served.engine.requests:
        gate.passes.release()
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("leave", ["close", "drop", "break", "cancel"])
def test_who_leaves_is_computed_no_further(model, leave):
    with serving(model, gated=True) as (served, gate):

        async def breaks():
            async for _ in served.generate([5, 6], params(40), "a"):
                break

        async def everything():
            if leave == "break":
                task = asyncio.create_task(breaks())
                while not served.waiters:
                    await asyncio.sleep(0)
                gate.passes.release()
                await task
            elif leave == "cancel":  # when the engine has it, and this loop has not heard of it
                task = asyncio.create_task(served.add_request("a", [5, 6], params(40)))
                await asyncio.sleep(0)
                while not served.waiters:
                    time.sleep(0.0005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                stream = await served.add_request("a", [5, 6], params(40))
                if leave == "close":
                    stream.close()
                del stream
            await asyncio.wait_for(is_forgotten(served, gate), 60)
            assert gate.steps < 30, "it was computed to its end"

        asyncio.run(everything())
        assert served.stats().num_aborted == 1


def test_draining_lets_every_request_finish_and_none_in(model):
    with serving(model, gated=True, max_num_seqs=1) as (served, gate):

        async def everything():
            assert served.is_ready
            streams = [await served.add_request("0", [7], params(5))]
            more = [asyncio.create_task(served.add_request(i, [7], params(5))) for i in "12"]
            await asyncio.sleep(0)
            gate.passes.release()
            streams += [await task for task in more]
            draining = asyncio.create_task(served.drain())
            await asyncio.sleep(0)
            gate.let_all()
            found = await asyncio.gather(*map(read, streams))
            assert await draining == 0 and not served.is_ready
            with pytest.raises(Draining):
                await served.add_request("late", [7], params(5))
            assert [len(steps[-1]) for steps in found] == [5] * 3
            assert await served.drain() == 0

        asyncio.run(everything())


def test_draining_does_not_wait_for_ever(model):
    with serving(model, gated=True, max_num_seqs=1) as (served, gate):

        async def everything():
            stream = await served.add_request("a", [7], params(40))
            draining = asyncio.create_task(served.drain(timeout_s=0.001))
            await asyncio.sleep(0)
            gate.passes.release()
            while served.drained is None:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            gate.passes.release()
            assert await draining == 1
            return (await read(stream))[-1], [o async for o in stream]

        tokens, after = asyncio.run(everything())
        assert len(tokens) < 40 and not after
        assert served.stats().num_aborted == 1


def test_a_step_that_raises_is_told_to_every_reader(model):
    engine = new_engine(model, 30, 4, max_num_seqs=1)
    served = AsyncLLMEngine(engine)
    gate = Gate(served)
    gate.step = lambda: 1 / 0

    async def everything():
        stream = await served.add_request("a", [7], params(4))
        draining = asyncio.create_task(served.drain())
        await asyncio.sleep(0)
        gate.let_all()
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await read(stream)
        await asyncio.gather(draining, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            await served.add_request("b", [7], params(4))

    asyncio.run(everything())
    assert not served.is_ready


def test_who_waits_for_a_drain_is_told_when_the_engine_dies(model):
    engine = new_engine(model, 30, 4, max_num_seqs=1)
    served = AsyncLLMEngine(engine)
    gate = Gate(served)

    async def everything():
        stream = await served.add_request("a", [7], params(4))
        draining = asyncio.create_task(served.drain())
        await asyncio.sleep(0)
        gate.passes.release()
        while served.drained is None:
            await asyncio.sleep(0)
        gate.step = lambda: 1 / 0
        gate.let_all()
        with pytest.raises(EngineDeadError):
            await read(stream)
        await asyncio.wait_for(draining, 60)

    asyncio.run(everything())


@pytest.mark.parametrize("order, place", [(by_user, 1), (by_priority, 5)])
def test_a_user_with_one_request_does_not_wait_for_anothers_many(model, order, place):
    """place: of the one request among the answers, 0 is the first."""
    with serving(model, gated=True, max_num_seqs=1, order=order) as (served, gate):
        done = []

        def noted():
            outputs = step()
            done.extend(output.request_id for output in outputs if output.finished)
            return outputs

        step, gate.step = gate.step, noted

        async def everything():
            async def one(request_id, user):
                await read(await served.add_request(request_id, [3, 4], params(6), user=user))

            tasks = [asyncio.create_task(one(f"greedy {i}", "greedy")) for i in range(5)]
            tasks.append(asyncio.create_task(one("modest", "modest")))
            await asyncio.sleep(0)
            gate.let_all()
            await asyncio.gather(*tasks)

        asyncio.run(everything())
        assert done.index("modest") == place


def test_what_a_request_did_not_use_brings_its_users_next_one_forward(model):
    """Users a and b, two requests each, in the order a b b a: a's second is laid out after 42
    tokens of her first. That is aborted before it runs, so a's second takes its turn.
    """
    engine = new_engine(model, 60, 4, max_num_seqs=1, order=by_user)
    for name, tokens in (("a1", 40), ("a2", 40), ("b1", 10), ("b2", 10)):
        engine.add_request(name, [1, 2], params(tokens), user=name[0])
    assert [s.request.request_id for s in engine.scheduler.waiting] == ["a1", "b1", "b2", "a2"]
    engine.abort_request("a1")
    done = []
    while engine.has_unfinished_requests:
        done += [output.request_id for output in engine.step() if output.finished]
    assert done == ["a2", "b1", "b2"]
    assert_clean(engine)


def test_a_newcomer_starts_where_the_engine_stands(model):
    engine = new_engine(model, 60, 4, max_num_seqs=2, order=by_user)
    for at in range(4):
        engine.add_request(f"early {at}", [1, 2], params(8), user="early")
    engine.step()
    engine.add_request("late", [1, 2], params(8), user="late")
    assert engine.requests["late"].ticket.start == 10
    first = engine.scheduler.waiting[0]
    assert first.request.request_id == "late"


@pytest.mark.parametrize("num_blocks", [14, 60])
def test_the_counts_are_those_of_the_outputs(model, seed, num_blocks):
    """Of requests that preempt each other, share prefixes, and leave at random moments."""
    prompts = random_prompts(24, shared=9)
    with serving(model, num_blocks=num_blocks, max_num_seqs=6, order=by_user) as (served, _):
        steps, got, preempted = [], {}, []
        preempt = served.engine.scheduler.preempt
        served.engine.scheduler.preempt = lambda *args: (preempted.append(args), preempt(*args))
        served.counter.observers.append(steps.append)

        async def one(at):
            stream = await served.add_request(str(at), prompts[at], params(9), user=str(at % 3))
            leaves_after = random.choice([None, None, random.randint(0, 8)])
            async for output in stream:
                got[at] = output
                if leaves_after is not None and len(output.outputs[0].token_ids) > leaves_after:
                    stream.close()
                    stream.close()
                    break

        async def everything():
            await asyncio.gather(*(one(at) for at in range(len(prompts))))
            await served.drain()

        asyncio.run(everything())
        stats = served.stats()
        ended = [request for step in steps for request in step.finished_requests]
        assert len(ended) == len(prompts) and stats.num_waiting == stats.num_running == 0
        assert stats.kv_cache_usage == 0
        assert stats.num_aborted == sum(one.finish_reason == "abort" for one in ended)
        assert stats.generation_tokens == sum(one.num_generation_tokens for one in ended)
        assert stats.generation_tokens == sum(step.num_generation_tokens for step in steps)
        began = sum(len(step.time_to_first_tokens_s) for step in steps)
        assert began == len(prompts)
        assert stats.prompt_tokens == sum(map(len, prompts)) == stats.prefix_cache_queries
        hits = sum(output.num_cached_tokens for output in got.values())
        assert stats.prefix_cache_hits == hits
        assert stats.num_preemptions == len(preempted)
        assert bool(preempted) == (num_blocks == 14)
        whole = [one for one in ended if one.finish_reason == "length"]
        assert all(one.num_generation_tokens == 9 for one in whole)
        for one in ended:
            parts = one.queued_s + one.prefill_s + one.decode_s
            assert (
                parts == pytest.approx(one.e2e_latency_s) and min(one.queued_s, one.prefill_s) >= 0
            )
            assert one.inference_s == pytest.approx(one.prefill_s + one.decode_s)


def test_disconnects_at_random_moments_leak_nothing(model, seed):
    prompts = random_prompts(12)
    with serving(model, num_blocks=20, max_num_seqs=4, order=by_user) as (served, _):

        async def one(at):
            answer = served.generate(
                random.choice(prompts), params(12), str(at), user=random.choice("ab")
            )
            async for _ in answer:
                pass

        async def everything():
            await leave_at_random(one)
            await served.drain()

        asyncio.run(everything())


def test_arguments_of_admission_are_checked():
    assert AsyncEngineArgs(max_waiting_requests=0, max_wait_s=0.5).limits == Limits(
        max_waiting_requests=0, max_wait_s=0.5
    )
    for name, wrong in (
        ("max_waiting_requests", -1),
        ("max_waiting_tokens", 1.5),
        ("max_waiting_per_user", True),
        ("max_wait_s", 0),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got {wrong}; accepted: None, or") as error:
            AsyncEngineArgs.read(**{name: wrong})
        assert "\n" not in str(error.value)
