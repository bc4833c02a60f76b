"""Three real servers behind a router. One is killed while all are busy."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from itertools import chain, count

import httpx
import pytest

from reference.router.args import RouterArgs
from reference.router.policies import new_policy, prefix_of
from tests.router.fakes import cluster_of, until
from tests.server.live import events
from tests.server.paths import REPOSITORY

BODY = dict(model="tiny", max_tokens=100, temperature=0, ignore_eos=True)
EACH = 4  # requests for each server, every other one a stream


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


def prompts_at_home(args: RouterArgs) -> list[list[str]]:
    """So many prompts for each server, in the order of the servers."""
    policy, found = new_policy(args), [[] for _ in args.replicas]
    for number in count():
        prompt = f"def f{number}("
        home = found[policy.ranked(prefix_of(json.dumps(BODY | dict(prompt=prompt)).encode()))[0]]
        if len(home) < EACH:
            home.append(prompt)
        if all(len(prompts) == EACH for prompts in found):
            return found


@pytest.mark.sample(3, of="processes")
async def test_one_of_three_is_killed(three):
    """Who had no byte of an answer gets it from another one; who had is told; all else is right."""
    args = RouterArgs(list(three), health_interval=0.2)
    prompts = prompts_at_home(args)
    async with cluster_of(args) as router:
        await until(lambda: router.routing.replicas.num_ready == 3)
        asked = [
            [Asked(router.client, prompt, at % 2 > 0) for at, prompt in enumerate(home)]
            for home in prompts
        ]
        await until(lambda: all(one.text for one in asked[1][1::2]))
        victim = router.routing.replicas.all[1]
        os.kill(three[victim.url], signal.SIGKILL)
        await asyncio.gather(*[one.work for one in chain(*asked)])
        assert router.outcomes(victim) == dict(lost=EACH / 2, broken=EACH / 2)
        right = [Asked(router.client, prompt, False) for prompt in chain(*prompts)]
        await asyncio.gather(*[one.work for one in right])
    cut = asked[1][1::2]
    for one, whole in zip(chain(*asked), right):
        if one in cut:
            assert "lost in the middle" in one.error["message"]
            assert whole.text.startswith(one.text) and one.text != whole.text
        else:
            assert one.error is None and one.text == whole.text, "wrong tokens"
