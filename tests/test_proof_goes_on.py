"""A run of `make gpu` that is cut off: what was proved stays, what passed is not run again, and
what matters most has come first.
"""

import json
import signal
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import pytest

from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import cases, plan, table
from lessons.toolbox.proof import machine as proof_machine
from lessons.toolbox.proof import run as proof_run
from lessons.toolbox.proof import steps as proof_steps
from lessons.toolbox.proof.run import TOO_FEW_GPUS, Run, silence
from tests import proof_course
from tests.proof_course import gpu, write

course = proof_course.course

HASH = "0123456789abcdef"
ROOM = "lessons/l02_more/test_equivalence.py"
# its second test waits until it may end; each test says that it ran
WAITS = """
import pathlib, time
import pytest
from lessons.l02_more.optimized import copy_kernel
def ran(name):
    with open("ran", "a") as file:
        file.write(name + " ")
def test_first(proof):
    ran("first")
    proof.record(copy_kernel)
def test_waits(proof):
    ran("waits")
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    proof.record(copy_kernel)
def test_last(proof):
    ran("last")
    proof.record(copy_kernel)
"""
COMMAND = """
import json, sys
from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import machine
proof.why_not_here = lambda interpreted: ""
here = machine.Machine({"device": "NVIDIA Pretend 9000", "torch": "2"}, False, None, 2)
machine.this_machine = lambda interpreted, chip=None: here
sys.exit(proof.main(["gpu", "--out", "out", "--lesson", "02", "--pack", "results.tar.gz"]))
"""


