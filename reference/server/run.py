"""The server's process: an engine behind a socket.

When a signal ends it, /ready says no, no new request is let in, and a client with an answer coming
gets it, for at most --shutdown-timeout seconds. `process` has what signals do.
"""

import asyncio
import gc
import sys
from contextlib import suppress

import uvicorn

from reference.engine.async_engine import EngineDeadError
from reference.server.app import new_app, new_service
from reference.server.args import ServerArgs
from reference.server.process import EndsOnSignal, new_config, new_socket, url_of
from reference.server.service import Service


class Server(EndsOnSignal):
    """It drains the engine."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    async def drain(self) -> None:
        """As in EndsOnSignal. An engine that has died has no answers."""
        with suppress(EngineDeadError):
            await self.service.engine.drain(self.service.args.shutdown_timeout)


def new_server(service: Service) -> Server:
    """A server over a service, which the caller has to run."""
    args = service.args
    config = new_config(
        new_app(service),
        args.read_timeout,
        args.shutdown_timeout,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        root_path=args.root_path,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        limit_concurrency=args.limit_concurrency,
    )
    return Server(config, service)


def serve_forever(args: ServerArgs) -> int:
    """Serve until a signal comes. Returns the exit code. Raises ValueError and OSError in one
    line.
    """
    # before the model is read, because that takes long
    listening = new_socket(args.host, args.port, args.write_timeout)
    with listening:
        service = new_service(args)
        server = new_server(service)
        names = ", ".join([*service.models.names, *service.models.adapters])
        # What was loaded stays, so no collection of garbage needs to look at it: that would stop
        # all streams for a tenth of a second.
        gc.collect()
        gc.freeze()
        url = url_of(listening, "https" if args.ssl_certfile else "http")
        print(f"serving {names} at {url}", file=sys.stderr, flush=True)
        try:
            asyncio.run(server.serve(sockets=[listening]))
        finally:
            service.engine.shutdown()  # or its processes would stay
    return 0
