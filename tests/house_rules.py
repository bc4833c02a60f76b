"""The shape of the house: what is on a folder's first screen, and whether its text names it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.course_rules import Complaints, committed_files, complete_rooms, rooms, within

ENTRIES_OF_A_ROOM = 12
ENTRIES_OF_THE_REFERENCE = 15
# Words that say nothing of who acts.
VAGUE = re.compile(r"\b(?:whoever|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
# Words that mean something else in plain English, or say nothing of who acts: say "after", "is",
# "the request". A stopwatch may still lie, and a stand-in stand in.
NOT_PLAIN = re.compile(
    r"\b(?:behind|whoever|somebody|nobody|everybody|anybody|another one|stands?(?!-)|"
    r"lies? (?:in|on|at|above|below|between|beside|within|far|near|close|side|dense))\b",
    re.IGNORECASE,
)
NO_PROSE = re.compile(r"<!--.*?-->|```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
TESTED = ("lessons", "reference", "solutions", "models")
NOT_HELD = {"checks", "lab", "test_equivalence.py"}
# What measures, draws and tests is found by its folder. Commands and empty files need no reader.
NOT_THE_SUBJECT = {"lab", "checks", "__init__.py", "__main__.py", "test_equivalence.py"}


def crowded_folders(root: Path) -> Complaints:
    """Folders with more files and folders beside each other than a reader sees at once."""
    complaints = []
    most = {room: ENTRIES_OF_A_ROOM for room in rooms(root)}
    most[root / "reference"] = ENTRIES_OF_THE_REFERENCE
    for folder, allowed in most.items():
        found = sorted(path.name for path in entries(folder))
        if len(found) > allowed:
            complaints.append(
                f"{within(root, folder)}: {len(found)} entries, at most {allowed}: "
                f"{', '.join(found)}"
            )
    return complaints


def entries(folder: Path) -> Iterator[Path]:
    """What a listing shows, without what Python writes and asks for, and without MORE.md, because
    it continues README.md.
    """
    silent = ("__init__.py", "__pycache__", "MORE.md")
    for path in folder.iterdir() if folder.exists() else ():
        if path.name not in silent and not path.name.startswith("."):
            yield path


def unnamed_modules(root: Path) -> Complaints:
    """Modules of a complete lesson that its README.md or MORE.md does not name by their path."""
    complaints = []
    for room in complete_rooms(root):
        texts = [path.read_text(encoding="utf-8") for path in room.glob("*.md")]
        for file in sorted([*room.rglob("*.py"), *room.rglob("*.cu")]):
            path = file.relative_to(room)
            if not NOT_THE_SUBJECT & set(path.parts) and not named(path.as_posix(), texts):
                complaints.append(f"{within(root, room)}: no text of the room names {path}")
    return complaints


def named(path: str, texts: list[str]) -> bool:
    """Whether a path is written in one of the texts, and is not the end of another one."""
    return any(re.search(rf"(?<![\w/]){re.escape(path)}\b", text) for text in texts)


def vague_persons(root: Path) -> Complaints:
    """Words in the code that a caller, a request or a sequence hides behind. Tests are not held to
    it yet, nor is a committed figure whose label is one of these words.
    """
    complaints = []
    for path in committed_files(root, ".py"):
        where = path.relative_to(root)
        if where.parts[0] in TESTED and not NOT_HELD & set(where.parts):
            text = path.read_text(encoding="utf-8")
            for found in VAGUE.finditer(text):
                line = text.count("\n", 0, found.start()) + 1
                complaints.append(f"{within(root, path)}:{line}: {found[0]!r}: say who it is")
    return complaints


def unplain_words(root: Path) -> Complaints:
    """Such words in the front page, the ways in, the texts beside the lessons, and the texts and
    notebooks of the lessons.
    """
    texts = [root / "README.md", root / "INSTALL.md", *sorted((root / "lessons").glob("*.md"))]
    for room in complete_rooms(root):
        notebook = root / "notebooks" / f"{room.name[1:]}.ipynb"
        texts += [room / "README.md", room / "MORE.md", notebook]
    complaints = []
    for path in filter(Path.exists, texts):
        prose = NO_PROSE.sub(" ", said_in(path))
        complaints += [
            f"{within(root, path)}: {found[0]!r} in "
            f"{prose[found.start() - 30 : found.end() + 20]!r}"
            for found in NOT_PLAIN.finditer(prose)
        ]
    return complaints


def said_in(path: Path) -> str:
    """A Markdown file, or the Markdown cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
