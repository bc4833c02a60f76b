"""The proof machinery on a tiny course of its own, where lessons pass, fail, hang and cheat: what
may count as proved.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lessons.toolbox.measure.bench import Benchmark
from lessons.toolbox.measure.bench import run as run_benchmark
from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import machine as proof_machine
from lessons.toolbox.proof import record as proof_record
from lessons.toolbox.proof import run as proof_run
from lessons.toolbox.proof import table as proof_table
from lessons.toolbox.proof.numerics import Errors

REPOSITORY = Path(__file__).resolve().parents[1]

# Neither Triton nor torch is needed to test the bookkeeping: a kernel is what has its function
# under `fn`.
OPTIMIZED = """
import types
triton = types.SimpleNamespace(jit=lambda f: types.SimpleNamespace(fn=f))
@triton.jit
def copy_kernel(x, out, BLOCK):
    out[0] = x[0]
@triton.jit
def helper(x):
    return x
"""
CONFTEST = """
import os
pytest_plugins = ["lessons.toolbox.proof.record"]
from lessons.toolbox.proof import record as proof_record
proof_record.where = lambda: os.environ.get("PRETEND", "cuda")
"""
TESTS = """
import os
from lessons.{room}.optimized import copy_kernel
def test_small(proof):
    proof.record(copy_kernel)
def test_large(proof):
    proof.record(copy_kernel)
def test_other_things():
    pass
"""
LADDER = """
import json, pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "ladder.json").write_text(json.dumps(dict(arguments=sys.argv[1:])))
"""
BENCH = """
import json, pathlib, sys
record = dict(schema=1, series={}, lesson=sys.argv[1])
pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "copy.json").write_text(json.dumps(record))
sys.exit(pathlib.Path("bench_exit").exists())
"""
SANITIZER = """#!{python}
import subprocess, sys, pathlib
python = next(i for i, part in enumerate(sys.argv) if part.endswith("/python") or "/python3" in part)
said = pathlib.Path("{root}/said")
if said.exists():
    print(said.read_text())
    sys.exit(86)
