"""How a test of equivalence leaves its proof: the `proof` fixture, and what the tests of a lesson
proved together.

    def test_softmax(proof, dtype):
        proof.record(softmax_kernel, prove(fused_softmax, softmax, inputs))

The same test proves the kernel on a CPU (Triton in its interpreter, CUDA C++ and Gluon by their
compiled code) and for real on a GPU; the record says which. A test that passes leaves its kernels
as properties of its report, which `cases` writes down. A test that asks for `proof` and records
nothing fails, because a proof that names no kernel proves none.
"""

import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from lessons.toolbox.kernels.kernel_hash import kernel_hash, python_function
from lessons.toolbox.proof.cases import Case

ROOM = re.compile(r"l(\d\d)_\w+")
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
    rooms = (room for folder in file.parents if (room := ROOM.fullmatch(folder.name)))
    if not (room := next(rooms, None)):
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
    if is_cuda_cpp(kernel):
        return hashlib.sha256(Path(kernel).read_text(encoding="utf-8").encode()).hexdigest()[:16]
    return kernel_hash(kernel)


WITHOUT_GPU = ("interpreter", "sm_90", "sm_100")  # the chips for Gluon and CUDA C++


def is_cuda_cpp(kernel) -> bool:
    """Whether a kernel, or its name in a record, is a .cu file."""
    return str(kernel).endswith(".cu")


def where(kernel, chip: int | None = None) -> str:
    """Where this process runs a kernel: "cuda"; without a GPU "interpreter", or "sm_80" for the
    compiled code of that chip; "rehearsal" on a pretended GPU, which proves nothing.

    chip: the only one that a Gluon kernel is for, 100 for sm_100; without it any.
    """
    # here, because it imports PyTorch, which the reading of records does without
    from lessons.toolbox.measure.device import has_gpu, interpreting, machine_chip, rehearsing

    if rehearsing():
        return "rehearsal"
    if has_gpu() and not interpreting():
        return "cuda"
    if interpreting() and not (is_cuda_cpp(kernel) or getattr(kernel, "is_gluon", bool)()):
        return "interpreter"
    return f"sm_{chip or machine_chip()}"


# ---------------------------------------------------------------- what a test records


class Proof:
    """What one test proved so far: {kernel: {"hash": ..., "errors": {...}, "where": ...}}."""

    def __init__(self):
        self.kernels = {}

    def record(self, kernel, errors=None, chip: int | None = None) -> None:
        """Say that `kernel` was proved here, with what `numerics.prove` or `assert_close_to_oracle`
        measured.

        kernel: the @triton.jit function, or the path of a .cu file; errors: Errors, several of
        them, or None for a bitwise proof; chip: as in `where`. Of all that one test records for a
        kernel, the errors nearest to their limit (rule E1) are kept.
        """
        entry = {"hash": hash_of(kernel), "errors": None, "where": where(kernel, chip)}
        entry = self.kernels.setdefault(kernel_name(kernel), entry)
        for measured in errors if isinstance(errors, (list, tuple)) else [errors]:
            if measured is not None:
                figures = {name: float(f"{getattr(measured, name):.3g}") for name in FIGURES}
                entry["errors"] = nearest_to_limit([entry["errors"], figures])


def nearest_to_limit(figures: list[dict | None]) -> dict | None:
    """Of several errors the ones that nearly break rule E1. None: a bitwise proof."""
    return max(figures, key=_of_limit)


def _of_limit(figures: dict | None) -> float:
    if figures is None:
        return -1.0
    limit = 1.5 * figures["rms_eager"] + figures["floor"]
    return figures["rms"] / limit if limit else 0.0


@pytest.fixture
def proof() -> Proof:
    """Records which kernel this test proves, and how well: `proof.record(kernel, errors)`."""
    return Proof()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    result = yield
    found = pyfuncitem.funcargs.get("proof")
    if isinstance(found, Proof):
        if not found.kernels:
            pytest.fail("this test asks for `proof` and records no kernel: proof.record(kernel)")
        for kernel, entry in found.kernels.items():
            pyfuncitem.user_properties.append((kernel, json.dumps(entry)))
    return result


# ---------------------------------------------------------------- what a lesson's tests proved


def gathered(cases: list[Case], places: Collection[str]) -> dict:
    """{tests: how many ran, failed: [test], kernels: {kernel: {hash, where, cases, errors,
    quick}}}.

    errors: of all cases the nearest to their limit; quick: the quickest case and a middling one.
    Kernels that ran in none of `places` are left out: they prove nothing here.
    """
    proved: dict[str, list] = {}
    for case in sorted(cases, key=lambda case: case.seconds):
        for kernel, found in case.kernels.items():
            if found["where"] in places:
                proved.setdefault(kernel, []).append((case.test, found))
    kernels = {}
    for kernel, found in sorted(proved.items()):
        tests = [test for test, _ in found]
        kernels[kernel] = {
            "hash": found[0][1]["hash"],
            "where": found[0][1]["where"],
            "cases": len(tests),
            "errors": nearest_to_limit([entry["errors"] for _, entry in found]),
            # never the slowest: it may fill the memory on purpose
            "quick": [tests[0], tests[(len(tests) - 1) // 2]],
        }
    return {
        "tests": sum(case.status != "skipped" for case in cases),
        "failed": [case.test for case in cases if case.status == "failed"],
        "kernels": kernels,
    }
