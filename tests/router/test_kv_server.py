"""The policy kv before a real server: its keys are the router's, whichever way a prompt comes."""

from dataclasses import replace

import httpx
import pytest

from reference.router.args import RouterArgs
from reference.server.app import new_service
from tests.router.fakes import cluster_of, until
from tests.server.live import Live, server_args

KEY = "a key"
TEXT = "def add(a, b):\n    return a + b\n\n\n" * 8


@pytest.fixture(scope="module")
def live():
    """A server with a key that tells of its blocks."""
    args = server_args(api_key=[KEY])
    args.engine = replace(args.engine, kv_events_config={"enable_kv_cache_events": True})
    found = Live(new_service(args))
    yield found
    found.stop()  # in time, although a stream of events may be open
    found.service.engine.shutdown()


def hits(live) -> float:
    text = httpx.get(f"{live.url}/metrics", timeout=60).text
    found = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return float(found[0].split()[-1])


async def test_the_router_knows_what_the_engine_will_find(live):
    args = RouterArgs([live.url], policy="kv", replica_api_key=KEY, health_interval=0.05)
    headers = {"authorization": f"Bearer {KEY}"}
    messages = [dict(role="system", content="Be brief."), dict(role="user", content=TEXT)]
    tool = dict(type="function", function=dict(name="f", parameters=dict(type="object")))
    bodies = [
        ("/v1/completions", dict(prompt=TEXT)),
        ("/v1/completions", dict(prompt=list(range(300, 400)))),
        ("/v1/chat/completions", dict(messages=messages)),
        ("/v1/chat/completions", dict(messages=messages, tools=[tool])),
    ]
    async with cluster_of(args) as router:
        index = router.routing.replicas.blocks.index
        await until(lambda: router.routing.replicas.blocks.is_fresh(live.url))
        for path, body in bodies:
            body = dict(model="tiny", max_tokens=2, temperature=0, ignore_eos=True) | body
            found = []
            for _ in range(2):
                known, engine = index.count, hits(live)
                before = router.counted("router_kv_cached_blocks_total", medium="pool")
                answer = await router.client.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                now = router.counted("router_kv_cached_blocks_total", medium="pool")
                found.append((now - before, (hits(live) - engine) / 16))
                if len(found) == 1:
                    await until(lambda known=known: index.count > known)
            # the first may begin as an earlier one, of which the router knows, too
            assert all(router_has == engine_had for router_has, engine_had in found), (path, found)
            assert found[1][0] > 5, (path, found)


async def test_events_need_the_key(live):
    assert httpx.get(f"{live.url}/kv_events", timeout=60).status_code == 401
    args = RouterArgs([live.url], policy="kv", health_interval=0.05)
    async with cluster_of(args) as router:
        await until(lambda: router.routing.replicas.num_ready == 1)
        assert not router.routing.replicas.blocks.is_fresh(live.url)


async def test_a_server_that_tells_nothing_says_how(live, monkeypatch):
    quiet = replace(live.service.args.engine, kv_events_config=None)
    monkeypatch.setattr(live.service.args, "engine", quiet)
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{live.url}/kv_events", headers=headers, timeout=60)
    assert answer.status_code == 404 and "--kv-events-config" in answer.text
