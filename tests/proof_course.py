"""A tiny course for tests of the proof machinery, and runs over it on a pretended GPU."""

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import machine as proof_machine
from lessons.toolbox.proof import table

REPOSITORY = Path(__file__).resolve().parents[1]

# Neither Triton nor torch is needed to test the bookkeeping: a kernel is what has its function
# under `fn`.
OPTIMIZED = """
import types
triton = types.SimpleNamespace(jit=lambda f: types.SimpleNamespace(fn=f))
@triton.jit
def copy_kernel(x, out, BLOCK):
    out[0] = x[0]
"""
CONFTEST = """
import os
pytest_plugins = ["lessons.toolbox.proof.record"]
from lessons.toolbox.proof import record as proof_record
proof_record.where = lambda kernel, chip=None: os.environ.get("PRETEND", "cuda")
"""
TESTS = """
import pytest
from lessons.{room}.optimized import copy_kernel
def test_small(proof):
    proof.record(copy_kernel)
@pytest.mark.parametrize("share", [0.5])
def test_large(proof, share):
    proof.record(copy_kernel)
def test_other_things():
    pass
@pytest.mark.compiler
def test_compiles():
    assert False, "needs no GPU, so it does not run here"
"""
LADDER = """
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "ladder.json").write_text('{"rungs": []}')
"""
BENCH = """
import os, pathlib, sys
if "TIMED_ONCE" in os.environ:
    open("warmed", "a").write(sys.argv[1])
    sys.exit(1)  # a warm-up that fails is no failure
assert "--resume" in sys.argv
pathlib.Path(sys.argv[sys.argv.index("--out") + 1], f"l{sys.argv[1]}_copy.json").write_text("{}")
sys.exit(pathlib.Path("bench_exit").exists())
"""
SANITIZER = """#!{python}
import os, subprocess, sys, pathlib
python = sys.argv.index(sys.executable)
said = pathlib.Path("{root}/said")
if said.exists():
    print(said.read_text())
    sys.exit(86)
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
code = subprocess.run(sys.argv[python:]).returncode
race = "racecheck" in sys.argv
print("=========", "RACECHECK SUMMARY: 0 hazards displayed" if race else "ERROR SUMMARY: 0 errors")
sys.exit(code)
"""
INI = """[pytest]
pythonpath = .
addopts = --import-mode=importlib --strict-markers
markers = compiler: asks the compiler
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of two lessons that pass, with this repository's proof machinery and stand-ins for
    bench and ladder.
    """
    monkeypatch.setattr(table, "kernels", lambda root: {})
    toolbox = tmp_path / "lessons" / "toolbox"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "lessons" / "toolbox", toolbox, ignore=ignored)
    files = {
        "lessons/__init__.py": "",
        "lessons/toolbox/measure/bench.py": BENCH,
        "conftest.py": CONFTEST,
        "pytest.ini": INI,
        "reference/ladder/__main__.py": LADDER,
        "lessons/l01_copy/lab/benchmark.py": "",
        "compute-sanitizer": SANITIZER.format(python=sys.executable, root=tmp_path),
    }
    for room in ("l01_copy", "l02_more"):
        files[f"lessons/{room}/optimized.py"] = OPTIMIZED
        files[f"lessons/{room}/lab/specs.py"] = "KERNELS = []\n"
        files[f"lessons/{room}/test_equivalence.py"] = TESTS.format(room=room)
    for name, text in files.items():
        write(tmp_path, name, text)
    (tmp_path / "compute-sanitizer").chmod(0o755)
    return tmp_path


def write(course, name, text):
    path = course / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gpu(
    course,
    capsys,
    out="out",
    minutes=5.0,
    interpreted=False,
    tool=True,
    lesson=None,
    pack=None,
    workers=1,
):
    """One `make gpu` on a pretended GPU: (exit code, what it printed, its steps)."""
    device = {"device": "NVIDIA Pretend 9000", "torch": "2"}
    path = str(course / "compute-sanitizer") if tool else None
    here = proof_machine.Machine(device, interpreted, path, jobs=2, workers=workers)
    given = Namespace(lesson=lesson, out=course / out, budget_minutes=minutes, pack=pack)
    code = proof.prove(given, here, course)
    file = course / out / "proof.json"
    steps = json.loads(file.read_text())["steps"] if file.exists() else {}
    return code, capsys.readouterr().out, steps
