"""The server's process: a socket, uvicorn, and what signals do.

The first SIGTERM or Ctrl-C begins the end: /ready says no, nobody new is let in, and whoever has an
answer coming gets it, for at most --shutdown-timeout seconds. A second signal ends at once.
"""

import asyncio
import os
import socket
import sys
from functools import partial

import uvicorn

from reference.server.app import new_app, new_service
from reference.server.args import ServerArgs
from reference.server.limits import MOST_HEADER_BYTES, TimedProtocol
from reference.server.service import Service

TO_SAY_SO_S = 2.0  # after the engine ended the last answers, for their errors to reach the clients


class Server(uvicorn.Server):
    """uvicorn's, which drains the engine while it waits for its connections."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame) -> None:
        """A signal has come. uvicorn itself would end at once only for a second Ctrl-C, and would
        send itself the signal again when all is done, so that the exit code told of a failure.
        """
        if self.should_exit:
            os._exit(130)  # nothing is left to be saved, and a step may take long
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the socket, then wait for both the engine and the connections."""
        limit_s = self.service.args.shutdown_timeout
        drain = asyncio.ensure_future(self.service.engine.drain(limit_s))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()


def new_socket(host: str, port: int, write_timeout_s: float) -> socket.socket:
    """A socket that listens. Raises OSError, in one line, if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # The system itself drops a connection whose client reads nothing, with what we had sent.
            option = socket.TCP_USER_TIMEOUT
            listening.setsockopt(socket.IPPROTO_TCP, option, int(write_timeout_s * 1000))
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listening


def new_server(service: Service) -> Server:
    """A server over a service, which somebody has to run."""
    args = service.args
    config = uvicorn.Config(
        new_app(service),
        http=partial(TimedProtocol, read_timeout_s=args.read_timeout),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        root_path=args.root_path,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        limit_concurrency=args.limit_concurrency,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        server_header=False,
        timeout_graceful_shutdown=args.shutdown_timeout + TO_SAY_SO_S,
    )
    return Server(config, service)


def serve_forever(args: ServerArgs) -> int:
    """Serve until a signal comes. Returns the exit code. Raises ValueError and OSError in one line."""
    # before the model is read, because that takes long
    listening = new_socket(args.host, args.port, args.write_timeout)
    with listening:
        service = new_service(args)
        server = new_server(service)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        names = ", ".join([*service.models.names, *service.models.adapters])
        print(f"serving {names} at http://{shown}:{port}", file=sys.stderr, flush=True)
        asyncio.run(server.serve(sockets=[listening]))
        service.engine.shutdown()
    return 0
