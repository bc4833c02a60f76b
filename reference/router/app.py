"""Everything together: what the router answers itself, and what it passes on."""

import asyncio

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from reference.router.args import RouterArgs
from reference.router.forward import Forwarded, Sent
from reference.router.metrics import Metrics
from reference.router.policies import prompt_of
from reference.router.prefill import Prefill
from reference.router.replicas import Replicas
from reference.server.errors import ApiError, response_of
from reference.server.limits import App, Limits

KEPT_S = 2.0  # an idle connection; uvicorn closes one after 5, and a request may meet that moment
TICK_S = 0.05  # between two looks at what runs, during a drain
WITH_BODY = ("POST", "PUT", "PATCH")


class Routing:
    """The ASGI application behind the limits."""

    def __init__(self, args: RouterArgs):
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S)
        # A client of httpx would keep cookies, and send one user's with the next one's request.
        self.transport = httpx.AsyncHTTPTransport(limits=limits)
        self.replicas = Replicas(args, self.transport)
        self.metrics = Metrics()
        self.metrics.watch(self.replicas, self.replicas.blocks)
        self.prefill = Prefill(args, self.transport, self.metrics) if args.prefill else None
        self.running: set[Forwarded] = set()
        self.is_draining = False
        self.own = {"/health": self.health, "/ready": self.ready, "/metrics": self.show_metrics}

    async def __call__(self, scope, receive, send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        own = self.own.get(scope["path"]) if scope["method"] in ("GET", "HEAD") else None
        if own is not None:
            await own()(scope, receive, send)
            return
        try:
            answer = await self.forwarded(scope, receive)
        except ApiError as error:
            await response_of(error, scope["path"])(scope, receive, send)
            return
        self.running.add(answer)
        try:
            await answer(scope, receive, send)
        finally:
            self.running.discard(answer)

    async def forwarded(self, scope, receive) -> Forwarded:
        """The answer to come. Raises ApiError for a request that goes nowhere."""
        if self.is_draining:
            raise ApiError(503, "the router is shutting down", retry_after_s=1)
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        if not target.startswith(b"/"):  # a whole address is for proxies that go anywhere
            raise ApiError(400, "path: got a whole address; accepted: a path")
        # Limits has read it to its end, and hands it on in one piece
        body = (await receive())["body"] if scope["method"] in WITH_BODY else b""
        address = scope["client"][0] if scope.get("client") else ""
        sent = Sent(scope["method"], target, scope["headers"], body, address)
        return Forwarded(sent, prompt_of(body), self.replicas, self.metrics, self.prefill)

    async def start(self) -> None:
        """Ask all replicas once, then go on asking. Call it in the event loop that serves."""
        for those in self.all_replicas():
            await those.start()

    def all_replicas(self) -> list[Replicas]:
        """Those that answer, and those that compute prompts for them."""
        return [self.replicas] + ([] if self.prefill is None else [self.prefill.replicas])

    def health(self) -> Response:
        """The router lives, whatever the replicas do."""
        return Response(status_code=200)

    def ready(self) -> Response:
        """Whether a request would find a replica."""
        is_ready = self.replicas.num_ready and not self.is_draining
        return Response(status_code=200 if is_ready else 503)

    def show_metrics(self) -> Response:
        """For Prometheus."""
        text = generate_latest(self.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def drain(self, timeout_s: float) -> None:
        """Take no new request, and wait for the answers that have begun, at most timeout_s seconds.
        Those that are left end with an error.
        """
        self.is_draining = True
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.running and loop.time() < end_s:
            await asyncio.sleep(TICK_S)
        for answer in self.running:
            answer.cut()

    async def stop(self) -> None:
        """Ask no replica any longer, and close all connections to them."""
        for those in self.all_replicas():
            await those.stop()
        await self.transport.aclose()


def new_app(routing: Routing) -> App:
    """The application with the limits of a request in front of it."""
    return Limits(routing, routing.replicas.args)
