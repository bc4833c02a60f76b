"""The way of a request, past replicas of every kind of misbehaviour."""

import asyncio
import socket

import httpx
import pytest

from reference.router.policies import FEW
from tests.router import fakes
from tests.router.fakes import cluster, until
from tests.server.live import events

STREAM = dict(prompt="hello", stream=True)


async def test_equal_beginnings_meet_at_one_replica():
    async with cluster() as router:
        for prompt in ("one", "two", "three", "four", "five") * 3:
            answer = await router.ask(prompt)
            assert answer.json()["from"] == router.ranked(prompt)[0].port
        assert router.counted("router_prefix_requests_total") == 15
        assert router.counted("router_prefix_hits_total") == 15
        await router.client.get("/v1/models")
        assert router.counted("router_prefix_requests_total") == 15, "it has no prompt"


async def test_who_has_too_much_to_do_is_passed_over():
    async with cluster(script=fakes.waits) as router:
        first, second, third = router.ranked("hello")
        asked = [asyncio.ensure_future(router.ask("hello")) for _ in range(FEW + 2)]
        await until(lambda: len(first.seen) == FEW and len(second.seen) == 2)
        assert not third.seen and sorted(router.in_flight) == [0, 2, FEW]
        for fake in router.fakes:
            fake.go_on.set()
        answers = await asyncio.gather(*asked)
        assert all(answer.status_code == 200 for answer in answers)
        assert router.counted("router_prefix_hits_total") == FEW


async def test_a_dead_replica_is_tried_once():
    async with cluster() as router:
        first, second, _ = router.ranked("hello")
        replicas = router.routing.replicas
        replica = next(one for one in replicas.all if one.url == first.url)
        await first.die()
        for _ in range(5):
            answer = await router.ask("hello")
            assert answer.json()["from"] == second.port
        assert router.outcomes(first) == dict(lost=1)
        assert router.outcomes(second) == dict(answered=5)
        first.is_ready = False
        await first.start()
        await replicas.ask(replica)
        assert not replica.is_ready, "it listens, but takes no request"
        first.is_ready = True
        await replicas.ask(replica)
        assert (await router.ask("hello")).json()["from"] == first.port


async def test_replicas_are_asked_again_and_again():
    async with cluster(count=2, health_interval=0.03) as router:
        replicas = router.routing.replicas
        for is_ready, count in ((False, 1), (True, 2)) * 2:
            router.fakes[0].is_ready = is_ready
            await until(lambda count=count: replicas.num_ready == count)
        await router.fakes[0].die()
        await until(lambda: replicas.num_ready == 1)


DEATHS = ["dies_at_once", "dies_in_a_whole_answer", "dies_before_the_first_event"]


@pytest.mark.parametrize("script", DEATHS)
async def test_no_client_sees_a_death_before_the_first_byte(script):
    async with cluster() as router:
        first, second, third = router.ranked("hello")
        first.script = getattr(fakes, script)
        answer = await router.ask("hello")
        assert answer.status_code == 200 and answer.json()["from"] == second.port
        assert [len(fake.seen) for fake in (first, second, third)] == [1, 1, 0]
        assert first.seen[0].body == second.seen[0].body
        assert router.outcomes(first) == dict(lost=1)


async def test_a_request_that_kills_is_not_passed_on_for_ever():
    async with cluster(count=4, script=fakes.dies_at_once) as router:
        answer = await router.ask("hello")
        assert answer.status_code == 502 and "2 replicas were lost" in answer.text
        assert [len(fake.seen) for fake in router.ranked("hello")] == [1, 1, 0, 0]


ERRORS = {
    "/v1/completions": ("data", ("error", "message")),
    "/v1/chat/completions": ("data", ("error", "message")),
    "/v1/messages": ("event: error", ("error", "message")),
    "/v1/responses": ("event: error", ("error", "message")),
    "/generate_stream": ("data", ("error",)),
}


