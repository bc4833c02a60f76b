"""compute-sanitizer on a few cases of every kernel: what it is asked to watch, and what its report
says.
"""

import re
from collections.abc import Iterable
from pathlib import Path

ENTRY_POINT = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
MACRO = r"#define\s+(\w+)\({0},"  # that writes a kernel whose name is its first argument
FOUND_EXIT_CODE = 86  # of compute-sanitizer, so that a finding differs from a failing test
# Without PyTorch's cache, because in a cached block a neighbour's memory is not out of bounds.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards",
}
UNSUPPORTED = ("Device not supported", "not supported on this device", "Failed to initialize")


def names_on_gpu(kernel: str, room: Path) -> list[str]:
    """What a GPU's tools call "08/softmax_kernel": the function's name; of a .cu file in the
    lesson's room all its kernels.
    """
    name = kernel.partition("/")[2]
    if not name.endswith(".cu"):
        return [name]
    source, found = (room / name).read_text(encoding="utf-8").replace("\\\n", " "), []
    for entry in ENTRY_POINT.findall(source):
        macro = re.search(MACRO.format(entry), source)
        # A macro's parameter is no kernel's name: each use of the macro is a kernel.
        found += re.findall(rf"^{macro[1]}\((\w+),", source, re.MULTILINE) if macro else [entry]
    return found


def command(program: str, tool: str, kernels: Iterable[str], lessons: dict[str, Path]) -> list[str]:
    """The command before the one that is watched. kernels: "08/softmax_kernel"."""
    watched = []
    for kernel in kernels:
        for name in names_on_gpu(kernel, lessons[kernel[:2]]):
            watched += ["--kernel-name", f"kns={name}"]
    return [program, "--tool", tool, "--error-exitcode", str(FOUND_EXIT_CODE), *watched]


def cases_of(steps: dict, lessons: dict) -> tuple[dict[str, str], list[str]]:
    """({kernel: hash}, [test]) of the kernels whose lessons passed."""
    kernels, tests = {}, []
    for number in lessons:
        step = steps.get(f"{number} equivalence", {})
        if step.get("status") == "passed":
            for kernel, entry in step["kernels"].items():
                kernels[kernel] = entry["hash"]
                tests += entry["quick"]
    return kernels, list(dict.fromkeys(tests))


def judged(status: str, output: str, tool: str, missed: set[str]) -> tuple[str, list[str]]:
    """(status, lines of the tool's report). Passed means: no finding, the tests passed, and every
    kernel was launched. status: of the command; missed: kernels that were not launched.
    """
    report = [line for line in output.splitlines() if line.startswith("=========")]
    if status == "timeout":
        return "timeout", report[:40]
    if any(words in output for words in UNSUPPORTED):
        return "not supported", report[:10]
    clean = any(CLEAN[tool] in line for line in report)
    if status == "passed" and clean and not missed:
        return "passed", report[-1:]
    return "failed", report[:40] or output.splitlines()[-10:]
