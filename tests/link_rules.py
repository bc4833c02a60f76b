"""Links and images of the texts lead somewhere, offline: files, and headings within them.

Ours, because the libraries for it read no notebooks, ask for the network or know another rule for
a heading's anchor than GitHub's.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from book.links import LINK, slug
from lessons.toolbox.proof.pages import pages
from tests.course_rules import Complaints, committed_files, complete_rooms, within
from tests.markdown import section

# code and comments, where nothing is a link
HIDDEN = re.compile(r"^```.*?^```|`[^`\n]*`|<!--.*?-->", re.DOTALL | re.MULTILINE)


def broken_links(root: Path) -> Complaints:
    """Relative links and images that lead nowhere, anchors included, and images without alt
    text.
    """
    complaints = []
    for path in committed_files(root, ".md", ".ipynb"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = _text_cells(json.loads(text))
        # the text of a notebook in Korean has the links of the English cells (book/notebooks.py)
        is_cells = path.parent == root / "ko/notebooks"
        place = root / "notebooks" / path.name if is_cells else path
        complaints += [f"{within(root, path)}: {why}" for why in _links(place, text)]
    return complaints


def _text_cells(notebook: dict) -> str:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def _links(path: Path, text: str) -> Iterator[str]:
    text = re.sub(HIDDEN, "", text)
    for bang, label, target, _ in LINK.findall(text):
        if bang and not label.strip():
            yield f"image {target} has no alt text"
        yield from _leads_nowhere(path, target, text)
    for image in re.findall(r"<img\b[^>]*>", text):
        if not re.search(r"alt=\"[^\"]+\"", image):
            yield f"{image} has no alt text"
        if source := re.search(r"src=\"([^\"]+)\"", image):
            yield from _leads_nowhere(path, source[1], text)


def _leads_nowhere(path: Path, target: str, text: str) -> Iterator[str]:
    if re.match(r"\w+:", target):
        return  # an address on the web
    file, _, anchor = target.partition("#")
    found = (path.parent / file).resolve() if file else path
    if not found.exists():
        yield f"{target} does not exist"
    elif anchor and found.suffix == ".md":
        body = found.read_text(encoding="utf-8") if file else text
        headings = re.findall(r"^#+ (.*)$", body, re.MULTILINE)
        if anchor not in {slug(heading) for heading in headings}:
            yield f"{target}: there is no such heading"


def unknown_tests(root: Path) -> Complaints:
    """Tests that a lesson names in its table of what must hold, and that do not exist."""
    known = _test_names(root)
    complaints = []
    for room in complete_rooms(root):
        for row in rows_of_tests(pages(room)):
            for name in re.findall(r"\btest_\w+", row):
                if name not in known:
                    complaints.append(f"{room.name}/README.md: there is no test {name}")
    return complaints


def rows_of_tests(text: str) -> list[str]:
    """The rows of the table under What must hold, without its head."""
    lines = [line.strip() for line in section(text, "What must hold").splitlines()]
    table = [line for line in lines if line.startswith("|")]
    rules = [i for i, line in enumerate(table) if re.fullmatch(r"\|[\s:|-]+\|", line)]
    heads = {i - 1 for i in rules}
    return [line for i, line in enumerate(table) if i not in heads and i not in rules]


def _test_names(root: Path) -> set[str]:
    names = set()
    for file in [*root.glob("lessons/l*/**/test_*.py"), *root.glob("tests/**/test_*.py")]:
        names.add(file.stem)
        names.update(re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8")))
    return names
