"""Clients that go, or that are slow: what they asked for ends, and its blocks are free."""

import asyncio
import json
import random
import socket
import sys
import time
from contextlib import suppress

import httpx
import pytest

from lessons.l22_serving.admission import Limits
from tests.engine_cases import assert_clean
from tests.server.live import Live, events, second

LONG = dict(prompt="def f(", max_tokens=400, temperature=0, ignore_eos=True)
KINDS = [
    ("/v1/completions", LONG),
    ("/v1/completions", LONG | dict(stream=True)),
    ("/v1/completions", LONG | dict(stream=True, n=3, temperature=1, prompt=["a", "b"])),
    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "x"}], stream=True)),
    ("/v1/responses", dict(input="x", stream=True)),
    ("/v1/messages", dict(messages=[{"role": "user", "content": "x"}], max_tokens=400)),
    ("/generate_stream", dict(inputs="x", parameters=dict(max_new_tokens=400))),
]


async def leave(client: httpx.AsyncClient, after_s: float) -> None:
    """One request, whose client goes after some seconds."""

    async def read(path: str, body: dict) -> None:
        async with client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_bytes():
                pass

    with suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(read(*random.choice(KINDS)), after_s)


def wait_until_idle(live: Live) -> None:
    end = time.monotonic() + 60
    while live.engine.requests and time.monotonic() < end:
        time.sleep(0.01)
    assert_clean(live.engine)


def test_clients_that_go_leave_no_block(live, seed, request):
    count = 1000 if request.config.getoption("--all") else 25

    async def all_clients():
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=live.url, limits=limits, timeout=60) as client:
            left = count
            while left:
                group = min(left, random.randint(1, 20))
                await asyncio.gather(*(leave(client, random.expovariate(8)) for _ in range(group)))
                left -= group

    asyncio.run(all_clients())
    wait_until_idle(live)
    aborted = live.service.engine.stats().num_aborted
    assert aborted, "some of them went in the middle"


@pytest.mark.sample(1, of="slow clients")
@pytest.mark.parametrize("clock", ["the system's", "ours"])
def test_who_reads_nothing_is_dropped(running, monkeypatch, clock):
    """A client that takes nothing: what the system holds for it fills up, then its time runs."""
    if clock == "ours":
        monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    elif sys.platform != "linux":
        pytest.skip("NOT RUN: only Linux has such a clock")
    live = second(running, write_timeout=0.3)
    try:
        # answers that are much longer than what the system holds for a client
        body = json.dumps(
            LONG | dict(n=8, prompt=["a"] * 8, temperature=1, stream=True, logprobs=20)
        ).encode()
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(live.socket.getsockname())
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            wire.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            end = time.monotonic() + 60
            while not live.engine.requests and time.monotonic() < end:
                time.sleep(0.01)
            wait_until_idle(live)
            sent = 0
            try:
                while data := wire.recv(2**16):
                    sent += len(data)
            except ConnectionResetError:
                pass
            assert sent < 10**7
    finally:
        live.stop()


@pytest.mark.sample(1, of="slow clients")
def test_who_sends_nothing_is_dropped(running):
    live = second(running, read_timeout=0.3)
    start = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    try:
        for data in (b"", start, start + b"Content-Length: 9\r\n\r\n{"):
            with socket.create_connection(live.socket.getsockname(), timeout=60) as wire:
                wire.sendall(data)
                begin = time.monotonic()
                answer = wire.recv(4096)
                assert (
                    time.monotonic() - begin < 30
                )  # tenths on an idle machine, and never without it
                assert answer == b"" or answer.startswith(b"HTTP/1.1 408")
    finally:
        live.stop()


@pytest.mark.sample(1, of="slow clients")
def test_an_answer_that_takes_too_long(running):
    live = second(running, request_timeout=0.15)
    try:
        answer = live.post("/v1/completions", LONG)
        assert answer.status_code == 504 and "--request-timeout" in answer.text
        streamed = live.post("/v1/completions", LONG | dict(stream=True))
        assert streamed.status_code in (200, 504)
        if streamed.status_code == 200:
            assert "--request-timeout" in events(streamed.text)[-1]["error"]["message"]
            assert "[DONE]" not in streamed.text.splitlines()[-4]
    finally:
        live.stop()
    wait_until_idle(running)


@pytest.mark.sample(1, of="slow clients")
def test_overload_is_said_at_once(running):
    admission = running.service.engine.admission
    before, admission.limits = admission.limits, Limits(max_waiting_requests=1)
    body = LONG | dict(max_tokens=60)

    async def many():
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            posts = [client.post("/v1/completions", json=body) for _ in range(24)]
            return await asyncio.gather(*posts)

    try:
        answers = asyncio.run(many())
    finally:
        admission.limits = before
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(refused) <= 8 and {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
