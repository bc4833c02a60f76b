"""What this machine can run: its device, its versions, and the doctor that explains what is
missing.

    python -m lessons.toolbox.measure.device      prints the report; exit code 0 if the course can run
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import sys
from functools import lru_cache

try:
    import torch
except ImportError:  # the doctor still has to say so
    torch = None

MIN_PYTHON = (3, 10)
REQUIRED = {
    "torch": (2, 11),
    "transformers": (5, 0),
    "numpy": (1, 26),
    "safetensors": (0, 4),
    "tokenizers": (0, 20),
    # package -> the oldest version that the course accepts
    "matplotlib": (3, 8),
    "rich": (13, 0),
}
NEEDS_CAPABILITY = {
    "bfloat16 on tensor cores": (8, 0),
    "float8 (E4M3)": (8, 9),
    "WGMMA, TMA, warp specialisation": (9, 0),
}
TRITON_KNOWN = ("3.6", "3.7")  # the interpreter's patches were checked with these


def has_gpu() -> bool:
    """Whether PyTorch can use a CUDA device."""
    return torch is not None and torch.cuda.is_available()


def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, as `import lessons` decides without a CUDA
    device.
    """
    # what Triton takes for true
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def default_device() -> torch.device:
    """The CUDA device if there is one, else the CPU, where kernels are interpreted."""
    return torch.device("cuda" if has_gpu() else "cpu")


def default_dtype() -> torch.dtype:
    """bfloat16 where the GPU multiplies it (compute capability 8.0 or more), float16 on older ones,
    float32 on a CPU.
    """
    if not has_gpu():
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def synchronize(device: torch.device | str) -> None:
    """Wait until all work given to `device` is done. A CPU has always finished."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- who measured


def version_of(package: str) -> str | None:
    """The installed version of a package, or None. Does not import it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    """The GPU's name, or the CPU's model."""
    return torch.cuda.get_device_name() if has_gpu() else cpu_name()


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The CPU's model as the system gives it, or its architecture."""
    try:
        # platform.processor() is empty on most Linux systems
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def core_count() -> int:
    """How many CPU cores this process may use; in a container that is often fewer than the machine
    has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver, or None where there is none."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def fingerprint() -> dict:
    """What a measurement depends on, for every recorded JSON. Holds no host name and no paths.

    Keys: device, cpu, cores, python, torch, triton, transformers, numpy, date (UTC), interpreted;
    with a GPU also compute_capability, memory_gib, cuda, driver. A package that is not installed is
    None.
    """
    facts = {
        "device": device_name(),
        "cpu": cpu_name(),
        "cores": core_count(),
        "python": platform.python_version(),
    }
    facts |= {
        package: version_of(package) for package in ("torch", "triton", "transformers", "numpy")
    }
    facts |= {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "interpreted": interpreting(),
    }
    if has_gpu():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": driver_version(),
        }
    return facts


# ---------------------------------------------------------------- the doctor


def what_stops_the_course() -> list[tuple[str, str]]:
    """(what is wrong, the remedy in one line) for everything without which the course cannot run at
    all.
    """
    problems = []
    if sys.version_info < MIN_PYTHON:
        problems.append(
            (
                f"Python {platform.python_version()} is too old",
                f"install Python {'.'.join(map(str, MIN_PYTHON))} or newer",
            )
        )
    for package, oldest in REQUIRED.items():
        wanted, installed = ".".join(map(str, oldest)), version_of(package)
        if installed is None:
            problems.append(
                (
                    f"{package} is not installed",
                    "run `make setup`, or `pip install -r requirements.txt`",
                )
            )
        elif _release(installed) < oldest:
            problems.append(
                (
                    f"{package} {installed} is older than {wanted}",
                    f"pip install -U '{package}>={wanted}'",
                )
            )
    return problems


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13)."""
    return tuple(
        int("".join(filter(str.isdigit, part)) or 0)
        for part in version.split("+")[0].split(".")[:2]
    )


def what_cannot_run_here() -> list[tuple[str, str]]:
    """(what, why and the remedy) for each part of the course that this machine cannot run. Empty on
    a recent GPU.
    """
    missing = []
    triton_version = version_of("triton")
    if not has_triton():
        remedy = (
            "pip install triton"
            if sys.platform == "linux"
            else "use Linux, WSL or a container; naive.py runs everywhere"
        )
        missing.append(("Triton kernels, in any form", f"Triton is not installed: {remedy}"))
    elif interpreting() and not (triton_version or "").startswith(TRITON_KNOWN):
        missing.append(
            (
                "a faithful interpreter, perhaps",
                f"triton {triton_version} is not among {', '.join(TRITON_KNOWN)}: "
                "pip install -r requirements.txt",
            )
        )
    if not has_gpu():
        why = _why_no_gpu()
        missing.append(
            (
                "timings of GPU kernels, CUDA graphs, NCCL",
                f"{why}; recorded GPU results are plotted instead",
            )
        )
        missing.append(
            (
                "Gluon and CUDA C++ kernels",
                f"{why}; `python -m lessons.toolbox.kernels.compile_check` still compiles them",
            )
        )
        return missing
    capability = torch.cuda.get_device_capability()
    if interpreting():
        missing.append(
            ("compiled kernels", "TRITON_INTERPRET is set although a GPU is here: unset it")
        )
    for what, needed in NEEDS_CAPABILITY.items():
        if capability < needed:
            missing.append(
                (
                    what,
                    f"{device_name()} has compute capability {capability[0]}.{capability[1]}, "
                    f"this needs {needed[0]}.{needed[1]}",
                )
            )
    return missing


def _why_no_gpu() -> str:
    if driver_version() is None:
        return "no CUDA device on this machine"
    if torch.version.cuda is None:
        return "torch is the CPU build: install the CUDA build from pytorch.org"
    return "torch finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"


def doctor() -> bool:
    """Print what this machine can do, and each missing thing with its reason and remedy. True if
    the course can run.
    """
    problems = what_stops_the_course()
    for what, remedy in problems:
        print(f"The course cannot run: {what}; {remedy}")
    if problems:
        return False
    from rich.console import Console  # here, because it may be what is missing
    from rich.table import Table

    console = Console(highlight=False)
    missing = what_cannot_run_here()
    facts = Table(title="This machine", title_justify="left", show_header=False)
    for key, value in fingerprint().items():
        facts.add_row(key, str(value))
    if has_triton():
        kernels = (
            "run in Triton's interpreter on the CPU"
            if interpreting()
            else "are compiled for the GPU"
        )
    else:
        kernels = "cannot run: Triton is not installed"
    facts.add_row("kernels", kernels)
    facts.add_row(
        "default device, dtype",
        f"{default_device()}, {str(default_dtype()).removeprefix('torch.')}",
    )
    console.print(facts)
    if missing:
        table = Table("not here", "why", title="The course runs, without", title_justify="left")
        for what, why in missing:
            table.add_row(what, why)
        console.print(table)
    console.print("[green]ready[/]" if missing else "[green]ready, with everything[/]")
    return True


if __name__ == "__main__":
    sys.exit(0 if doctor() else 1)
