"""What the compiler says about a kernel, for five GPU generations and without a GPU.

A lesson lists the kernels that it ships in its lab/specs.py:

    KERNELS = [
        KernelSpec(
            "lessons.l03_kv_cache.optimized:decode_kernel",
            signature={"q_ptr": "*bf16", "scale": "fp32", "n": "i32"},
            constexprs={"BLOCK": 64},
        )
    ]

`check(spec)` compiles it and returns a Report for each chip: registers, spills, shared memory
against the chip's limit, a census of the machine instructions, the compiler's warning that it
serialised WGMMA, or its error. It cannot tell speed, races, or what a tensor core rounds. Types are
Triton's: i32, i64, fp32, *bf16, *fp8e4nv, "tensordesc<bf16[64, 64]>".

The same kernel, arguments, chip and compiler give the same report, so nothing is compiled twice.
Reports of the lessons' kernels are committed in results/compiled/, others are kept under build/.
Triton decides at decoration whether a kernel is interpreted, so the work is done by
`compile_worker` in a process of its own.

    python -m lessons.toolbox.kernels.compile_check lessons.l03_kv_cache.lab.specs[:decode_kernel]
"""

import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lessons.toolbox.kernels.compile_report import CHIPS, Job, KernelSpec, Report, from_json
from lessons.toolbox.kernels.compile_worker import compile_cuda, nvrtc_version
from lessons.toolbox.kernels.kernel_hash import kernel_hash, python_function, resolve
from lessons.toolbox.measure.device import has_triton, version_of

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "results" / "compiled"
EARLIER = RECORDED / "triton_3.6"  # the same kernels by the Triton of torch 2.11
CACHE = ROOT / "build" / "compile_check"


def check(spec: KernelSpec, chips: Iterable[int] | None = None) -> list[Report]:
    """Compile one kernel, for the chips that its spec names or for others. Errors as check_all."""
    return check_all([spec], chips)


def check_all(specs: Iterable[KernelSpec], chips: Iterable[int] | None = None) -> list[Report]:
    """Compile every spec for every chip, by default each for its own; reports in the order of the
    specs, then the chips.

    Raises ValueError for an unknown chip or a spec that does not fit its kernel. A compiler's error
    is in the report.
    """
    chips = None if chips is None else tuple(chips)
    jobs = [triton_job(spec, chip) for spec in specs for chip in chips or spec.chips]
    return check_jobs(jobs)


def check_cuda(source: str, chips: Iterable[int] = CHIPS, name: str = "CUDA C++") -> list[Report]:
    """Compile CUDA C++ with NVRTC for each chip; without it no report was run."""
    return check_jobs([cuda_job(source, chip, name) for chip in chips])


def check_jobs(jobs: list[Job], afresh: bool = False) -> list[Report]:
    """A report for each job, in order. afresh: also where a report is kept."""
    found = {}
    if not afresh:
        found = {job.key: report for job in jobs if (report := kept(job))}
    waiting = list({job.key: job for job in jobs if job.key not in found}.values())
    while waiting:
        done = compile_some(waiting)
        for job, facts in zip(waiting, done):
            found[job.key] = job.report(**facts)
            if found[job.key].was_run:
                keep(job, found[job.key])
        waiting = waiting[len(done) :]
    return [dataclasses.replace(found[job.key], name=job.name) for job in jobs]


# ---------------------------------------------------------------- what is kept


@functools.cache
def recorded(folder: Path = RECORDED) -> dict[str, Report]:
    """{key of the job: report} of all committed reports, of whatever compiler."""
    texts = [file.read_text("utf-8") for file in sorted(folder.glob("*.jsonl"))]
    reports = [from_json(line) for text in texts for line in text.splitlines()]
    return {report.key: report for report in reports}


def kept(job: Job) -> Report | None:
    """The committed report of a job by the same compiler, else the one under build/, else None."""
    both = (recorded(folder).get(job.key) for folder in (RECORDED, EARLIER))
    found = next((report for report in both if report and report.compiler == job.compiler), None)
    if found is None:
        file = cache_file(job)
        if not file.exists():
            return None
        found = from_json(file.read_text("utf-8"))
    return dataclasses.replace(found, name=job.name)


def keep(job: Job, report: Report) -> None:
    """Keep a report under build/ for the next time that the same job is asked for."""
    file = cache_file(job)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(report.to_json(), "utf-8")
    part.replace(file)  # tests run in parallel, none may read half a file


def cache_file(job: Job) -> Path:
    return CACHE / job.compiler / f"{job.key}.json"


