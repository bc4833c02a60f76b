"""A process that listens: its socket, uvicorn, and what signals do. The server and the router share
it.

The first SIGTERM or Ctrl-C begins the end: no new request is let in, and a client with an answer
coming gets it, until the time to shut down is over. A second signal ends at once.
"""

import asyncio
import os
import socket
import time
from functools import partial

import uvicorn

from reference.server.limits import MOST_HEADER_BYTES, App, TimedProtocol

TO_SAY_SO_S = 2.0  # after the last answers were ended, for their errors to reach the clients


class EndsOnSignal(uvicorn.Server):
    """uvicorn's, which drains, and whose exit codes tell a drain from a failure."""

    async def drain(self) -> None:
        """Take no new request, and return when the answers that have begun have ended. The last of
        them are ended after the time to shut down.
        """
        raise NotImplementedError

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close the socket and the connections. The socket stays open until then, so
        that probes and newcomers are told what goes on.
        """
        begin = time.monotonic()
        most_s = self.config.timeout_graceful_shutdown
        drain = asyncio.ensure_future(self.drain())
        await asyncio.wait({drain}, timeout=most_s)  # an engine may hang
        drain.cancel()
        left_s = most_s - (time.monotonic() - begin)
        self.config.timeout_graceful_shutdown = max(left_s, TO_SAY_SO_S)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame) -> None:
        """A signal has come. uvicorn itself would end at once only for a second Ctrl-C, and would
        send itself the signal again when all is done, so that the exit code told of a failure.
        """
        if self.should_exit:
            os._exit(130)  # nothing is left to be saved, and a step may take long
        self.should_exit = True


def new_socket(host: str, port: int, write_timeout_s: float) -> socket.socket:
    """A socket that listens. Raises OSError, in one line, if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP by name, because asyncio switches Nagle's algorithm off only where it stands. With it a
    # second write waits for the client to acknowledge the first, which takes up to 40 ms: each
    # event would.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # The system itself drops a connection whose client reads nothing, with what we had
            # sent.
            option = socket.TCP_USER_TIMEOUT
            listening.setsockopt(socket.IPPROTO_TCP, option, int(write_timeout_s * 1000))
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listening


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def new_config(app: App, read_timeout_s: float, shutdown_s: float, **more) -> uvicorn.Config:
    """uvicorn's settings. read_timeout_s: of a request's headers. shutdown_s: until the last
    answers are ended. more: of uvicorn.Config.
    """
    return uvicorn.Config(
        app,
        http=partial(TimedProtocol, read_timeout_s=read_timeout_s),
        ws="none",
        lifespan="off",
        loop="asyncio",
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        server_header=False,
        timeout_graceful_shutdown=shutdown_s + TO_SAY_SO_S,
        **more,
    )
