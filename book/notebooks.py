"""Notebooks with Korean text: the same code and the same outputs.

    python -m book.notebooks                       # which text cells are not translated, or stale
    python -m book.notebooks blank 04              # those of a notebook, to be translated
    python -m book.notebooks write OUT [--force]   # copies to work in, as `make lab` makes them

`ko/notebooks/04_positions.md` has the text cells of `notebooks/04_positions.ipynb`. Each begins
with a comment that holds the hash of the English cell that it was made from, so a cell that has
changed since stays English. Exercises are not in it: their statements come from the lesson's
README in Korean. Links are written as in the English cell.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path

from book import translations
from book.agreement import Complaints, differences
from book.links import LINK
from lessons.toolbox.command import OneLineParser
from lessons.toolbox.exercises.exercise import all_exercises
from lessons.toolbox.exercises.statements import fold_of

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = f"{translations.FOLDER}/notebooks"
CELL = re.compile(r"^<!-- cell ([0-9a-f]{12}) -->\n", re.MULTILINE)
EXERCISE = re.compile(r"%%exercise (\S+)\n")
START = '''\
"""What each notebook begins with: notebooks/start.py, in Korean."""

import os
import runpy
from pathlib import Path

os.environ.setdefault("INFERENCE_LADDER_LANG", "ko")
globals().update(runpy.run_path({start!r}))
'''


def key(source: str) -> str:
    """Of an English text cell."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def source_of(cell: dict) -> str:
    return "".join(cell["source"])


def read(root: Path, page: str) -> dict:
    """A notebook of the repository."""
    return json.loads((root / page).read_text(encoding="utf-8"))


def pages(root: Path) -> list[str]:
    """The notebooks that are translated, by their English names: `notebooks/04_positions.ipynb`."""
    stems = [path.stem for path in sorted((root / FOLDER).glob("*.md"))]
    return [
        f"notebooks/{stem}.ipynb" for stem in stems if (root / f"notebooks/{stem}.ipynb").exists()
    ]


def place_of(page: str) -> str:
    """Where the book has a notebook's translation."""
    return f"{translations.FOLDER}/{page}"


def cells_of(root: Path, page: str) -> dict[str, str]:
    """The translated text cells of a notebook by the keys of the English ones."""
    path = root / FOLDER / f"{Path(page).stem}.md"
    if not path.is_file():
        return {}
    _, *parts = CELL.split(path.read_text(encoding="utf-8"))
    return dict(zip(parts[::2], map(str.strip, parts[1::2])))


# ---------------------------------------------------------------- English and Korean, cell by cell


def texts(notebook: dict) -> Iterator[tuple[dict, str]]:
    """The text cells of a notebook, each with the exercise that it states, or ""."""
    cells = notebook["cells"]
    for cell, after in zip(cells, [*cells[1:], {"source": ""}]):
        if cell["cell_type"] == "markdown":
            found = EXERCISE.match(source_of(after))
            yield cell, found[1] if found else ""


def translated(root: Path, page: str, place: str) -> dict:
    """A notebook with Korean text; a cell without a translation stays English. place: the file that
    it is written to, within the repository, for its links.
    """
    notebook, cells = copy.deepcopy(read(root, page)), cells_of(root, page)
    for cell, exercise in texts(notebook):
        source = source_of(cell)
        text = statement(root, exercise) if exercise else cells.get(key(source))
        cell["source"] = relinked(root, page, place, text or source)
    return notebook


def staged(root: Path, name: str) -> dict:
    """A notebook of the book. name: `notebooks/04_positions.ipynb`, or with ko/ before it."""
    page = name.removeprefix(f"{translations.FOLDER}/")
    return read(root, page) if page == name else translated(root, page, name)


def add_switch(root: Path, name: str, notebook: dict) -> None:
    """A line below its heading that leads to the same notebook in the other language."""
    page = name.removeprefix(f"{translations.FOLDER}/")
    if page not in pages(root):
        return
    other, label = (place_of(page), "한국어") if page == name else (page, "English")
    switch = f"\n[{label}]({relpath(other, Path(name).parent)})\n"
    first = notebook["cells"][0]
    first["source"] = re.sub(r"^# .*\n", lambda found: found[0] + switch, source_of(first), count=1)


