"""Answers that are written while a client waits: as events, or as one JSON at the end.

Both watch the client. When it goes, or takes nothing for --write-timeout seconds, the work is
cancelled, and with it the requests in the engine.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from reference.server.errors import ApiError, body_of, response_of

Send = Callable[[dict], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collected events would undo the streaming
]


# One for all, because json.dumps makes a new one for each call that is not in its usual form.
as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event. name: its type, where the API has types."""
    text = as_json(data)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


def error_event(error: ApiError, path: str) -> bytes:
    """An error behind the first event, as the API at this path writes it."""
    body = body_of(error, path)
    return event(body, "error" if body.get("type") == "error" else None)


async def while_there(work: Awaitable, receive: Callable[[], Awaitable[dict]]) -> None:
    """Do the work until its client closes the connection. Whatever it waits for then is
    cancelled.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(is_gone(receive))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        doing.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)
    if not doing.cancelled() and (error := doing.exception()) is not None:
        raise error


async def is_gone(receive: Callable[[], Awaitable[dict]]) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Watched(Response):
    """A response that is still being worked on. write_timeout_s: how long one write may take."""

    def __init__(self, write_timeout_s: float):
        self.write_timeout_s = write_timeout_s
        self.sending_since: float | None = None  # while a write waits for the client
        self.background = None
        self.status_code = 200

    async def __call__(self, scope, receive, send) -> None:
        loop = asyncio.get_running_loop()

        async def noted_send(message: dict) -> None:
            self.sending_since = loop.time()
            await send(message)
            self.sending_since = None

        def check() -> None:
            nonlocal timer
            since = self.sending_since
            if since is not None and loop.time() - since >= self.write_timeout_s:
                work.cancel()
            else:
                timer = loop.call_later(self.write_timeout_s / 4, check)

        timer = loop.call_later(self.write_timeout_s / 4, check)
        work = asyncio.ensure_future(self.write(scope, receive, noted_send))
        try:
            await while_there(work, receive)
        finally:
            timer.cancel()

    async def write(self, scope, receive, send: Send) -> None:
        """Do the work and send it."""
        raise NotImplementedError


class Whole(Watched):
    """The JSON that a coroutine returns, or the ApiError that it raises."""

    def __init__(self, body: Awaitable[dict[str, Any]], write_timeout_s: float):
        super().__init__(write_timeout_s)
        self.body_to_come = body

    async def write(self, scope, receive, send: Send) -> None:
        try:
            response = Response(as_json(await self.body_to_come), media_type="application/json")
        except ApiError as error:
            response = response_of(error, scope["path"])
        await response(scope, receive, send)


class EventStream(Watched):
    """Events as they come. The status is sent with the first one, so that whatever is wrong before
    it has a status of its own; after it an error is an event, and the stream ends.
    """

    def __init__(self, events: AsyncIterator[bytes], write_timeout_s: float):
        super().__init__(write_timeout_s)
        self.events = events

    async def write(self, scope, receive, send: Send) -> None:
        is_begun, path = False, scope["path"]
        try:
            async with aclosing(self.events) as events:
                async for data in events:
                    if not is_begun:
                        is_begun = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": HEADERS}
                        )
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            if not is_begun:
                await response_of(error, path)(scope, receive, send)
                return
            data = error_event(error, path)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
