"""What the lessons say of other projects: each file named has an entry, and the reverse."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reference.bench.peers.claims import CLAIMS, main

ROOT = Path(__file__).parents[1]
# a file of source in backticks, and nothing else between them
NAMED = re.compile(r"`([\w./-]+\.(?:py|cuh?|cpp|hpp|h|c|rs))`")


def foreign(lesson: str) -> set[str]:
    """The source files that a lesson's MORE.md names and this repository does not have."""
    (more,) = (ROOT / "lessons").glob(f"l{lesson}_*/MORE.md")
    named = set(NAMED.findall(more.read_text(encoding="utf-8")))
    return {file for file in named if not any(o.endswith("/" + file) for o in own())}


def own() -> list[str]:
    folders = ("lessons", "reference", "tests", "solutions", "exercises", "models")
    return ["/" + p.relative_to(ROOT).as_posix() for f in folders for p in (ROOT / f).rglob("*.*")]


@pytest.mark.parametrize("lesson", [f"{n:02d}" for n in range(29)])
def test_each_named_file_has_an_entry_and_each_entry_is_named(lesson):
    claims = json.loads((ROOT / CLAIMS).read_text(encoding="utf-8"))["claims"]
    listed = {claim["file"] for claim in claims if claim["lesson"] == lesson}
    (more,) = (ROOT / "lessons").glob(f"l{lesson}_*/MORE.md")
    text = more.read_text(encoding="utf-8")
    assert [f for f in foreign(lesson) if not any(x.endswith(f) for x in listed)] == []
    assert [file for file in listed if f"{file.rsplit('/')[-1]}`" not in text] == []


def test_each_entry_is_of_a_known_project_and_says_when_it_was_read():
    listed = json.loads((ROOT / CLAIMS).read_text(encoding="utf-8"))
    for claim in listed["claims"]:
        assert claim["project"] in listed["projects"], claim
        assert bool(claim["read"]) == bool(claim["version"]), claim


@pytest.mark.parametrize(
    "file, name, code, says",
    [
        ("engine/a.py", "class Pool", 0, "true"),
        ("engine/a.py", "class Gone", 1, "FALSE: name missing: class Gone"),
        ("engine/b.py", "class Pool", 1, "FALSE: file missing"),
        ("csrc/a.cu", "pool", 0, "NOT CHECKED: the package has no such sources"),
    ],
)
def test_a_planted_false_claim_is_found(file, name, code, says, tmp_path, capsys, monkeypatch):
    (tmp_path / "engine").mkdir()
    # an error if it is imported
    (tmp_path / "engine" / "__init__.py").write_text("1 / 0")
    (tmp_path / "engine" / "a.py").write_text("class Pool: ...")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    claim = {"lesson": "12", "project": "Engine", "file": file, "names": [name]}
    project = {"package": "engine", "folders": {"engine/": ""}}
    listed = tmp_path / "claims.json"
    listed.write_text(json.dumps({"projects": {"Engine": project}, "claims": [claim]}))
    assert main(["--python", sys.executable, "--claims", str(listed)]) == code
    assert capsys.readouterr().out == f"12 Engine {file}: {says}\n"


def test_without_an_interpreter_nothing_is_checked():
    command = [sys.executable, "-m", "reference.bench.peers.claims", "--python", "no/such/python"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0
    assert all("NOT CHECKED: not installed" in line for line in run.stdout.splitlines())
