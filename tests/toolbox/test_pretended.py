"""A rehearsal finds what a GPU would refuse, and proves nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.toolbox.measure.device import has_triton, rehearsing
from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import machine, rehearsal, table

ROOT = Path(__file__).resolve().parents[2]
PRETENDED = [sys.executable, "-m", "lessons.toolbox.proof.pretended"]

pytestmark = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")


def pretended(*arguments) -> subprocess.CompletedProcess:
    environment = machine.ENVIRONMENT | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*PRETENDED, *map(str, arguments)],
        cwd=ROOT,
        env=dict(machine.os.environ) | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.sample(1, of="rehearsals")
def test_the_pretended_device():
    done = pretended("pytest", "-q", "-p", "no:cacheprovider", "tests/toolbox/pretended_cases.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not rehearsing(), "only that process pretends"


@pytest.mark.sample(3, of="processes")
def test_a_planted_device_bug_is_found(tmp_path):
    """A test that forgets `device=` passes on a CPU, and not on a GPU."""
    (tmp_path / "test_planted.py").write_text(
        """
import torch
from lessons.l03_kv_cache.optimized import append_rows
from lessons.toolbox.measure.device import default_device

def append(slot_mapping):
    cache = torch.zeros(2, 8, 1, 16, device=default_device())
    k, v = torch.ones(2, 5, 1, 16, device=default_device())
    append_rows(k, v, *cache, slot_mapping)
    return cache[0, :, 0, 0]

def test_right():
    assert append(torch.arange(5, device=default_device())).sum() == 5

def test_without_a_device():
    append(torch.arange(5))

def test_without_a_device_in_the_expectation():
    torch.testing.assert_close(append(torch.arange(5, device=default_device())), torch.ones(8))

def test_to_numpy():
    append(torch.arange(5, device=default_device())).numpy()
"""
    )
    done = pretended("--report", tmp_path / "launched.json", "pytest", "-q", tmp_path)
    assert done.returncode == 1 and "3 failed, 1 passed" in done.stdout, done.stdout
    launched = json.loads((tmp_path / "launched.json").read_text())
    assert launched["variants"] == {"append_kernel": 1} and launched["left_out"] == {}


# ---------------------------------------------------------------- a rehearsal


@pytest.mark.sample(1, of="rehearsals")
def test_lesson_1_rehearsed(tmp_path, capfd):
    """Its tests and its benchmark run, and nothing of it counts."""
    out = tmp_path / "rehearsal"
    assert proof.main(["gpu", "--rehearse", "--lesson", "01", "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert "01 equivalence       passed" in said and "variants, about" in said
    assert "memcheck, racecheck  NOT REHEARSED" in said
    recorded = json.loads((out / "proof.json").read_text())
    assert recorded["rehearsed"] and recorded["device"] == "pretended GPU"
    step = recorded["steps"]["01 equivalence"]
    assert step["fingerprint"]["rehearsed"] and step["variants"]["scale_copy_kernel"] > 3
    assert json.loads((out / "l01_scale_copy.json").read_text())["fingerprint"]["rehearsed"]

    shutil.copytree(out, tmp_path / "results" / "h100")
    assert table.proofs(tmp_path) == [], "wherever it is copied, it is no proof"


def test_a_rehearsal_writes_no_results(capsys):
    assert proof.main(["gpu", "--rehearse", "--out", str(ROOT / "results" / "h100")]) == 2
    assert "a rehearsal proves nothing" in capsys.readouterr().err
    assert not (ROOT / "results" / "h100").exists()


def step_of(tmp_path, launched) -> dict:
    """What a rehearsal records of a lesson whose tests passed, and launched this."""
    here = machine.Machine({"device": "pretended GPU"}, False, None, 1)
    (tmp_path / "lessons" / "l01_copy").mkdir(parents=True)
    tests = tmp_path / "lessons" / "l01_copy" / "test_equivalence.py"
    tests.write_text("proof.record(kernel)")  # so that it is one of the first to run
    run = rehearsal.Rehearsal(here, tmp_path / "out", machine.rooms(tmp_path), 60, tmp_path)
    assert run.key("source") != run.key("source"), "nothing is resumed"
    (step,) = run.equivalence()
    run.report(step).write_text(json.dumps(launched))
    return run.facts(step, "passed", "")


def test_a_lesson_that_would_compile_beyond_its_limit_fails(tmp_path, capsys):
    launched = {"launches": 9, "operations": 9, "variants": {"a": 400, "b": 300}}
    assert step_of(tmp_path, launched | {"left_out": {"x.cu": 1}})["status"] == "takes too long"
    said = capsys.readouterr().out
    assert "NOT REHEARSED: x.cu" in said and "700 variants" in said


def test_a_lesson_that_would_launch_beyond_its_limit_fails(tmp_path):
    launched = {"launches": 9, "operations": 10**8, "variants": {"a": 40}, "left_out": {}}
    assert step_of(tmp_path, launched)["status"] == "takes too long"


def test_a_lesson_that_runs_in_time_passes(tmp_path):
    launched = {"launches": 9, "operations": 10**6, "variants": {"a": 40}, "left_out": {}}
    assert "status" not in step_of(tmp_path, launched)
