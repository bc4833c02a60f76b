"""/kv_events: which blocks this server has, for routers, as they come and go.

Server-sent events, where vLLM publishes over ZeroMQ. A router knows the server's address already,
so no second port is opened or found by name, and keys and TLS are those of all routes. A connection
that ends says at once that the server is gone, where a socket of ZeroMQ's connects again silently
and drops what does not fit. And a server-sent event has an id: here epoch and sequence number.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter

from reference.engine.async_engine import EngineDeadError
from reference.features.block_events import to_json
from reference.features.kv_events import events_since
from reference.server.errors import ApiError
from reference.server.service import Service
from reference.server.streaming import EventStream, event

POLL_S = 0.05  # between two questions to the engine, while a router reads
ALIVE_S = 1.0  # after so long without events a comment says that there are none
ALIVE = b": no events\n\n"


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["server"])

    @router.get("/kv_events")
    async def kv_events() -> EventStream:
        """The whole state, then what changes, until the server shuts down."""
        if not service.args.engine.tells_blocks:
            accepted = "--kv-events-config '{\"enable_kv_cache_events\": true}'"
            raise ApiError(404, f"/kv_events: this server was started without {accepted}")
        return EventStream(batches(service), service.args.write_timeout)

    return router


async def batches(service: Service) -> AsyncIterator[bytes]:
    """Events of a stream. The engine itself says the whole state where a reader is too slow."""
    engine, (epoch, seq), told_s = service.engine, ("", 0), 0.0
    about = {
        "block_size": service.args.engine.block_size,
        "models": service.models.names,  # of which the keys are: adapters have others
    }
    while engine.is_ready:
        try:
            found = await engine.call(events_since, epoch, seq)
        except EngineDeadError:
            return
        for batch in found:
            epoch, seq = batch.epoch, batch.seq
            yield f"id: {epoch}-{seq}\n".encode() + event(to_json(batch) | about)
        if found or time.monotonic() - told_s > ALIVE_S:
            told_s = time.monotonic()
            if not found:
                yield ALIVE
        await asyncio.sleep(POLL_S)
