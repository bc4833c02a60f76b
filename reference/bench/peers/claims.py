"""Check what the lessons say of other projects' sources against those that are installed.

    python -m reference.bench.peers.claims --python .venv-peers/bin/python

`lessons/production.json` has one entry for each file that a lesson names. Its `names` are texts
that the file must contain; with `gone`, the file may not exist any more. `read` is the day when
they were looked up in `version`, `null` if not yet. That a name is there does not prove the
sentence around it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLAIMS = Path("lessons/production.json")
# finds a package by its top-level name, without importing it
FIND = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({n: list(s.submodule_search_locations or []) for n, s in specs.items() if s}))
"""


def installed(python: str, packages: Sequence[str]) -> dict[str, Path]:
    """{package: its folder} of those that this interpreter could import; {} without it."""
    try:
        asked = [python, "-c", FIND, *packages]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: Path(at[0]) for name, at in json.loads(answer.stdout).items() if at}


def verdict(claim: dict[str, Any], project: dict[str, Any], folders: dict[str, Path]) -> str:
    """Return "true", "FALSE: …" with what is missing, or "NOT CHECKED: …" with the reason."""
    if project["package"] not in folders:
        return "NOT CHECKED: not installed"
    for prefix, inside in project["folders"].items():
        if claim["file"].startswith(prefix):
            path = folders[project["package"]] / inside / claim["file"].removeprefix(prefix)
            break
    else:
        return "NOT CHECKED: the package has no such sources"
    if claim.get("gone"):
        return "FALSE: file is there" if path.exists() else "true"
    if not path.is_file():
        return "FALSE: file missing"
    text = path.read_text(encoding="utf-8", errors="replace")
    missing = [name for name in claim["names"] if name not in text]
    return f"FALSE: name missing: {', '.join(missing)}" if missing else "true"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a verdict for each claim; returns 1 if one is false, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=".venv-peers/bin/python", help="whose packages")
    parser.add_argument("--claims", type=Path, default=CLAIMS, help="the list of claims")
    args = parser.parse_args(argv)
    listed = json.loads(args.claims.read_text(encoding="utf-8"))
    projects = listed["projects"]
    folders = installed(args.python, [p["package"] for p in projects.values() if p["package"]])
    verdicts = []
    for claim in listed["claims"]:
        verdicts.append(verdict(claim, projects[claim["project"]], folders))
        print(f"{claim['lesson']} {claim['project']} {claim['file']}: {verdicts[-1]}")
    return int(any(v.startswith("FALSE") for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
