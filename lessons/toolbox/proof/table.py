"""Which kernels there are, and what is known of each: proved on a CPU (in Triton's interpreter or
by their compiled code), compiled for which chips, proved on which GPU.

Everything is made from files alone (sources, results/compiled/, results/<device>/proof.json), so
that it is the same on every machine.
"""

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.kernels import compile_check
from lessons.toolbox.kernels.compile_check import EARLIER
from lessons.toolbox.kernels.compile_report import CHIPS, Job, Report
from lessons.toolbox.kernels.kernel_hash import kernel_hash
from lessons.toolbox.proof import beside
from lessons.toolbox.proof.machine import ROOT, rooms

COMMAND = "`python -m lessons.toolbox.proof readme` writes it"
BEGIN, END = f"<!-- proofs: {COMMAND} -->", "<!-- end of proofs -->"
PROVED, NOT_YET = "proved", "not yet"
INTERPRETED, COMPILED = "interpreter only", "compiled code only"
STALE, NOT_FOR_IT = "stale", "–"
EXECUTED = "compiled code executed"
MEANING = (
    "A cell holds registers a thread, bytes spilled and KiB of shared memory, the most over all "
    "launches of the kernel. `!`: it spills, or does not fit the chip. `–`: the kernel is not for "
    "this chip. `stale`: the kernel has changed since. *Compiled code executed*: the chips for "
    "which the tests of equivalence have passed with the code that the compilers make for them, "
    "run on a CPU by `lessons/toolbox/gpu/`. It is no GPU, and tells no time."
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a lesson and how it is compiled: a job for each launch and chip.

    source_hash: what a test records; None: that of the first job. A job's hash counts the hooks of
    its launch, too.
    """

    file: str  # "lessons/l03_kv_cache/optimized.py"
    jobs: list[Job]
    source_hash: str | None = None

    @property
    def hash(self) -> str:
        return self.source_hash or self.jobs[0].kernel_hash

    @property
    def lesson(self) -> str:
        """Whose room the source stands in: "03"."""
        return Path(self.file).parts[1][1:3]


def kernels(root: Path = ROOT) -> dict[str, Kernel]:
    """{"03/decode_kernel": ...} from the lists KERNELS in the lessons' lab/specs.py and from the
    .cu files, in the order of the lessons. Imports the lessons.
    """
    found: dict[str, Kernel] = {}
    for room in rooms(root).values():
        if (room / "lab" / "specs.py").exists():
            for spec in importlib.import_module(f"lessons.{room.name}.lab.specs").KERNELS:
                module, _, name = spec.kernel.partition(":")
                file = module.replace(".", "/") + ".py"
                kernel = Kernel(file, [], kernel_hash(spec.kernel))
                kernel = found.setdefault(f"{room.name[1:3]}/{name}", kernel)
                kernel.jobs.extend(compile_check.triton_job(spec, chip) for chip in spec.chips)
        for file in room.glob("*.cu"):
            source = file.read_text(encoding="utf-8")
            cuda = [compile_check.cuda_job(source, chip, file.name) for chip in CHIPS]
            path = f"lessons/{room.name}/{file.name}"
            found[f"{room.name[1:3]}/{file.name}"] = Kernel(path, cuda)
    return found


# ---------------------------------------------------------------- compiled


def record_compiled(root: Path = ROOT) -> None:
    """Write results/compiled/03.jsonl of every lesson: what the compiler says of its kernels. With
    Triton 3.6 instead results/compiled/triton_3.6/, for sm_90 alone, the chip of the machines that
    have it. Compiles those without a report. Raises ValueError where there is no compiler.
    """
    folder, is_earlier = root / "results" / "compiled", of_earlier_triton()
    folder = folder / EARLIER.name if is_earlier else folder
    of_lesson: dict[str, list[Job]] = {}
    for key, kernel in kernels(root).items():
        jobs = kernel.jobs
        if is_earlier:
            jobs = [job for job in jobs if isinstance(job.source, dict) and job.chip == 90]
        of_lesson.setdefault(key[:2], []).extend(jobs)
    for lesson, jobs in of_lesson.items():
        reports = compile_check.check_jobs(jobs)
        for report in reports:
            if not report.was_run:
                raise ValueError(f"{report.name} cannot be compiled here: {report.error}")
        lines = "".join(report.to_json() + "\n" for report in reports)
        file = folder / f"{lesson}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines, encoding="utf-8")
    compile_check.recorded.cache_clear()


def of_earlier_triton() -> bool:
    """Whether the Triton here is the one of EARLIER."""
    return compile_check.triton_version().startswith(EARLIER.name.replace("_", " "))


def compiled_cell(reports: list[Report | None]) -> str:
    """All launches of a kernel on one chip -> "24 / 0 / 2.0". None: a launch without a report."""
    if not reports:
        return NOT_FOR_IT
    if None in reports:
        return STALE
    if any(report.error for report in reports):
        return "error"
    spilled = max(report.spill_bytes for report in reports)
    shared_kib = max(report.shared_bytes for report in reports) / 1024
    text = f"{max(report.registers for report in reports)} / {spilled} / {shared_kib:.1f}"
    return text if all(report.fits for report in reports) else f"{text} !"


# ---------------------------------------------------------------- proved


def proofs(root: Path = ROOT) -> list[dict]:
    """The proof.json of each device in results/. One of a pretended GPU (proof.rehearsal) is none,
    wherever it came from.
    """
    files = sorted((root / "results").glob("*/proof.json"))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [proof for proof in found if not proof.get("rehearsed")]


def proof_cell(key: str, current_hash: str, proofs: list[dict]) -> str:
    """ "proved on NVIDIA H200", "stale on ..." for each GPU that has seen the kernel; else
    "interpreter only", "stale in the interpreter"; for Gluon and CUDA C++, which no interpreter
    runs, the same of their compiled code; or "not yet".

    Proved: all tests of a lesson that record a proof passed there, and among them the kernel with
    the source that it has now.
    """
    on_gpu, without = [], NOT_YET
    for proof in proofs:
        if proof.get("chip") or not (found := records_of(key, proof)):
            continue
        is_current = current_hash in {entry["hash"] for entry in found}
        if proof["interpreted"]:
            place = "interpreter" if where_of(found[0]) == "interpreter" else "compiled code"
            without = f"{place} only" if is_current else f"{STALE} in the {place}"
        else:
            on_gpu.append(f"{PROVED if is_current else STALE} on {proof['device']}")
    return ", ".join(on_gpu) or without


def where_of(record: dict) -> str:
    """Where a kernel ran that a step without a GPU recorded: "interpreter" or a chip, "sm_90"."""
    return record.get("where", "interpreter")


def records_of(key: str, proof: dict) -> list[dict]:
    """What the steps that passed there recorded of a kernel."""
    passed = [step for step in proof["steps"].values() if step["status"] == "passed"]
    return [step["kernels"][key] for step in passed if key in step.get("kernels", ())]


def executed_cell(key: str, current_hash: str, proofs: list[dict]) -> str:
    """The chips whose compiled code has run on a CPU and was right: "80, 90"; "stale" if the kernel
    has changed since; "not yet".
    """
    ran = [record for proof in proofs for record in records_of(key, proof)]
    hashes = {(where_of(record), record["hash"]) for record in ran if "sm_" in where_of(record)}
    current = {int(where[3:]) for where, hash in hashes if hash == current_hash}
    if current:
        return ", ".join(map(str, sorted(current)))
    return STALE if hashes else NOT_YET


def steps_of(proof: dict, lesson: str) -> dict:
    """What the steps of one lesson have found."""
    steps = {name: step for name, step in proof["steps"].items() if name.startswith(lesson)}
    return proof | {"steps": steps}


# ---------------------------------------------------------------- what is shown


def rows(kernels: dict[str, Kernel], proofs: list[dict]) -> list[list[str]]:
    """[lesson, kernel with a link, a cell for each chip, for which chips its compiled code has run,
    how it is proved] of each kernel.
    """
    known = compile_check.recorded()
    lines = []
    for key, kernel in kernels.items():
        lesson, _, name = key.partition("/")
        of_chip = {chip: [] for chip in CHIPS}
        for job in kernel.jobs:
            of_chip[job.chip].append(known.get(job.key))
        cells = [compiled_cell(reports) for reports in of_chip.values()]
        link = f"[`{name}`](../{kernel.file})"
        # A lesson that launches an older kernel with hooks of its own proves it under its old name.
        proved = proofs if lesson == kernel.lesson else [steps_of(p, lesson) for p in proofs]
        key = f"{kernel.lesson}/{name}"
        executed = executed_cell(key, kernel.hash, proved)
        lines.append([lesson, link, *cells, executed, proof_cell(key, kernel.hash, proved)])
    return lines


def markdown(rows: list[list[str]]) -> str:
    """The table of results/README.md."""
    names = ["lesson", "kernel", *(f"sm_{chip}" for chip in CHIPS), EXECUTED, "proved"]
    lines = [names, ["---"] * len(names), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    compilers = sorted({report.compiler for report in compile_check.recorded().values()})
    compiled = f"Compiled by {' and '.join(compilers)}, without a GPU. {MEANING}"
    return "\n\n".join(
        filter(None, [table, compiled, beside.paragraph(beside.pairs(), beside.refused())])
    )


def sentence(rows: list[list[str]]) -> str:
    """README.md's sentence on what is proved."""
    compiled = []
    for chip, cells in zip(CHIPS, zip(*(row[2:-2] for row in rows))):
        fit = sum(cell[0].isdigit() and not cell.endswith("!") for cell in cells)
        compiled.append(f"{fit} for sm_{chip}")
    on_gpu = sum(PROVED in row[-1] for row in rows)
    elsewhere = [
        f"{count} {where}"
        for count, where in (
            (sum(row[-1] == INTERPRETED for row in rows), "in Triton's interpreter only"),
            (sum(row[-1] == COMPILED for row in rows), "by its compiled code only"),
            (sum(row[-1].startswith(f"{STALE} on") for row in rows), "in an earlier version"),
        )
        if count
    ]
    others = f" ({', '.join(elsewhere)})" if elsewhere else ""
    executed = sum(row[-2][0].isdigit() for row in rows)
    return (
        f"Of the {len(rows)} kernels, {on_gpu or 'none'} are proved equal to the naive code on a "
        f"GPU{others}. The compiled code of {executed or 'none'} has also run on a CPU, "
        f"instruction by instruction, and was equal. The compiler takes {', '.join(compiled[:-1])} "
        f"and {compiled[-1]} without spills ([the table](results/README.md))."
    )


def with_text(readme: str, text: str) -> str:
    """A README with what stands between its two markers replaced. Raises ValueError if they are
    not there, once each and in order.
    """
    pattern = f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})"
    readme, places = re.subn(pattern, lambda _: f"{text}\n", readme, flags=re.DOTALL)
    if places != 1:
        raise ValueError(f"no place for the proofs; accepted: a line `{BEGIN}` and a line `{END}`")
    return readme


def readmes(root: Path = ROOT) -> dict[Path, str]:
    """{file: its text as it should be now}."""
    found = rows(kernels(root), proofs(root))
    texts = {"README.md": sentence(found), "results/README.md": markdown(found)}
    return {
        root / name: with_text((root / name).read_text(encoding="utf-8"), text)
        for name, text in texts.items()
    }
