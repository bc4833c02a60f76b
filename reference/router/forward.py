"""The way of one request: to a replica, and its answer back.

Until the first byte of the answer has gone to the client, it has seen nothing, and another replica
can take the request. From then on it is never repeated, because the client would read the beginning
twice: if the replica dies now, the answer ends with an error.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

import httpx
from starlette.responses import Response

from reference.router.cache_aware import Share
from reference.router.metrics import Metrics
from reference.router.policies import Prompt, request_of
from reference.router.prefill import Prefill
from reference.router.replicas import Replica, Replicas
from reference.server.errors import ApiError, body_of, response_of
from reference.server.streaming import Send, Watched, error_event, event

# Of one connection, not of the message (RFC 9110, section 7.6.1); and what both ends say
# themselves.
HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
              b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}  # fmt: skip
OURS = {b"host", b"content-length", b"expect", b"x-forwarded-for"}
THEIRS = {b"date", b"server"}
# "Not now": a full queue, or a drain. Another replica may have room.
REFUSALS = (429, 503)
NOT_TAKEN = (httpx.ConnectError, httpx.ConnectTimeout)
MOST_DEATHS = 2  # of replicas that had taken a request: perhaps it is what kills them
# Of an answer that is no stream; a longer one begins before it is whole.
MOST_HELD_BYTES = 16 * 2**20
SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')  # of an event of /v1/responses
Headers = list[tuple[bytes, bytes]]


class Refused(Exception):
    """A replica has no room. response: what it said."""

    def __init__(self, response: Response):
        super().__init__(response.status_code)
        self.response = response


class Lost(Exception):
    """A replica is gone, and has answered nothing. had_it: it had taken the request."""

    def __init__(self, had_it: bool):
        super().__init__(had_it)
        self.had_it = had_it


@dataclass
class Sent:
    """What a client sent. target: path and query. address: of the client, "" if unknown."""

    method: str
    target: bytes
    headers: Headers
    body: bytes
    address: str

    def to(self, replica: Replica, timeout: httpx.Timeout) -> httpx.Request:
        """The same request for a replica. timeout: in s, of its steps."""
        headers = passed_on(self.headers, OURS)
        # replicas take turns between users, and an address may be all they know of one
        headers += [(b"x-forwarded-for", self.address.encode())] if self.address else []
        return httpx.Request(
            self.method,
            replica.url,
            headers=headers,
            content=self.body or None,
            # the target as it came, because httpx would tidy up a path
            extensions={"target": self.target, "timeout": timeout.as_dict()},
        )


def passed_on(headers: Headers, without: set[bytes]) -> Headers:
    """The headers that are for the other end, in lower case."""
    named = [value for name, value in headers if name.lower() == b"connection"]
    options = {one.strip().lower() for one in b",".join(named).split(b",")}
    left_out = HOP_BY_HOP | without | options
    return [(name.lower(), value) for name, value in headers if name.lower() not in left_out]


def is_events(response: httpx.Response) -> bool:
    """Whether the answer is a stream of events, which the client reads as they come."""
    return response.headers.get("content-type", "").startswith("text/event-stream")


def last_event(error: ApiError, path: str, before: bytes) -> bytes:
    """An error that ends a stream, as the API at this path writes it. before: what came last.

    OpenAI documents the error of /v1/responses flat, and sends it nested. Its clients raise for the
    nested one alone, others read the flat one, so this is both.
    """
    if path != "/v1/responses":
        return error_event(error, path)
    numbers = SEQUENCE_NUMBER.findall(before)
    number = int(numbers[-1]) + 1 if numbers else 0
    nested = body_of(error, path)["error"]
    flat = {name: nested[name] for name in ("code", "message", "param")}
    return event({"type": "error", "sequence_number": number, **flat, "error": nested}, "error")


async def whole_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Bytes of events, each time up to the end of a line. So an error that has to follow is never
    glued to half an event.
    """
    rest = b""
    async for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield rest + chunk[:cut]
            rest = b""
        rest += chunk[cut:]
    yield rest


