"""The work of every route is bounded, shared between users, and ends when its client goes."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from reference.server import chat
from reference.server.routes import completions, tokens
from reference.server.turns import Turns
from tests.server.live import ask, beside
from tests.server.test_limits import head

TEXTS = ["def f("] * 300
USER = {"role": "user", "content": "def f("}
READING = {
    "/v1/completions": dict(prompt="x", max_tokens=1),
    "/v1/chat/completions": dict(messages=[USER], max_tokens=1),
    "/v1/responses": dict(input="x", max_output_tokens=1),
    "/v1/messages": dict(messages=[USER], max_tokens=1),
    "/v1/messages/count_tokens": dict(messages=[USER]),
    "/v1/embeddings": dict(input="x"),
    "/tokenize": dict(prompt="x"),
    "/generate": dict(prompt="x", max_tokens=1),
    "/generate_stream": dict(inputs="x", parameters=dict(max_new_tokens=1)),
    "/": dict(inputs="x", parameters=dict(max_new_tokens=1)),
}


def sent(live, path: str, body: dict) -> socket.socket:
    """A request under way, on a connection of its own."""
    data = json.dumps(body).encode()
    wire = socket.create_connection(live.socket.getsockname(), timeout=60)
    wire.sendall(head(path, len(data)) + data)
    return wire


class Slow:
    """Reads no text and waits until it is cancelled."""

    def __init__(self):
        self.begun, self.cancelled = threading.Event(), threading.Event()

    async def __call__(self, *_):
        self.begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize("path", READING)
def test_reading_ends_with_its_client(live, path, monkeypatch):
    slow = Slow()
    for module in (chat, completions, tokens):
        monkeypatch.setattr(module, "encode", slow)
    wire = sent(live, path, READING[path])
    assert slow.begun.wait(60) and not slow.cancelled.is_set()
    wire.close()
    assert slow.cancelled.wait(60), "the client has gone, and the work goes on"


def test_detokenizing_ends_with_its_client(live, monkeypatch):
    """Long lists wait for a place among the readers."""
    service, held = live.service, threading.Event()
    waiting = Slow()

    class Places:
        async def __aenter__(self):
            held.set()
            await waiting()

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(service, "reading", Places())
    wire = sent(live, "/detokenize", dict(tokens=[300] * 5000))
    assert held.wait(60)
    wire.close()
    assert waiting.cancelled.wait(60)


def counted(monkeypatch, seconds: float = 0.02) -> list[int]:
    """How many tokens each text had that was embedded, each in so many seconds."""
    found = []

    def embed(_, ids):
        found.append(len(ids))
        time.sleep(seconds)
        return [float(len(ids))]

    monkeypatch.setattr(tokens, "embed", embed)
    return found


def test_embedding_ends_with_its_client(live, monkeypatch):
    found = counted(monkeypatch)
    wire = sent(live, "/v1/embeddings", dict(input=TEXTS))
    while len(found) < 3:
        time.sleep(0.01)
    wire.close()
    count = 0
    while count < len(found):  # the server hears of it when its loop comes round
        count = len(found)
        time.sleep(0.3)
    assert count < len(TEXTS)
    assert live.post("/v1/embeddings", dict(input="x")).status_code == 200, "and the turn is free"


def test_users_take_turns_at_embedding(live, monkeypatch):
    found = counted(monkeypatch)

    async def both() -> int:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            many = [
                asyncio.create_task(
                    client.post("/v1/embeddings", json=dict(input=TEXTS, user="many"))
                )
                for _ in range(5)
            ]
            while len(found) < 10:
                await asyncio.sleep(0.01)
            other = [TEXTS[0] * 9] * 4
            few = await client.post("/v1/embeddings", json=dict(input=other, user="few"))
            assert few.status_code == 200
            mine = [at for at, tokens in enumerate(found) if tokens > found[0]]
            assert len(mine) == 4
            passed = mine[-1] + 1 - mine[0]
            for task in many:
                task.cancel()
            await asyncio.gather(*many, return_exceptions=True)
            return passed

    assert asyncio.run(both()) <= 10, "between two texts of one user at most two of the other"


def test_late_vectors_are_not_waited_for(running, monkeypatch):
    counted(monkeypatch)
    own = dict(request_timeout=0.1)
    answer = ask(running.service, "POST", "/v1/embeddings", own, json=dict(input=TEXTS))
    assert answer.status_code == 504 and "--request-timeout" in answer.text


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("/v1/embeddings", dict(input=["x"] * 2049), "input: got '2049 of them'"),
        ("/v1/completions", dict(prompt=["x"] * 2049), "prompt: got '2049 of them'"),
        ("/v1/completions", dict(prompt=[[9] * 500] * 100, max_tokens=1, prompt_logprobs=5),
            "prompt_logprobs: got 5; accepted: at most 3 for 50000 tokens"),
        ("/v1/completions", dict(prompt=[[9] * 500] * 100, max_tokens=1, echo=True, logprobs=5),
            "prompt_logprobs: got 5; accepted: at most 3 for 50000 tokens"),
        ("/v1/embeddings", dict(input=[[9] * 500] * 601), "input: got '300500 tokens'"),
    ],
)  # fmt: skip
def test_work_in_all_is_bounded(running, path, body, said):
    own = dict(max_body_bytes=2**22)
    answer = ask(running.service, "POST", path, own, json=body)
    assert answer.status_code == 400 and said in answer.text, answer.text


def test_between_two_texts_others_have_their_turn(running):
    """1030 texts are read before their number is refused, and meanwhile the loop comes round."""

    async def turns() -> int:
        async with beside(running.service) as client:
            body = dict(prompt=["def f("] * 1030, max_tokens=1)
            post, count = asyncio.create_task(client.post("/v1/completions", json=body)), 0
            while not post.done():
                await asyncio.sleep(0)
                count += 1
            assert post.result().status_code == 400
            return count

    assert asyncio.run(turns()) > 900


# ---------------------------------------------------------------- turns


def order_of(users: str, leaving: tuple[int, ...] = ()) -> str:
    """Who had a turn, in order, where all wait from the start. leaving: those who go before."""

    async def run() -> str:
        turns, had = Turns(), []

        async def one(user: str) -> None:
            async with turns.turn(user):
                await asyncio.sleep(0)
                had.append(user)

        async with turns.turn("first"):
            waiting = [asyncio.create_task(one(user)) for user in users]
            await asyncio.sleep(0)
            for at in leaving:
                waiting[at].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not turns.is_busy and not turns.waiting
        return "".join(had)

    return asyncio.run(run())


def test_turns_go_round():
    assert order_of("aaaabbc") == "abcabaa"
    assert order_of("") == ""


def test_who_asks_again_after_each_turn_gets_every_second():
    async def run() -> str:
        turns, had = Turns(), []

        async def each(user: str, count: int) -> None:
            for _ in range(count):
                async with turns.turn(user):
                    had.append(user)
                    for _ in range(3):  # who has had a turn is back before the next has ended
                        await asyncio.sleep(0)

        many = [each("a", 1) for _ in range(8)]
        await asyncio.gather(*many, each("b", 4))
        return "".join(had)

    assert asyncio.run(run()) == "ababababaaaa"


def test_those_who_leave_have_no_turn():
    assert order_of("aaab", leaving=(1, 2)) == "ab"
    assert order_of("ab", leaving=(0, 1)) == ""


def test_a_turn_passes_on_from_who_fails_and_who_leaves_as_it_is_called():
    async def run() -> None:
        turns = Turns()
        with contextlib.suppress(ValueError):
            async with turns.turn("a"):
                raise ValueError
        async with turns.turn("a"):
            waiting = asyncio.create_task(turns.turn("b").__aenter__())
            third = asyncio.create_task(turns.turn("c").__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()  # its future is done, and it has not run yet
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(third, 60)

    asyncio.run(run())
