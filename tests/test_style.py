"""The linters' rules (pyproject.toml) hold everywhere: style, format, which way imports point."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def needs(module):
    """Skip where a linter is not installed: a borrowed GPU machine has none."""
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"NOT RUN: {module} is not installed")


@needs("ruff")
@pytest.mark.parametrize(
    "arguments", [["check", "--output-format", "concise"], ["format", "--diff"]]
)
def test_ruff_has_no_complaint(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "."]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("importlinter")
def test_imports_point_one_way():
    code = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout.partition("Broken contracts")[2] or done.stderr


def test_warnings_can_be_imported():
    """A worker of xdist tells its controller the name of a warning's class. That of a file of tests
    is unknown there, and the run ends with an internal error.
    """
    files = [*REPOSITORY.glob("tests/**/test_*.py"), *REPOSITORY.glob("lessons/**/test_*.py")]
    own = re.compile(r"^class (\w+)\(\w*Warning\)", re.MULTILINE)
    found = {path: own.findall(path.read_text(encoding="utf-8")) for path in files}
    found = {str(path.relative_to(REPOSITORY)): names for path, names in found.items() if names}
    assert files and not found, f"{found}: a class of warnings belongs into tests/warned.py"
