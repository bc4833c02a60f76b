"""`make gpu` on a machine that was not made for the course: what has to be installed there is asked
for before the first step, is what results/README.md says, and is all that the steps import; the
code of its Triton is like that of ours.
"""

import ast
import importlib.metadata
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lessons.toolbox.kernels import compile_check
from lessons.toolbox.kernels.compile_report import Job, Report
from lessons.toolbox.proof import beside, table
from lessons.toolbox.proof.__main__ import NEEDED
from lessons.toolbox.proof.steps import ENGINE_TESTS, FIRST
from tests.since import git

ROOT = Path(__file__).parents[1]
OURS = ("lessons", "reference", "tests", "models", "solutions", "exercises")
# {module: (package of NEEDED, what that cannot be installed without)}
BROUGHT = {
    "jinja2": ("torch", "jinja2"),
    "fsspec": ("torch", "fsspec"),
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


# ---------------------------------------------------------------- what the steps import and read


def first_files() -> list[Path]:
    """What the steps run by name, before the last one, which is all other tests of the lessons."""
    tests = ROOT.glob("lessons/l*/**/test_*.py")
    found = [file for file in tests if any(word in file.read_text("utf-8") for word in FIRST)]
    found += [*ROOT.glob("lessons/l*/lab/benchmark.py"), ROOT / "reference/ladder/__main__.py"]
    return found + [ROOT / test for test in ENGINE_TESTS]


def loaded_with(roots: list[Path]) -> tuple[set[Path], dict[str, str]]:
    """(all files of the course that are loaded with these, {foreign module: who imports it})."""
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
    return found, foreign


def test_the_steps_import_nothing_else():
    """All that is imported while the tests and benchmarks of `make gpu` are loaded. A file that
    skips its tests without a package may import it.
    """
    roots = [*first_files(), *ROOT.glob("lessons/l*/**/test_*.py"), ROOT / "conftest.py"]
    plugins = ["tests.since", "tests.seeds", "tests.sample", "lessons.toolbox.proof.record"]
    plugins += ["lessons.toolbox.proof.cases", "lessons.toolbox.proof.__main__"]
    found, foreign = loaded_with([*roots, *map(file_of, plugins)])
    assert len(found) > 500
    known = {"torch", *NEEDED, *BROUGHT, *sys.stdlib_module_names}
    assert {name: file for name, file in foreign.items() if name not in known} == {}


TRAVELS_MIB = 60  # the machines that are lent take a working tree of 64 MiB


def test_what_travels_to_a_borrowed_machine_is_small_and_all_that_is_needed():
    """By the patterns of travels.txt, whose last match counts: everything, but for what follows."""
    everything, *stays = (ROOT / "lessons/toolbox/proof/travels.txt").read_text("utf-8").split()
    assert everything == "/*" and all(line[:2] in ("!/", "!*") for line in stays)
    folders = tuple(line[2:] for line in stays if line[1] == "/")
    endings = tuple(line[2:] for line in stays if line[1] == "*")
    if not (names := git(ROOT, "ls-files")):
        pytest.skip("NOT RUN: this is no checkout")
    for pattern in (*folders, *endings):
        assert any(name.startswith(pattern) or name.endswith(pattern) for name in names), pattern
    kept = [name for name in names if not (name.startswith(folders) or name.endswith(endings))]
    files = {ROOT / name for name in kept if (ROOT / name).exists()}
    assert sum(file.stat().st_size for file in files) < TRAVELS_MIB * 2**20
    needed, _ = loaded_with([*first_files(), ROOT / "conftest.py"])
    assert {file for file in needed if file.relative_to(ROOT).as_posix() in names} <= files
    models = re.compile(
        "|".join(rf"\b{Path(folder).name}\b" for folder in folders if "-" in folder)
    )
    asking = [file for file in first_files() if models.search(file.read_text("utf-8"))]
    assert not asking, "they name models that stay at home"


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of the course."""
    path = ROOT.joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


def imported(file: Path) -> set[str]:
    """The modules that a file imports when it is loaded, but for those its tests do without."""
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


# ---------------------------------------------------------------- the Triton that is there

# Instructions of Triton 3.6's code over those of 3.7's, for the same launch and sm_90.
BAND = 0.75, 1.5
# In lesson 12's grouped_mla_kernel it has 144 asynchronous copies, and 3.7 has 64.
LONGER = {"int4_decode_bf16_3x64_paged_16": 2.0}
LONGER |= {"grouped_mla_bf16_16_sm90": 2.0, "grouped_mla_listed_bf16_16_sm90": 2.1}
# They spill with one version alone, these bytes at most.
SPILLS = {"paged_mla_fp32_16_sm90": 60, "paged_mla_bf16_128_sm90": 36}
SPILLS |= {"tree_fp32_4x128_26": 16, "e4m3_row_bf16_32x64": 24, "sparse_mla_bf16_128": 24}
SPILLS |= {"fp8_attention_64_paged_16": 80, "fp8_attention_256_paged_16": 40}
SPILLS |= {"grouped_mla_bf16_16_sm90": 244, "grouped_mla_listed_bf16_16_sm90": 92}
# Whose products 3.6's code waits for one by one.
SERIAL = {"mxfp4_gate_up_m16"}
# What 3.6 cannot compile.
REFUSED = []


def test_both_tritons_make_nearly_the_same_code():
    """Counts and proofs are made with one version, and a borrowed GPU has the other."""
    pairs = beside.pairs()
    assert len(pairs) > 150
    for pair in pairs:
        at = pair.pinned.name
        assert BAND[0] <= pair.ratio <= LONGER.get(at, BAND[1]), (at, pair.ratio)
        assert pair.earlier.error is None and pair.pinned.error is None, at
        assert pair.earlier.matrix_instruction == pair.pinned.matrix_instruction, at
        assert not pair.pinned.serialized_wgmma, at
        assert pair.earlier.serialized_wgmma == (at in SERIAL), at
        assert pair.earlier.shared_bytes <= pair.earlier.shared_limit_bytes, at
        if pair.spills_differ:
            assert max(pair.earlier.spill_bytes, pair.pinned.spill_bytes) <= SPILLS[at], at


def test_what_the_page_says_of_them():
    plain = Report("a", 90, "k", "triton 3.7.1", registers=8, census={"LDG": 8, "NOP": 9})
    later = [plain, replace(plain, name="b"), replace(plain, name="c", spill_bytes=4)]
    earlier = [replace(x, compiler="triton 3.6.0", spill_bytes=0) for x in later]
    earlier[1] = replace(earlier[1], spill_bytes=12, census={"LDG": 12}, serialized_wgmma=True)
    said = beside.paragraph([beside.Pair(*both) for both in zip(earlier, later)])
    assert "Triton 3.6.0, which" in said and "compiled 3 of these launches" in said
    assert "has 1.00 to 1.50 times the instructions, in the median 1.00 times" in said
    assert "It alone spills in `b` (12 bytes). It alone spills nothing in `c` (4 bytes)." in said
    assert said.endswith("It alone waits for each product in `b`.")
    assert beside.paragraph([]) == ""
    pair = beside.Pair(earlier[0], later[0])
    assert beside.paragraph([pair], ["x", "y"]).endswith("It cannot compile `x`, `y`.")
    assert beside.refused() == REFUSED


def test_reports_of_triton_3_6_have_a_folder_of_their_own(tmp_path, monkeypatch):
    jobs = {chip: Job("k", chip, {"kernel": "k"}, "hash", "triton 3.6.0") for chip in (80, 90)}
    cuda = Job("optimized.cu", 90, "source", "hash", "nvrtc 13.5")
    kernels = {
        "01/k": table.Kernel("a", [*jobs.values()]),
        "01/optimized.cu": table.Kernel("b", [cuda]),
    }
    monkeypatch.setattr(table, "kernels", lambda root: kernels)
    monkeypatch.setattr(compile_check, "triton_version", lambda: "triton 3.6.0")
    monkeypatch.setattr(
        compile_check, "check_jobs", lambda jobs: [j.report(registers=8) for j in jobs]
    )
    table.record_compiled(tmp_path)
    (file,) = tmp_path.rglob("*.jsonl")
    assert file == tmp_path / "results" / "compiled" / "triton_3.6" / "01.jsonl"
    found = compile_check.recorded(file.parent)
    assert [report.chip for report in found.values()] == [90]
    monkeypatch.setattr(compile_check, "RECORDED", tmp_path)
    monkeypatch.setattr(compile_check, "EARLIER", file.parent)
    assert compile_check.kept(jobs[90]).registers == 8
