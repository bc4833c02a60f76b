"""What a committed notebook must hold: outputs without errors, figures that show something, no
place on somebody's machine.
"""

import base64
import io
import json
import re
from collections.abc import Iterator
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
    if len(cells) > MOST_CELLS:
        yield f"{len(cells)} cells, more than {MOST_CELLS}"
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
