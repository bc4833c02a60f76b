"""`make test SINCE=main` leaves out what a change cannot reach, and nothing else."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.since import BELOW, TOP, changed_files, floor_of, floor_of_test, lowest_floor, why


@pytest.mark.parametrize(
    "path, floor",
    [
        ("lessons/l03_kv_cache/lab/benchmark.py", 3),
        ("solutions/l11_cuda_graphs.py", 11),
        ("exercises/l11_cuda_graphs.py", 11),
        ("notebooks/05_gqa.ipynb", 5),
        ("tests/test_l05_gqa.py", 5),
        ("tests/exercises/test_l05.py", 5),
        ("tests/exercises/wrong/l05.py", 5),
        ("lessons/toolbox/measure/bench.py", BELOW),
        ("tests/toolbox/test_bench.py", BELOW),
        ("conftest.py", BELOW),
        ("requirements.txt", BELOW),
        ("reference/ladder/command.py", TOP),
        ("tests/exercises/running.py", TOP),
        ("lessons/GLOSSARY.md", TOP),
    ],
)
def test_floor_of_a_file(path, floor):
    assert floor_of(path) == floor


@pytest.mark.parametrize(
    "path, name, floor",
    [
        ("tests/test_notebooks.py", "test_notebook_runs[05_gqa]", 5),
        ("tests/exercises/test_machinery.py", "test_every_check_fails_on_the_stub[11.4]", 11),
        ("tests/exercises/test_machinery.py", "test_registries[l03]", 3),
        ("tests/exercises/test_learner.py", "test_a_learners_terminal", TOP),
        ("tests/test_sampling.py", "test_a_temperature[0.5]", TOP),
        ("lessons/l05_gqa/test_equivalence.py", "test_kernel[7.5-3]", 5),
    ],
)
def test_floor_of_a_test(path, name, floor):
    item = SimpleNamespace(path=Path("/course") / path, name=name)
    assert floor_of_test(Path("/course"), item) == floor


@pytest.fixture
def course(tmp_path):
    """A git repository of three files on a branch behind main."""
    for name in ("conftest.py", "lessons/l03_kv_cache/naive.py", "reference/engine/model.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        [*identity, "commit", "-qm", "first"],
        ["checkout", "-qb", "branch"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_committed_changed_and_new_files_count(course):
    assert changed_files(course, "main") == []
    assert why(lowest_floor([])).startswith("no room")
    (course / "reference/engine/model.py").write_text("2\n")
    (course / "lessons/l11_cuda_graphs").mkdir()
    (course / "lessons/l11_cuda_graphs/new.py").touch()
    assert lowest_floor(changed_files(course, "main")) == (11, "lessons/l11_cuda_graphs/new.py")
    (course / "lessons/l03_kv_cache/naive.py").unlink()
    lowest = lowest_floor(changed_files(course, "main"))
    assert why(lowest) == ("lessons 03 and above, because lessons/l03_kv_cache/naive.py changed")
    (course / "conftest.py").write_text("2\n")
    assert why(lowest_floor(changed_files(course, "main"))).startswith("everything")


def test_an_unknown_revision_is_named(course):
    with pytest.raises(pytest.UsageError, match="--since: got 'nowhere'; accepted"):
        changed_files(course, "nowhere")