code = subprocess.run(sys.argv[python:]).returncode
race = "racecheck" in sys.argv
print("=========", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if race else "ERROR SUMMARY: 0 errors")
sys.exit(code)
"""


@pytest.fixture
def course(tmp_path):
    """A course of two lessons that pass, with this repository's proof machinery and stand-ins for
    bench and ladder.
    """
    toolbox = tmp_path / "lessons" / "toolbox"
    shutil.copytree(
        REPOSITORY / "lessons" / "toolbox", toolbox, ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "lessons" / "__init__.py").touch()
    (toolbox / "bench.py").write_text(BENCH)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n"
    )
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "ladder.py").write_text(LADDER)
    for room in ("l01_copy", "l02_more"):
        write(tmp_path, room, "optimized.py", OPTIMIZED)
        write(tmp_path, room, "test_equivalence.py", TESTS.format(room=room))
    write(tmp_path, "l01_copy", "benchmark.py", "")
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(SANITIZER.format(python=sys.executable, root=tmp_path))
    sanitizer.chmod(0o755)
    return tmp_path


def write(course, room, name, text):
    path = course / "lessons" / room / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def gpu(
    course, capsys, out="out", budget_minutes=5.0, interpreted=False, sanitizer=True, **options
):
    """One `make gpu` on a pretended GPU: (exit code, what it printed, {file: its content})."""
    given = SimpleNamespace(
        **{
            "lesson": None,
            "again": False,
            "rehearse": False,
            "out": course / out,
            "budget_minutes": budget_minutes,
        }
        | options
    )
    tool = str(course / "compute-sanitizer") if sanitizer else None
    machine = proof_machine.Machine(
        {"device": "NVIDIA Pretend 9000", "torch": "2"}, interpreted, tool, jobs=2
    )
    code = proof.gpu(given, machine, course)
    texts = {path.name: path.read_text() for path in (course / out).iterdir()}
    files = {
        name: json.loads(text) if name.endswith(".json") else text for name, text in texts.items()
    }
    return code, capsys.readouterr().out, files


# ---------------------------------------------------------------- what a test records


def pytest_in(course, *arguments):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--proof-record",
        "record.jsonl",
        *arguments,
    ]
    return subprocess.run(
        command,
        cwd=course,
        capture_output=True,
        text=True,
        env=os.environ | proof_machine.ENVIRONMENT,
    )


def test_only_a_test_that_passed_to_its_end_records_a_proof(course):
    write(
        course,
        "l01_copy",
        "test_equivalence.py",
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
    done = pytest_in(course, "lessons/l01_copy")
    assert "records no kernel" in done.stdout and "3 failed" in done.stdout, done.stdout
    lines = {
        line["test"].split("::")[1]: line for line in proof_record.read(course / "record.jsonl")
    }
    assert {name: line["outcome"] for name, line in lines.items()} == {
        "test_passes": "passed",
        "test_fails_after_recording": "failed",
        "test_records_nothing": "failed",
        "test_fails_in_teardown": "failed",
    }
    assert (
        list(lines["test_passes"]["kernels"]) == ["01/copy_kernel"]
        and lines["test_passes"]["where"] == "cuda"
    )
    assert (
        not lines["test_fails_after_recording"]["kernels"]
        and not lines["test_fails_in_teardown"]["kernels"]
    )


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


def test_a_cuda_file_is_known_by_its_text_and_anything_else_is_refused(tmp_path):
    source = tmp_path / "l09_flash" / "optimized.cu"
    source.parent.mkdir()
    source.write_text("__global__ void f() {}")
    before = proof_record.hash_of(source)
    assert proof_record.kernel_name(source) == "09/optimized.cu"
    source.write_text("__global__ void f() { }")
    assert proof_record.hash_of(source) != before
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
    assert proof_record.names_on_gpu("08/optimized.cu", tmp_path) == ["softmax_x8", "plain"]
    assert proof_record.names_on_gpu("08/softmax_kernel", tmp_path) == ["softmax_kernel"]


def test_a_torn_line_is_left_out_and_the_last_word_counts(tmp_path):
    path = tmp_path / "record.jsonl"
    proof_record.append(path, "a", "passed", 1, {})
    proof_record.append(path, "a", "failed", 1, {})
    with open(path, "a") as file:
        file.write('{"test": "b", "whe')
    assert [(line["test"], line["outcome"]) for line in proof_record.read(path)] == [
        ("a", "failed")
    ]
    assert proof_record.read(tmp_path / "none") == []


# ---------------------------------------------------------------- the run on a (pretended) GPU


def test_a_whole_run_and_its_resumption(course, capsys):
    code, said, files = gpu(course, capsys)
    assert code == 0, said
    # at most 8, all flat
    assert sorted(files) == [
        "benchmarks.json",
        "ladder.json",
        "log.txt",
        "proof.json",
        "sanitizer.json",
    ]
    assert files["proof.json"]["device"] == "NVIDIA Pretend 9000"
    for number, lesson in files["proof.json"]["lessons"].items():
        kernel = lesson["kernels"][f"{number}/copy_kernel"]
        assert (lesson["status"], lesson["tests"], len(kernel["cases"]), len(kernel["hash"])) == (
            "passed",
            2,
            2,
            16,
        )
        assert lesson["fingerprint"]["device"] == "NVIDIA Pretend 9000"
    assert files["benchmarks.json"]["01"]["records"] == {
        "copy": {"schema": 1, "series": {}, "lesson": "01"}
    }
    assert "02" not in files["benchmarks.json"]
    assert "--requests" not in files["ladder.json"]["arguments"]
    for tool in ("memcheck", "racecheck"):
        assert set(files["sanitizer.json"][tool]["kernels"]) == {"01/copy_kernel", "02/copy_kernel"}
        assert files["sanitizer.json"][tool]["status"] == "passed"
    assert "3 passed" in files["log.txt"] and "--kernel-name kns=copy_kernel" in files["log.txt"]

    code, said, again = gpu(course, capsys)
    assert (
        code == 0
        and said.count("finished   earlier") == 6
        and again["proof.json"] == files["proof.json"]
    )
    write(course, "l02_more", "optimized.py", OPTIMIZED.replace("out[0]", "out[-1]"))
    code, said, changed = gpu(course, capsys)
    assert (
        code == 0
        and "01 equivalence       finished" in said
        and "02 equivalence       passed" in said
    )
    hashes = [
        run["proof.json"]["lessons"]["02"]["kernels"]["02/copy_kernel"]["hash"]
        for run in (files, changed)
    ]
    assert hashes[0] != hashes[1]
    code, said, _ = gpu(course, capsys, again=True, lesson="2", sanitizer=False)
    assert "02 equivalence       passed" in said and "01 " not in said.split("\n", 1)[1]
    assert "memcheck             not run    compute-sanitizer is not installed" in said


def test_a_failure_is_recorded_and_stops_nothing(course, capsys):
    write(
        course,
        "l01_copy",
        "test_equivalence.py",
        TESTS.format(room="l01_copy") + "def test_wrong(proof): assert 0\n",
    )
    (course / "bench_exit").touch()
    code, said, files = gpu(course, capsys)
    lessons = files["proof.json"]["lessons"]
    assert code == 1 and lessons["01"]["status"] == "failed" and lessons["02"]["status"] == "passed"
    assert lessons["01"]["failed"] == ["lessons/l01_copy/test_equivalence.py::test_wrong"]
    assert (
        files["benchmarks.json"]["01"]["status"] == "failed"
        and files["benchmarks.json"]["01"]["records"]
    )
    assert set(files["sanitizer.json"]["memcheck"]["kernels"]) == {"02/copy_kernel"}
    assert "2 steps failed" in said and "assert 0" in files["log.txt"]
    assert (
        proof_table.proved_on(
            "01/copy_kernel",
            lessons["01"]["kernels"]["01/copy_kernel"]["hash"],
            files["proof.json"],
        )
        == "not yet"
    ), "a lesson that fails proves none of its kernels"


def test_a_lesson_that_hangs_is_ended_with_its_children(course, capsys, monkeypatch):
    monkeypatch.setitem(proof_run.LIMIT_S, "equivalence", 4)
    write(
        course,
        "l01_copy",
        "test_equivalence.py",
        TESTS.format(room="l01_copy")
        + """