async def all_at_once(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The bytes in one, so that a replica that dies in the middle has sent the client nothing."""
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) > MOST_HELD_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


class Forwarded(Watched):
    """The answer to one request, from whichever replica can give it."""

    def __init__(
        self,
        sent: Sent,
        prompt: Prompt,
        replicas: Replicas,
        metrics: Metrics,
        prefill: Prefill | None = None,
    ):
        args = replicas.args
        super().__init__(args.write_timeout)
        self.sent = sent
        self.prompt = prompt
        self.replicas = replicas
        self.metrics = metrics
        self.prefill = prefill
        self.timeout = httpx.Timeout(args.answer_timeout, connect=args.connect_timeout)
        self.work: asyncio.Task | None = None
        self.is_cut = False
        self.begun: httpx.Response | None = None
        self.share: Share | None = None  # of the replica's work
        self.last = b""  # what came last of it

    def cut(self) -> None:
        """End it now, because the router ends."""
        self.is_cut = True
        if self.work is not None:
            self.work.cancel()

    async def write(self, scope, receive, send: Send) -> None:
        """As in Watched."""
        self.work = asyncio.current_task()
        try:
            response = await self.forward(send)
        except ApiError as error:
            response = await self.failed(error, scope["path"], send)
        except asyncio.CancelledError:
            if not self.is_cut:  # but the client has gone
                raise
            error = ApiError(503, "the router ended this answer: it is shutting down")
            response = await self.failed(error, scope["path"], send)
        if response is not None:
            await response(scope, receive, send)

    async def failed(self, error: ApiError, path: str, send: Send) -> Response | None:
        """Tell the client. Returns a response if none has begun."""
        if self.begun is None:
            return response_of(error, path)
        if is_events(self.begun):
            # the empty line ends an event that has a line already
            data = b"\n" + last_event(error, path, self.last)
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        # Of anything else the client has a length, or chunks without an end. uvicorn closes the
        # connection of an answer that is not complete, so the client sees that it is broken.
        return None

    async def forward(self, send: Send) -> Response | None:
        """Try one replica after the other, each once. Returns what the client is told if none took
        the request. Raises ApiError.
        """
        refusal, deaths = None, 0
        path = self.sent.target.partition(b"?")[0].decode("latin-1")
        self.prompt = await self.replicas.read(self.prompt, path, self.sent.body, self.sent.headers)
        for at, replica in enumerate(self.replicas.candidates(self.prompt)):
            if at == 0:
                self.metrics.count_prefix(self.replicas.is_home(self.prompt, replica))
                self.metrics.count_blocks(self.replicas.blocks, self.prompt, replica.url)
            try:
                await self.try_one(replica, await self.prefilled(replica), send)
                return None
            except Refused as refused:
                refusal = refused.response
            except Lost as lost:
                deaths += lost.had_it
                if deaths == MOST_DEATHS:
                    raise ApiError(502, f"{deaths} replicas were lost with this request") from None
        self.metrics.unserved.inc()
        if refusal is not None:
            return refusal
        count, ready = len(self.replicas.all), self.replicas.num_ready
        why = f"no replica took this request: {ready} of {count} are ready"
        raise ApiError(503, why, retry_after_s=self.replicas.args.health_interval)

    async def prefilled(self, replica: Replica) -> Sent:
        """The request for this replica, once another one has computed its prompt, if that is
        worth it.
        """
        request = {} if self.prefill is None else request_of(self.sent.body)
        if not request or not self.prefill.is_worth(self.sent.target, request):
            return self.sent
        replica.in_flight += 1  # now, or those that follow would choose the same one
        try:
            body = await self.prefill.sent(self.prompt, request, self.sent, replica)
        finally:
            replica.in_flight -= 1
        return self.sent if body is None else replace(self.sent, body=body)

    async def try_one(self, replica: Replica, sent: Sent, send: Send) -> None:
        """Send it to a replica, and the answer to the client. Raises Refused or Lost if another one
        may try, else ApiError.
        """
        outcome = "cancelled"
        self.share = self.replicas.begin(replica, self.prompt, self.sent.body)
        try:
            await self.exchange(replica, sent, send)
            outcome = "answered"
        except Refused:
            outcome = "refused"
            raise
        except httpx.LocalProtocolError as error:
            outcome = "answered"
            raise ApiError(400, f"request: {error}; accepted: HTTP/1.1") from None
        except httpx.ReadTimeout:
            outcome = "late"  # it lives and works on this, so another one would do the work again
            wait_s = self.timeout.read
            raise ApiError(504, f"the replica sent nothing for {wait_s:g} s") from None
        except httpx.TransportError as error:
            if self.begun is not None:
                outcome = "broken"
                message = "the replica was lost in the middle of this answer"
                raise ApiError(502, message, code="replica_lost") from None
            outcome = "lost"
            self.replicas.lost(replica)
            raise Lost(not isinstance(error, NOT_TAKEN)) from None
        finally:
            replica.in_flight -= 1
            if self.share is not None:
                self.share.end()
            self.metrics.requests.labels(replica.url, outcome).inc()

    async def exchange(self, replica: Replica, sent: Sent, send: Send) -> None:
        """One request and its answer. Raises Refused and httpx.TransportError."""
        transport = self.replicas.transport
        response = await transport.handle_async_request(sent.to(replica, self.timeout))
        headers = passed_on(response.headers.raw, THEIRS)
        in_parts = whole_lines if is_events(response) else all_at_once
        async with aclosing(response), aclosing(in_parts(response.aiter_raw())) as parts:
            if response.status_code in REFUSALS:
                body = b"".join([part async for part in parts])
                refusal = Response(body, response.status_code)
                refusal.raw_headers = headers
                raise Refused(refusal)
            async for part in parts:
                if self.begun is None:
                    self.begun = response
                    if self.share is not None and is_events(response):
                        self.share.answers()
                    status = response.status_code
                    start = {"type": "http.response.start", "status": status, "headers": headers}
                    await send(start)
                self.last = part or self.last
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
