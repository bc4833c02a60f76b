"""The router's process. When a signal ends it, /ready says no, no new request is let in, and
answers that have begun end, for at most --shutdown-timeout seconds.
"""

import asyncio
import socket
import sys

from reference.router.app import Routing, new_app
from reference.router.args import RouterArgs
from reference.server.process import EndsOnSignal, new_config, new_socket, url_of


class RouterServer(EndsOnSignal):
    """uvicorn's, which knows the replicas before it lets a request in."""

    def __init__(self, args: RouterArgs):
        self.args = args
        self.routing = Routing(args)
        config = new_config(
            new_app(self.routing),
            args.read_timeout,
            args.shutdown_timeout,
            log_level="warning",
            access_log=False,
            # else a client on this machine could say that it is another one
            proxy_headers=False,
            limit_concurrency=args.limit_concurrency,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn, with the replicas known."""
        await self.routing.start()
        await super().startup(sockets)

    async def drain(self) -> None:
        """As in EndsOnSignal."""
        await self.routing.drain(self.args.shutdown_timeout)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As in EndsOnSignal. At last the connections to the replicas are closed."""
        try:
            await super().shutdown(sockets)
        finally:
            await self.routing.stop()


def serve_forever(args: RouterArgs) -> int:
    """Route until a signal comes. Returns the exit code. Raises OSError in one line."""
    with new_socket(args.host, args.port, args.write_timeout) as listening:
        server = RouterServer(args)
        count = len(args.replicas)
        what = f"{count} replica{'s' * (count > 1)}"
        print(f"routing to {what} at {url_of(listening)}", file=sys.stderr, flush=True)
        asyncio.run(server.serve(sockets=[listening]))
    return 0
