"""INSTALL.md, AGENTS.md and the Dockerfile: what they name exists, the first cell of a notebook
service does what it says, and the course loads where there is no Triton.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("INSTALL.md", "AGENTS.md", "README.md", "lessons/TEACHING.md")


def text_of(name: str) -> str:
    """A file of the course."""
    return (ROOT / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------- commands and the Dockerfile


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|[`\s;])make ([a-z-]+)(?=[\s`]|$)", code_of(text_of(page))))
    assert named and named <= targets, named - targets


def code_of(text: str) -> str:
    """The blocks and spans of code in a Markdown text."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*blocks, *spans])


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each instruction of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", text_of("Dockerfile"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def test_everything_that_the_container_copies_is_there():
    copied = [shlex.split(rest)[:-1] for name, rest in instructions() if name == "COPY"]
    sources = [source for sources in copied for source in sources]
    assert ["."] in copied and len(sources) > 3
    ignored = text_of(".dockerignore").split()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source not in ignored
    # all that `make setup` reads is copied before it runs
    names = [name for name, _ in instructions()]
    (setup,) = [i for i, (name, rest) in enumerate(instructions()) if "make setup" in rest]
    before = [rest for name, rest in instructions()[:setup] if name == "COPY"]
    assert names.index("WORKDIR") < setup
    for needed in ("requirements.txt", "Makefile", "lessons/toolbox/setup.sh"):
        assert any(needed in rest for rest in before), needed


def test_the_container_has_the_variants_that_the_text_offers():
    facts = dict(instructions())
    (run,) = [rest for name, rest in instructions() if "make setup" in rest]
    assert facts["ARG"] == "VARIANT=cpu" and " cpu) " in run and " cuda) " in run
    assert set(re.findall(r"VARIANT=(\w+)", text_of("INSTALL.md"))) <= {"cpu", "cuda"}
    assert re.fullmatch(r"python:3\.\d+-slim", facts["FROM"])  # a version, never `latest`
    assert eval(facts["CMD"])[:2] == ["make", "lab"]
    assert facts["EXPOSE"] == "8888" and "8888:8888" in text_of("INSTALL.md")


def test_variant_that_is_neither_is_refused_before_anything_is_installed():
    (run,) = [rest for name, rest in instructions() if "make setup" in rest]
    environment = {"PATH": "/usr/bin:/bin", "VARIANT": "gpu"}
    done = subprocess.run(["sh", "-c", run], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "got gpu; accepted: cpu, cuda" in done.stderr


# ---------------------------------------------------------------- a notebook service


def first_cell() -> str:
    """The cell that INSTALL.md gives for notebook services."""
    (cell,) = re.findall(r"```python\n(.*?)```", text_of("INSTALL.md"), re.DOTALL)
    return cell


@pytest.fixture
def asked(monkeypatch):
    """Commands that the cell runs. `git clone` makes a course of one file."""
    commands = []

    def run(command, check):
        assert check
        commands.append(command)
        if command[0] == "git":
            course = Path(command[-1])
            (course / "notebooks").mkdir(parents=True)
            (course / "requirements.txt").write_text(text_of("requirements.txt"))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return commands


@pytest.mark.parametrize("folder", [".", "notebooks"])
def test_the_first_cell_does_nothing_on_your_own_machine(folder, asked, monkeypatch):
    monkeypatch.chdir(ROOT / folder)
    before = list(sys.path)
    exec(first_cell(), {})
    assert not asked and Path.cwd() == (ROOT / folder).resolve() and sys.path == before


def test_the_first_cell_installs_all_but_what_the_service_has(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="Fill in REPOSITORY"):
        exec(first_cell(), {})
    filled = first_cell().replace('REPOSITORY = ""', 'REPOSITORY = "https://example.org/x.git"')
    exec(filled, {})
    clone, pip = asked
    course = tmp_path / "inference-ladder"
    assert clone == ["git", "clone", "--depth", "1", "https://example.org/x.git", str(course)]
    assert pip[:4] == [sys.executable, "-m", "pip", "install"]
    wanted = (course / "service.txt").read_text().splitlines()
    packages = {re.split(r"[=<>]", line)[0] for line in wanted}
    assert {"transformers", "rich", "hypothesis", "pytest", "adjustText"} <= packages
    assert not packages & {"torch", "triton", "numpy", "jupyter", "cuda-bindings"}
    assert Path.cwd() == course / "notebooks" and sys.path[0] == str(course)
    monkeypatch.chdir(tmp_path)
    exec(filled, {})
    assert [command[0] for command in asked] == ["git", sys.executable, sys.executable]


# ---------------------------------------------------------------- without Triton

HIDDEN = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec

def find_spec(cls, name, path=None, target=None):
    hidden = name.partition(".")[0] in ("triton", "cuda")
    return None if hidden else found(name, path, target)

PathFinder.find_spec = classmethod(find_spec)
"""
COURSE = """
import importlib
from pathlib import Path

for file in sorted(Path("lessons").glob("l[0-9]*/*.py")):
    if not file.name.startswith(("test_", "__main__")):
        importlib.import_module(".".join(file.with_suffix("").parts))
import reference.ladder.rungs
from lessons.toolbox.measure.device import doctor

assert doctor()
"""


@pytest.fixture
def without_triton(tmp_path):
    """Run Python with these arguments where Triton is hidden, as on macOS."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.sample(3, of="processes")
def test_the_course_loads_without_triton_and_says_what_it_cannot_run(without_triton):
    """Every room and the ladder are imported."""
    done = without_triton("-c", COURSE)
    assert done.returncode == 0, done.stderr
    said = re.sub(" +", " ", done.stdout)
    assert "kernels none: Triton is not installed" in said
    assert "Triton kernels, in any form: Triton is not installed" in said
    assert "compile_check` still compiles" not in said
    assert done.stdout.rstrip().endswith("ready")


@pytest.mark.sample(3, of="processes")
def test_tests_that_need_triton_are_not_run_without_it(without_triton):
    file = "lessons/l08_online_softmax/test_equivalence.py"
    options = ("-p", "no:cacheprovider", "-k", "test_probes_with_known_answers")
    done = without_triton("-m", "pytest", file, *options)
    assert done.returncode == 0, done.stdout
    assert "NOT RUN: needs Triton" in done.stdout and "F" not in done.stdout.splitlines()[0]
