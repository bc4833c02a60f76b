"""Proves that the async engine gives the tokens of the blocking loop, however slow its readers are,
whenever they leave, and however many there are; and that mailboxes keep the newest output and
nothing else.
"""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Full

import pytest

from lessons.l15_chunked_prefill.lab.virtual import VirtualModel, answer
from lessons.l22_serving.engine import Output, new_engine
from lessons.l22_serving.fair import by_fair_share
from lessons.l22_serving.mailbox import Bell, Mailbox
from lessons.l22_serving.naive import BlockingServer, GrowingQueue, StoppingQueue
from lessons.l22_serving.optimized import AsyncEngine, EngineDeadError


@dataclass
class Asked:
    name: str
    prompt: list[int]
    max_tokens: int
    user: str

    @property
    def wishes(self) -> dict:
        return dict(prompt=self.prompt, max_tokens=self.max_tokens, user=self.user)


def some_requests(count: int = 20) -> list[Asked]:
    return [
        Asked(
            str(at),
            random.choices(range(97), k=random.randint(1, 30)),
            random.randint(1, 20),
            random.choice("abc"),
        )
        for at in range(count)
    ]


def small_engine():
    return new_engine(VirtualModel, 9, by_fair_share, max_num_seqs=4, max_num_batched_tokens=16)


def assert_free(engine) -> None:
    blocks = engine.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks and not blocks.tables and not engine.sequences
    assert engine.scheduler.is_idle


def asked_one_by_one(requests: list[Asked]) -> dict[str, list[int]]:
    """What naive.py answers. Its clients are threads."""
    engine, answers = small_engine(), {}
    server = BlockingServer(engine)

    def client(one: Asked):
        answers[one.name] = server.ask(one.name, **one.wishes).tokens

    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    clients = [threading.Thread(target=client, args=(one,)) for one in requests]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    server.stop()
    serving.join(60)
    assert_free(engine)
    return answers


def add(engine, one: Asked) -> float:
    engine.add_request(one.name, **one.wishes)
    return 0.0


async def asked_together(served: AsyncEngine, requests: list[Asked], leaves=frozenset()) -> dict:
    """What optimized.py answers, to readers of different speeds. leaves: who reads one output."""

    async def client(one: Asked):
        stream = await served.submit(one.name, partial(add, served.engine, one))
        async for output in stream:
            if one.name in leaves:
                return stream.close()
            tokens = output.tokens
            for _ in range(random.choice([0, 0, 3])):
                await asyncio.sleep(0)
        return tokens

    found = await asyncio.gather(*map(client, requests))
    await served.drain()
    return {one.name: tokens for one, tokens in zip(requests, found)}


def test_the_same_tokens(seed):
    """The blocking loop, the async engine, and each request alone. The virtual model makes a token
    from the context and from the row, which is the request's place in the order of arrival.
    """
    requests = some_requests()
    rows = {one.name: at for at, one in enumerate(requests)}
    engine = small_engine()
    served = AsyncEngine(engine)
    together = asyncio.run(asked_together(served, requests))
    served.shutdown()
    assert_free(engine)
    alone = {one.name: answer(rows[one.name], one.prompt, one.max_tokens) for one in requests}
    assert together == alone
    for one in requests[:6]:
        (tokens,) = asked_one_by_one([one]).values()
        assert tokens == answer(0, one.prompt, one.max_tokens)
    assert {name: len(t) for name, t in asked_one_by_one(requests).items()} == {
        one.name: one.max_tokens for one in requests
    }


def test_a_reader_who_leaves_disturbs_no_other(seed):
    requests = some_requests(40)
    leaves = {one.name for one in random.sample(requests, 15)}
    engine = small_engine()
    served = AsyncEngine(engine)
    found = asyncio.run(asked_together(served, requests, leaves))
    served.shutdown()
    assert_free(engine)
    assert all(
        (found[one.name] is None) == (one.name in leaves) for one in requests if one.max_tokens > 1
    )
    for at, one in enumerate(requests):
        if one.name not in leaves:
            assert found[one.name] == answer(at, one.prompt, one.max_tokens)


def test_a_stream_that_is_dropped_is_forgotten(seed):
    engine = small_engine()
    served = AsyncEngine(engine)
    (one,) = some_requests(1)
    one.max_tokens = 20

    async def drops():
        # What it returns is kept nowhere.
        await served.submit(one.name, partial(add, engine, one))
        await served.drain()

    asyncio.run(drops())
    served.shutdown()
    assert_free(engine)


