"""`make setup`: each way it can fail is one line, an unfinished install is started over, a finished
one is left alone.
"""

import ast
import importlib.util
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "lessons/toolbox/install.py"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install.py, pointed at an empty folder, with commands recorded instead of run."""
    spec = importlib.util.spec_from_file_location("install_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    (tmp_path / "requirements.txt").write_text("torch==0\n")
    for name, value in dict(
        ROOT=tmp_path,
        VENV=venv,
        PYTHON=venv / "bin/python",
        STAMP=str(venv / "installed"),
        REQUIREMENTS=str(tmp_path / "requirements.txt"),
        NEEDED_GB=0.0,
    ).items():
        monkeypatch.setattr(module, name, value)
    module.commands = []

    def pretend(command, doing):
        module.commands.append(doing)
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").touch()

    module.real_run = module.run
    monkeypatch.setattr(module, "run", pretend)
    return module


def one_line_failure(capsys, call) -> str:
    with pytest.raises(SystemExit) as stopped:
        call()
    assert stopped.value.code == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_second_run_does_nothing(install):
    install.main()
    assert len(install.commands) == 3
    install.main()
    assert len(install.commands) == 3


def test_changed_requirements_install_again(install):
    install.main()
    Path(install.REQUIREMENTS).write_text("torch==1\n")
    install.main()
    assert len(install.commands) == 6


def test_an_unfinished_install_is_started_over(install):
    leftover = install.VENV / "lib/half-unpacked"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    install.main()
    assert not leftover.exists() and install.is_installed()


def test_a_failing_step_leaves_no_stamp(install, monkeypatch):
    monkeypatch.setattr(install, "run", lambda command, doing: install.fail(doing))
    with pytest.raises(SystemExit):
        install.main()
    assert not install.is_installed()


def test_old_python(install, monkeypatch, capsys):
    version = namedtuple("version", "major minor micro")(3, 9, 1)
    monkeypatch.setattr(sys, "version_info", version)
    assert "Python 3.9 is too old" in one_line_failure(capsys, install.main)


def test_full_disk_before(install, monkeypatch, capsys):
    monkeypatch.setattr(install, "NEEDED_GB", 3.0)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1_000_000_000)
    )
    assert "1.0 GB free" in one_line_failure(capsys, install.main)


@pytest.mark.parametrize(
    "printed, said",
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError: nope", "could not be found or reached"),
        ("something else", "see above"),
    ],
)
def test_a_failing_command_is_explained(install, capsys, printed, said):
    command = [sys.executable, "-c", f"print({printed!r}); raise SystemExit(1)"]
    assert said in one_line_failure(capsys, lambda: install.real_run(command, "installing"))


def test_the_script_runs_on_its_own():
    """The Makefile runs it before anything is installed: it must import nothing of ours."""
    source = SCRIPT.read_text()
    assert "import lessons" not in source and "from lessons" not in source
    ast.parse(source, feature_version=(3, 6))


def test_make_without_a_target_lists_the_targets():
    out = subprocess.run(["make"], cwd=SCRIPT.parents[2], capture_output=True, text=True)
    assert out.returncode == 0
    for target in ("demo", "test", "setup", "lab", "bench", "doctor", "help"):
        assert f"make {target} " in out.stdout