def test_hangs():
    import subprocess, pathlib
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("child").write_text(str(child.pid))
    child.wait()
""",
    )
    code, _, files = gpu(course, capsys, sanitizer=False)
    lesson = files["proof.json"]["lessons"]["01"]
    assert code == 1 and lesson["status"] == "timeout" and lesson["tests"] == 2, (
        "what was proved before is kept"
    )
    assert files["proof.json"]["lessons"]["02"]["status"] == "passed"
    child = int((course / "child").read_text())
    for _ in range(50):  # the kernel reaps it when it likes
        if (
            not Path(f"/proc/{child}").exists()
            or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]
        ):
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child of a timed out test lives on")


INTERRUPTED = """
import sys
from lessons.toolbox.proof import __main__ as proof
from lessons.toolbox.proof import machine as proof_machine
proof.why_not_here = lambda rehearse: ""
proof_machine.this_machine = lambda interpreted: proof_machine.Machine({"device": "Pretend"}, False, None, 2)
sys.exit(proof.main(["gpu", "--out", "out"]))
"""


def test_an_interrupted_run_ends_at_once_and_keeps_what_is_finished(course):
    write(
        course,
        "l02_more",
        "test_equivalence.py",
        "def test_hangs():\n    import time; time.sleep(600)\n",
    )
    command = [sys.executable, "-c", INTERRUPTED]
    run = subprocess.Popen(
        command, cwd=course, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "01 equivalence" not in run.stdout.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGTERM)  # Ctrl-C raises the same exception
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130 and err.count("\n") == 1 and "interrupted" in err, err
    assert (
        json.loads((course / "out" / "proof.json").read_text())["lessons"]["01"]["status"]
        == "passed"
    )


def test_without_time_nothing_is_lost_and_the_next_run_goes_on(course, capsys):
    code, said, files = gpu(course, capsys, budget_minutes=0.0)
    assert code == 1 and said.count("no time left") >= 4 and "proof.json" not in files
    assert gpu(course, capsys)[0] == 0


def test_what_another_run_recorded_for_this_device_is_taken_over(course, capsys):
    gpu(course, capsys, out="results/pretend-9000", sanitizer=False)
    code, said, files = gpu(course, capsys, out="elsewhere", sanitizer=False)
    assert (
        code == 0
        and said.count("finished   earlier") == 4
        and set(files["proof.json"]["lessons"]) == {"01", "02"}
    )


def test_kernels_that_were_interpreted_prove_nothing_on_a_gpu(course, capsys, monkeypatch):
    monkeypatch.setenv("PRETEND", "interpreter")
    code, _, files = gpu(course, capsys)
    assert code == 1 and files["proof.json"]["lessons"]["01"]["status"] == "no kernel recorded"
    code, _, files = gpu(course, capsys, out="results/rehearsal", interpreted=True, sanitizer=False)
    assert code == 0 and "--requests" in files["ladder.json"]["arguments"]
    assert proof_table.recorded(course) == {}, "a rehearsal never counts"
    monkeypatch.setenv("PRETEND", "cuda")
    code, said, files = gpu(course, capsys, out="results/rehearsal", sanitizer=False)
    assert code == 0 and "finished" not in said and not files["proof.json"]["interpreted"], (
        "a rehearsal finishes nothing"
    )


@pytest.mark.parametrize(
    "said, status, code",
    [
        (
            "========= Invalid __global__ write of size 4 bytes\n=========     at "
            "copy_kernel+0x1c0",
            "failed",
            1,
        ),
        (
            "========= Error: Device not supported. Please refer to the documentation",
            "not supported",
            0,
        ),
        ("Segmentation fault", "failed", 1),
    ],
)
def test_what_a_sanitizer_says_is_recorded(course, capsys, said, status, code):
    (course / "said").write_text(said)
    got, _, files = gpu(course, capsys, lesson="02")
    assert got == code and files["sanitizer.json"]["memcheck"]["status"] == status
    assert files["sanitizer.json"]["memcheck"]["report"] == said.split("\n")


def test_a_step_that_crashes_wastes_no_other(course, capsys):
    (course / "lessons" / "toolbox" / "bench.py").write_text(BENCH.replace("schema=1", "schema=0"))
    code, said, files = gpu(course, capsys, sanitizer=False)
    assert (
        code == 1
        and "benchmark            crashed" in said
        and "is no benchmark record" in files["log.txt"]
    )
    assert "ladder               passed" in said and "memcheck             not run" in said


def test_a_clean_report_that_saw_no_launch_is_no_pass():
    clean = proof_machine.Outcome("passed", 0, 1.0, "========= ERROR SUMMARY: 0 errors")
    assert proof_run.judged(clean, "memcheck", {"01/k": "h"}, {"01/k": {}})[0] == "passed"
    assert proof_run.judged(clean, "memcheck", {"01/k": "h"}, {})[0] == "failed"
    assert proof_run.judged(clean, "racecheck", {"01/k": "h"}, {"01/k": {}})[0] == "failed", (
        "the summary of another tool"
    )


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


# ---------------------------------------------------------------- the table


def test_the_table_follows_the_source(course, capsys, monkeypatch):
    # so that `lessons.l01_copy` of the tiny course is found
    monkeypatch.syspath_prepend(str(course))
    gpu(course, capsys, out="results/pretend-9000", sanitizer=False)
    monkeypatch.setattr(proof_table.Kernel, "hash", property(hash_by_file))
    assert [kernel.key for kernel in proof_table.kernels(course)] == [
        "01/copy_kernel",
        "02/copy_kernel",
    ], "a helper is no kernel"
    shown = proof_table.markdown(course)
    assert shown.count("| proved on NVIDIA Pretend 9000 |") == 2 and shown.count("no spec") == 10
    write(course, "l02_more", "optimized.py", "# a comment changes nothing\n" + OPTIMIZED)
    assert proof_table.markdown(course) == shown
    write(course, "l02_more", "optimized.py", OPTIMIZED.replace("out[0]", "out[-1]"))
    assert "| stale on NVIDIA Pretend 9000 |" in proof_table.markdown(course)
    shutil.rmtree(course / "results")
    assert proof_table.markdown(course).count("| not yet |") == 2


def hash_by_file(kernel):
    namespace = {"__name__": f"lessons.{kernel.file.parent.name}.optimized"}
    import linecache

    linecache.checkcache()
    exec(compile(kernel.file.read_text(), str(kernel.file), "exec"), namespace)
    return proof_record.hash_of(namespace[kernel.name])


def test_compiled_cells():
    facts = {"registers": 24, "spill_bytes": 0, "shared_bytes": 2048, "error": None, "fits": True}
    assert proof_table.compiled_cell({"chips": {"90": facts}}, 90) == "24 / 0 / 2.0"
    assert (
        proof_table.compiled_cell({"chips": {"90": facts | {"spill_bytes": 8, "fits": False}}}, 90)
        == "24 / 8 / 2.0 !"
    )
    assert (
        proof_table.compiled_cell({"chips": {"90": facts | {"error": "not run: no compiler"}}}, 90)
        == "not run"
    )
    assert proof_table.compiled_cell({"chips": {"90": facts | {"error": "boom"}}}, 90) == "error"
    assert proof_table.compiled_cell(None, 90) == "no spec"
    assert proof_table.compiled_cell({"chips": {"90": facts}}, 75) == "–"


@pytest.mark.parametrize(
    "lines, cell",
    [
        ([("passed", "aa"), ("passed", "aa"), ("passed", "old")], "2 cases"),
        ([("passed", "old")], "stale"),
        ([], "not run"),
        ([("passed", "aa"), ("failed", None)], "failed"),
    ],
)
def test_interpreter_cells(lines, cell):
    lines = [
        {
            "test": f"lessons/l03_x/test_equivalence.py::test_{i}",
            "where": "interpreter",
            "outcome": outcome,
            "kernels": {"03/k": {"hash": digest}} if digest else {},
        }
        for i, (outcome, digest) in enumerate(lines)
    ]
    elsewhere = {
        "test": "t",
        "where": "cuda",
        "outcome": "passed",
        "kernels": {"03/k": {"hash": "aa"}},
    }
    assert proof_table.interpreter_cell("03/k", "aa", [*lines, elsewhere]) == cell


def test_readme_is_rewritten_between_its_markers_only():
    readme = f"above\n{proof_table.BEGIN}\nold\n{proof_table.END}\nbelow\n"
    once = proof_table.with_table(readme, "| new |")
    assert (
        once
        == f"above\n{proof_table.BEGIN}\n| new |\n{proof_table.END}\nbelow\n"
        == proof_table.with_table(once, "| new |")
    )
    with pytest.raises(ValueError, match="no place for the table"):
        proof_table.with_table("nothing", "| new |")


def test_the_readme_shows_the_table_of_today():
    readme = (REPOSITORY / "README.md").read_text() if (REPOSITORY / "README.md").exists() else ""
    if proof_table.BEGIN not in readme:
        pytest.skip("NOT RUN: README.md has no table of proofs yet")
    assert proof_table.with_table(readme, proof_table.markdown()) == readme, (
        "run `python -m lessons.toolbox.proof readme`"
    )


# ---------------------------------------------------------------- the commands


def test_without_a_gpu_one_line(capsys, monkeypatch):
    monkeypatch.setattr(proof, "has_gpu", lambda: False)
    assert proof.main(["gpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "no CUDA device" in err and "--rehearse" in err
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None)
    assert proof.main(["gpu"]) == 2 and "pip install pytest" in capsys.readouterr().err


def test_a_gpu_whose_kernels_are_interpreted_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(proof, "has_gpu", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert proof.main(["gpu"]) == 2 and "unset it" in capsys.readouterr().err


def test_an_unknown_lesson_lists_the_known(course, capsys):
    with pytest.raises(ValueError, match="LESSON='99'; accepted: 01 copy, 02 more"):
        proof_machine.find_rooms("99", course)
    assert list(proof_machine.find_rooms("more", course)) == ["02"]
    assert list(proof_machine.find_rooms(None, course)) == ["01", "02"]


def test_figures_are_drawn_from_a_recorded_run_anywhere(tmp_path, capsys):
    benchmark = Benchmark(
        name="double",
        title="twice",
        x_name="elements",
        x_values=[8, 16],
        inputs=lambda x, device: (x,),
        providers={
            "a": ("naive", lambda x: lambda: 2 * x),
            "b": ("optimized", lambda x: lambda: x + x),
        },
    )
    record = run_benchmark(benchmark, "cpu", out=None)
    (tmp_path / "benchmarks.json").write_text(json.dumps({"03": {"records": {"double": record}}}))
    assert proof.main(["draw", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "benchmarks.json",
        "l03_double.png",
        "l03_double.svg",
    ]
    for series in record["series"].values():
        series["points"] = [
            {"x": p["x"], "status": "not run", "reason": "no GPU"} for p in series["points"]
        ]
    (tmp_path / "benchmarks.json").write_text(json.dumps({"03": {"records": {"double": record}}}))
    assert proof.main(["draw", str(tmp_path)]) == 1 and "nothing to draw" in capsys.readouterr().err
    assert proof.main(["draw", str(tmp_path / "none")]) == 2
