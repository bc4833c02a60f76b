"""A server that a measurement starts for itself, in processes of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 60.0  # that it may take to end


class OwnServer:
    """A server's processes, which can be stopped for a moment."""

    def __init__(self, process: subprocess.Popen, port: str):
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        """No process of it runs until go_on. Its sockets stay open, and the kernel takes
        requests.
        """
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run again."""
        os.killpg(self.process.pid, signal.SIGCONT)


@contextmanager
def own_server(model: str, *flags: str) -> Iterator[OwnServer]:
    """A server in a process group of its own; ended with the block. flags: of the server, beside
    the model and the port.
    """
    port = free_port()
    command = [sys.executable, "-m", "reference.server", "--model", model, "--port", port, *flags]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    server = OwnServer(process, port)
    try:
        yield server
    finally:
        server.go_on()  # because a stopped process does not hear that it shall end
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> str:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
