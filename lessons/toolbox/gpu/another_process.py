"""A function called in another process, whose kernels are compiled for a chip and run on this machine.

    steps = call("lessons.l00_gpu_and_triton.lab.steps:recordings", chip=90)

Triton decides when a kernel is decorated whether it is interpreted, so a notebook whose kernels are
interpreted cannot compile them itself.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from lessons.toolbox.measure.device import CHIP, RUNS, has_triton

ROOT = Path(__file__).resolve().parents[3]


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
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # no GPU of the machine's, because Triton has to compile for the chip that was asked for
    environment |= {CHIP: str(chip), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "call.pickle"
        file.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", "lessons.toolbox.gpu.another_process", str(file)]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(f"{function}: {said[-1]}")
        return pickle.loads(file.read_bytes())


def main(file: Path) -> None:
    """Call what the file holds, and put what it returned in its place."""
    import triton  # here, because it may not be installed

    # because code that was compiled before may name another file with the same source
    triton.knobs.compilation.always_compile = True
    function, arguments = pickle.loads(file.read_bytes())
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*arguments)
    file.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
