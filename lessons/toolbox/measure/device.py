"""What this machine can run: its device, its versions, and the doctor that explains what is
missing.

    python -m lessons.toolbox.measure.device      the report; exit code 0 if the course can run
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from functools import lru_cache
from pathlib import Path

try:
    import torch
except ImportError:  # the doctor still has to say so
    torch = None

REQUIRED = {  # package -> the oldest version that the course accepts
    "torch": "2.11",
    "transformers": "5.0",
    "numpy": "1.26",
    "safetensors": "0.4",
    "tokenizers": "0.20",
    "matplotlib": "3.8",
    "rich": "13.0",
}
NEEDS_CAPABILITY = {
    "bfloat16 on tensor cores": (8, 0),
    "float8 (E4M3)": (8, 9),
    "WGMMA, TMA, warp specialisation": (9, 0),
}
# In a process that pretends to have a GPU (proof.pretended), and in its children, this is set.
REHEARSING = "LADDER_REHEARSES"
CHIP = "LADDER_CHIP"
RUNS = (75, 80, 86, 89, 90, 100)  # chips whose instructions toolbox.gpu knows
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


def compiled_chip() -> int | None:
    """The chip whose compiled code `toolbox.gpu` runs on this CPU: what LADDER_CHIP names, as 80
    for sm_80. None without it. Raises ValueError.
    """
    text = os.environ.get(CHIP, "")
    if text and text not in map(str, RUNS):
        raise ValueError(f"{CHIP}: got {text!r}; accepted: {', '.join(map(str, RUNS))}")
    return int(text) if text else None


def machine_chip() -> int:
    """The chip for which kernels that are never interpreted, of CUDA C++ and Gluon, are compiled on
    a CPU: that of LADDER_CHIP, else an H100's.
    """
    return compiled_chip() or 90


def capability() -> tuple[int, int] | None:
    """The compute capability that kernels are compiled for: (8, 0); None where they are
    interpreted.
    """
    if chip := compiled_chip():
        return divmod(chip, 10)
    return torch.cuda.get_device_capability() if has_gpu() else None


def rehearsing() -> bool:
    """Whether the GPU of this process is pretended, so that nothing it records counts."""
    return os.environ.get(REHEARSING) == "1"


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
    # platform.processor() is empty on most Linux systems
    facts = _text_of("/proc/cpuinfo")
    model = re.search(r"model name\s*: *(.+)", facts)
    return model[1] if model else platform.processor() or platform.machine()


def core_count() -> int:
    """How many CPU cores this process may use; in a container that is often fewer than the machine
    has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver, or None where there is none."""
    return _text_of("/sys/module/nvidia/version").strip() or None


def _text_of(path: str) -> str:
    """A file's text; "" if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def fingerprint() -> dict:
    """What a measurement depends on, for every recorded JSON. Holds no host name and no paths.

    Keys: device, cpu, cores, python, torch, triton, transformers, numpy, date (UTC), interpreted;
    with a GPU also compute_capability, memory_gib, cuda, driver; rehearsed, if the GPU is
    pretended. A package that is not installed is None.
    """
    packages = ("torch", "triton", "transformers", "numpy")
    facts = {
        "device": device_name(),
        "cpu": cpu_name(),
        "cores": core_count(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "interpreted": interpreting(),
    }
    if rehearsing():
        facts["rehearsed"] = True
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
    for package, oldest in REQUIRED.items():
        installed = version_of(package)
        if installed is None:
            remedy = "run `make setup`, or `pip install -r requirements.txt`"
            problems.append((f"{package} is not installed", remedy))
        elif _release(installed) < _release(oldest):
            remedy = f"pip install -U '{package}>={oldest}'"
            problems.append((f"{package} {installed} is older than {oldest}", remedy))
    return problems


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def what_cannot_run_here() -> list[tuple[str, str]]:
    """(what, why and the remedy) for each part of the course that this machine cannot run. Empty on
    a recent GPU.
    """
    from lessons.toolbox.gpu import nvrtc  # here, because only the doctor asks for it

    gpu, why = has_gpu(), _why_no_gpu()
    capability = torch.cuda.get_device_capability() if gpu else (0, 0)
    triton = version_of("triton") or "of an unknown version"
    unknown = has_triton() and interpreting() and not triton.startswith(TRITON_KNOWN)
    checks = [
        (
            "Triton kernels, in any form",
            not has_triton(),
            "Triton is not installed: pip install triton, on Linux, in WSL or in a container; "
            "naive.py runs everywhere",
        ),
        (
            "a faithful interpreter, perhaps",
            unknown,
            f"triton {triton} is not among {', '.join(TRITON_KNOWN)}: "
            "pip install -r requirements.txt",
        ),
        (
            "timings of GPU kernels, CUDA graphs, NCCL",
            not gpu,
            f"{why}; recorded GPU results are plotted instead",
        ),
        (
            "Gluon kernels",
            not gpu,
            f"{why}; without Triton they are not compiled either"
            if not has_triton()
            else f"{why}; `python -m lessons.toolbox.kernels.compile_check` still compiles them",
        ),
        (
            "CUDA C++ kernels",
            not gpu and bool(nvrtc.why_not_here()),
            f"{why}; CUDA C++ {nvrtc.why_not_here()}",
        ),
        (
            "compiled kernels",
            gpu and interpreting(),
            "TRITON_INTERPRET is set although a GPU is here: unset it",
        ),
    ]
    here = f"{device_name()} has compute capability {capability[0]}.{capability[1]}"
    for what, (major, minor) in NEEDS_CAPABILITY.items():
        too_old = gpu and capability < (major, minor)
        checks.append((what, too_old, f"{here}, this needs {major}.{minor}"))
    return [(what, why) for what, missing, why in checks if missing]


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
    facts = fingerprint()
    where = "interpreted on the CPU" if interpreting() else "compiled for the GPU"
    facts["kernels"] = where if has_triton() else "none: Triton is not installed"
    facts["default device"], facts["default dtype"] = default_device(), default_dtype()
    print("This machine")
    for key, value in facts.items():
        print(f"  {key:20}{value}")
    missing = what_cannot_run_here()
    if missing:
        print("The course runs, without")
    for what, why in missing:
        print(f"  {what}: {why}")
    print("ready" if missing else "ready, with everything")
    return True


if __name__ == "__main__":
    sys.exit(0 if doctor() else 1)
