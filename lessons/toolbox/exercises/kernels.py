"""The ladder of kernel exercises: what each asks for, in the order of the course.

    python -m lessons.toolbox.exercises kernels

`mask`: one load and one store of a few lines, which need a mask. `load`: a pattern of addresses, in
two dimensions, with strides or of a packed format. `body`: the kernel, or the part of it that
computes. `bugs`: a kernel that is given and wrong. `wrapper`: the launch too, with grid, block
sizes, warps, strides and refusals. `test`: a test for kernels that others wrote. What is asked is
read from the solution's gaps.
"""

import ast
import re

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lessons.toolbox.exercises.exercise import SOLUTIONS, Exercise, all_exercises

SHORT = 6  # lines of a gap that is no body yet, if nothing is computed in it
COMPUTES = re.compile(r"\btl\.(sum|max|dot|exp|rsqrt|where)\(")
PATTERN = re.compile(r"\[:, None\]|\[None, :\]|stride")


def asked(entry: Exercise) -> list[str]:
    """What the learner writes of a kernel, in the words above; [] if the exercise is about no
    kernel. CUDA C++ is a body, too.
    """
    source = (SOLUTIONS / entry.file).read_text(encoding="utf-8")
    lines, parts = source.splitlines(), []
    kernels = {node.name: node for node in ast.parse(source).body if _is_kernel(node)}
    own = lines[entry.lines.start - 1 : entry.lines.stop - 1]
    for node in kernels.values():
        if gap := _gap(lines, node, f"# SOLUTION {entry.id}"):
            parts.append(_kind(node, gap))
    has_gap = any(line.strip() == "# SOLUTION" for line in own)
    if parts and has_gap:
        parts.append("wrapper")
    if any("run_cuda(" in line for line in own):
        parts.append("body")
    if not parts and any(name.startswith("planted") for name in kernels) and "test" in entry.title:
        parts.append("test")
    return parts


def _kind(node: ast.stmt, gap: list[str]) -> str:
    text = "\n".join(gap)
    if "# STUB" in gap:
        return "bugs"
    if any(isinstance(inner, ast.Return) and inner.value for inner in ast.walk(node)):
        return "load"  # a function that a kernel calls
    if COMPUTES.search(text) or len(gap) > SHORT:
        return "body"
    return "load" if PATTERN.search(text) else "mask"


def _is_kernel(node: ast.stmt) -> bool:
    marks = getattr(node, "decorator_list", [])
    return any(ast.unparse(mark) == "triton.jit" for mark in marks)


def _gap(lines: list[str], node: ast.stmt, mark: str) -> list[str]:
    """The lines between a mark in a definition and its END, which may come after its last line."""
    stripped = [line.strip() for line in lines]
    if mark not in stripped[node.lineno : node.end_lineno]:
        return []
    start = stripped.index(mark, node.lineno)
    return stripped[start + 1 : stripped.index("# END", start)]


def ladder() -> list[tuple[Exercise, list[str]]]:
    """The exercises about a kernel, in the order of the course."""
    return [(entry, parts) for entry in all_exercises() if (parts := asked(entry))]


def print_ladder() -> None:
    table = Table("", "minutes", "asked", "", box=None)
    for entry, parts in ladder():
        table.add_row(entry.id, str(entry.minutes), " + ".join(parts), escape(entry.title))
    Console(highlight=False).print(table)
