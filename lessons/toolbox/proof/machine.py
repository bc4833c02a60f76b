"""What a proof run stands on: the machine, the lessons that there are, and commands run under a
time limit.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.measure import device

ROOT = Path(__file__).resolve().parents[3]
# The machine's other pytest plugins stay out: what they do to a test was never tried.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@dataclass(frozen=True)
class Machine:
    """Where the steps run. interpreted: on a CPU. Triton's interpreter runs the kernels; CUDA C++
    and Gluon run as the code that the compilers make (`toolbox.gpu`), and with a chip (80 for
    sm_80) all kernels do.
    """

    fingerprint: dict
    interpreted: bool
    sanitizer: str | None  # path of compute-sanitizer
    jobs: int  # lessons whose equivalence is tested at once
    workers: int = 1  # processes that share the tests of one of them
    chip: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a step's process must know of it."""
        return {device.CHIP: str(self.chip), "TRITON_INTERPRET": "0"} if self.chip else {}


def this_machine(interpreted: bool = False, chip: int | None = None) -> Machine:
    """The machine that this process runs on."""
    fingerprint = device.fingerprint()
    # a test process takes gigabytes
    jobs = min(device.core_count() // 2, int(fingerprint.get("memory_gib", 0) // 10), 8)
    beside_cuda = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    path = os.pathsep.join([os.environ.get("PATH", ""), beside_cuda])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    jobs, workers = max(1, jobs), 1
    if not interpreted and importlib.util.find_spec("xdist"):
        workers = max(1, device.core_count() // jobs)
    if chip:
        fingerprint |= {"chip": chip, "interpreted": False}
    return Machine(fingerprint, interpreted, sanitizer, jobs, workers, chip)


def device_folder(name: str) -> str:
    """ "NVIDIA GeForce RTX 4090" -> "rtx-4090": the folder in results/."""
    name = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def rooms(root: Path = ROOT, wanted: str | None = None) -> dict[str, Path]:
    """{"02": its folder}, in order: all lessons, or the one named by number ("3", "03") or name
    ("kv_cache"). ValueError lists what exists.
    """
    known = {path.name[1:3]: path for path in sorted((root / "lessons").glob("l[0-9][0-9]_*/"))}
    if not wanted:
        return known
    for number, path in known.items():
        if wanted in (path.name, path.name[4:], number, number.lstrip("0")):
            return {number: path}
    names = ", ".join(f"{number} {path.name[4:]}" for number, path in known.items())
    raise ValueError(f"LESSON={wanted!r}; accepted: {names or 'none yet'}")


def source_hash(*folders: Path) -> str:
    """Of all code in these folders: a finished step is finished until it changes."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*")):
        if file.suffix in (".py", ".cu"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Command:
    """A command that runs, with everything it starts, for `limit_s` at most. output: the file that
    receives what it prints.
    """

    def __init__(self, command: list[str], limit_s: float, cwd: Path, output: Path, **environment):
        self.start, self.limit_s, self.output = time.monotonic(), limit_s, output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=os.environ | ENVIRONMENT | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.start, 1)

    @property
    def status(self) -> str:
        """ "running", "passed", "failed" or "timeout"."""
        code = self.process.poll()
        if code is None:
            return "timeout" if self.seconds > self.limit_s else "running"
        return "failed" if code else "passed"

    def end(self) -> str:
        """Kill what is left of it, and return its output. A compiler may outlive the test that
        started it.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return self.output.read_text(encoding="utf-8", errors="replace")
