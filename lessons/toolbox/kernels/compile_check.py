"""What the compiler says about a kernel, for five GPU generations and without a GPU.

A lesson lists the kernels that it ships:

    KERNELS = [KernelSpec("lessons.l03_kv_cache.optimized:decode_kernel",
                          signature={"q_ptr": "*bf16", "scale": "fp32", "n": "i32"}, constexprs={"BLOCK": 64})]

`check(spec)` compiles it and returns a Report for each chip: registers, spills, shared memory
against the chip's limit, a census of the machine instructions, the compiler's warning that it
serialised WGMMA, or its error. It cannot tell speed, races, or what a tensor core rounds. Triton
decides at decoration whether a kernel is interpreted, so the work is done by `compile_worker` in a
process of its own. Reports are kept under build/ by the hash of the kernel's source, its arguments
and the versions. Types are Triton's: i32, i64, fp32, *bf16, *fp8e4nv, "tensordesc<bf16[64, 64]>".

    python -m lessons.toolbox.kernels.compile_check lessons.l03_kv_cache.optimized[:decode_kernel]
"""

import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lessons.toolbox.kernels.kernel_hash import kernel_hash, python_function, resolve
from lessons.toolbox.measure.device import has_triton, version_of

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "compile_check"


@dataclass(frozen=True)
class Chip:
    name: str
    shared_limit_bytes: int  # what one block may have


# Shared memory per block: CUDA C++ Programming Guide, table "Technical Specifications per Compute
# Capability".
CHIPS = {
    75: Chip("T4", 64 * 1024),
    80: Chip("A100", 163 * 1024),
    89: Chip("RTX 4090, L40S", 99 * 1024),
    90: Chip("H100, H200", 227 * 1024),
    100: Chip("B200", 227 * 1024),
}
MATRIX_INSTRUCTIONS = (
    "UTCHMMA",
    "UTCQMMA",
    "UTCIMMA",
    "HGMMA",
    "QGMMA",
    "IGMMA",
    "HMMA",
    "QMMA",
    "IMMA",
    "DMMA",
)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel as it is launched: types of the arguments, values of the constexprs, launch
    options.
    """

    kernel: str  # "package.module:function"
    # argument -> Triton type; pointers are taken as 16-byte aligned
    signature: dict[str, str]
    constexprs: dict[str, object] = field(default_factory=dict)
    # where one kernel is listed twice; else the function's name
    name: str = ""
    num_warps: int = 4
    num_stages: int = 3
    # integer arguments known to be, as launches find out for themselves
    divisible_by_16: tuple[str, ...] = ()
    # further compiler options: maxnreg, num_ctas
    options: dict[str, object] = field(default_factory=dict)
    # the compute capabilities that the kernel is written for
    chips: tuple[int, ...] = tuple(CHIPS)

    @property
    def label(self) -> str:
        return self.name or self.kernel.rpartition(":")[2]


@dataclass
class Report:
    """What the compiler said of one kernel on one chip. Everything is None, 0 or empty where
    `error` is set.
    """

    name: str
    chip: int  # compute capability: 75, 80, 89, 90 or 100
    compiler: str = ""  # "triton 3.7.1" or "nvrtc 12.9"
    kernel_hash: str = ""
    error: str | None = None  # one line; "not run: ..." where there was no compiler
    registers: int | None = None  # per thread
    spill_bytes: int = 0  # per thread, stores and loads
    stack_bytes: int = 0  # per thread
    shared_bytes: int = 0  # per block
    # machine instruction -> how often it stands in the code
    census: dict[str, int] = field(default_factory=dict)
    loads_128bit: int = 0  # global loads of 16 bytes a thread, LDGSTS included
    serialized_wgmma: bool = False  # ptxas warning C7515 and its neighbours
    warp_specialized: bool = False

    @property
    def shared_limit_bytes(self) -> int:
        return CHIPS[self.chip].shared_limit_bytes

    @property
    def fits(self) -> bool:
        """Compiled, without spills, within the chip's shared memory, and without serialised WGMMA."""
        return (
            self.error is None
            and not self.spill_bytes
            and not self.serialized_wgmma
            and self.shared_bytes <= self.shared_limit_bytes
        )

    @property
    def matrix_instruction(self) -> str | None:
        """The tensor-core instruction that the kernel uses, or None."""
        return next((name for name in MATRIX_INSTRUCTIONS if name in self.census), None)

    @property
    def tma_instructions(self) -> int:
        return sum(
            count
            for name, count in self.census.items()
            if name.startswith(("UTMALDG", "UTMASTG", "UBLKCP"))
        )

    @property
    def local_memory_instructions(self) -> int:
        return self.census.get("LDL", 0) + self.census.get("STL", 0)

    def to_dict(self) -> dict:
        """What JSON holds of it."""
        return dataclasses.asdict(self)


