"""Run a module as if this machine had a GPU.

    python -m lessons.toolbox.proof.pretended --report FILE pytest lessons/l03_kv_cache
    python -m lessons.toolbox.proof.pretended --report FILE --shapes reference.ladder --out build

Tensors on "cuda" lie on the CPU (tensor.py), torch.cuda answers for a GPU (cuda.py, graphs.py),
kernels are checked and interpreted (launches.py). --shapes: no floating-point number is kept and no
kernel runs, so a benchmark of any size takes seconds, and says nothing but that it runs. FILE
receives what was launched. Whatever such a process records is marked as rehearsed and proves
nothing.
"""

import argparse
import json
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from lessons.toolbox.kernels import triton_  # noqa: F401  mends the interpreter
from lessons.toolbox.measure import bench, device, timing
from lessons.toolbox.proof.machine import ENVIRONMENT
from lessons.toolbox.proof.pretended import cuda, launches
from lessons.toolbox.proof.pretended.hosts import Hosts
from lessons.toolbox.proof.pretended.refusals import NotRehearsed


def pretend(keep_values: bool) -> None:
    """Pretend a GPU in this process, for good. keep_values: as Hosts says."""
    os.environ[device.REHEARSING] = "1"
    Hosts.keep_values = keep_values
    cuda.install()
    launches.install()
    # The kernels are interpreted, and only the interpreter's own patches shall know.
    device.interpreting = lambda: False
    timing.FLUSH_BYTES, timing.ONCE = 2**10, True  # times are not what a rehearsal is for
    if not keep_values:
        bench.disagreement = same_layout


def same_layout(output, truth, tolerance: float) -> str:
    """bench.disagreement of outputs without numbers: [...] shape, type and device alone."""
    if output is None or truth is None:
        return "a provider returned None; accepted: its output, so that it can be compared"
    if not hasattr(output, "shape"):
        return ""
    layouts = [(list(x.shape), x.device) for x in (output, truth)]
    return "" if layouts[0] == layouts[1] else f"{layouts[0]}, not {layouts[1]}"


class Skips:
    """A pytest plugin: what cannot be rehearsed is skipped, and a test's interpreting has
    limits.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        launches.LAUNCHES.seconds = 0.0
        try:
            return (yield)
        except NotRehearsed as reason:
            pytest.skip(str(reason))


def run(module: str, arguments: list[str]) -> int:
    """The module as `python -m` runs it; its exit code."""
    if module == "pytest":
        os.environ |= ENVIRONMENT  # other packages' plugins may need what is ABSENT
        return int(pytest.main(arguments, plugins=[Skips()]))
    sys.argv = [module, *arguments]
    # toolbox.measure.bench is a module and a command, and provides for that
    warnings.filterwarnings("ignore", "'lessons.toolbox.measure.bench' found in sys.modules")
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lessons.toolbox.proof.pretended", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--report", type=Path, help="JSON file for what was launched")
    parser.add_argument("--shapes", action="store_true", help="keep no numbers, run no kernel")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    pretend(keep_values=not options.shapes)
    code = run(options.module, options.arguments)
    report = launches.LAUNCHES.report()
    print(f"variants: {sum(report['variants'].values())}, launches: {report['launches']}")
    if options.report:
        options.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