def begin(course):
    """`make gpu` in a process of its own, when the test that waits has begun."""
    process = subprocess.Popen([sys.executable, "-c", COMMAND], cwd=course, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    until = time.monotonic() + 120
    while "waits" not in told(course):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    return process


def told(course) -> str:
    file = course / "ran"
    return file.read_text() if file.exists() else ""


@pytest.mark.sample(3, of="processes")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_that_was_cut_off_goes_on_with_the_tests_that_are_missing(course, capsys, end):
    write(course, ROOM, WAITS)
    process = begin(course)
    process.send_signal(end)
    process.communicate(timeout=60)
    file = course / "out" / "02_equivalence.cases.jsonl"
    assert [(c.test.split("::")[1], c.status) for c in cases.read(file)] == [
        ("test_first", "passed")
    ]
    assert {test.split("::")[1] for test in cases.unfinished(file)} == {"test_waits"}
    (course / "go").touch()
    if end == signal.SIGKILL:  # the tests of the step that was under way go on alone
        until = time.monotonic() + 60
        while "last" not in told(course):
            assert time.monotonic() < until
            time.sleep(0.05)
        return
    code, said, steps = gpu(course, capsys, tool=False, lesson="02")
    step = steps["02 equivalence"]
    assert code == 0, said
    assert told(course).split()[:4] == ["first", "waits", "last", "waits"], "what hung comes last"
    assert (step["tests"], step["kernels"]["02/copy_kernel"]["cases"]) == (3, 3)
    assert not file.exists(), "a step that passed needs it no more"


def test_results_are_packed_while_a_step_runs(course, monkeypatch):
    """A machine that is taken away gives back what was packed."""
    write(course, ROOM, WAITS)
    run = new_run(course, pack=course / "results.tar.gz")
    monkeypatch.setattr(proof_run, "PACK_S", 0)
    write(course, "out/proof.json", "{}")
    once = SimpleNamespace(status="running")
    monkeypatch.setattr(run, "begin", lambda step: [(step, once)])
    monkeypatch.setattr(run, "finish", lambda *_: None)

    def sleep(seconds):
        if (course / "results.tar.gz").exists():
            once.status = "passed"

    monkeypatch.setattr(proof_run.time, "sleep", sleep)
    monkeypatch.setattr(proof_run.time, "monotonic", iter(range(10**6)).__next__)
    once.end = lambda: ""
    run.run([proof_steps.Step("02 benchmark", [], "source")], 1)
    with tarfile.open(course / "results.tar.gz") as archive:
        assert "out/proof.json" in archive.getnames()


def test_a_test_that_passed_is_run_again_when_the_source_is_another(course, capsys):
    (course / "go").touch()
    write(course, ROOM, WAITS + "def test_wrong(proof): assert 0\n")
    gpu(course, capsys, tool=False, lesson="02")
    once = told(course).split()
    _, _, steps = gpu(course, capsys, tool=False, lesson="02")
    again = told(course).split()[len(once) :]
    step = steps["02 equivalence"]
    assert step["status"] == "failed" and step["failed"] == [f"{ROOM}::test_wrong"]
    assert step["tests"] == 4 and not again, "only what failed is tried again"
    write(course, ROOM, WAITS + "def test_wrong(proof): assert 1 - 1\n")
    gpu(course, capsys, tool=False, lesson="02")
    assert told(course).split()[len(once) :], "another source, and a test was not run"


def test_all_that_was_missing_may_have_passed(course, capsys):
    """Cut off after its last test, a step has no tests left, which pytest takes for a failure."""
    write(course, ROOM, WAITS)
    (course / "go").touch()
    run = new_run(course)
    (step,) = run.equivalence()
    done = subprocess.run(step.command, cwd=course, capture_output=True, text=True)
    assert done.returncode == 0 and len(cases.read(step.cases)) == 3, done.stdout
    code, _, steps = gpu(course, capsys, tool=False, lesson="02")
    assert steps["02 equivalence"]["tests"] == 3 and code == 0
    assert told(course).split().count("first") == 2, "once by the step, once by the checks"


@pytest.mark.sample(3, of="processes")
def test_a_test_that_hangs_costs_one_process_of_several(course, capsys, monkeypatch):
    monkeypatch.setattr(proof_steps, "HANGS_S", 4)
    monkeypatch.setitem(proof_steps.LIMIT_S, "equivalence", 100)
    write(course, ROOM, WAITS)
    _, said, steps = gpu(course, capsys, tool=False, lesson="02", workers=2)
    step = steps["02 equivalence"]
    assert step["status"] == "failed" and step["failed"] == [f"{ROOM}::test_waits"], said
    assert step["kernels"]["02/copy_kernel"]["cases"] == 2 and "last" in told(course)


def test_a_file_that_cannot_be_imported_is_named(course, capsys):
    write(course, ROOM, "import nothing_of_this_name  # proof.record(\n")
    _, _, steps = gpu(course, capsys, tool=False, lesson="02")
    assert steps["02 equivalence"]["failed"] == [ROOM]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / "cases"
    case = cases.Case("t.py::a", "passed", 1.0, {})
    file.write_text(json.dumps({"begun": "t.py::a"}) + "\n" + json.dumps(vars(case)) + '\n{"begu')
    assert cases.read(file) == [case] and cases.unfinished(file) == set()


# ---------------------------------------------------------------- what is kept


def new_run(course, lesson="02", pack=None, jobs=2, workers=1):
    here = proof_machine.Machine(
        {"device": "NVIDIA Pretend 9000", "torch": "2"}, False, None, jobs, workers
    )
    rooms = proof_machine.rooms(course, lesson)
    return Run(here, course / "out", rooms, 300.0, course, pack)


@pytest.mark.parametrize(
    "status, seconds, kept",
    [
        ("timeout", 10.0, True),
        ("timeout", proof_steps.LIMIT_S["equivalence"] + 1, False),
        ("failed", 10.0, False),
    ],
)
def test_a_proof_stays_until_the_next_run_has_ended(course, status, seconds, kept):
    """A kernel whose hash is the same is proved, though the tests are new and were cut off."""
    proved = {
        "status": "passed",
        "seconds": 9,
        "source": "older",
        "kernels": {"02/k": {"hash": HASH}},
    }
    write(
        course,
        "out/proof.json",
        json.dumps(dict(interpreted=False, steps={"02 equivalence": proved})),
    )
    run = new_run(course)
    (step,) = run.equivalence()
    run.finish(step, SimpleNamespace(status=status, seconds=seconds, end=lambda: ""))
    found = json.loads((course / "out" / "proof.json").read_text())["steps"]["02 equivalence"]
    assert (found == proved) is kept
    assert not run.is_finished(step), "it is tried again"


def test_a_lesson_whose_kernel_changed_in_another_room_is_not_finished(course, capsys, monkeypatch):
    def kernel(hash):
        return {"02/copy_kernel": table.Kernel("lessons/l01_copy/optimized.py", [], hash)}

    monkeypatch.setattr(table, "kernels", lambda root: kernel(HASH))
    write(course, "lessons/l02_more/lab/benchmark.py", "")

    def steps_of(hash):
        monkeypatch.setattr(table, "kernels", lambda root: kernel(hash))
        run = new_run(course)
        return run, [*run.equivalence(), *run.benchmarks(["02"]), *run.checks()]

    run, before = steps_of(HASH)
    later, after = steps_of(HASH[::-1])
    for step, changed in zip(before, after, strict=True):
        done = {step.name: {"status": "passed", "source": step.source}}
        run.proof["steps"] = later.proof["steps"] = done
        assert run.is_finished(step) and not later.is_finished(changed), step.name


# ---------------------------------------------------------------- what comes first


def test_lessons_with_kernels_that_are_not_proved_come_first(course, monkeypatch):
    hashes = {"01/copy_kernel": "a", "02/copy_kernel": "b"}
    monkeypatch.setattr(
        table,
        "kernels",
        lambda root: {name: table.Kernel("", [], hash) for name, hash in hashes.items()},
    )
    run = new_run(course, lesson=None)

    def proved(number, hash, status="passed"):
        kernels = {f"{number}/copy_kernel": {"hash": hash}}
        run.proof["steps"][f"{number} equivalence"] = {"status": status, "kernels": kernels}

    assert run.by_need(["01", "02"]) == ["01", "02"]
    proved("01", "a")
    assert run.by_need(["01", "02"]) == ["02", "01"]
    proved("02", "older")
    assert run.by_need(["01", "02"]) == ["02", "01"]
    proved("02", "b", "failed")
    assert [step.name[:2] for step in run.equivalence()] == ["02", "01"]
    proved("02", "b")
    assert run.by_need(["01", "02"]) == ["01", "02"]


def test_what_was_never_measured_comes_before_what_was(course, monkeypatch):
    run, order = new_run(course, lesson=None), []
    assert not run.is_old("01")
    record = course / "out" / "l01_copy.json"
    record.write_text(json.dumps({"resume": "another source"}))
    assert run.is_old("01")
    record.with_name("l01_other.json").write_text(json.dumps({"resume": run.key(run.source("01"))}))
    assert not run.is_old("01"), "a run that was cut off goes on in its order"
    for number, is_first in (("01", True), ("02", False)):
        write(course, f"lessons/l{number}_{'copy' if is_first else 'more'}/lab/benchmark.py", "")
    monkeypatch.setattr(proof_steps, "HEADLINES", ("01",))
    monkeypatch.setattr(run, "is_old", lambda number: number == "01")
    monkeypatch.setattr(run, "run", lambda steps, at_once: order.extend(s.name for s in steps))
    run.everything()
    assert [name for name in order if name.endswith("benchmark")] == [
        "02 benchmark",
        "01 benchmark",
    ]
    assert order.index("ladder") < order.index("02 benchmark")


def test_what_is_warmed_up_is_measured_next(course, monkeypatch):
    """A lesson that finds no time is not warmed up before those that do."""
    numbers = [f"{n:02}" for n in range(1, 6)]
    for number in numbers:
        write(course, f"lessons/l{number}_of_many/lab/benchmark.py", "")
    run = new_run(course, lesson=None)
    run.lessons = {n: course / f"lessons/l{n}_of_many" for n in numbers}
    monkeypatch.setattr(proof_steps, "HEADLINES", ("04",))
    monkeypatch.setattr(proof_steps, "SECOND", ("05",))
    found = [[step.name for step in steps] for steps, _ in run.phases()]
    names = ["04"], ["ladder"], ["05"], [], ["01", "02"], ["03"]
    expected = [[f"{n} {kind}" for n in group]
                for group in names if group and group != ["ladder"]
                for kind in ("warm-up", "benchmark")]  # fmt: skip
    expected.insert(2, ["ladder"])
    assert [group for group in found if group] == expected


def test_what_cannot_go_on_is_not_begun_without_its_time(course):
    run = new_run(course)
    for name, status, least_s in (
        ("ladder", "passed", 70),
        ("ladder", "failed", 0),
        ("02 benchmark", "passed", 0),
    ):
        run.proof["steps"] = {name: {"status": status, "seconds": 70}}
        assert run.least_s(proof_steps.Step(name, [], "source")) == least_s
    run.deadline = time.monotonic() + 60
    run.proof["steps"] = {"ladder": {"status": "passed", "seconds": 70}}
    assert run.begin(proof_steps.Step("ladder", [sys.executable], "source")) == []


def test_a_plan_of_what_fits(course, monkeypatch):
    """Seconds as they were measured, else counted, else the limit; two lessons at once."""
    write(course, "lessons/l01_copy/lab/benchmark.py", "")
    measured = {"01 equivalence": dict(status="passed", seconds=40, kernels={})}
    of_gpu = dict(device="NVIDIA H200", interpreted=False, steps=measured)
    write(course, "results/h200/proof.json", json.dumps(of_gpu))
    jobs = [SimpleNamespace(chip=chip) for chip in (80, 90, 90)]
    kernels = {"02/k": table.Kernel("", jobs, HASH)}
    monkeypatch.setattr(table, "kernels", lambda root: kernels)
    bench = SimpleNamespace(providers=range(3), x_values=range(4))
    monkeypatch.setattr(plan.bench, "load_benchmarks", lambda number, root: [bench, bench])
    monkeypatch.setattr(plan.timing, "BUDGET_S", 0.4)
    steps = new_run(course, lesson=None)
    said = list(plan.plan(steps, plan.Estimates(course), 300))
    second_s = plan.START_S + 2 * plan.LAUNCH_S
    bench_s = plan.START_S + 24 * (0.4 * 9 / 8 + plan.CHECK_S)
    end = 40 + 240
    assert said[:4] == [
        f"{second_s:6.0f} s  02 equivalence       fits     {second_s:.0f} s predicted",
        f"{40:6.0f} s  01 equivalence       fits     40 s measured",
        f"{end:6.0f} s  ladder               fits     at most 240 s",
        f"{end + 120:6.0f} s  01 warm-up           cut off  at most 120 s",
    ]
    assert said[4] == "for later runs: 01 benchmark, 01 checks, 02 checks"
    latest = end + 120 + bench_s + proof_steps.LIMIT_S["checks"]
    assert said[5].endswith(f"after {latest:.0f} s at the latest")


def test_the_plan_of_this_course(capsys):
    assert proof.main(["plan", "--budget-minutes", "8"]) == 0
    said = capsys.readouterr().out
    assert "12 equivalence       fits" in said and "for later runs:" in said


def test_the_engine_has_the_processes_of_all_lessons(course):
    write(course, "tests/test_engine.py", "def test_serves(): pass\n")
    for workers, said in ((2, "-n 16"), (1, "")):
        (step,) = new_run(course, jobs=8, workers=workers).engine()
        assert (said in " ".join(step.command)) and ("-n" in step.command) == bool(said)


def test_what_needs_more_gpus_is_no_failure(course, capsys):
    write(
        course,
        ROOM,
        """
import pytest
def test_ranks(proof):
    pytest.skip("NOT RUN: needs 2 GPUs")
    proof.record(None)
def test_other(): pass
""",
    )
    code, said, steps = gpu(course, capsys, tool=False, lesson="02")
    assert steps["02 equivalence"]["status"] == TOO_FEW_GPUS and code == 0, said
    tests = [cases.Case("a", "skipped", 0, {}, reason) for reason in ("NOT RUN: needs 2 GPUs", "x")]
    assert silence(tests[:1]) == TOO_FEW_GPUS
    assert silence(tests) == silence([]) == "no kernel recorded"