# ---------------------------------------------------------------- compiling


def check(spec: KernelSpec, chips: Iterable[int] | None = None) -> list[Report]:
    """Compile one kernel for each chip, by default those that the spec names. Errors as check_all."""
    return check_all([spec], chips)


def check_all(specs: Iterable[KernelSpec], chips: Iterable[int] | None = None) -> list[Report]:
    """Compile every spec for every chip, by default each for its own; reports in the order of the
    specs, then the chips.

    Raises ValueError for an unknown chip or a spec that does not fit its kernel. A compiler's error
    is in the report.
    """
    specs, chips = list(specs), None if chips is None else tuple(chips)
    for spec in specs:
        _check_arguments(spec)
        for chip in chips or spec.chips:
            if chip not in CHIPS:
                raise ValueError(f"chip {chip!r} is unknown; known: {list(CHIPS)}")
    jobs = [Job(spec, chip) for spec in specs for chip in chips or spec.chips]
    if not has_triton():
        return [job.report(error="not run: Triton is not installed") for job in jobs]
    waiting = [job for job in jobs if not job.file.exists()]
    while waiting:
        _run_worker(waiting)
        waiting = [job for job in waiting if not job.file.exists()]
    return [job.load() for job in jobs]


def _check_arguments(spec: KernelSpec) -> None:
    parameters = inspect.signature(python_function(resolve(spec))).parameters
    given = {*spec.signature, *spec.constexprs}
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in given and parameter.default is parameter.empty
    ]
    if missing:
        raise ValueError(
            f"{spec.label}: {missing} have neither a type in `signature` nor a value in "
            f"`constexprs`"
        )
    if unknown := sorted((given | set(spec.divisible_by_16)) - set(parameters)):
        raise ValueError(
            f"{spec.label}: {unknown} are no arguments of the kernel; it has {list(parameters)}"
        )


class Job:
    """One kernel on one chip, and the file under build/ that keeps its report."""

    def __init__(self, spec: KernelSpec, chip: int):
        self.chip, self.label, self.hash = chip, spec.label, kernel_hash(spec)
        self.spec = dataclasses.asdict(spec) | {
            "constexprs": {k: _as_json(v) for k, v in spec.constexprs.items()}
        }
        self.compiler = f"triton {version_of('triton')}"
        tools = [
            (Path(__file__).parent / name).read_text("utf-8")
            for name in ("compile_check.py", "compile_worker.py")
        ]
        key = json.dumps([self.spec, chip, self.hash, self.compiler, tools], sort_keys=True)
        self.file = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def report(self, **facts) -> Report:
        """A Report of this job with the given facts filled in."""
        return Report(self.label, self.chip, self.compiler, self.hash, **facts)

    def save(self, report: Report) -> None:
        """Keep a report for the next time the same job is asked for."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(report.to_dict()), "utf-8")
        part.replace(self.file)  # tests run in parallel, none may read half a file

    def load(self) -> Report:
        """The report that was kept. Raises OSError if there is none."""
        return Report(**json.loads(self.file.read_text("utf-8")))


def _as_json(value: object) -> object:
    """A constexpr as the worker can read it. Triton's types travel by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__name__ == "dtype" and hasattr(value, "name"):
        return {"dtype": value.name}
    raise ValueError(
        f"a constexpr must be a number, a string, None or a Triton type, not {value!r}"
    )


