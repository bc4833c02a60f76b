"""A function called in another process, whose kernels are compiled for a chip and run on this
machine.

    steps = call("lessons.l00_gpu_and_triton.lab.steps:recordings", chip=90)

Triton decides when a kernel is decorated whether it is interpreted, so a notebook whose kernels are
interpreted cannot compile them itself.

The first call for a chip starts a process that imports PyTorch and Triton, which takes seconds, and
then waits. Each call is a fork of it, so no call sees what an earlier one imported or changed.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from lessons.toolbox.measure.device import CHIP, RUNS, has_triton

ROOT = Path(__file__).resolve().parents[3]
_waiting: dict[int, subprocess.Popen] = {}  # chip -> the process that forks
_one_at_a_time = threading.Lock()


def why_not_here() -> str | None:
    """Why no kernel can be compiled for another chip and run here, in words, or None."""
    return None if has_triton() else "Triton is not installed, so no kernel can be compiled"


def call(function: str, *arguments, chip: int):
    """What the function "package.module:name" returns for the arguments, both pickled. Raises
    ValueError for an unknown chip, RuntimeError with the last line of what went wrong.
    """
    if chip not in RUNS:
        raise ValueError(f"chip: got {chip!r}; accepted: {', '.join(map(str, RUNS))}")
    if reason := why_not_here():
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder, _one_at_a_time:
        asked = Path(folder) / "asked"
        asked.write_bytes(pickle.dumps((_environment(chip), function, arguments)))
        process = _waiting.get(chip)
        if process is None or process.poll() is not None:
            process = _waiting[chip] = _start(chip)
        try:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            code = process.stdout.readline().strip()
        except BaseException:
            # interrupted: a late answer would be taken for that of the next call
            process.kill()
            raise
        if code != "0":
            said = Path(folder) / "said"  # missing where no fork was made
            lines = said.read_text("utf-8", "replace").strip().splitlines() if said.exists() else []
            why = lines[-1] if lines else f"its process ended, exit code {code or 'unknown'}"
            raise RuntimeError(f"{function}: {why}")
        return pickle.loads((Path(folder) / "answer").read_bytes())


def _environment(chip: int) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # no GPU of the machine's, because Triton has to compile for the chip that was asked for
    return environment | {CHIP: str(chip), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def _start(chip: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "lessons.toolbox.gpu.another_process"],
        env=_environment(chip),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


# ---- in the other process


def serve() -> None:
    """Answer each folder that is named on standard input with the exit code of a fork that makes
    its call. Ends with the process that asks, because then there is no more input.
    """
    import triton  # here, because it may not be installed

    importlib.import_module("lessons.toolbox.kernels.triton_")
    # because code that was compiled before may name another file with the same source
    triton.knobs.compilation.always_compile = True
    for line in sys.stdin:
        folder = Path(line.strip())
        child = os.fork()
        if not child:
            os._exit(_answer(folder))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _answer(folder: Path) -> int:
    """Make the call that a folder asks for; what it prints, and why it failed, is in `said`."""
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        environment, function, arguments = pickle.loads((folder / "asked").read_bytes())
        os.environ.clear()
        os.environ.update(environment)
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(*arguments)
        (folder / "answer").write_bytes(pickle.dumps(result))
        return 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
