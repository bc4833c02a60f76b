"""A server that listens, in a thread of the test's own process, and what tests ask of it."""

import asyncio
import json
import threading
import time
from dataclasses import replace

import httpx
import uvicorn

from reference.engine.async_engine import AsyncEngineArgs
from reference.server.app import new_app, new_service
from reference.server.args import ServerArgs
from reference.server.run import new_server, new_socket
from reference.server.service import Service
from tests.server.paths import ADAPTERS, MODEL


def server_args(**own) -> ServerArgs:
    """Small, with an adapter. own: fields of ServerArgs."""
    engine = AsyncEngineArgs(
        MODEL,
        max_num_seqs=16,
        max_model_len=512,
        kv_cache_memory_bytes=40_000_000,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        scheduling_policy="priority",
    )
    own = dict(served_model_name=["tiny", "base"], lora_modules=ADAPTERS) | own
    own = dict(disable_frontend_multiprocessing=True) | own  # because tests look into the engine
    return ServerArgs(engine, uvicorn_log_level="error", disable_uvicorn_access_log=True, **own)


class Live:
    """A running server. shares: its engine with another one, so that its end does not end the
    engine.
    """

    def __init__(self, service: Service, shares: bool = False):
        self.service = service
        self.socket = new_socket("127.0.0.1", 0, service.args.write_timeout)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = new_server(service)
        if shares:
            self.server = uvicorn.Server(self.server.config)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.socket]))

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=60)
        assert not self.thread.is_alive(), "the server did not end"
        self.socket.close()

    @property
    def engine(self):
        return self.service.engine.engine

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, body: dict, **more) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **more)

    def tokens_of(self, prompt: str | list[int], params, lora=None) -> list[list[int]]:
        """What the engine answers without a server: the token ids of each answer."""

        async def ask():
            outputs = self.service.engine.generate(prompt, params, "offline", lora_request=lora)
            return [output async for output in outputs][-1]

        return [answer.token_ids for answer in asyncio.run(ask()).outputs]


def beside(service: Service, **own) -> httpx.AsyncClient:
    """A client of a second server over the same engine, without a socket. own: other arguments."""
    other = Service(service.engine, service.models, replace(service.args, **own))
    transport = httpx.ASGITransport(new_app(other), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120)


def second(first: Live, **own) -> Live:
    """Another server over the same engine. own: its other arguments."""
    service = first.service
    args = replace(service.args, **own)
    return Live(Service(service.engine, service.models, args), shares=True)


def ask(service: Service, method: str, path: str, own: dict | None = None, **more):
    """One request to a second server over the same engine. own: its other arguments."""

    async def one():
        async with beside(service, **(own or {})) as client:
            return await client.request(method, path, **more)

    return asyncio.run(one())


def events(text: str) -> list[dict]:
    """The data of server-sent events, without [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def new_live() -> Live:
    """A server over a fresh engine."""
    return Live(new_service(server_args()))