# ---------------------------------------------------------------- what is asked


def triton_job(spec: KernelSpec, chip: int) -> Job:
    """Raises ValueError for an unknown chip or a spec that does not fit its kernel."""
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is unknown; known: {list(CHIPS)}")
    _check_arguments(spec)
    constexprs = {k: _as_json(v) for k, v in spec.constexprs.items()}
    source = dataclasses.asdict(dataclasses.replace(spec, constexprs=constexprs))
    return Job(spec.label, chip, source, kernel_hash(spec), triton_version())


@functools.cache
def triton_version() -> str:
    return f"triton {version_of('triton')}"


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


def _as_json(value: object) -> object:
    """A constexpr as the worker can read it. Triton's types and jit functions travel by name."""
    if (function := python_function(value)) is not None:
        return {"function": f"{function.__module__}:{function.__name__}"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__name__ == "dtype" and hasattr(value, "name"):
        return {"dtype": value.name}
    raise ValueError(
        f"a constexpr must be a number, a string, None, a Triton type or a jit function, not "
        f"{value!r}"
    )


def cuda_job(source: str, chip: int, name: str) -> Job:
    stamp = hashlib.sha256(source.encode()).hexdigest()[:16]
    return Job(name, chip, source, stamp, nvrtc_version())


# ---------------------------------------------------------------- the compilers


def compile_some(jobs: list[Job]) -> list[dict]:
    """The facts of the first jobs, of one at least: a compiler that crashes ends the batch."""
    of_triton = list(itertools.takewhile(lambda job: isinstance(job.source, dict), jobs))
    if not of_triton:
        return [compile_cuda(jobs[0].source, jobs[0].chip)]
    if not has_triton():
        return [{"error": "not run: Triton is not installed"}] * len(of_triton)
    return compile_triton(of_triton)


def compile_triton(jobs: list[Job]) -> list[dict]:
    """Compile the jobs in a fresh process, up to the first that crashes the compiler."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "LADDER_CHIP": "",
            "TRITON_CACHE_DIR": folder,
            "TRITON_DUMP_PTXAS_LOG": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        process = subprocess.run(
            [sys.executable, "-m", "lessons.toolbox.kernels.compile_worker", str(results)],
            input=json.dumps([{"spec": job.source, "chip": job.chip} for job in jobs]),
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        # no verdict of the compiler's
        if process.returncode > 0 or process.returncode == -signal.SIGKILL:
            last_words = (process.stderr.strip().splitlines() or ["killed"])[-1]
            raise RuntimeError(f"the compile worker failed: {last_words}")
        done = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
        if len(done) < len(jobs):
            said = results.with_suffix(".stderr").read_text("utf-8", errors="replace")
            done.append({"error": f"the compiler crashed: {_cause(said, -process.returncode)}"})
    return done


def _cause(said: str, number: int) -> str:
    """Why the compiler took its process down: its last words, else the signal's number."""
    telling = [line for line in said.splitlines() if re.search("error|assertion", line, re.I)]
    cause = telling[0] if telling else f"signal {number}"
    return re.sub(r"\S*/(\S+)", r"\1", cause)[:300]  # no paths in a record


# ---------------------------------------------------------------- the command


def print_table(reports: list[Report]) -> None:
    """A row a report: what to look at before a kernel is called done."""
    from rich.console import Console
    from rich.table import Table

    columns = "kernel,chip,registers,spill B,shared KiB,of KiB,matrix,16 B loads,TMA,remarks"
    table = Table(*columns.split(","))
    for report in reports:
        facts = [
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
        table.add_row(
            report.name,
            f"sm_{report.chip}",
            *("" if report.error else str(fact) for fact in facts),
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
        command = "python -m lessons.toolbox.kernels.compile_check package.module[:kernel]"
        print(f"usage: {command}", file=sys.stderr)
        return 2
    module_name, _, wanted = arguments[0].partition(":")
    try:
        listed = getattr(importlib.import_module(module_name), "KERNELS", [])
    except ModuleNotFoundError as error:
        print(f"no module {module_name!r}: {error}", file=sys.stderr)
        return 2
    specs = [spec for spec in listed if wanted in ("", spec.label, spec.kernel.rpartition(":")[2])]
    if not specs:
        held = [spec.label for spec in listed]
        print(f"{module_name} lists no kernel {wanted!r}; KERNELS holds {held}", file=sys.stderr)
        return 2
    reports = check_all(specs)
    print_table(reports)
    return 0 if all(report.error is None for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