def test_an_engine_that_has_ended_answers_no_request():
    served = AsyncEngine(small_engine())
    served.shutdown()
    with pytest.raises(EngineDeadError, match="the engine has ended: shut down"):
        asyncio.run(served.submit("a", lambda: 0.0))
    assert not served.is_ready


# ---------------------------------------------------------------- mailboxes


def outputs(count: int) -> list[Output]:
    return [Output("a", list(range(at + 1)), at == count - 1) for at in range(count)]


def kept(queue) -> int:
    """Tokens in memory that were not read, after a thousand outputs."""
    for output in outputs(1000):
        queue.put(output)
    if isinstance(queue, Mailbox):
        return sum(len(output.tokens) for output in queue.newest)
    tokens = 0
    while not queue.outputs.empty():
        tokens += len(queue.get().tokens)
    return tokens


def test_a_mailbox_keeps_the_newest_and_naive_queues_grow_or_stop():
    assert kept(Mailbox()) == 1000
    assert kept(GrowingQueue()) == 500_500
    stopping = StoppingQueue(2)
    stopping.put(1), stopping.put(2)
    with pytest.raises(Full):  # where the engine's thread would wait
        stopping.outputs.put(3, timeout=0.01)


def test_no_wake_up_is_lost_however_the_threads_interleave(seed):
    """A thread puts at random moments; the reader always gets the last output."""

    async def everything():
        loop = asyncio.get_running_loop()
        bell, mailboxes = Bell(loop), [Mailbox() for _ in range(4)]
        all_outputs = outputs(60)

        def engine():
            for output in all_outputs:
                chosen = [
                    mailbox for mailbox in mailboxes if output.finished or random.random() < 0.7
                ]
                for mailbox in chosen:
                    mailbox.put(output)
                bell.ring(chosen)

        async def reader(mailbox):
            seen = [Output("", [], False)]
            while not seen[-1].finished:
                seen.append(await mailbox.get())
            lengths = [len(output.tokens) for output in seen]
            assert lengths == sorted(set(lengths))
            return seen[-1]

        thread = threading.Thread(target=engine)
        reading = [asyncio.create_task(reader(mailbox)) for mailbox in mailboxes]
        thread.start()
        found = await asyncio.wait_for(asyncio.gather(*reading), 60)
        thread.join()
        assert all(output is all_outputs[-1] for output in found)

    for _ in range(20):
        asyncio.run(everything())


def test_a_loop_that_stands_still_is_called_once():
    """However many steps ring meanwhile, its list of calls does not grow."""

    async def everything():
        loop, calls = asyncio.get_running_loop(), []
        bell, mailbox = Bell(loop), Mailbox()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), call(*args))
        for output in outputs(100):
            mailbox.put(output)
            bell.ring([mailbox])
        assert len(calls) == 1 and (await mailbox.get()).finished
        await asyncio.sleep(0)
        bell.ring([mailbox])
        assert len(calls) == 2

    asyncio.run(everything())


def test_a_closed_loop_is_no_problem():
    loop = asyncio.new_event_loop()
    bell = Bell(loop)
    loop.close()
    bell.ring([Mailbox()])
    bell.ring([Mailbox()])


# ---------------------------------------------------------------- commands


class Counting:
    """An engine of which only the steps count."""

    def __init__(self, is_busy: bool):
        self.has_unfinished_requests = is_busy
        self.steps = 0

    def step(self) -> list:
        self.steps += 1
        return []


def test_a_flood_of_commands_does_not_stop_the_steps():
    """Each command is followed by another one before it has ended. A step comes after each."""
    engine = Counting(is_busy=True)
    served, seen, over = AsyncEngine(engine), [], threading.Event()

    def command() -> None:
        seen.append(engine.steps)
        served.send(command) if len(seen) < 50 else over.set()

    served.send(command)
    assert over.wait(60)
    served.shutdown()
    assert len(set(seen)) == 50


def test_a_request_at_the_last_moment_is_answered():
    """The engine's thread has refused those who were there, and has not ended yet."""

    class Late(AsyncEngine):
        late = None

        def _refuse_all(self):
            super()._refuse_all()
            if threading.current_thread() is self.thread:
                with ThreadPoolExecutor(1) as other:
                    self.late = other.submit(self.send, lambda: None).result(60)

    served = Late(Counting(is_busy=False))
    served.shutdown()
    with pytest.raises(EngineDeadError, match="the engine has ended: shut down"):
        served.late.result(0)
