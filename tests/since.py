"""`pytest --since REVISION` (make test SINCE=main): only what a change can reach.

A room is reached by changes in itself, in the rooms below and in the toolbox, because imports point
one way. What is on top of the rooms (the reference, the models, the course's own tests) is
always tested. What is below (the toolbox's tests) is tested only if something there changed.
"""

import re
import subprocess
from pathlib import Path

import pytest

BELOW, TOP = -1, 100  # the floors under and over the rooms, which have the numbers 0 to 99
GROUND = (
    "lessons/toolbox/",
    "lessons/__init__.py",
    "tests/toolbox/",
    "conftest.py",
    "requirements.txt",
    "pyproject.toml",
)
ROOM = re.compile(
    r"(?:(?:lessons|exercises|solutions)/l"
    r"|notebooks/"
    r"|tests/(?:exercises/wrong/|exercises/test_|test_)l"
    r")(\d\d)[_.]"
)
# Tests that go through all rooms, and the room in their names: test_notebook_runs[05_gqa],
# test_every_check_rejects_something[5.2], test_stub_keeps_imports_and_docstrings[l05].
OF_ALL_ROOMS = ("tests/test_notebooks.py", "tests/exercises/")
PARAMETER = re.compile(r"\[l?(\d\d?)[._\]]")


def pytest_addoption(parser):
    parser.addoption(
        "--since",
        metavar="REVISION",
        help="only tests of the rooms at and above those that changed since this git revision",
    )


def pytest_configure(config):
    config.since = None
    revision = config.getoption("--since")
    if revision:
        config.since = lowest_floor(changed_files(config.rootpath, revision))


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.since and reporter:
        reporter.write_line(
            f"since {session.config.getoption('--since')}: {why(session.config.since)}"
        )


def pytest_collection_modifyitems(config, items):
    if not config.since:
        return
    lowest, _ = config.since
    left_out = [item for item in items if floor_of_test(config.rootpath, item) < lowest]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if floor_of_test(config.rootpath, item) >= lowest]


def changed_files(root: Path, revision: str) -> list[str]:
    """Files that differ from where this branch left `revision`, uncommitted and new ones included.

    Raises pytest.UsageError if git knows no such revision.
    """
    if git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        raise pytest.UsageError(
            f"--since: got {revision!r}; accepted: a branch, tag or commit that git knows here"
        )
    base = git(root, "merge-base", revision, "HEAD") or [revision]
    changed = git(root, "diff", "--name-only", "--no-renames", base[0])
    return sorted({*changed, *git(root, "ls-files", "--others", "--exclude-standard")})


def git(root: Path, *arguments: str) -> list[str] | None:
    """The lines that a git command prints, None if it fails."""
    command = ["git", "-C", str(root), "-c", "core.quotePath=false", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def floor_of(path: str) -> int:
    """On which floor a file is: the number of its room, or below or on top of the rooms."""
    if path.startswith(GROUND):
        return BELOW
    found = ROOM.match(path)
    return int(found[1]) if found else TOP


def floor_of_test(root: Path, item) -> int:
    """On which floor a test is, by its file or by the parameter in its name."""
    path = item.path.relative_to(root).as_posix()
    parameter = PARAMETER.search(item.name) if path.startswith(OF_ALL_ROOMS) else None
    return int(parameter[1]) if parameter else floor_of(path)


def lowest_floor(changed: list[str]) -> tuple[int, str]:
    """The lowest floor on which a file changed, and the first such file; TOP if none did."""
    return min(((floor_of(path), path) for path in changed), default=(TOP, "no file"))


def why(since: tuple[int, str]) -> str:
    """What is selected and why, in one line."""
    floor, path = since
    if floor == BELOW:
        return f"everything, because {path} changed, and every room stands on it"
    if floor == TOP:
        return f"no room, only what stands on top of them, because {path} changed there"
    return f"lessons {floor:02d} and above, because {path} changed"