@pytest.mark.parametrize("path", ERRORS)
async def test_an_answer_that_has_begun_is_never_repeated(path):
    async with cluster(script=fakes.dies_in_a_stream) as router:
        body = STREAM | (dict(inputs="hello") if path == "/generate_stream" else {})
        answer = await router.client.post(path, json=body)
        assert sum(len(fake.seen) for fake in router.fakes) == 1
        begin, error = events(answer.text)
        line, keys = ERRORS[path]
        for key in keys:
            error = error[key]
        assert begin == {"n": 0} and "lost in the middle" in error and line in answer.text
        assert '{"n":\n' not in answer.text, "half an event reached the client"
        hit = next(fake for fake in router.fakes if fake.seen)
        assert router.outcomes(hit) == dict(broken=1)


@pytest.mark.parametrize("numbers, following", [([0, 1, 7], 8), ([], 0)])
async def test_the_error_of_responses_is_flat_and_nested(numbers, following):
    """OpenAI's documents have one, its servers the other, and clients read either."""

    async def dies_later(fake, request, reader, writer):
        events = [f'data: {{"type":"x","sequence_number":{number}}}\n\n' for number in numbers]
        begin = fakes.chunk("".join(events) or ": hello\n\n")
        writer.write(fakes.HEAD_OF_EVENTS + begin + fakes.chunk('data: {"sequence_num'))
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    async with cluster(script=dies_later) as router:
        answer = await router.client.post("/v1/responses", json=dict(input="hello", stream=True))
        error = events(answer.text)[-1]
        assert error["type"] == "error" and error["sequence_number"] == following
        assert "lost in the middle" in error["message"] and error["code"] == "replica_lost"
        assert {name: error[name] for name in ("message", "code", "param")}.items() <= error[
            "error"
        ].items()


async def responses_stream(url) -> str:
    openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.APIError) as told:
            async for _ in await client.responses.create(model="tiny", input="hello", stream=True):
                pass
    return str(told.value)


async def openai_stream(url) -> str:
    openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        messages = [dict(role="user", content="hello")]
        with pytest.raises(openai.APIError) as told:
            asked = dict(model="tiny", messages=messages, stream=True)
            async for _ in await client.chat.completions.create(**asked):
                pass
    return str(told.value)


