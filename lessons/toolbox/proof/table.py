"""Which kernels there are, and what is known of each: tested in the interpreter, compiled for which
chips, proved on which GPU.

The table in README.md is made from files alone (sources, results/compiled.json,
results/<device>/proof.json), so that it is the same on every machine. `make proof` shows more: what
this machine's own test run left, and its compiler's verdict of today.
"""

import ast
import importlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from lessons.toolbox.kernels import compile_check
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.proof import record as proof_record

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = (
    "<!-- proof table: `python -m lessons.toolbox.proof readme` writes it -->",
    "<!-- end of proof table -->",
)
NOT_YET, NOT_FOR_IT = "not yet", "–"
MEANING = (
    "registers a thread / bytes spilled / KiB of shared memory, the most over its launches; !: "
    "spills or does not fit; "
    "–: not for this chip"
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a lesson: a @triton.jit or @gluon.jit function that returns nothing, or a CUDA
    C++ file.
    """

    lesson: str  # "03"
    name: str  # "decode_kernel", or "optimized.cu"
    file: Path

    @property
    def key(self) -> str:
        return f"{self.lesson}/{self.name}"

    @property
    def hash(self) -> str:
        """Of its source as it is now. Imports the lesson."""
        return proof_record.hash_of(
            self.file if self.file.suffix == ".cu" else f"{_module(self.file)}:{self.name}"
        )


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts[file.parts.index("lessons") :])


def kernels(root: Path = ROOT) -> list[Kernel]:
    """All kernels of all lessons, in the order of lessons, files and lines. Reads the sources,
    imports nothing.
    """
    found = []
    for file in sorted((root / "lessons").glob("l[0-9][0-9]_*/*")):
        number = file.parent.name[1:3]
        if file.suffix == ".cu":
            found.append(Kernel(number, file.name, file))
        elif file.suffix == ".py" and not file.name.startswith("test_"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [Kernel(number, node.name, file) for node in tree.body if is_kernel(node)]
    return found


def is_kernel(node: ast.stmt) -> bool:
    """Whether a definition is a kernel: decorated with some `jit`, and without a result (with one
    it is a kernel's helper).
    """
    return (
        isinstance(node, ast.FunctionDef)
        and any(
            ast.unparse(decorator).split("(")[0].endswith(".jit")
            for decorator in node.decorator_list
        )
        and not any(
            isinstance(part, ast.Return) and part.value is not None for part in ast.walk(node)
        )
    )


# ---------------------------------------------------------------- compiled


def specs(root: Path = ROOT) -> dict[str, list[compile_check.KernelSpec]]:
    """{"03/decode_kernel": how it is launched, once or more}, from the lists KERNELS in the
    lessons' lab/specs.py.
    """
    found: dict[str, list] = {}
    for file in sorted((root / "lessons").glob("l[0-9][0-9]_*/lab/specs.py")):
        for spec in importlib.import_module(_module(file)).KERNELS:
            module, _, name = spec.kernel.partition(":")
            found.setdefault(f"{module.split('.')[1][1:3]}/{name}", []).append(spec)
    return found


def compiled_now(root: Path = ROOT) -> dict:
    """{kernel: {hash, compiler, chips: {"90": {registers, spill_bytes, shared_bytes, error,
    fits}}}}, worst of its launches.
    """
    listed = specs(root)
    reports = iter(
        compile_check.check_all([spec for launches in listed.values() for spec in launches])
    )
    result = {
        key: _worst(list(itertools.islice(reports, sum(len(spec.chips) for spec in launches))))
        for key, launches in listed.items()
    }
    for kernel in kernels(root):
        if kernel.file.suffix == ".cu":
            result[kernel.key] = _worst(
                compile_check.check_cuda(kernel.file.read_text(encoding="utf-8"))
            )
    return dict(sorted(result.items()))


def _worst(reports: list[compile_check.Report]) -> dict:
    chips = {}
    for chip in sorted({report.chip for report in reports}):
        of_chip = [report for report in reports if report.chip == chip]
        chips[str(chip)] = {
            "registers": max(r.registers or 0 for r in of_chip),
            "spill_bytes": max(r.spill_bytes for r in of_chip),
            "shared_bytes": max(r.shared_bytes for r in of_chip),
            "error": next((r.error for r in of_chip if r.error), None),
            "fits": all(r.fits for r in of_chip),
        }
    return {"hash": reports[0].kernel_hash, "compiler": reports[0].compiler, "chips": chips}


def record_compiled(root: Path = ROOT) -> None:
    """Write results/compiled.json, from which README.md's table reads."""
    write_json(root / "results" / "compiled.json", compiled_now(root))


def compiled_cell(compiled: dict | None, chip: int) -> str:
    """ "24 / 0 / 2.0": registers a thread, bytes spilled, KiB of shared memory; or why not. –: the
    kernel is not for this chip.
    """
    if compiled is None:
        return "no spec"
    report = compiled["chips"].get(str(chip))
    if report is None:
        return NOT_FOR_IT
    if report["error"]:
        return "not run" if report["error"].startswith("not run") else "error"
    text = f"{report['registers']} / {report['spill_bytes']} / {report['shared_bytes'] / 1024:.1f}"
    return text if report["fits"] else f"{text} !"


# ---------------------------------------------------------------- proved


def recorded(root: Path = ROOT) -> dict[str, dict]:
    """{device folder: proof.json} of the runs in results/ that ran on a GPU."""
    files = sorted((root / "results").glob("*/proof.json"))
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in files}
    return {device: proof for device, proof in found.items() if not proof["interpreted"]}


def proved_on(key: str, current_hash: str, proof: dict) -> str:
    """ "proved", "stale" or "not yet" on the device of one proof.json.

    Proved: a lesson's whole test_equivalence.py passed there, and in it the kernel with the source
    that it has now.
    """
    hashes = {
        lesson["kernels"][key]["hash"]
        for lesson in proof["lessons"].values()
        if lesson["status"] == "passed" and not lesson["interpreted"] and key in lesson["kernels"]
    }
    return "proved" if current_hash in hashes else "stale" if hashes else NOT_YET


def proof_cell(key: str, current_hash: str, proofs: dict[str, dict]) -> str:
    """ "proved on NVIDIA H200", "stale on ..." for each device that has seen the kernel, or "not
    yet".
    """
    cells = [
        f"{status} on {proof['device']}"
        for proof in proofs.values()
        if (status := proved_on(key, current_hash, proof)) != NOT_YET
    ]
    return ", ".join(cells) or NOT_YET


def interpreter_cell(key: str, current_hash: str, lines: list[dict]) -> str:
    """What the last test runs on this machine say: "34 cases", "failed", "stale" or "not run"."""
    of_interpreter = [line for line in lines if line["where"] == "interpreter"]
    room = f"lessons/l{key[:2]}_"
    if any(
        line["outcome"] == "failed" and line["test"].startswith(room) for line in of_interpreter
    ):
        return "failed"
    hashes = [line["kernels"][key]["hash"] for line in of_interpreter if key in line["kernels"]]
    current = hashes.count(current_hash)
    return f"{current} cases" if current else "stale" if hashes else "not run"


# ---------------------------------------------------------------- the table


def markdown(root: Path = ROOT) -> str:
    """The table of README.md, from sources and results/ alone."""
    path = root / "results" / "compiled.json"
    compiled, proofs = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {},
        recorded(root),
    )
    lines = [
        "| lesson | kernel | "
        + " | ".join(f"sm_{chip}" for chip in compile_check.CHIPS)
        + " | on a GPU |",
        "|---|---|" + "---|" * len(compile_check.CHIPS) + "---|",
    ]
    for kernel in kernels(root):
        report = compiled.get(kernel.key)
        if report and report["hash"] != kernel.hash:
            cells = ["stale"] * len(compile_check.CHIPS)
        else:
            cells = [compiled_cell(report, chip) for chip in compile_check.CHIPS]
        link = f"[`{kernel.name}`](lessons/{kernel.file.parent.name}/{kernel.file.name})"
        lines.append(
            f"| {kernel.lesson} | {link} | {' | '.join(cells)} | "
            f"{proof_cell(kernel.key, kernel.hash, proofs)} |"
        )
    compilers = sorted({report["compiler"] for report in compiled.values()})
    compiler = f" ({', '.join(compilers)})" if compilers else ""
    return "\n".join(
        [
            *lines,
            "",
            f"sm_NN, compiled without that GPU{compiler}: {MEANING}. "
            "On a CPU every kernel runs through the same tests in Triton's interpreter (`make "
            "test`).",
        ]
    )


