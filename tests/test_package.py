"""The wheel: what is in it, and what its command does. The long form installs it."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from inference_ladder import __version__, console
from lessons.toolbox.measure.device import REQUIRED
from tests.course_rules import committed_files, within

ROOT = Path(__file__).parents[1]
# of the repository, and of no use to a learner without it
NOT_PACKED = {".ci", ".github", ".gitattributes", "inference_ladder"}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture
def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="NOT RUN: needs Python 3.11")
    return tomllib.loads(text_of("pyproject.toml"))


# ---------------------------------------------------------------- what is in it


def test_the_wheel_has_every_part_of_the_repository(project):
    tops = {within(ROOT, path).partition("/")[0] for path in committed_files(ROOT)}
    assert {*console.FOLDERS, *console.FILES} == tops - NOT_PACKED
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["inference_ladder", *console.FOLDERS]
    places = wheel["sources"] | wheel["force-include"]
    assert places == {name: f"inference_ladder/course/{name}" for name in places}
    assert list(places) == [*console.FOLDERS, *console.FILES]


def test_it_asks_for_the_versions_that_the_doctor_asks_for(project):
    asked = dict(re.match(r"([\w-]+)(?:>=([\d.]+))?", line).groups() for line in wanted(project))
    assert {name: asked[name] for name in REQUIRED} == REQUIRED
    exact = re.findall(r"^([\w-]+)[=>]=", text_of("requirements.txt"), re.MULTILINE)
    assert {name.lower() for name in asked} <= {name.lower() for name in exact}


def wanted(project: dict) -> list[str]:
    """What pip installs with it."""
    return project["project"]["dependencies"]


def test_one_version_everywhere(project):
    assert project["tool"]["hatch"]["version"]["path"] == "inference_ladder/__init__.py"
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert str(citation["version"]) == __version__
    assert re.findall(r"^## (.+)$", text_of("CHANGELOG.md"), re.MULTILINE)[0] == __version__
    assert f"inference_ladder-{__version__}-py3-none-any.whl" in text_of("INSTALL.md")
    assert f"image: inference-ladder:{__version__}\n" in text_of("deploy/compose.yaml")


def test_the_citation_has_what_its_format_asks_for():
    """The whole schema is in the package cffconvert."""
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["type"] == "software" and citation["license"] == "MIT"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", citation["date-released"])


# ---------------------------------------------------------------- the command


class Executed(Exception):
    """In the place of the process."""


@pytest.fixture
def executed(monkeypatch):
    """Run the command; returns (what Python gets, its environment)."""

    def execve(program, words, environment):
        raise Executed(words, environment)

    monkeypatch.setattr(console.os, "execve", execve)

    def run(*words: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(Executed) as done:
            console.main(list(words))
        return done.value.args

    return run


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_command_is_a_module_of_the_course(name, executed, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "lessons/toolbox")
    words, environment = executed(name, "--help")
    assert words[:2] == [sys.executable, "-m"] and words[-1] == "--help"
    assert importlib.util.find_spec(words[2]) is not None
    assert environment["LADDER_COMMAND"] == f"inference-ladder {name}"
    assert environment["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert environment["PYTHONSAFEPATH"] == "1"
    assert f"`inference-ladder {name}" in text_of("INSTALL.md")
    assert re.search(rf'"\$ladder" {name}\b', text_of("deploy/try_wheel.sh"))


def installed(folder: Path, monkeypatch) -> Path:
    """Let the command think that it comes from a wheel; returns the wheel's course."""
    course = folder / "site-packages/inference_ladder/course"
    for name in ("lessons/toolbox", "exercises"):
        shutil.copytree(ROOT / name, course / name, ignore=console.NOT_COPIED)
    for name in console.FOLDERS:
        (course / name).mkdir(exist_ok=True)
    (course / "README.md").write_text("read me")
    monkeypatch.setattr(console, "HERE", course.parent)
    monkeypatch.chdir(folder)
    return course


def test_commands_run_in_the_learners_folder_and_else_from_the_wheel(
    executed, tmp_path, monkeypatch, capsys
):
    course = installed(tmp_path, monkeypatch)
    assert executed("doctor")[1]["PYTHONPATH"].split(":")[0] == str(course)
    assert console.main(["check", "02"]) == 2  # nothing is written into a wheel
    said = capsys.readouterr().err
    assert said.startswith("inference-ladder: check: this is no folder of yours; accepted: ")
    assert console.main(["start", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine/lessons")
    words, environment = executed("check", "02")
    assert words[2:] == ["lessons.toolbox.exercises", "check", "02"]
    assert environment["PYTHONPATH"].split(":")[0] == str(tmp_path / "mine")


def test_start_copies_the_course_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    installed(tmp_path, monkeypatch)
    assert console.main(["start", "mine"]) == 0
    mine = tmp_path / "mine"
    assert (mine / "README.md").read_text() == "read me"
    assert {path.name for path in mine.iterdir()} == {*console.FOLDERS, "README.md"}
    exercise = mine / "exercises/l01_roofline.py"
    assert exercise.read_text() == text_of("exercises/l01_roofline.py")
    exercise.write_text("mine")
    capsys.readouterr()
    assert console.main(["start", "mine"]) == 2
    assert "got mine, which is not empty; accepted: a new folder" in capsys.readouterr().err
    assert exercise.read_text() == "mine"


@pytest.mark.parametrize("words", [["start"], ["start", "a", "b"], ["start", "--help"], ["climb"]])
def test_mistakes_are_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert console.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "; accepted: " in said and not list(tmp_path.iterdir())


def test_overview_and_version(capsys):
    assert console.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"inference-ladder {name}" in said for name in ("start", *console.COMMANDS))
    assert console.main(["--version"]) == 0
    assert capsys.readouterr().out == f"inference-ladder {__version__}\n"


def test_a_failed_check_names_the_command_that_was_typed(monkeypatch):
    from lessons.toolbox.exercises.exercise import all_exercises
    from lessons.toolbox.exercises.report import command_for

    monkeypatch.delenv("MAKELEVEL", raising=False)
    monkeypatch.setenv("LADDER_COMMAND", "inference-ladder check")
    (entry,) = all_exercises("2.1")
    assert command_for(entry, "exercises") == "inference-ladder check 2.1"
    assert command_for(entry, "solutions") == "inference-ladder check 2.1 --impl solutions"


def test_the_wheel_in_an_empty_environment(request):
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: it installs PyTorch (make test-all)")
    (wheel,) = (ROOT / "build/wheel").glob("*.whl") or [None]
    if wheel is None:
        pytest.skip("NOT RUN: there is no wheel here (make wheel)")
    command = ["sh", "deploy/try_wheel.sh", str(wheel), sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# ---------------------------------------------------------------- what GitHub reads


@pytest.mark.parametrize("name", ["bug", "lesson", "number"])
def test_a_form_has_what_github_asks_for(name):
    form = yaml.safe_load(text_of(f".github/ISSUE_TEMPLATE/{name}.yml"))
    assert form["name"] in text_of("CONTRIBUTING.md") and form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids) > 2
    for part in form["body"]:
        assert part["type"] in ("input", "textarea") and part["attributes"]["label"]
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert set(part["attributes"]) <= {"label", "description", "render", "placeholder"}
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    assert json.dumps(form)  # no dates, no other objects
