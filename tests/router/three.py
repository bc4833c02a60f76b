"""Replicas as processes: python -m tests.router.three PORT PORT … starts one server for each port.

They are forked behind their imports, which take longest. Each writes "pid port" when it is born.
"""

import os
import sys

from reference.server.run import serve_forever
from tests.server.live import server_args


def main() -> None:
    for port in map(int, sys.argv[1:]):
        pid = os.fork()
        if pid == 0:
            serve_forever(server_args(port=port))
            os._exit(0)
        print(pid, port, flush=True)
    for _ in sys.argv[1:]:
        os.wait()


if __name__ == "__main__":
    main()