async def anthropic_stream(url) -> str:
    anthropic = pytest.importorskip("anthropic", reason="NOT RUN: anthropic is not installed")
    async with anthropic.AsyncAnthropic(base_url=str(url), api_key="none", max_retries=2) as client:
        messages = [dict(role="user", content="hello")]
        with pytest.raises(anthropic.APIError) as told:
            asked = dict(model="tiny", messages=messages, max_tokens=9, stream=True)
            async for _ in await client.messages.create(**asked):
                pass
    return str(told.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stream", [openai_stream, responses_stream, anthropic_stream])
async def test_clients_raise_what_the_last_event_says(stream):
    async with cluster(script=fakes.dies_in_a_stream) as router:
        assert "lost in the middle of this answer" in await stream(router.client.base_url)
        assert sum(len(fake.seen) for fake in router.fakes) == 1, "the client asked again"


async def test_events_come_one_by_one():
    async with cluster(script=fakes.streams) as router:
        async with router.client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.aiter_lines()
            assert await lines.__anext__() == 'data: {"n":0}'
            for fake in router.fakes:  # the second event exists only from now on
                fake.go_on.set()
            rest = [line async for line in lines]
        assert rest == ["", 'data: {"n":1}', "", "data: [DONE]", ""]


@pytest.mark.parametrize("script", ["is_full", "drains"])
async def test_another_one_may_have_room(script):
    async with cluster() as router:
        first, second, _ = router.ranked("hello")
        first.script = getattr(fakes, script)
        assert (await router.ask("hello")).json()["from"] == second.port
        assert router.outcomes(first) == dict(refused=1)
        assert all(replica.is_ready for replica in router.routing.replicas.all)


async def test_if_all_are_full_the_client_waits():
    async with cluster(script=fakes.is_full) as router:
        answer = await router.ask("hello")
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert answer.json() == {"error": {"message": "full"}}
        assert [len(fake.seen) for fake in router.fakes] == [1, 1, 1]
        assert router.counted("router_unserved_total") == 1


async def test_a_draining_replica_gets_no_new_request_and_ends_what_it_has():
    async with cluster(health_interval=0.03, script=fakes.streams) as router:
        first, second, _ = router.ranked("hello")
        request = router.client.build_request("POST", "/v1/completions", json=STREAM)
        begun = await router.client.send(request, stream=True)
        first.is_ready = False
        replicas = router.routing.replicas
        await until(lambda: replicas.num_ready == 2)
        second.script = fakes.answers
        for _ in range(3):
            assert (await router.ask("hello")).json()["from"] == second.port
        first.go_on.set()
        assert len(events((await begun.aread()).decode())) == 2
        assert len(first.seen) == 1


@pytest.mark.parametrize("is_stream", [True, False])
async def test_who_leaves_is_forgotten(is_stream):
    """The replica hears of it, and nothing is left in flight."""

    async def streams_on(fake, request, reader, writer):
        writer.write(fakes.HEAD_OF_EVENTS + fakes.chunk("data: {}\n\n"))
        await fakes.waits(fake, request, reader, writer)

    async with cluster(script=streams_on if is_stream else fakes.waits) as router:

        async def begins() -> None:
            async with router.client.stream("POST", "/v1/completions", json=STREAM) as answer:
                async for _ in answer.aiter_lines():
                    break

        for count in range(1, 6):
            client = asyncio.ensure_future(begins())
            if is_stream:
                await client
            else:
                home = router.ranked("hello")[0]
                await until(lambda home=home, count=count: len(home.seen) == count)
                client.cancel()
                await asyncio.gather(client, return_exceptions=True)
        home = router.ranked("hello")[0]
        await until(lambda: home.left == 5 and not any(router.in_flight))
        assert router.outcomes(home) == dict(cancelled=5)
        assert not router.routing.running


async def test_what_is_passed_on_of_the_headers():
    async with cluster(count=1) as router:
        headers = {
            "Authorization": "Bearer secret",
            "X-Forwarded-For": "10.0.0.1",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "of this connection",
            "TE": "trailers",
            "X-Request-Id": "7",
            "User-Agent": "mine",
        }
        for _ in range(2):
            answer = await router.client.post("/v1/x?a=%2F../b", json={}, headers=headers)
            router.client.cookies.clear()
        seen = router.fakes[0].seen[1]
        assert seen.target == "/v1/x?a=%2F../b" and seen.body == b"{}"
        names = [name for name, _ in seen.headers]
        assert len(names) == len(set(names)) and not {"te", "x-hop", "cookie"} & set(names)
        assert seen.header("authorization") == "Bearer secret"
        assert seen.header("x-forwarded-for") == "127.0.0.1"
        assert seen.header("x-request-id") == "7" and seen.header("user-agent") == "mine"
        assert seen.header("host") == router.fakes[0].url.removeprefix("http://")
        assert answer.headers["set-cookie"] == "who=someone" and answer.headers["x-own"] == "1"
        assert len(answer.headers.get_list("date")) == 1


async def test_no_replica_is_there():
    async with cluster(count=2) as router:
        assert (await router.client.get("/ready")).status_code == 200
        for fake in router.fakes:
            await fake.die()
        answer = await router.client.post("/v1/messages", json=dict(system="hello"))
        error = answer.json()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "30"
        assert error["error"]["type"] == "overloaded_error" and "0 of 2" in answer.text
        assert (await router.client.get("/ready")).status_code == 503
        assert (await router.client.get("/health")).status_code == 200


async def test_who_is_late_is_not_repeated():
    async with cluster(script=fakes.waits, answer_timeout=0.1) as router:
        answer = await router.ask("hello")
        assert answer.status_code == 504 and "nothing for 0.1 s" in answer.text
        await until(lambda: [len(fake.seen) for fake in router.ranked("hello")] == [1, 0, 0])
        assert router.outcomes(router.ranked("hello")[0]) == dict(late=1)
    async with cluster(script=fakes.streams, answer_timeout=1.0) as router:
        answer = await router.ask("hello")
        assert "nothing for 1 s" in events(answer.text)[-1]["error"]["message"]


@pytest.mark.parametrize(
    "body, status",
    [(b"{" * 100, 400), (b"[]", 400), (b'{"prompt": "\xff"}', 400), (b'"%d"' % 10**3000, 413)],
)
async def test_what_no_replica_has_to_see(body, status):
    async with cluster(count=1, max_body_bytes=2000) as router:
        headers = {"Content-Type": "application/json"}
        answer = await router.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == status and "message" in answer.json()["error"]
        assert not router.fakes[0].seen


@pytest.mark.parametrize("target", [b"http://169.254.169.254/x", b"*"])
async def test_the_router_goes_to_its_replicas_alone(target):
    async with cluster(count=1) as router:
        address = router.client.base_url
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % target)
        answer = await reader.read()
        assert b" 400 " in answer.split(b"\r\n")[0] and b"got a whole address" in answer
        writer.close()
        assert not router.fakes[0].seen