def statement(root: Path, exercise: str) -> str | None:
    """An exercise as the Korean README states it, with links like those of an English notebook;
    None if no README does.
    """
    (entry,) = all_exercises(exercise)
    for path in (root / translations.FOLDER / "lessons").glob(f"l{entry.lesson}_*/README.md"):
        readme = path.relative_to(root).as_posix()
        text = translations.meanings(root, readme, path.read_text(encoding="utf-8"))
        fold = fold_of(entry.id, text)
        if fold:
            return LINK.sub(lambda link: link[0].replace("](", "](../", 1), fold)
    return None


def relinked(root: Path, page: str, place: str, text: str) -> str:
    """Links that lead to Korean pages, from another folder."""

    def relink(found: re.Match) -> str:
        target = translations.english(root, page, found["target"])
        target = translations.korean(root, place, target)
        return f"{found['bang']}[{found['label']}]({target}{found['title'] or ''})"

    return LINK.sub(relink, text)


# ---------------------------------------------------------------- what is to be done


def missing(root: Path, page: str) -> list[str]:
    """English text cells that stay English."""
    there = cells_of(root, page)
    return [
        source_of(cell)
        for cell, exercise in texts(read(root, page))
        if not (statement(root, exercise) if exercise else there.get(key(source_of(cell))))
    ]


def stale(root: Path, page: str) -> list[str]:
    """The keys of translated cells whose English cell has changed, or is gone."""
    known = {key(source_of(cell)) for cell, _ in texts(read(root, page))}
    return [cell for cell in cells_of(root, page) if cell not in known]


def complaints(root: Path, page: str) -> Complaints:
    """What translated cells say otherwise than the English ones: see book/agreement.py."""
    ours = cells_of(root, page)
    theirs = {key(source_of(cell)): source_of(cell) for cell, _ in texts(read(root, page))}
    both = [cell for cell in ours if cell in theirs]
    return [f"cell {cell}: {why}" for cell in both for why in differences(theirs[cell], ours[cell])]


def report(root: Path) -> Iterator[str]:
    """A line for each notebook with something to do."""
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        page = path.relative_to(root).as_posix()
        if page not in pages(root):
            yield f"missing: {FOLDER}/{path.stem}.md"
            continue
        yield from (f"{page}: stale: cell {cell}" for cell in stale(root, page))
        yield from (f"{page}: {why}" for why in complaints(root, page))
        if left := missing(root, page):
            yield f"{page}: {len(left)} cells stay English, the first one: {left[0][:60]!r}"


def blank(root: Path, page: str) -> str:
    """What is to be translated of a notebook, as its file has it."""
    return "\n\n".join(f"<!-- cell {key(text)} -->\n{text}" for text in missing(root, page)) + "\n"


def write(root: Path, out: Path, force: bool = False) -> Iterator[str]:
    """Copies of the translated notebooks, which a learner can change. One that is there already is
    kept unless force. Says of each what was done.
    """
    out.mkdir(parents=True, exist_ok=True)
    start = START.format(start=str(root / "notebooks/start.py"))
    (out / "start.py").write_text(start, encoding="utf-8")
    place = out.resolve().relative_to(root).as_posix()
    for page in pages(root):
        target = out / Path(page).name
        if target.exists() and not force:
            yield f"{target.name}: kept (--force: again)"
            continue
        notebook = translated(root, page, f"{place}/{target.name}")
        target.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", "utf-8")
        yield f"{target.name}: written"


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = OneLineParser(prog="python -m book.notebooks")
    parser.add_argument("command", nargs="?", choices=["list", "blank", "write"], default="list")
    parser.add_argument("what", nargs="?", help="of blank: a number, of write: a folder")
    parser.add_argument("--force", action="store_true", help="write over copies that are there")
    args = parser.parse_args()
    if args.command == "list":
        print("\n".join(report(REPOSITORY)) or "all notebooks are translated and of today")
        return
    if args.command == "blank":
        found = sorted((REPOSITORY / "notebooks").glob(f"{args.what}*.ipynb")) if args.what else []
        if not found:
            parser.error(f"what: got {args.what}; accepted: a notebook's number, such as 04")
        print(blank(REPOSITORY, found[0].relative_to(REPOSITORY).as_posix()), end="")
        return
    out = Path(args.what or "build/ko/notebooks")
    if not out.resolve().is_relative_to(REPOSITORY):
        parser.error(f"what: got {out}; accepted: a folder of the course, for the links")
    print("\n".join(write(REPOSITORY, out, args.force)))


if __name__ == "__main__":
    main()
