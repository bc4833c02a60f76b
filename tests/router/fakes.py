"""Replicas with scripted behaviour and a router in front of them, all in one event loop."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from reference.router.args import RouterArgs
from reference.router.run import RouterServer
from reference.server.process import new_socket, url_of

SOON_S = 30.0  # until a test that waits has failed


@dataclass
class Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


def whole(body: dict, status: str = "200 OK", *headers: str) -> bytes:
    """An answer of one piece."""
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + data


HEAD_OF_EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


class Fake:
    """A replica. script: what it does with a request; seen: those that it got."""

    def __init__(self):
        self.is_ready = True
        self.ready_says = {}
        self.seen: list[Request] = []
        self.script: Callable[[Fake, Request], Awaitable[None]] = answers
        self.left = 0  # clients that closed the connection
        self.go_on = asyncio.Event()
        self.server = None
        self.port = 0
        self.writers = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Refuse connections from now on, and cut those that there are."""
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def serve(self, reader, writer) -> None:
        self.writers.add(writer)
        try:
            while True:
                request = await read_request(reader)
                if request.target == "/ready":
                    writer.write(whole(self.ready_says, "200 OK" if self.is_ready else "503 No"))
                    continue
                self.seen.append(request)
                await self.script(self, request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


async def read_request(reader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = [tuple(line.split(": ", 1)) for line in head[1:-2]]
    headers = [(name.lower(), value) for name, value in headers]
    length = int(dict(headers).get("content-length", 0))
    return Request(method, target, headers, await reader.readexactly(length))


# ---------------------------------------------------------------- scripts


async def answers(fake, request, reader, writer) -> None:
    own = ("Set-Cookie: who=someone", "X-Own: 1", "Date: Sun, 06 Nov 1994 08:49:37 GMT")
    writer.write(whole({"from": fake.port}, "200 OK", *own))


async def streams(fake, request, reader, writer) -> None:
    """One event, then a second when the test says so."""
    writer.write(HEAD_OF_EVENTS + chunk('data: {"n":0}\n\n'))
    await fake.go_on.wait()
    writer.write(chunk('data: {"n":1}\n\n') + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")


async def dies_in_a_stream(fake, request, reader, writer) -> None:
    writer.write(HEAD_OF_EVENTS + chunk('data: {"n":0}\n\n') + chunk('data: {"n":'))
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()


async def dies_before_the_first_event(fake, request, reader, writer) -> None:
    writer.write(HEAD_OF_EVENTS)
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()


async def dies_in_a_whole_answer(fake, request, reader, writer) -> None:
    writer.write(whole({"from": "x" * 100})[:-20])
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()


async def dies_at_once(fake, request, reader, writer) -> None:
    writer.transport.abort()


async def is_full(fake, request, reader, writer) -> None:
    writer.write(whole({"error": {"message": "full"}}, "429 Full", "Retry-After: 7"))


async def drains(fake, request, reader, writer) -> None:
    writer.write(whole({"error": {"message": "draining"}}, "503 No"))


async def waits(fake, request, reader, writer) -> None:
    """Nothing, until the client has gone or the test says so."""
    gone = asyncio.ensure_future(reader.read(1))
    going_on = asyncio.ensure_future(fake.go_on.wait())
    await asyncio.wait({gone, going_on}, return_when=asyncio.FIRST_COMPLETED)
    going_on.cancel()
    if gone.done():
        fake.left += 1
        raise ConnectionError
    gone.cancel()
    await answers(fake, request, reader, writer)


# ---------------------------------------------------------------- a cluster


class Cluster:
    """A router with its replicas. client: of the router."""

    def __init__(self, fakes: Sequence[Fake], server: RouterServer, client: httpx.AsyncClient):
        self.fakes = fakes
        self.server = server
        self.routing = server.routing
        self.client = client

    async def ask(self, prompt: str = "hello", **more) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt}, **more)

    def ranked(self, prompt: str) -> list[Fake]:
        """The replicas as the router ranks them for this prompt, which is none of its rules."""
        from reference.router.policies import prefix_of

        prefix = prefix_of(json.dumps({"prompt": prompt}).encode())
        return [self.fakes[at] for at in self.routing.replicas.homes.ranked(prefix)]

    def counted(self, metric: str, **labels: str) -> float:
        return self.routing.metrics.registry.get_sample_value(metric, labels) or 0.0

    def outcomes(self, fake) -> dict[str, float]:
        names = ("answered", "refused", "lost", "broken", "late", "cancelled")
        found = {
            name: self.counted("router_requests_total", replica=fake.url, outcome=name)
            for name in names
        }
        return {name: count for name, count in found.items() if count}

    @property
    def in_flight(self) -> list[int]:
        return [replica.in_flight for replica in self.routing.replicas.all]


async def until(condition: Callable[[], bool]) -> None:
    """Return when it holds."""
    end = asyncio.get_running_loop().time() + SOON_S
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not happen"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def cluster_of(args: RouterArgs, fakes: Sequence[Fake] = ()):
    """A router before replicas that run. Afterwards nothing is in flight."""
    server = RouterServer(args)
    with new_socket("127.0.0.1", 0, 30.0) as listening:
        serving = asyncio.ensure_future(server._serve([listening]))
        await until(lambda: server.started)
        async with httpx.AsyncClient(base_url=url_of(listening), timeout=3 * SOON_S) as client:
            found = Cluster(fakes, server, client)
            yield found
            await until(lambda: not any(found.in_flight))
        server.should_exit = True
        await serving


@asynccontextmanager
async def cluster(count: int = 3, script=answers, **own):
    """A router before so many fakes. own: fields of RouterArgs."""
    fakes = [Fake() for _ in range(count)]
    for fake in fakes:
        fake.script = script
        await fake.start()
    own = {"health_interval": 30.0} | own
    async with cluster_of(RouterArgs([fake.url for fake in fakes], **own), fakes) as found:
        yield found
    for fake in fakes:
        fake.go_on.set()
        await fake.die()
    await until(lambda: not any(fake.writers for fake in fakes))
