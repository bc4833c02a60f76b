"""What a committed notebook must hold: outputs without errors, figures that show something, no
place on one machine, and no source that has changed since it was printed.
"""

import ast
import base64
import io
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image

from tests.course_rules import Complaints, committed_files, within

MOST_CELLS = 30
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/<])/(?:root|home|Users|work|tmp|mnt|opt|usr|var|private|content)/[\w.-]+"
)


def notebooks(root: Path) -> list[Path]:
    """The committed notebooks of the course."""
    return [path for path in committed_files(root, ".ipynb") if path.parent == root / "notebooks"]


def bad_notebooks(root: Path) -> Complaints:
    """What is wrong with notebooks as they are committed."""
    return [
        f"{within(root, path)}: {why}"
        for path in notebooks(root)
        for why in _notebook(json.loads(path.read_text(encoding="utf-8")))
    ]


def _notebook(notebook: dict) -> Iterator[str]:
    cells = notebook["cells"]
    code = [
        cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()
    ]
    exercises = [cell for cell in code if "".join(cell["source"]).startswith("%%exercise ")]
    most = MOST_CELLS + 2 * len(exercises)  # each has its statement, and a cell
    if len(cells) > most:
        yield f"{len(cells)} cells, more than {most}"
    if not any(output for cell in code for output in cell["outputs"]):
        yield "has no outputs: run it and commit what it shows"
    for number, cell in enumerate(code, 1):
        if cell.get("execution_count") is None:
            yield f"code cell {number} was not run"
        for output in cell["outputs"]:
            yield from (f"code cell {number}: {why}" for why in _output(output))
    for cell in cells:
        shown = [text for output in cell.get("outputs", ()) for text in _texts(output)]
        for text in ["".join(cell["source"]), *shown]:
            if found := ABSOLUTE_PATH.search(text):
                yield f"holds the absolute path {found[0]}"


def _output(output: dict) -> Iterator[str]:
    if output["output_type"] == "error":
        yield f"ends in {output['ename']}: {output['evalue']}"
    if output.get("name") == "stderr" and "Traceback" in "".join(output["text"]):
        yield "shows a traceback"
    if (picture := output.get("data", {}).get("image/png")) and is_empty(
        base64.b64decode("".join(picture))
    ):
        yield "shows an empty figure"
    if re.match(
        r"<Figure size .* with 0 Axes>", "".join(output.get("data", {}).get("text/plain", ""))
    ):
        yield "shows a figure without axes"


def is_empty(png: bytes) -> bool:
    """Whether a picture has (nearly) one colour only: less than 0.1 % of its pixels differ from the
    commonest one.
    """
    image = Image.open(io.BytesIO(png)).convert("RGB")
    pixels = image.width * image.height
    return max(count for count, _ in image.getcolors(pixels)) > 0.999 * pixels


def _texts(output: dict) -> list[str]:
    data = {
        kind: value for kind, value in output.get("data", {}).items() if kind.startswith("text/")
    }
    return ["".join(output.get("text", "")), *("".join(value) for value in data.values())]


# --------------------------------------------------------------- source that a notebook has printed

HOLD_SOURCE = ("lessons/", "reference/", "models/", "exercises/", "solutions/")
DEFINITION = re.compile(r"^(\s*)(?:async )?(?:def|class) (\w+)\b")
Sources = Mapping[str, list[list[str]]]  # {name: the lines of each definition of that name}


def stale_sources(root: Path) -> Complaints:
    """Stored outputs that show source which the files do not hold any more.

    Two ways of printing are known: `inspect.getsource`, whole or cut off, and
    `excerpt(function, first, last)`. Nothing runs: definitions are found by their names.
    """
    known = definitions(root)
    return [
        f"{within(root, path)}: {why}; run it again"
        for path in notebooks(root)
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
        for why in _stale(cell, known)
    ]


def definitions(root: Path) -> Sources:
    """The lines of every function and class of the course, with its decorators, dedented."""
    found = defaultdict(list)
    for path in committed_files(root, ".py"):
        if not within(root, path).startswith(HOLD_SOURCE):
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                own = "\n".join(lines[first - 1 : node.end_lineno])
                found[node.name].append(textwrap.dedent(own).splitlines())
    return found


def _stale(cell: dict, known: Sources) -> Iterator[str]:
    source = "".join(cell["source"])
    shown = "".join(
        "".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout"
    )
    if "getsource(" in source:
        yield from _changed(shown.splitlines(), known, source)
    for name, first, last in _excerpts(source):
        cuts = [_cut(lines, first, last) for lines in known.get(name, ())]
        if not any(cut and cut in shown for cut in cuts):
            yield f"shows an excerpt of {name} that no file holds"


def _changed(lines: list[str], known: Sources, cell: str) -> Iterator[str]:
    """What is wrong with the definitions in an output. One whose name neither the course nor the
    cell knows is text of another kind.
    """
    after = 0
    for start, line in enumerate(lines):
        found = DEFINITION.match(line)
        if start < after or not found:
            continue
        indent, name = found.groups()
        rest = [line.removeprefix(indent) for line in lines[start:]]
        same = [_same_lines(_undecorated(lines), rest) for lines in known.get(name, ())]
        if same and max(same):
            after = start + max(same)
        elif name in known or re.search(rf"\b{name}\b", cell):
            yield f"shows a {name} that no file holds"


def _undecorated(lines: list[str]) -> list[str]:
    return lines[next(i for i, line in enumerate(lines) if DEFINITION.match(line)) :]


def _same_lines(definition: list[str], shown: list[str]) -> int:
    """How many lines an output begins with that are those of a definition, whole or cut off; 0 if
    it goes on otherwise.
    """
    pairs = enumerate(zip(definition, shown))
    count = next((i for i, (own, line) in pairs if own != line), min(map(len, (definition, shown))))
    if count == len(definition) or count == len(shown):
        return count
    is_cut_off = not shown[count].strip() or not shown[count].startswith((" ", ")"))
    return count if is_cut_off else 0


def _excerpts(source: str) -> Iterator[tuple[str, str, str | None]]:
    """(name of the function, first, last) of each `excerpt(...)` whose bounds are in the cell."""
    if "excerpt(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "excerpt":
            continue
        function, *bounds = node.args
        texts = [bound.value for bound in bounds if isinstance(bound, ast.Constant)]
        if texts and len(texts) == len(bounds):
            name = getattr(function, "attr", None) or getattr(function, "id", "")
            yield name, texts[0], texts[1] if len(texts) > 1 else None


def _cut(lines: list[str], first: str, last: str | None) -> str:
    """What `excerpt` prints of a definition; "" where it finds no such lines."""
    start = next((i for i, line in enumerate(lines) if first in line), None)
    if start is None:
        return ""
    ends = (i for i in range(start, len(lines)) if last is not None and last in lines[i])
    end = len(lines) - 1 if last is None else next(ends, None)
    return "" if end is None else textwrap.dedent("\n".join(lines[start : end + 1]))