def with_table(readme: str, table: str) -> str:
    """README.md with its table replaced. Raises ValueError if the two markers are not there, once
    each.
    """
    if (
        readme.count(BEGIN) != 1
        or readme.count(END) != 1
        or readme.index(BEGIN) > readme.index(END)
    ):
        raise ValueError(
            f"README.md has no place for the table; accepted: a line `{BEGIN}` and below it a line "
            f"`{END}`"
        )
    before, after = readme[: readme.index(BEGIN)], readme[readme.index(END) :]
    return f"{before}{BEGIN}\n{table}\n{after}"


def print_live(root: Path = ROOT) -> None:
    """The table with this machine's own tests (build/proof.jsonl) and compiler."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    lines, compiled, proofs = (
        proof_record.read(root / "build" / "proof.jsonl"),
        compiled_now(root),
        recorded(root),
    )
    shown = Table(
        "",
        "kernel",
        "interpreter",
        *map(str, compile_check.CHIPS),
        "on a GPU",
        show_lines=True,
        box=box.HORIZONTALS,
        padding=(0, 1, 0, 0),
        title="What is proved",
        title_justify="left",
        caption_justify="left",
        caption=f"75 to 100, compiled for that compute capability: {MEANING}",
    )
    for kernel in kernels(root):
        cells = [compiled_cell(compiled.get(kernel.key), chip) for chip in compile_check.CHIPS]
        shown.add_row(
            kernel.lesson,
            kernel.name,
            interpreter_cell(kernel.key, kernel.hash, lines),
            *(cell.replace(" / ", "\n").replace(" ", "\n") for cell in cells),
            proof_cell(kernel.key, kernel.hash, proofs),
        )
    for column in shown.columns[:-1]:
        column.no_wrap = True
    shown.columns[-1].min_width = 12
    console = Console()
    console.print(shown)
    for key, report in compiled.items():
        for chip, facts in report["chips"].items():
            if facts["error"]:
                console.print(f"{key} on sm_{chip}: {facts['error']}")
    if not lines:
        console.print("interpreter: no test of equivalence has run on this machine yet (make test)")
    if not proofs:
        console.print("GPU: nothing recorded in results/ yet (make gpu, on a machine with one)")
