"""Jupyter kernels that start at once: forked from one process that has imported the big libraries.

Importing PyTorch, transformers and matplotlib takes a core about five seconds, and every notebook
needs them. None of the course's own modules is imported before the fork, so a notebook has to find
the course as it does anywhere. Where there is no fork, a kernel starts as Jupyter starts it.

    with preloaded_kernels() as seconds_used: ...     nbclient starts its kernels this way

Run as a script, this file is the process that forks. It answers each request, a line of JSON on its
standard input, with a line of JSON.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PRELOADED = (
    "torch",
    "triton",
    "transformers",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "ipykernel.kernelapp",
)
INLINE = "module://matplotlib_inline.backend_inline"  # what a kernel sets before it imports it


# ---------------------------------------------------------------- the process that forks


def serve() -> None:
    """Answer requests until standard input ends, then end the kernels that still run."""
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # kernels end when this process does
    for name in PRELOADED:
        with suppress(ImportError):  # the notebook that needs it will say so
            importlib.import_module(name)
    running = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            pid = start(request)
            running.add(pid)
            answer = {"pid": pid}
        else:
            answer = poll(request["pid"])
            if answer["status"] is not None:
                running.discard(request["pid"])
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)  # at once: taking PyTorch apart takes seconds


def start(request: dict) -> int:
    """Fork a kernel, in a process group of its own; returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            become_kernel(**request)
        finally:
            os._exit(1)
    os.setpgid(pid, pid)  # here too, because the answer may be read before the child does it
    return pid


def become_kernel(do: str, connection_file: str, folder: str, environment: dict) -> None:
    """Be `python -m ipykernel_launcher -f connection_file`, started in `folder`."""
    os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # they belong to the requests
        os.dup2(silence, descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ipykernel_launcher", "-f", connection_file]
    del sys.path[0]  # the folder of this script

    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance()


def poll(pid: int) -> dict:
    """{"status": None} while it runs, then its status and the seconds that it kept a core busy,
    processes included that it started itself.
    """
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    if not ended:
        return {"status": None}
    seconds = usage.ru_utime + usage.ru_stime
    return {"status": os.waitstatus_to_exitcode(status), "seconds": seconds}


# ---------------------------------------------------------------- Jupyter's side of it


class Server:
    """The process that forks, as seen from the tests."""

    def __init__(self):
        environment = os.environ | {"MPLBACKEND": INLINE, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.seconds = 0.0  # of a core, used by kernels that have ended

    def ask(self, **request) -> dict:
        """The answer to one request."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def launch(self, command: list[str], env: dict, cwd: str, **_) -> "Kernel":
        """Stands in for jupyter_client's launch_kernel. command: [..., "-f", connection file]."""
        connection_file = command[command.index("-f") + 1]
        answer = self.ask(
            do="start", connection_file=connection_file, folder=str(cwd), environment=env
        )
        return Kernel(self, answer["pid"])

    def close(self) -> None:
        """End the process and the kernels that still run."""
        self.process.stdin.close()
        self.process.wait()


class Kernel:
    """What Jupyter asks of the process of a kernel: a part of subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, server: Server, pid: int):
        self.server, self.pid, self.returncode = server, pid, None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.returncode is None:
            answer = self.server.ask(do="poll", pid=self.pid)
            self.returncode = answer["status"]
            self.server.seconds += answer.get("seconds", 0.0)
        return self.returncode

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        while self.poll() is None:
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Only while it runs: afterwards its number may be another's."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def preloaded_kernels() -> Iterator[Callable[[], float]]:
    """Within it Jupyter forks its kernels. Yields a function: the seconds of a core that kernels
    used which have ended.
    """
    if sys.platform != "linux":  # on a Mac its own libraries do not survive a fork
        yield seconds_of_children
        return
    from jupyter_client.provisioning import local_provisioner

    server, launch = Server(), local_provisioner.launch_kernel
    local_provisioner.launch_kernel = server.launch
    try:
        yield lambda: server.seconds
    finally:
        local_provisioner.launch_kernel = launch
        server.close()


def seconds_of_children() -> float:
    """Seconds of a core that processes used which this one started, and which have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


if __name__ == "__main__":
    serve()
