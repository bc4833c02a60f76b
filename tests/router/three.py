"""Replicas as processes: python -m tests.router.three PORT PORT … starts one server for each port.

They are forked from a process that has read the model already, so that libraries are imported once.
Each is announced by a line "pid port".
"""

import os
import sys

from reference.engine.assembly import new_engine
from reference.server.run import serve_forever
from tests.server.live import server_args


def main() -> None:
    new_engine(server_args().engine)  # libraries are imported where they are first needed
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
