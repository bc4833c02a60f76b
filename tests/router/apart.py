"""Replicas as processes: python -m tests.router.apart PORT:ROLE:CONNECTOR … starts one for each.

They are forked from a process that has read the model already, as in three.py. Each is announced by
a line "pid port". The steps of a producer take PAUSE_S longer, so that it can be killed while a
prompt runs.
"""

import os
import sys
import time
from dataclasses import replace

from reference.engine.assembly import new_engine
from reference.engine.engine import Engine
from reference.server.args import ServerArgs
from reference.server.run import serve_forever
from tests.server.live import server_args

PAUSE_S = 0.02


def args_of(port: int, role: str, connector: str) -> ServerArgs:
    """Of a server with small steps, so that a prompt is several chunks."""
    found = server_args(port=port)
    transfer = dict(kv_connector=connector, kv_role=role, kv_port=0, kv_buffer_size=4e7)
    own = dict(enable_lora=False, kv_transfer_config=transfer, max_num_batched_tokens=32)
    engine = replace(found.engine, **own, max_loras=1)
    return replace(found, engine=engine, lora_modules={})


def main() -> None:
    new_engine(server_args().engine)  # libraries are imported where they are first needed
    for each in sys.argv[1:]:
        port, role, connector = each.split(":")
        pid = os.fork()
        if pid == 0:
            if role == "kv_producer":
                slow_down()
            serve_forever(args_of(int(port), role, connector))
            os._exit(0)
        print(pid, port, flush=True)
    for _ in sys.argv[1:]:
        os.wait()


def slow_down() -> None:
    advance = Engine.advance

    def slow(self):
        time.sleep(PAUSE_S)
        return advance(self)

    Engine.advance = slow


if __name__ == "__main__":
    main()
