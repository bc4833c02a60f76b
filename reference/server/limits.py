"""What stands in front of every route, so that no request costs more than it may.

Every refusal comes from what was read so far: a body is never read further than its limit, and is
checked before anything is built from it.
"""

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from typing import Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from reference.server.errors import ApiError, response_of
from reference.server.streaming import while_there

MOST_DEPTH = 64  # of JSON within JSON
MOST_PARTS = 20_000  # arrays and objects
MOST_HEADER_BYTES = 32 * 1024
# They say nothing of prompts, and who asks (a probe, Prometheus) has no key.
OPEN = ("/health", "/ready", "/ping", "/version", "/metrics")
# The closing quote is optional, so that a string without one is read once and not once a character.
STRINGS_AND_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")

App = Callable[[dict, Callable, Callable], Awaitable[None]]


class LimitArgs(Protocol):
    """The arguments that count here. read_timeout: s, of a body."""

    api_key: list[str]
    max_body_bytes: int
    read_timeout: float


class Limits:
    """ASGI middleware: keys, size, time and form of a body."""

    def __init__(self, app: App, args: LimitArgs):
        self.app = app
        self.args = args

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = None
        try:
            check_headers(scope["headers"])
            headers = dict(scope["headers"])
            check_key(headers, scope["path"], self.args.api_key)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                check_kind_of_body(headers)
                body = await self.read(headers, receive)
                check_json(body)
        except ApiError as error:
            response = response_of(error, scope["path"])
            # what is left of the body would be taken for the next request
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        if body is None:
            await self.app(scope, receive, send)
        else:
            await while_there(self.app(scope, replayed(body, receive), send), receive)

    async def read(self, headers: dict[bytes, bytes], receive) -> bytes:
        """The whole body. Raises ApiError for one that is too large or comes too slowly."""
        most = self.args.max_body_bytes
        too_large = ApiError(413, f"body: got more; accepted: at most {most} bytes")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > most:
            raise too_large
        parts, size = [], 0

        async def whole() -> None:
            nonlocal size
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "body: the connection was closed in the middle of it")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_large
                if not message.get("more_body", False):
                    return

        try:
            await asyncio.wait_for(whole(), self.args.read_timeout)
        except asyncio.TimeoutError:
            limit_s = self.args.read_timeout
            raise ApiError(408, f"body: not here after {limit_s} s (--read-timeout)") from None
        return b"".join(parts)


def replayed(body: bytes, receive) -> Callable[[], Awaitable[dict]]:
    """`receive` for the app: the body that was read already, then whatever comes."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict:
        return messages.pop() if messages else await receive()

    return next_message


def check_headers(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise ApiError for too many bytes of them: h11 counts only those that come in pieces."""
    if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
        raise ApiError(431, f"headers: got more; accepted: at most {MOST_HEADER_BYTES} bytes")


def check_key(headers: dict[bytes, bytes], path: str, keys: list[str]) -> None:
    """Raise ApiError without one of the keys: "Authorization: Bearer KEY", or Anthropic's
    "x-api-key: KEY".
    """
    if not keys or path in OPEN:
        return
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    token = token.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    # each of them is compared in full, so that the time tells nothing
    fits = [hmac.compare_digest(token, key.encode()) for key in keys]
    if not any(fits):
        message = "api key: got none, or a wrong one; accepted: Authorization: Bearer <key>"
        raise ApiError(401, message, code="invalid_api_key")


def check_kind_of_body(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError for a body that does not say it is JSON. A page of another origin can send
    text without asking, but JSON only if CORS allows it.
    """
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        got = kind.decode("latin-1") or "none"
        raise ApiError(415, f"content-type: got {got}; accepted: application/json")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise ApiError(415, "content-encoding: got one; accepted: none")


def check_json(body: bytes) -> None:
    """Raise ApiError for what is no JSON, or JSON that no parser should meet."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: byte {error.start} is not UTF-8; accepted: UTF-8") from None
    check_nesting(body)
    try:
        value = json.loads(body, parse_constant=refuse_constant)
    except ApiError:
        raise
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: {error}; accepted: JSON") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"body: got a JSON {type(value).__name__}; accepted: an object")
    # Halves of surrogate pairs cannot be written as UTF-8, wherever they are repeated.
    if SURROGATES.search(body) and has_surrogate(value):
        raise ApiError(400, "body: got half of a surrogate pair; accepted: whole characters")


def check_nesting(body: bytes) -> None:
    """Raise ApiError for JSON within JSON within … deeper than MOST_DEPTH, and for too many parts.
    It takes time in proportion to the body, whatever is in it.
    """
    if body.count(b"[") + body.count(b"{") <= MOST_DEPTH:
        return
    depth = count = 0
    for found in STRINGS_AND_BRACKETS.finditer(body):
        token = found[0]
        if token in (b"[", b"{"):
            depth, count = depth + 1, count + 1
            if depth > MOST_DEPTH:
                raise ApiError(
                    400, f"body: nested deeper than {MOST_DEPTH}; accepted: flatter JSON"
                )
            if count > MOST_PARTS:
                accepted = f"at most {MOST_PARTS} arrays and objects"
                raise ApiError(400, f"body: got too many parts; accepted: {accepted}")
        elif token in (b"]", b"}"):
            depth -= 1


def refuse_constant(name: str) -> None:
    """NaN and the infinities are no JSON, though Python reads them."""
    raise ApiError(400, f"body: got {name}; accepted: JSON, which has no such number")


def has_surrogate(value: dict) -> bool:
    """Whether any string in a parsed body has half of a surrogate pair."""
    return bool(re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)))


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 that closes a connection whose request line and headers do not come."""

    def __init__(self, *args, read_timeout_s: float, **more):
        super().__init__(*args, **more)
        self.read_timeout_s = read_timeout_s
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        """As uvicorn; from now on the headers are waited for."""
        super().connection_made(transport)
        self.watch()

    def data_received(self, data: bytes) -> None:
        """As uvicorn; the headers may be whole now, or have begun."""
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn."""
        self.forget_timer()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Start a timer while headers are missing, stop it when they are there."""
        if self.conn.their_state is not h11.IDLE:
            self.forget_timer()
        elif self.timer is None:
            self.timer = self.loop.call_later(self.read_timeout_s, self.transport.close)

    def forget_timer(self) -> None:
        """Wait no longer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
