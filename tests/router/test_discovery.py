"""A name of several replicas, as a headless service of Kubernetes does."""

import asyncio
import socket

import pytest

pytest.importorskip("httpx", reason="NOT RUN: httpx is not installed")
from reference.router import replicas as replicas_module
from reference.router.args import RouterArgs, check_url
from reference.router.replicas import urls_of
from tests.router.fakes import Fake, answers, cluster_of, streams, until

NAME = "dns://pods:8000"


class Names:
    """What DNS says. urls: of NAME; an error: it says nothing."""

    def __init__(self, monkeypatch, urls):
        self.urls = urls
        self.asked = 0
        monkeypatch.setattr(replicas_module, "urls_of", self.look_up)

    async def look_up(self, name, wait_s):
        assert name == NAME
        self.asked += 1
        if isinstance(self.urls, Exception):
            raise self.urls
        return sorted(self.urls)


async def started(count, script=answers):
    fakes = [Fake() for _ in range(count)]
    for fake in fakes:
        fake.script = script
        await fake.start()
    return fakes


def args(**own) -> RouterArgs:
    return RouterArgs([NAME], **{"health_interval": 0.02} | own)


async def test_replicas_come_and_go(monkeypatch):
    """A new replica takes requests, one that has gone gets none, and no other home moves."""
    fakes = await started(3)
    urls = [fake.url for fake in fakes]
    names = Names(monkeypatch, urls[:2])
    async with cluster_of(args(), fakes) as router:
        replicas = router.routing.replicas
        assert [one.url for one in replicas.all] == sorted(urls[:2]) and replicas.num_ready == 2
        kept = replicas.all[0]
        names.urls = urls
        await until(lambda: replicas.num_ready == 3)
        homes = {prefix: home(replicas, prefix) for prefix in map(str, range(40))}
        assert len(set(homes.values())) == 3 and kept in replicas.all
        names.urls = urls[:2]
        await until(lambda: len(replicas.all) == 2)
        for prefix, url in homes.items():
            assert home(replicas, prefix) == url or url == urls[2]
        for prefix in homes:
            assert (await router.ask(prefix)).status_code == 200
        assert not fakes[2].seen and set(replicas.watchers) == {"names", *urls[:2]}
        text = (await router.client.get("/metrics")).text
        assert urls[0] in text and urls[2] not in text
    for fake in fakes:
        await fake.die()


def home(replicas, prefix: str) -> str:
    return replicas.all[replicas.homes.ranked(prefix)[0]].url


async def test_a_name_that_no_resolver_knows_now_keeps_its_replicas(monkeypatch):
    fakes = await started(1)
    names = Names(monkeypatch, socket.gaierror("no such name"))
    async with cluster_of(args(), fakes) as router:
        answer = await router.ask("hello")
        assert answer.status_code == 503 and "0 of 0 are ready" in answer.text
        assert (await router.client.get("/ready")).status_code == 503
        names.urls = [fakes[0].url]
        await until(lambda: router.routing.replicas.num_ready == 1)
        for error in (socket.gaierror("no"), asyncio.TimeoutError()):
            names.urls, before = error, names.asked
            await until(lambda before=before: names.asked > before + 1)
            assert (await router.ask("hello")).status_code == 200
    await fakes[0].die()


async def test_an_answer_of_a_replica_that_has_gone_from_the_name_ends(monkeypatch):
    """A pod that drains is no longer in the name, and its streams are whole."""
    fakes = await started(2, streams)
    names = Names(monkeypatch, [fake.url for fake in fakes])
    async with cluster_of(args(policy="least"), fakes) as router:
        body = {"prompt": "x", "stream": True}
        async with router.client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
            busy = next(fake for fake in fakes if fake.seen)
            names.urls = [fake.url for fake in fakes if fake is not busy]
            await until(lambda: len(router.routing.replicas.all) == 1)
            busy.go_on.set()
            text = "".join([part async for part in stream.aiter_text()])
            assert text.endswith("data: [DONE]\n\n")
    for fake in fakes:
        await fake.die()


async def test_names_and_addresses_together(monkeypatch):
    fakes = await started(2)
    Names(monkeypatch, [fake.url for fake in fakes])
    listed = RouterArgs([fakes[0].url, NAME], health_interval=30.0)
    async with cluster_of(listed, fakes) as router:
        urls = [one.url for one in router.routing.replicas.all]
        assert urls == [fakes[0].url, fakes[1].url], "one that has both is one replica"
    for fake in fakes:
        await fake.die()


async def test_a_name_of_this_machine():
    found = await urls_of("dns://localhost:8000", 5.0)
    assert "http://127.0.0.1:8000" in found or "http://[::1]:8000" in found
    with pytest.raises(OSError):
        await urls_of("dns://no-such-name.invalid:8000", 5.0)


@pytest.mark.parametrize("url", ["dns://pods", "dns://:8000", "dns://pods:x", "dns://a..b:1"])
def test_names_that_are_refused(url):
    with pytest.raises(ValueError, match=r"accepted: .* or dns://name:port") as error:
        check_url(url)
    assert "\n" not in str(error.value)