async def test_no_write_waits_for_an_acknowledgement():
    """Nagle's algorithm would hold back the body after its headers, and each event."""
    async with cluster(count=1) as router:
        await router.ask("hello")
        (connection,) = router.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_metrics_are_the_routers_own():
    async with cluster(count=2) as router:
        await router.ask("hello")
        text = (await router.client.get("/metrics")).text
        home = router.ranked("hello")[0].url
        assert f'router_requests_total{{outcome="answered",replica="{home}"}} 1.0' in text
        assert f'router_requests_in_flight{{replica="{home}"}} 0.0' in text
        assert f'router_replica_ready{{replica="{home}"}} 1.0' in text
        assert not any(fake.seen[1:] for fake in router.fakes)


async def test_a_draining_replica_takes_no_request():
    """A connection that was open already may still bring a request."""
    async with cluster(count=1) as router:
        router.routing.is_draining = True
        assert (await router.client.get("/ready")).status_code == 503
        answer = await router.ask("hello")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert (await router.client.get("/health")).status_code == 200
        assert not router.fakes[0].seen


async def test_a_drain_ends_what_has_begun_and_then_what_takes_too_long():
    # in which the quick one ends, on a busy machine too
    async with cluster(script=fakes.streams, shutdown_timeout=2.0) as router:
        home = router.ranked("a")[0]
        elsewhere = next(at for at in "bcdefghijklm" if router.ranked(at)[0] is not home)
        begun = []
        for prompt in ("a", elsewhere):
            body = dict(prompt=prompt, stream=True)
            request = router.client.build_request("POST", "/v1/completions", json=body)
            begun.append(await router.client.send(request, stream=True))
        router.server.should_exit = True
        await until(lambda: router.routing.is_draining)
        home.go_on.set()
        quick, slow = await asyncio.gather(*[answer.aread() for answer in begun])
        assert quick.endswith(b'data: {"n":1}\n\ndata: [DONE]\n\n')
        error = events(slow.decode())[-1]["error"]
        assert "shutting down" in error["message"] and error["type"] == "server_error"
        (listening,) = router.server.servers
        await until(lambda: not listening.is_serving())
        with pytest.raises(httpx.ConnectError):
            await router.ask("hello")


async def test_a_drain_is_told_to_new_clients():
    """The socket is open until the last answer has ended, so a probe hears that the router is alive
    and not ready, and a newcomer when to come again.
    """
    async with cluster(count=1, script=fakes.streams) as router:
        body = dict(prompt="a", stream=True)
        request = router.client.build_request("POST", "/v1/completions", json=body)
        begun = await router.client.send(request, stream=True)
        router.server.should_exit = True
        await until(lambda: router.routing.is_draining)
        async with httpx.AsyncClient(base_url=router.client.base_url, timeout=60) as newcomer:
            assert (await newcomer.get("/ready")).status_code == 503
            assert (await newcomer.get("/health")).status_code == 200
            refused = await newcomer.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        router.fakes[0].go_on.set()
        assert (await begun.aread()).endswith(b"data: [DONE]\n\n")
        (listening,) = router.server.servers
        await until(lambda: not listening.is_serving())
