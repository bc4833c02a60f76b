"""Three real servers behind a router. One is killed while all are busy."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from reference.router.args import RouterArgs
from tests.router.fakes import cluster_of, until
from tests.server.live import events
from tests.server.paths import REPOSITORY

BODY = dict(model="tiny", max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = [f"def f{number}(" for number in range(12)]


@pytest.fixture
def three():
    """{url: pid} of three servers that were just started."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    command = [sys.executable, "-m", "tests.router.three", *ports]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = [started.stdout.readline().split() for _ in ports]
        yield {f"http://127.0.0.1:{port}": int(pid) for pid, port in lines}
    finally:
        os.killpg(started.pid, signal.SIGKILL)  # a group of our own
        started.wait()
        started.stdout.close()


class Asked:
    """A request and what came back. text: so far; error: how it ended, if it did so badly."""

    def __init__(self, client: httpx.AsyncClient, prompt: str, is_stream: bool):
        self.client = client
        self.body = BODY | dict(prompt=prompt, stream=is_stream)
        self.is_stream = is_stream
        self.text = ""
        self.error = None
        self.work = asyncio.ensure_future(self.whole() if not is_stream else self.streamed())

    async def whole(self) -> None:
        answer = await self.client.post("/v1/completions", json=self.body)
        answer.raise_for_status()
        self.text = answer.json()["choices"][0]["text"]

    async def streamed(self) -> None:
        async with self.client.stream("POST", "/v1/completions", json=self.body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                for found in events(line):
                    if "error" in found:
                        self.error = found["error"]
                    else:
                        self.text += found["choices"][0]["text"]


@pytest.mark.sample(5, of="processes")
async def test_one_of_three_is_killed(three):
    """Who had no byte of an answer gets it from another one; who had is told; all else is right."""
    args = RouterArgs(list(three), health_interval=0.2)
    async with cluster_of(args) as router:
        await until(lambda: router.routing.replicas.num_ready == 3)
        asked = [Asked(router.client, prompt, at % 3 > 0) for at, prompt in enumerate(PROMPTS)]
        replicas = router.routing.replicas.all
        await until(lambda: any(one.text for one in asked))
        at = max(range(3), key=lambda at: replicas[at].in_flight)
        os.kill(three[replicas[at].url], signal.SIGKILL)
        await asyncio.gather(*[one.work for one in asked])
        outcomes = router.outcomes(replicas[at])
        right = [Asked(router.client, prompt, False) for prompt in PROMPTS]
        await asyncio.gather(*[one.work for one in right])
    broken = [one for one in asked if one.error is not None]
    assert len(broken) == outcomes["broken"] > 0 and outcomes["lost"] > 0, outcomes
    for one, whole in zip(asked, right):
        if one.error is None:
            assert one.text == whole.text, "wrong tokens"
        else:
            assert one.is_stream and "lost in the middle" in one.error["message"]
            assert whole.text.startswith(one.text) and one.text != whole.text
