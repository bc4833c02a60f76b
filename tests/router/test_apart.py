"""Real servers: one computes prompts, two decode them, and a router decides. Then each of them is
killed with a request on its way: the answers are those of one server, each once.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from itertools import chain

import httpx
import pytest

from reference.router.args import RouterArgs
from tests.router.fakes import Cluster, cluster_of, until
from tests.server.live import events
from tests.server.paths import REPOSITORY

BODY = dict(model="tiny", max_tokens=12, ignore_eos=True)
PROMPT = "".join(f"def f{n}(a, b):\n    return a * {n} + b\n\n" for n in range(14))
ROLES = ("kv_producer", "kv_consumer", "kv_consumer")


@asynccontextmanager
async def servers(connector: str):
    """(router, pid of the prefill replica, {url: pid} of the decode replicas)."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in ROLES]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    wanted = [f"{port}:{role}:{connector}" for port, role in zip(ports, ROLES)]
    command = [sys.executable, "-m", "tests.router.apart", *wanted]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = [started.stdout.readline().split() for _ in ROLES]
        urls = {f"http://127.0.0.1:{port}": int(pid) for pid, port in lines}
        first, *others = urls
        args = RouterArgs(
            others, prefill=[first], health_interval=0.2, policy="least", send_from=50
        )
        async with cluster_of(args) as router:
            await until(lambda: all(those.num_ready == len(those.all) for those in ready(router)))
            yield router, urls[first], {url: urls[url] for url in others}
    finally:
        os.killpg(started.pid, signal.SIGKILL)  # a group of our own
        started.wait()
        started.stdout.close()


def ready(router: Cluster):
    return router.routing.all_replicas()


async def text_of(client: httpx.AsyncClient, **own) -> str:
    answer = await client.post("/v1/completions", json=BODY | own)
    answer.raise_for_status()
    assert "kv_transfer_params" not in answer.json()
    return answer.json()["choices"][0]["text"]


async def streamed(client: httpx.AsyncClient, **own) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=BODY | own | dict(stream=True)) as got:
        got.raise_for_status()
        async for line in got.aiter_lines():
            for found in events(line):
                assert "error" not in found, found
                text += found["choices"][0]["text"]
    return text


def prefills(router: Cluster, *outcomes: str) -> float:
    url = router.routing.prefill.replicas.all[0].url
    counts = (router.counted("router_prefills_total", replica=url, outcome=one) for one in outcomes)
    return sum(counts)


async def hits(url: str) -> float:
    """Tokens that a replica found in its inbox."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{url}/metrics")).text
    name = "vllm:external_prefix_cache_hits_total"
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("connector", ["SharedMemoryConnector", "TcpConnector"])
async def test_prompts_and_answers_apart_and_each_killed(connector):
    greedy, drawn = dict(temperature=0), dict(temperature=0.8, seed=11)
    async with servers(connector) as (router, first, others):
        # what one server answers, which no prefill replica has a part in
        url = next(iter(others))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            wishes = [
                dict(prompt=f"{PROMPT}# {n}\n", **how) for n in range(3) for how in (greedy, drawn)
            ]
            right = [await text_of(client, **wish) for wish in wishes]
        before = {url: await hits(url) for url in others}
        both = zip(wishes, (text_of, streamed) * 3)
        got = await asyncio.gather(*[how(router.client, **wish) for wish, how in both])
        assert got == right and prefills(router, "sent") == len(wishes)
        found = sum([await hits(url) for url in others]) - sum(before.values())
        assert found > 100, "blocks came from the prefill replica"

        # a decode replica is killed while a prompt is computed for it
        fresh = [dict(prompt=f"# {n} of them\n{PROMPT}", **greedy) for n in range(4)]
        asked = [asyncio.ensure_future(text_of(router.client, **wish)) for wish in fresh[:2]]
        await until(lambda: router.routing.prefill.replicas.all[0].in_flight == 2)
        os.kill(others[url], signal.SIGKILL)
        dead = await asyncio.gather(*asked)

        # then the prefill replica, in the middle of prompts
        asked = [asyncio.ensure_future(text_of(router.client, **wish)) for wish in fresh[2:]]
        await until(lambda: router.routing.prefill.replicas.all[0].in_flight == 2)
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        dead += await asyncio.gather(*asked)
        assert prefills(router, "lost") == 2 and not any(router.in_flight)

        alone = [await text_of(router.client, **wish) for wish in chain(fresh, wishes)]
        assert alone == dead + right, "computed again on what is left"