def _run_worker(jobs: list[Job]) -> None:
    """Compile the jobs in a fresh process, up to the first that crashes the compiler, and save a
    report for each.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": folder,
            "TRITON_DUMP_PTXAS_LOG": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        work = json.dumps([{"spec": job.spec, "chip": job.chip} for job in jobs])
        process = subprocess.run(
            [sys.executable, "-m", "lessons.toolbox.kernels.compile_worker", str(results)],
            input=work,
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        # no verdict of the compiler's, so none is kept
        if process.returncode > 0 or process.returncode == -signal.SIGKILL:
            raise RuntimeError(
                f"the compile worker failed: "
                f"{(process.stderr.strip().splitlines() or ['killed'])[-1]}"
            )
        done = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
        # the compiler took the process down with it, and left its last words
        if len(done) < len(jobs):
            words = results.with_suffix(".stderr").read_text("utf-8", errors="replace").splitlines()
            telling = [line for line in words if re.search("error|assertion", line, re.IGNORECASE)]
            cause = telling[0] if telling else f"signal {-process.returncode}"
            cause = re.sub(r"\S*/(\S+)", r"\1", cause)[:300]  # no paths in a record
            done.append({"error": f"the compiler crashed: {cause}"})
    for job, facts in zip(jobs, done):
        job.save(job.report(**facts))


def check_cuda(
    source: str, chips: Iterable[int] = tuple(CHIPS), name: str = "CUDA C++"
) -> list[Report]:
    """Compile CUDA C++ with NVRTC through cuda.core, for each chip. Without it every report says
    that it was not run.
    """
    # here, because the worker imports nothing from this file
    from lessons.toolbox.kernels.compile_worker import compile_cuda

    stamp = hashlib.sha256(source.encode()).hexdigest()[:16]
    return [Report(name, chip, kernel_hash=stamp, **compile_cuda(source, chip)) for chip in chips]


# ---------------------------------------------------------------- the command


def print_table(reports: list[Report]) -> None:
    """A row a report: what to look at before a kernel is called done."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "kernel",
        "chip",
        "registers",
        "spill B",
        "shared KiB",
        "of KiB",
        "matrix",
        "16 B loads",
        "TMA",
        "remarks",
    )
    for report in reports:
        numbers = [
            report.registers,
            report.spill_bytes,
            round(report.shared_bytes / 1024, 1),
            report.shared_limit_bytes // 1024,
            report.matrix_instruction or "-",
            report.loads_128bit,
            report.tma_instructions,
        ]
        remarks = {
            "WGMMA serialised": report.serialized_wgmma,
            "warp specialised": report.warp_specialized,
            "too much shared memory": report.shared_bytes > report.shared_limit_bytes,
            "failed": report.error,
        }
        cells = [""] * len(numbers) if report.error else map(str, numbers)
        table.add_row(
            report.name,
            f"sm_{report.chip}",
            *cells,
            ", ".join(name for name, holds in remarks.items() if holds),
            style=None if report.fits else "red",
        )
    Console(width=max(110, Console().width)).print(table)
    for report in reports:
        if report.error:
            print(f"{report.name} sm_{report.chip}: {report.error}")


def main(arguments: list[str]) -> int:
    """`module[:kernel]` -> exit code 0 if every kernel compiles for every chip."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(
            "usage: python -m lessons.toolbox.kernels.compile_check package.module[:kernel]",
            file=sys.stderr,
        )
        return 2
    module_name, _, wanted = arguments[0].partition(":")
    try:
        listed = getattr(importlib.import_module(module_name), "KERNELS", [])
    except ModuleNotFoundError as error:
        print(f"no module {module_name!r}: {error}", file=sys.stderr)
        return 2
    specs = [spec for spec in listed if wanted in ("", spec.label, spec.kernel.rpartition(":")[2])]
    if not specs:
        print(
            f"{module_name} lists no kernel {wanted!r}; KERNELS holds "
            f"{[spec.label for spec in listed]}",
            file=sys.stderr,
        )
        return 2
    reports = check_all(specs)
    print_table(reports)
    return 0 if all(report.error is None for report in reports) else 1


if __name__ == "__main__":
    # because the specs of a lesson are of that module's class, not of __main__'s
    from lessons.toolbox.kernels import compile_check

    sys.exit(compile_check.main(sys.argv[1:]))
