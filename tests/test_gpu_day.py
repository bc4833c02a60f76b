"""`make gpu` on a machine that was not made for the course: what has to be installed there is asked
for before the first step, is what results/README.md says, and is all that the steps import.
"""

import ast
import importlib.metadata
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from lessons.toolbox.proof.__main__ import NEEDED
from lessons.toolbox.proof.steps import ENGINE_TESTS

ROOT = Path(__file__).parents[1]
OURS = ("lessons", "reference", "tests", "models", "solutions", "exercises")
# {module: (package of NEEDED, what that cannot be installed without)}
BROUGHT = {
    "jinja2": ("torch", "jinja2"),
    "tqdm": ("transformers", "tqdm"),
    "huggingface_hub": ("transformers", "huggingface-hub"),
    "PIL": ("matplotlib", "pillow"),
}


def test_the_page_names_what_the_command_asks_for():
    text = " ".join((ROOT / "results" / "README.md").read_text("utf-8").split())
    (named,) = re.findall(r"`make gpu` needs ([\w, ]+), no `\.venv`", text)
    assert set(re.split(r", | and ", named)) == {"torch", *NEEDED}


@pytest.mark.parametrize("package", BROUGHT)
def test_what_other_packages_bring(package):
    by, distribution = BROUGHT[package]
    required = {re.split(r"[^\w-]", line)[0] for line in importlib.metadata.requires(by)}
    assert distribution in required


def test_the_steps_import_nothing_else():
    """All that is imported while the tests and benchmarks of `make gpu` are loaded. A file that
    skips its tests without a package may import it.
    """
    roots = [*ROOT.glob("lessons/l*/**/test_*.py"), *ROOT.glob("lessons/l*/lab/benchmark.py")]
    roots += [ROOT / "conftest.py", ROOT / "reference/ladder/__main__.py"]
    roots += [ROOT / test for test in ENGINE_TESTS]
    plugins = ["tests.since", "tests.seeds", "tests.sample", "lessons.toolbox.proof.record"]
    roots += [file_of(name) for name in [*plugins, "lessons.toolbox.proof.__main__"]]
    found, waiting = set(roots), list(roots)
    foreign = {}
    while waiting:
        file = waiting.pop()
        for name in imported(file):
            top = name.partition(".")[0]
            if top not in OURS:
                foreign.setdefault(top, file.relative_to(ROOT).as_posix())
            elif (other := file_of(name)) and other not in found:
                found.add(other)
                waiting.append(other)
    assert len(found) > 500
    known = {"torch", *NEEDED, *BROUGHT, *sys.stdlib_module_names}
    assert {name: file for name, file in foreign.items() if name not in known} == {}


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of the course."""
    path = ROOT.joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


def imported(file: Path) -> set[str]:
    """The modules that a file imports when it is loaded, without those that its tests do without."""
    text = file.read_text("utf-8")
    skipped = re.findall(r"^(?:\w+ = )?pytest\.importorskip\(\s*\"(\w+)", text, re.MULTILINE)
    found = set()
    for node in loaded(ast.parse(text).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.partition(".")[0] not in skipped}


def loaded(body: list[ast.stmt]):
    """The statements that run when a file is loaded. An import that is tried is no need."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.With, ast.ClassDef)):
            yield from loaded(node.body)
            yield from loaded(getattr(node, "orelse", []))
