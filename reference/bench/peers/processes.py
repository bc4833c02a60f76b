"""vLLM and llama.cpp in processes of their own, in the environment that `make peers` makes. They
are asked in JSON and import nothing of this course.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".venv-peers/bin/python"
QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MODULES = {"vLLM": "vllm", "llama.cpp": "xllamacpp"}


def python_with(name: str) -> Path | None:
    """The Python that has a library of MODULES: the one that `make peers` made, or this one."""
    if PYTHON.exists():
        return PYTHON
    return Path(sys.executable) if find_spec(MODULES[name]) else None


class Theirs:
    """A library in a process of its own. It is asked by calling it. cpu_s: seconds of processor
    time that it has taken for its answers.
    """

    def __init__(self, process: subprocess.Popen, name: str):
        self.process, self.name, self.cpu_s = process, name, 0.0
        STARTED.append(self)

    def __call__(self, requests: list[dict]) -> list[dict]:
        """What it gives for each request: a dict of fields, or {"error": one line}. requests:
        [{"prompt": text or token ids, "params": SamplingParams as a dict}, …], all at once.
        """
        answer = self.ask(requests)
        self.cpu_s += answer["cpu_s"]
        return answer["answers"]

    def forget(self) -> None:
        """Let it forget the prompts that it has seen: an empty prefix cache."""
        self.ask("forget")

    def ask(self, question: list | str) -> dict:
        """One line there, one line back."""
        self.process.stdin.write(f"{json.dumps(question)}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")
        return json.loads(line)


STARTED: list[Theirs] = []


def processor_time() -> float:
    """Seconds of processor time of this process, and of all libraries for the answers they gave."""
    return time.process_time() + sum(one.cpu_s for one in STARTED)


@contextmanager
def started(
    name: str, script: str, environment: dict[str, str], arguments: dict
) -> Iterator[Theirs]:
    """Start a script of this folder in the Python that has the library, and end it. arguments: what
    it is told, as JSON.
    """
    command = [python_with(name), Path(__file__).with_name(script)]
    process = subprocess.Popen(
        [*map(str, command), json.dumps(arguments)], text=True, env=os.environ | environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Theirs(process, name)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def vllm(model: str, compiles: bool = False, **arguments):
    """vLLM. compiles: where times are compared; numbers need no compiling. arguments: of vLLM's
    LLM.
    """
    quiet = QUIET | ({} if compiles else {"TORCH_COMPILE_DISABLE": "1"})
    told = {"model": str(model), **arguments}
    return started("vLLM", "vllm_process.py", quiet, told)


@contextmanager
def vllm_server(model: str, *flags: str) -> Iterator[str]:
    """vLLM's server on a free port of this machine, and its address. flags: of `vllm serve`. Raises
    RuntimeError if it ends before it answers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # not `vllm serve`, which asks for a package of another name than the CPU build's
    command = [python_with("vLLM"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--port", port, "--host", "127.0.0.1", *flags]
    settings = QUIET | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.Popen(
        [*map(str, command)], env=os.environ | settings,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(f"{url}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"vLLM's server ended with exit code {process.returncode}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def llama_cpp(gguf: Path, places: int, context: int):
    """llama.cpp on a GGUF file. places: requests side by side, each with `context` tokens."""
    told = {"model": str(gguf), "places": places, "context": context}
    return started("llama.cpp", "llama_process.py", {}, told)
