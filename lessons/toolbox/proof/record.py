"""How a test of equivalence leaves its proof: the `proof` fixture, and the file that it writes.

    def test_softmax(proof, dtype):
        proof.record(softmax_kernel, prove(fused_softmax, softmax, inputs))

The same test proves the kernel in the interpreter on a CPU and for real on a GPU; the record says
which. It is written only when the whole test has passed, one JSON line a test, to build/proof.jsonl
(`pytest --proof-record FILE` for another). A test that asks for `proof` and records nothing fails,
because a proof that names no kernel proves none.
"""

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

from lessons.toolbox.kernels.kernel_hash import kernel_hash, python_function

ROOT = Path(__file__).resolve().parents[3]
DEFAULT_RECORD = ROOT / "build" / "proof.jsonl"
COMPACT_BYTES = 1_000_000  # a longer file is rewritten without the lines that later runs replaced
ROOM = re.compile(r"l(\d\d)_\w+")
ENTRY_POINT = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
# of numerics.Errors, kept for the record
FIGURES = ("rms", "rms_eager", "max_abs", "max_abs_eager", "worst_tile_rms", "floor")


# ---------------------------------------------------------------- which kernel


def kernel_name(kernel) -> str:
    """ "02/softmax_kernel" for a Triton or Gluon kernel, "09/optimized.cu" for the path of a CUDA
    C++ file.

    Raises ValueError for what stands in no lesson's room.
    """
    if isinstance(kernel, (str, Path)):
        file, name = Path(kernel), Path(kernel).name
    else:
        if (function := python_function(kernel)) is None:
            raise ValueError(
                f"kernel: got {kernel!r}; accepted: a @triton.jit function, or the path of a .cu "
                f"file"
            )
        file, name = Path(function.__code__.co_filename), function.__name__
    if not (room := ROOM.fullmatch(file.parent.name)):
        raise ValueError(
            f"kernel: got {name} of {file.parent.name}/{file.name}; accepted: one that stands in a "
            f"folder lNN_topic"
        )
    return f"{room[1]}/{name}"


def hash_of(kernel) -> str:
    """The hash of a kernel's source as compile_check stamps it: of what a @triton.jit function
    reads, of a .cu file its text.

    kernel: the function, "package.module:function", or the path of a .cu file.
    """
    if str(kernel).endswith(".cu"):
        return hashlib.sha256(Path(kernel).read_text(encoding="utf-8").encode()).hexdigest()[:16]
    return kernel_hash(kernel)


def names_on_gpu(kernel: str, room: Path) -> list[str]:
    """What a GPU's tools call "08/softmax_kernel": the function's name; of a .cu file in the
    lesson's room all its kernels.
    """
    name = kernel.partition("/")[2]
    if not name.endswith(".cu"):
        return [name]
    return ENTRY_POINT.findall((room / name).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- the fixture


class Proof:
    """What one test proved so far: {kernel: {"hash": ..., "errors": {...}}}."""

    def __init__(self):
        self.kernels = {}

    def record(self, kernel, errors=None) -> None:
        """Say that `kernel` was proved here, with what `numerics.prove` or `assert_close_to_oracle`
        measured.

        kernel: the @triton.jit function, or the path of a .cu file; errors: Errors, several of
        them, or None for a bitwise proof. Of all that one test records for a kernel, the errors
        nearest to their limit (rule E1) are kept.
        """
        entry = self.kernels.setdefault(
            kernel_name(kernel), {"hash": hash_of(kernel), "errors": None}
        )
        for measured in errors if isinstance(errors, (list, tuple)) else [errors]:
            if measured is None:
                continue
            figures = {
                name: float(f"{value:.3g}")
                for name, value in dataclasses.asdict(measured).items()
                if name in FIGURES
            }
            if entry["errors"] is None or _of_limit(figures) > _of_limit(entry["errors"]):
                entry["errors"] = figures


def _of_limit(figures: dict) -> float:
    limit = 1.5 * figures["rms_eager"] + figures["floor"]
    return figures["rms"] / limit if limit else 0.0


PROOF = pytest.StashKey[Proof]()


@pytest.fixture
def proof(request) -> Proof:
    """Records which kernel this test proves, and how well: `proof.record(kernel, errors)`."""
    return request.node.stash.setdefault(PROOF, Proof())


# ---------------------------------------------------------------- the plugin


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--proof-record",
        type=Path,
        default=DEFAULT_RECORD,
        metavar="FILE",
        help="where tests of equivalence record what they proved (default: build/proof.jsonl)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if "proof" not in getattr(item, "fixturenames", ()):
        return report
    found = item.stash.get(PROOF, Proof())
    if report.when == "call" and report.passed and not found.kernels:
        report.outcome = "failed"
        report.longrepr = (
            "this test asks for `proof` and records no kernel; call proof.record(kernel, errors)"
        )
    if report.failed or (report.when == "call" and report.passed):
        kernels = found.kernels if report.passed else {}
        append(
            item.config.getoption("--proof-record"),
            item.nodeid,
            report.outcome,
            report.duration,
            kernels,
        )
    return report


def append(path: Path, test: str, outcome: str, duration_s: float, kernels: dict) -> None:
    """Add one test's line. A line is written at once, so that parallel workers and a run cut short
    leave whole lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "test": test,
        "where": where(),
        "outcome": outcome,
        "seconds": round(duration_s, 3),
        "kernels": kernels,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def where() -> str:
    """ "interpreter" or "cuda": where this process runs its kernels."""
    from lessons.toolbox.measure.device import has_gpu, interpreting

    return "cuda" if has_gpu() and not interpreting() else "interpreter"


def pytest_sessionfinish(session) -> None:
    path = session.config.getoption("--proof-record")
    if (
        not hasattr(session.config, "workerinput")
        and path.exists()
        and path.stat().st_size > COMPACT_BYTES
    ):
        lines = [json.dumps(line) + "\n" for line in read(path)]
        path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[dict]:
    """The last line of every test, in the order of the file; a line cut off in the middle is left
    out. [] without a file.
    """
    last = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        last[line["test"], line["where"]] = line
    return list(last.values())
