"""A server that a measurement starts for itself, in processes of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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

    def kill(self) -> None:
        """End all of it at once, as a machine that fails does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def own_server(model: str, *flags: str, port: str | None = None) -> Iterator[OwnServer]:
    """A server in a process group of its own; ended with the block. flags: of the server, beside
    the model and the port. port: None takes a free one.
    """
    with own_process("reference.server", "--model", model, *flags, port=port) as server:
        yield server


@contextmanager
def own_process(module: str, *flags: str, port: str | None = None) -> Iterator[OwnServer]:
    """python -m module --port …, in a process group of its own; ended with the block."""
    port = port or free_port()
    command = [sys.executable, "-m", module, "--port", port, *flags]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command, start_new_session=True, **quiet)
    server = OwnServer(process, port)
    try:
        yield server
    finally:
        if process.poll() is None:
            server.go_on()  # because a stopped process does not hear that it shall end
            process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(server: OwnServer, path: str = "/health", wait_s: float = 300.0) -> None:
    """Return when a server answers. Raises OSError if it ended, or does not come."""
    import httpx

    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise OSError(f"the server at {server.url} ended with code {server.process.returncode}")
        try:
            if httpx.get(server.url + path, timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise OSError(f"the server at {server.url} did not come in {wait_s:.0f} s")


def free_port() -> str:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
