"""vLLM and llama.cpp in processes of their own, in the environment that `make peers` makes. They are
asked in JSON and import nothing of this course.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = REPOSITORY / ".venv-peers/bin/python"
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
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    quiet |= {} if compiles else {"TORCH_COMPILE_DISABLE": "1"}
    told = {"model": str(model), **arguments}
    return started("vLLM", "vllm_process.py", quiet, told)


def llama_cpp(gguf: Path, places: int, context: int):
    """llama.cpp on a GGUF file. places: requests side by side, each with `context` tokens."""
    told = {"model": str(gguf), "places": places, "context": context}
    return started("llama.cpp", "llama_process.py", {}, told)
