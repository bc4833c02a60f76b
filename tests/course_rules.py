"""What every rule of the course builds on: where its rooms are, which files belong to it.

A rule is a function from the course's root folder to complaints, and [] means that all is well. A
lesson whose README.md exists claims to be complete.
"""

import re
import subprocess
from pathlib import Path

Complaints = list[str]
A_MACHINES_PATH = r"(?<![\w.])/(?:root|home|Users|work)/\w\S{0,30}"
TEXTS = (".py", ".md", ".ipynb", ".toml", ".json", ".txt", ".cu", ".svg", "")


def rooms(root: Path) -> list[Path]:
    """The lessons' folders, in order."""
    return [path for path in sorted((root / "lessons").glob("l[0-9][0-9]_*")) if path.is_dir()]


def complete_rooms(root: Path) -> list[Path]:
    """The lessons that claim to be complete."""
    return [room for room in rooms(root) if (room / "README.md").exists()]


def committed_files(root: Path, *suffixes: str) -> list[Path]:
    """Files that git tracks or would track, of these suffixes; without git, all files."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run([*command, "--exclude-standard"], capture_output=True, text=True)
    if done.returncode == 0:
        paths = {root / name for name in done.stdout.split("\0") if name}
    else:
        paths = set(root.rglob("*"))
    wanted = [path for path in paths if not suffixes or path.suffix in suffixes]
    return sorted(path for path in wanted if path.is_file())


def within(root: Path, path: Path) -> str:
    """The path as the course's texts write it: lessons/l01_roofline/naive.py."""
    return path.relative_to(root).as_posix()


def places_on_a_machine(root: Path) -> Complaints:
    """Paths that exist on the author's machine alone."""
    complaints = []
    for path in committed_files(root, *TEXTS):
        text = path.read_text(encoding="utf-8", errors="replace")
        for found in re.findall(A_MACHINES_PATH, text):
            complaints.append(f"{within(root, path)}: a path on one machine: {found!r}")
    return complaints
