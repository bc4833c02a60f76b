"""What a proof run stands on: the machine, the lessons there are, and one command run under a time
limit.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# The machine's other pytest plugins stay out: what they do to a test nobody here has seen.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
RUNNING: set[subprocess.Popen] = set()


@dataclass(frozen=True)
class Machine:
    """Where the steps run. interpreted: a rehearsal on a CPU, which goes through every step and
    proves nothing.
    """

    fingerprint: dict
    interpreted: bool
    sanitizer: str | None  # path of compute-sanitizer
    jobs: int  # lessons whose equivalence is tested at once


def this_machine(interpreted: bool = False) -> Machine:
    """The machine that this process runs on."""
    from lessons.toolbox.measure import device

    fingerprint = device.fingerprint()
    # a test process takes gigabytes
    at_once = min(device.core_count() // 2, int(fingerprint.get("memory_gib", 0) // 10), 8)
    beside_cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    sanitizer = shutil.which("compute-sanitizer") or (
        str(beside_cuda) if beside_cuda.exists() else None
    )
    return Machine(fingerprint, interpreted, sanitizer, max(1, at_once))


def device_folder(device: str) -> str:
    """ "NVIDIA GeForce RTX 4090" -> "rtx-4090": the folder in results/."""
    name = re.sub(r"\b(nvidia|geforce|tesla)\b", "", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


# ---------------------------------------------------------------- the lessons


def rooms(root: Path = ROOT) -> dict[str, Path]:
    """{"02": its folder}, in order, of the lessons that exist under `root`/lessons."""
    return {
        path.name[1:3]: path
        for path in sorted((root / "lessons").glob("l[0-9][0-9]_*"))
        if path.is_dir()
    }


def find_rooms(wanted: str | None, root: Path = ROOT) -> dict[str, Path]:
    """All lessons, or the one named by number ("3", "03") or name ("kv_cache"). ValueError lists
    what exists.
    """
    known = rooms(root)
    if not wanted:
        return known
    for number, path in known.items():
        if wanted in (path.name, path.name[4:]) or (
            wanted.isdecimal() and int(wanted) == int(number)
        ):
            return {number: path}
    raise ValueError(
        f"LESSON={wanted!r}; accepted: "
        f"{', '.join(f'{n} {p.name[4:]}' for n, p in known.items()) or 'none yet'}"
    )


def source_hash(*folders: Path) -> str:
    """Of all code in these folders: a finished step is finished until it changes."""
    files = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".cu"))
    return hashlib.sha256(
        b"\0".join(p.name.encode() + b"\0" + p.read_bytes() for p in files)
    ).hexdigest()[:16]


# ---------------------------------------------------------------- one command


@dataclass(frozen=True)
class Outcome:
    """What became of a command. status: "passed", "failed", "timeout"."""

    status: str
    code: int | None
    seconds: float
    output: str


def execute(command: list[str], limit_s: float, cwd: Path, env: dict | None = None) -> Outcome:
    """Run a command with everything it starts, for `limit_s` at most; its output is kept whatever
    happens.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process)
        try:
            code = process.wait(timeout=max(0.1, limit_s))
            status = "failed" if code else "passed"
        except subprocess.TimeoutExpired:
            code, status = None, "timeout"
        finally:
            _end(process)
        output.seek(0)
        return Outcome(
            status, code, round(time.monotonic() - start, 1), output.read().decode(errors="replace")
        )


def _end(process: subprocess.Popen) -> None:
    """Kill what is left of a command's process group: a compiler may outlive the test that started
    it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    RUNNING.discard(process)


def end_all() -> None:
    """End every command that is running, in any thread."""
    for process in tuple(RUNNING):
        _end(process)
