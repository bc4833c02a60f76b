"""The proof machinery on a tiny course of its own, where lessons pass, fail, hang and cheat: what
may count as proved.
"""

import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lessons.l08_online_softmax.cuda_softmax import SOFTMAX
from lessons.l09_flash_attention.worklog.cuda_flash import FLASH
from lessons.l12_paged_kv.kernels.cuda_paged import DECODE as PAGED_DECODE
from lessons.l18_weight_quantization.kernels.cuda_w4a16 import W4A16
from lessons.toolbox.kernels import compile_check
from lessons.toolbox.kernels.compile_report import CHIPS, Report
from lessons.toolbox.measure.device import has_gpu, interpreting, machine_chip
from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import cases as proof_cases
from lessons.toolbox.proof import machine as proof_machine
from lessons.toolbox.proof import record as proof_record
from lessons.toolbox.proof import run as proof_run
from lessons.toolbox.proof import sanitizer, table
from lessons.toolbox.proof import steps as proof_steps
from lessons.toolbox.proof.numerics import Errors
from tests import proof_course
from tests.proof_course import OPTIMIZED, REPOSITORY, TESTS, gpu, write

course = proof_course.course


# ---------------------------------------------------------------- what a test records


def test_only_a_test_that_passed_to_its_end_records_a_proof(course):
    write(
        course,
        "lessons/l01_copy/test_equivalence.py",
        """
import pytest
from lessons.l01_copy.optimized import copy_kernel
def test_passes(proof): proof.record(copy_kernel)
def test_fails_after_recording(proof): proof.record(copy_kernel); assert False
def test_records_nothing(proof): pass
def test_is_skipped(proof): proof.record(copy_kernel); pytest.skip("not here")
@pytest.fixture
def bad_end():
    yield
    raise RuntimeError
def test_fails_in_teardown(proof, bad_end): proof.record(copy_kernel)
def test_knows_no_proof(): assert False
""",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lessons.toolbox.proof.cases"]
    command += ["--cases", "tests.jsonl", "lessons/l01_copy"]
    environment = os.environ | proof_machine.ENVIRONMENT
    done = subprocess.run(command, cwd=course, capture_output=True, text=True, env=environment)
    assert "records no kernel" in done.stdout, done.stdout
    cases = {case.test.split("::")[1]: case for case in proof_cases.read(course / "tests.jsonl")}
    assert {name: case.status for name, case in cases.items()} == {
        "test_passes": "passed",
        "test_fails_after_recording": "failed",
        "test_records_nothing": "failed",
        "test_is_skipped": "skipped",
        "test_fails_in_teardown": "failed",
        "test_knows_no_proof": "failed",
    }
    (kernel,) = cases["test_passes"].kernels.values()
    assert (len(kernel["hash"]), kernel["errors"], kernel["where"]) == (16, None, "cuda")
    assert not any(case.kernels for case in cases.values() if case.status != "passed")


def test_a_run_cut_off_before_it_wrote_its_cases_has_none(tmp_path):
    assert proof_cases.read(tmp_path / "none.jsonl") == []


def errors(rms):
    return Errors(
        rms=rms,
        rms_eager=1e-7,
        max_abs=0.1,
        max_abs_eager=0.1,
        worst_tile_rms=rms,
        bias=0,
        bias_eager=0,
        floor=2e-6,
    )


def kernel_in(folder, source="def some_kernel(): pass"):
    (path := folder / "l07_topic" / "optimized.py").parent.mkdir(exist_ok=True)
    path.write_text(source)
    namespace = {"__name__": "lessons.l07_topic.optimized"}
    exec(compile(source, str(path), "exec"), namespace)
    return SimpleNamespace(fn=namespace["some_kernel"])


def test_the_errors_nearest_to_their_limit_are_kept(tmp_path):
    found, kernel = proof_record.Proof(), kernel_in(tmp_path)
    found.record(kernel)
    assert found.kernels["07/some_kernel"]["errors"] is None
    for measured in (errors(1e-6), (errors(2.12345e-6), errors(1e-7)), errors(0.0)):
        found.record(kernel, measured)
    assert found.kernels["07/some_kernel"]["errors"]["rms"] == 2.12e-6


def test_of_all_cases_the_worst_errors_and_two_quick_tests_are_kept():
    cases = []
    for i, rms in enumerate((3e-7, 2e-6, 1e-7)):
        figures = {"rms": rms, "rms_eager": 1e-7, "floor": 2e-6}
        entry = {"hash": "aa", "errors": figures, "where": "cuda"}
        cases.append(proof_cases.Case(f"t{i}", "passed", 3.0 - i, {"07/k": entry}))
    cases.append(proof_cases.Case("t3", "failed", 0.1, {}))
    cases.append(proof_cases.Case("t4", "skipped", 0.0, {}))
    found = proof_record.gathered(cases, ("cuda",))
    assert (found["tests"], found["failed"]) == (4, ["t3"])
    kernel = found["kernels"]["07/k"]
    assert (kernel["cases"], kernel["errors"]["rms"], kernel["quick"]) == (3, 2e-6, ["t2", "t1"])
    assert proof_record.gathered(cases, proof_record.WITHOUT_GPU)["kernels"] == {}


def test_a_cuda_file_is_known_by_its_text_and_anything_else_is_refused(tmp_path):
    source = tmp_path / "l09_flash" / "optimized.cu"
    source.parent.mkdir()
    source.write_text("__global__ void f() {}")
    before = proof_record.hash_of(source)
    assert before == compile_check.cuda_job(source.read_text(), 90, "f").kernel_hash
    assert proof_record.kernel_name(source) == "09/optimized.cu"
    source.write_text("__global__ void f() { }")
    assert proof_record.hash_of(source) != before
    assert proof_record.where(source) == ("cuda" if has_gpu() else f"sm_{machine_chip()}")
    for wrong, said in (
        (len, "accepted: a @triton.jit function"),
        (tmp_path / "x.cu", "accepted: one that stands in a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            proof_record.kernel_name(wrong)


def test_what_a_sanitizer_is_told_to_watch(tmp_path):
    (tmp_path / "optimized.cu").write_text(
        "__device__ float half(float x) { return x / 2; }\n"
        'extern "C" __global__ void __launch_bounds__(1024) softmax_x8(\n    float* x) {}\n'
        'extern "C" __global__ void plain(float* x) {}\n'
    )
    assert sanitizer.names_on_gpu("08/optimized.cu", tmp_path) == ["softmax_x8", "plain"]
    assert sanitizer.names_on_gpu("08/softmax_kernel", tmp_path) == ["softmax_kernel"]
    # and of the course's own files what Python launches by name
    launched = {"08": SOFTMAX, "09": FLASH["tiled"], "12": PAGED_DECODE, "18": W4A16}
    assert len(list(REPOSITORY.glob("lessons/*/*.cu"))) == len(launched)
    for number, kernels in launched.items():
        names = [kernel.name for kernel in kernels.values()]
        room = next(iter(kernels.values())).file.parent
        assert sorted(sanitizer.names_on_gpu(f"{number}/optimized.cu", room)) == sorted(names)


# ---------------------------------------------------------------- the run on a (pretended) GPU


@pytest.mark.sample(3, of="processes")
def test_a_whole_run_and_its_resumption(course, capsys):
    code, _, steps = gpu(course, capsys)
    assert code == 0 and set(steps) == {
        "01 benchmark",
        "01 checks",
        "01 equivalence",
        "02 checks",
        "02 equivalence",
        "ladder",
        "memcheck",
        "racecheck",
    }
    for number in ("01", "02"):
        lesson = steps[f"{number} equivalence"]
        kernel = lesson["kernels"][f"{number}/copy_kernel"]
        assert (lesson["status"], lesson["tests"], kernel["cases"]) == ("passed", 2, 2)
        assert steps[f"{number} checks"]["tests"] == 3
        assert lesson["fingerprint"]["device"] == "NVIDIA Pretend 9000"
    assert (course / "out" / "l01_copy.json").exists() and (course / "out" / "ladder.json").exists()
    for tool in ("memcheck", "racecheck"):
        assert set(steps[tool]["watched"]) == {"01/copy_kernel", "02/copy_kernel"}
        assert steps[tool]["status"] == "passed"
    assert (course / "warmed").read_text() == "01"
    log = (course / "out" / "log.txt").read_text()
    assert "2 passed, 2 deselected" in log and "--kernel-name kns=copy_kernel" in log
    assert "test_large[0.5]" in log.split("---- memcheck")[1]

    code, said, again = gpu(course, capsys)
    assert code == 0 and said.count("finished   earlier") == 8 and again == steps
    assert (course / "warmed").read_text() == "01", "for what is finished nothing is compiled"
    write(course, "lessons/l02_more/optimized.py", OPTIMIZED.replace("out[0]", "out[-1]"))
    code, said, changed = gpu(course, capsys)
    assert code == 0 and "02 equivalence       passed" in said
    assert "01 equivalence       finished" in said
    assert "02/copy_kernel" in changed["02 equivalence"]["kernels"]
    assert changed["02 equivalence"]["kernels"] != steps["02 equivalence"]["kernels"]
    shutil.rmtree(course / "out")
    code, said, _ = gpu(course, capsys, lesson="2", tool=False)
    assert "02 equivalence       passed" in said and "01 " not in said.split("\n", 1)[1]
    assert "memcheck             not run    compute-sanitizer is not installed" in said


def test_what_failed_is_tried_again_after_all_others(course, capsys):
    wrong = TESTS.format(room="l01_copy") + "def test_wrong(proof): assert 0\n"
    write(course, "lessons/l01_copy/test_equivalence.py", wrong)
    gpu(course, capsys, tool=False, lesson="01")
    code, said, _ = gpu(course, capsys, tool=False)
    order = [said.index(what) for what in ("02 equivalence", "ladder ", "01 equivalence")]
    assert code == 1 and order == sorted(order), said
    write(course, "lessons/l01_copy/test_equivalence.py", wrong + "# changed\n")
    _, said, _ = gpu(course, capsys, tool=False)
    assert said.index("01 equivalence") < said.index("ladder "), "with another source it may pass"


def test_a_step_that_the_end_cut_off_does_not_wait():
    run = object.__new__(proof_run.Run)
    step = proof_steps.Step("02 benchmark", [], "source")
    for status, seconds, waits in (
        ("timeout", proof_steps.LIMIT_S["benchmark"] - 1, False),
        ("timeout", proof_steps.LIMIT_S["benchmark"] + 1, True),
        ("failed", 1, True),
    ):
        entry = {"status": status, "seconds": seconds, "source": "source"}
        run.proof = {"steps": {step.name: entry}}
        assert run.has_failed(step) is waits


def test_the_tests_of_a_lesson_shared_by_two_processes_record_the_same(course, capsys):
    _, _, alone = gpu(course, capsys, tool=False, lesson="02")
    _, said, shared = gpu(course, capsys, out="shared", tool=False, lesson="02", workers=2)
    kernels = [steps["02 equivalence"]["kernels"]["02/copy_kernel"] for steps in (alone, shared)]
    assert kernels[0]["cases"] == kernels[1]["cases"] == 2, said
    assert "-n 2" in (course / "shared" / "log.txt").read_text()


def test_two_runs_at_once_do_not_read_each_others_reports(course):
    """A folder of reports that they shared had one run miss the kernels of the other."""
    machine = SimpleNamespace(workers=1, interpreted=False, fingerprint={}, chip=None)
    runs = [proof_steps.Steps(machine, course / name, {}, course) for name in "ab"]
    for watched in ([], ["compute-sanitizer"]):
        steps = [one.testing("02 equivalence", ["tests"], "", watched=watched) for one in runs]
        assert len({step.cases for step in steps}) == 2


def test_the_results_in_one_file(course, capsys):
    """What a borrowed machine gives back; unpacked, the next run goes on there."""
    pack = course / "results.tar.gz"
    gpu(course, capsys, tool=False, pack=pack)
    (course / "out" / "l01_copy.png").touch()
    gpu(course, capsys, tool=False, pack=pack, lesson="01")
    with tarfile.open(pack) as archive:
        assert "out/proof.json" in archive.getnames() and "out/l01_copy.json" in archive.getnames()
    shutil.unpack_archive(pack, course / "elsewhere")
    _, said, _ = gpu(course, capsys, out="elsewhere/out", tool=False)
    assert said.count("finished   earlier") == 6


def test_the_engine_is_tested_too_and_proves_no_kernel(course, capsys):
    for name in ("engine", "llm"):
        write(course, f"tests/test_{name}.py", "def test_serves(): pass\n")
    code, _, steps = gpu(course, capsys, tool=False)
    assert code == 0 and steps["engine"]["tests"] == 2 and "kernels" not in steps["engine"]
    write(course, "tests/test_llm.py", "def test_serves(): assert False\n")
    code, said, steps = gpu(course, capsys, tool=False)
    assert code == 1 and steps["engine"]["failed"] == ["tests/test_llm.py::test_serves"]
    assert "engine: failed" in said


def test_a_failure_is_recorded_and_stops_nothing(course, capsys):
    wrong = TESTS.format(room="l01_copy") + "def test_wrong(proof): assert 0\n"
    write(course, "lessons/l01_copy/test_equivalence.py", wrong)
    (course / "bench_exit").touch()
    code, said, steps = gpu(course, capsys)
    assert code == 1 and steps["02 equivalence"]["status"] == "passed"
    first = steps["01 equivalence"]
    assert first["status"] == "failed"
    assert first["failed"] == ["lessons/l01_copy/test_equivalence.py::test_wrong"]
    assert steps["01 benchmark"]["status"] == "failed"
    assert set(steps["memcheck"]["watched"]) == {"02/copy_kernel"}
    assert "3 steps failed" in said and "assert 0" in (course / "out" / "log.txt").read_text()
    proved = {"steps": steps, "interpreted": False, "device": "P"}
    digest = first["kernels"]["01/copy_kernel"]["hash"]
    assert table.proof_cell("01/copy_kernel", digest, [proved]) == "not yet", (
        "a lesson that fails proves none of its kernels"
    )


@pytest.mark.sample(3, of="processes")
@pytest.mark.parametrize("hangs_s, status", [(2, "failed"), (600, "timeout")])
def test_a_lesson_that_hangs_is_ended_with_its_children(
    course, capsys, monkeypatch, hangs_s, status
):
    """By the limit of a test, or else by that of the step."""
    _, _, steps = gpu(course, capsys, tool=False, lesson="02")
    limit_s = 5 + 2 * steps["02 equivalence"]["seconds"]
    for kind in ("equivalence", "checks"):  # both run the test that hangs
        monkeypatch.setitem(proof_steps.LIMIT_S, kind, limit_s)
    monkeypatch.setattr(proof_steps, "HANGS_S", hangs_s)
    hanging = """
def test_hangs(proof):
    import subprocess, pathlib
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("child").write_text(str(child.pid))
    child.wait()
"""
    room = "lessons/l01_copy/test_equivalence.py"
    write(course, room, TESTS.format(room="l01_copy") + hanging)
    code, _, steps = gpu(course, capsys, tool=False)
    assert code == 1 and steps["01 equivalence"]["status"] == status
    assert steps["01 benchmark"]["status"] == "passed", "a lesson that hangs stops nothing"
    log = (course / "out" / "log.txt").read_text()
    assert ("in test_hangs" in log) is (status == "failed"), "the log says which test hung"
    child = int((course / "child").read_text())
    for _ in range(50):  # the kernel reaps it when it likes
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or "Z" in stat.read_text().split(")")[1][:3]:
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child of a timed out test lives on")


INTERRUPTED = """
import sys
from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import machine
proof.why_not_here = lambda interpreted: ""
here = machine.Machine({"device": "Pretend"}, False, None, 2)
machine.this_machine = lambda interpreted, chip=None: here
sys.exit(proof.main(["gpu", "--out", "out"]))
"""


@pytest.mark.sample(3, of="processes")
def test_an_interrupted_run_ends_at_once_and_keeps_what_is_finished(course):
    hangs = "def test_hangs(proof):\n    import time; time.sleep(600)\n"
    write(course, "lessons/l02_more/test_equivalence.py", hangs)
    command = [sys.executable, "-c", INTERRUPTED]
    run = subprocess.Popen(
        command, cwd=course, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "01 equivalence" not in run.stdout.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)  # Ctrl-C raises the same exception
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130 and err.count("\n") == 1 and "interrupted" in err, err
    steps = json.loads((course / "out" / "proof.json").read_text())["steps"]
    assert steps["01 equivalence"]["status"] == "passed"


def test_without_time_nothing_is_lost_and_the_next_run_goes_on(course, capsys):
    code, said, steps = gpu(course, capsys, minutes=0.0)
    assert code == 1 and said.count("no time left") >= 4 and not steps
    assert gpu(course, capsys)[0] == 0


def test_kernels_that_were_interpreted_prove_nothing_on_a_gpu(course, capsys, monkeypatch):
    monkeypatch.setenv("PRETEND", "interpreter")
    (course / "lessons/l02_more/lab/specs.py").unlink()  # a lesson without kernels
    code, _, steps = gpu(course, capsys)
    assert code == 1 and steps["01 equivalence"]["status"] == "no kernel recorded"
    assert steps["02 equivalence"]["status"] == "passed"
    code, _, steps = gpu(course, capsys, out="cpu", interpreted=True)
    assert code == 0 and set(steps) == {"01 equivalence", "02 equivalence"}
    monkeypatch.setenv("PRETEND", "cuda")
    code, said, _ = gpu(course, capsys, out="cpu", tool=False)
    assert code == 0 and "finished" not in said, "what was interpreted finishes nothing"


@pytest.mark.parametrize(
    "said, status, code",
    [
        ("========= Invalid __global__ write\n=========     at copy_kernel+0x1c0", "failed", 1),
        ("========= Error: Device not supported. Please refer to", "not supported", 0),
        ("Segmentation fault", "failed", 1),
    ],
)
def test_what_a_sanitizer_says_is_recorded(course, capsys, said, status, code):
    (course / "said").write_text(said)
    got, _, steps = gpu(course, capsys, lesson="02")
    assert got == code and steps["memcheck"]["status"] == status
    assert steps["memcheck"]["report"] == said.split("\n")


def test_a_step_whose_record_cannot_be_read_wastes_no_other(course, capsys, monkeypatch):
    monkeypatch.setattr(proof_record, "gathered", lambda cases, on_gpu: cases["none"])
    code, said, _ = gpu(course, capsys, tool=False)
    assert (
        code == 1 and "equivalence       crashed" in said and "ladder               passed" in said
    )
    assert "TypeError" in (course / "out" / "log.txt").read_text()


def test_a_clean_report_that_saw_no_launch_is_no_pass():
    clean = "========= ERROR SUMMARY: 0 errors"
    assert sanitizer.judged("passed", clean, "memcheck", set())[0] == "passed"
    assert sanitizer.judged("passed", clean, "memcheck", {"01/k"})[0] == "failed"
    assert sanitizer.judged("failed", clean, "memcheck", set())[0] == "failed"
    assert sanitizer.judged("timeout", clean, "memcheck", set())[0] == "timeout"
    another_tools = sanitizer.judged("passed", clean, "racecheck", set())
    assert another_tools[0] == "failed"


@pytest.mark.parametrize(
    "device, folder",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ],
)
def test_the_folder_of_a_device(device, folder):
    assert proof_machine.device_folder(device) == folder


# ---------------------------------------------------------------- the kernels of the course


def kernels_of(files):
    """Kernels in a lesson's files: under some `jit`, without a result, and named by no other jit
    function (else it is a helper of a kernel).
    """
    functions = []
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            decorators = [ast.unparse(part) for part in getattr(node, "decorator_list", ())]
            if any(name.split("(")[0].endswith(".jit") for name in decorators):
                functions.append(node)
    for function in functions:
        parts = [part for other in functions if other is not function for part in ast.walk(other)]
        named = {part.id for part in parts if isinstance(part, ast.Name)}
        results = [part for part in ast.walk(function) if isinstance(part, ast.Return)]
        if function.name not in named and not any(part.value is not None for part in results):
            yield function.name


def test_every_kernel_is_listed_for_the_compiler_and_proved_by_a_test():
    listed, missing = table.kernels(), []
    for room in proof_machine.rooms().values():
        tests = "".join(file.read_text() for file in sorted(room.rglob("test_*.py")))
        files = [file for file in room.rglob("*.py") if not {"lab", "checks"} & set(file.parts)]
        files = [file for file in files if not file.name.startswith("test_")]
        kernels = {name: rf"proof\.record\(\s*{name}\b" for name in kernels_of(files)}
        kernels |= {file.name: re.escape(file.name) for file in room.glob("*.cu")}
        for name, pattern in kernels.items():
            key = f"{room.name[1:3]}/{name}"
            if key not in listed:
                missing.append(f"{key} stands in no KERNELS of {room.name}/lab/specs.py")
            if not re.search(pattern, tests):
                missing.append(f"{key}: no test records it")
    assert len(listed) > 20 and not missing, "\n".join(missing)


def test_every_kernel_has_a_recorded_report():
    recorded = compile_check.recorded()
    asked = {job.key for kernel in table.kernels().values() for job in kernel.jobs}
    assert asked == set(recorded), "run `python -m lessons.toolbox.proof readme`"


def pytest_generate_tests(metafunc):
    if "compiled_lesson" in metafunc.fixturenames:
        every = metafunc.config.getoption("all")
        lessons = [*proof_machine.rooms()] if every else ["two at random"]
        metafunc.parametrize("compiled_lesson", lessons)


@pytest.mark.compiler
@pytest.mark.sample(1, of="compiler")
def test_the_compiler_still_says_what_is_recorded(compiled_lesson, seed):
    """Every kernel with --all (`make test-all`), else two, each for one of its chips."""
    listed = table.kernels().items()
    if compiled_lesson == "two at random":
        jobs = random.sample([job for _, kernel in listed for job in kernel.jobs], 2)
    else:
        jobs = [job for key, kernel in listed for job in kernel.jobs if key[:2] == compiled_lesson]
    for report in compile_check.check_jobs(jobs, afresh=True):
        recorded = compile_check.recorded().get(report.key)
        if recorded is None:
            continue  # another test says so
        if recorded.compiler != report.compiler:
            pytest.skip(f"NOT RUN: recorded by {recorded.compiler}, here is {report.compiler}")
        assert report.to_json() == recorded.to_json()


# ---------------------------------------------------------------- the table


def report(**facts):
    return Report("k", 90, registers=24, shared_bytes=2048, **facts)


def test_compiled_cells():
    assert table.compiled_cell([report()]) == "24 / 0 / 2.0"
    assert table.compiled_cell([report(), report(spill_bytes=8)]) == "24 / 8 / 2.0 !"
    assert table.compiled_cell([report(), report(error="boom")]) == "error"
    assert table.compiled_cell([report(), None]) == "stale"
    assert table.compiled_cell([]) == "–"


def test_reports_are_recorded_in_a_file_a_lesson(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_check, "CACHE", tmp_path / "cache")
    jobs = [compile_check.cuda_job(f"source {chip}", chip, "k") for chip in CHIPS]
    kernels = {"01/k": table.Kernel("a", jobs[:2]), "02/k": table.Kernel("b", jobs[2:])}
    monkeypatch.setattr(table, "kernels", lambda root: kernels)
    said = {"error": "not run: no compiler"}
    monkeypatch.setattr(compile_check, "compile_some", lambda jobs: [said] * len(jobs))
    with pytest.raises(ValueError, match="k cannot be compiled here: not run: no compiler"):
        table.record_compiled(tmp_path)
    said = {"registers": 8}
    table.record_compiled(tmp_path)
    folder = tmp_path / "results" / "compiled"
    assert sorted(file.name for file in folder.iterdir()) == ["01.jsonl", "02.jsonl"]
    recorded = compile_check.recorded(folder)
    assert [recorded[job.key].registers for job in jobs] == [8] * len(CHIPS)


def proof_of(device, digest, status="passed", chip=None):
    where = "interpreter" if chip is None else f"sm_{chip}"
    step = {"status": status, "kernels": {"01/k": {"hash": digest, "where": where}}}
    found = {"01 equivalence": step, "ladder": {"status": "passed"}}
    return {"device": device, "interpreted": device == "cpu", "steps": found, "chip": chip}


@pytest.mark.parametrize(
    "proofs, cell",
    [
        ([], "not yet"),
        ([("cpu", "new")], "interpreter only"),
        ([("cpu", "old")], "stale in the interpreter"),
        ([("H200", "new", "failed")], "not yet"),
        ([("A100", "old"), ("H200", "new"), ("cpu", "new")], "stale on A100, proved on H200"),
    ],
)
def test_how_a_kernel_is_proved(proofs, cell):
    assert table.proof_cell("01/k", "new", [proof_of(*given) for given in proofs]) == cell


def test_gluon_on_a_cpu_is_compiled():
    from lessons.l09_flash_attention.hopper.gluon_flash import flash_hopper_kernel
    from lessons.toolbox.kernels.kernel_hash import kernel_hash

    assert len(kernel_hash(flash_hopper_kernel)) == 16  # Triton gives it an attribute `kernel`
    if interpreting():
        assert proof_record.where(flash_hopper_kernel) == "sm_90"
        assert proof_record.where(flash_hopper_kernel, 100) == "sm_100"
    found = {"where": "sm_90", "hash": "new", "errors": None}
    case = proof_cases.Case("test.py::test_k", "passed", 1.0, {"01/k": found})
    proof = proof_of("cpu", "new")
    proof["steps"]["01 equivalence"] |= proof_record.gathered([case], proof_record.WITHOUT_GPU)
    assert table.proof_cell("01/k", "new", [proof]) == "compiled code only"
    assert table.proof_cell("01/k", "other", [proof]) == "stale in the compiled code"
    assert table.executed_cell("01/k", "new", [proof]) == "90"
    assert table.executed_cell("01/k", "other", [proof]) == "stale"
    assert not proof_record.gathered([case], ("cuda",))["kernels"]
    rows = [["01", "k", *["–"] * 5, cell] for cell in ("compiled code only", "interpreter only")]
    said = table.sentence(rows)
    assert "2 kernels, none are" in said
    assert "(1 in Triton's interpreter only, 1 by its compiled code only)" in said


def test_the_table_and_its_sentence_follow_the_records(monkeypatch):
    jobs = [compile_check.cuda_job("source", chip, "k") for chip in (90, 100)]
    known = {job.key: job.report(registers=8) for job in jobs}
    monkeypatch.setattr(compile_check, "recorded", lambda: known)
    kernels = {"01/k": table.Kernel("lessons/l01_copy/optimized.cu", jobs)}
    proofs = [proof_of("NVIDIA Pretend", kernels["01/k"].hash)]
    rows = table.rows(kernels, proofs)
    assert rows[0][:2] == ["01", "[`k`](../lessons/l01_copy/optimized.cu)"]
    compiled = ["–"] * 3 + ["8 / 0 / 0.0"] * 2
    assert rows[0][2:] == [*compiled, "not yet", "proved on NVIDIA Pretend"]
    assert f"| {' | '.join(rows[0])} |" in table.markdown(rows)
    said = table.sentence(rows)
    assert (
        "Of the 1 kernels, 1 are proved" in said and "on a GPU." in said and "1 for sm_90" in said
    )
    assert "compiled code of none has also run" in said
    ran = [proof_of("cpu", kernels["01/k"].hash, chip=chip) for chip in (90, 80)]
    rows = table.rows(kernels, [*proofs, *ran])
    assert rows[0][-2:] == ["80, 90", "proved on NVIDIA Pretend"], (
        "it is no GPU, and no interpreter"
    )
    assert "compiled code of 1 has also run" in table.sentence(rows)
    old = proof_of("cpu", "another", chip=80)
    assert table.rows(kernels, [old])[0][-2:] == ["stale", "not yet"]
    known.pop(jobs[0].key)
    changed = table.rows(kernels, [])
    assert changed[0][5] == "stale" and "0 for sm_90" in table.sentence(changed)
    assert "none are proved" in table.sentence(changed)


def test_a_readme_is_rewritten_between_its_markers_only():
    readme = f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n"
    once = table.with_text(readme, "| new |")
    assert once == f"above\n{table.BEGIN}\n| new |\n{table.END}\nbelow\n"
    assert table.with_text(once, "| new |") == once
    for wrong in ("nothing", f"{table.END}\n{table.BEGIN}\n", readme + readme):
        with pytest.raises(ValueError, match="no place for the proofs"):
            table.with_text(wrong, "| new |")


def test_the_readmes_say_what_is_proved_today():
    for file, text in table.readmes().items():
        assert file.read_text() == text, "run `python -m lessons.toolbox.proof readme`"


# ---------------------------------------------------------------- the commands


def test_without_a_gpu_one_line(capsys, monkeypatch):
    monkeypatch.setattr(proof, "has_gpu", lambda: False)
    monkeypatch.setattr(proof, "interpreting", lambda: False)
    assert proof.main(["gpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no CUDA device" in err and "make proof" in err
    assert proof.main(["cpu"]) == 2 and "set TRITON_INTERPRET=1" in capsys.readouterr().err
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None)
    assert proof.main(["gpu"]) == 2 and "pip install pytest" in capsys.readouterr().err


def test_a_gpu_whose_kernels_are_interpreted_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(proof, "has_gpu", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert proof.main(["gpu"]) == 2 and "unset it" in capsys.readouterr().err


def test_an_unknown_lesson_lists_the_known(course):
    with pytest.raises(ValueError, match="LESSON='99'; accepted: 01 copy, 02 more"):
        proof_machine.rooms(course, "99")
    assert list(proof_machine.rooms(course, "more")) == ["02"]
    assert list(proof_machine.rooms(course, "2")) == ["02"]
    assert list(proof_machine.rooms(course)) == ["01", "02"]


def test_the_table_can_be_shown(capsys, monkeypatch):
    monkeypatch.setattr(table, "kernels", lambda root: {})
    assert proof.main(["table"]) == 0
    assert "sm_100" in capsys.readouterr().out and "sm_100" in f"sm_{max(CHIPS)}"
