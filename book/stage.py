"""The sources of the book: every page and notebook of the course, with links that stay inside it.

    python -m book.stage build/book/source

Sphinx reads what this writes. It needs nothing but Python. Pages keep their places, so that a
link between two pages stays as it is; the front page alone becomes index.md. A link to a file of
code leads to a page that shows it, and a link to a folder to a list of what is in it.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path, PurePosixPath

from book import api, code, glossary, notebooks, order, translations
from book.links import LINK
from lessons.toolbox.command import OneLineParser

REPOSITORY = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CONF = "conf.py"  # Sphinx reads it beside the pages
# light and dark pictures in HTML; the book turns the light one dark by itself
PICTURE = re.compile(
    r'<picture>.*?<img alt="(?P<alt>[^"]*)" src="(?P<file>[^"]*)">.*?</picture>', re.DOTALL
)
# an output that only a running kernel could show; its picture stays
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Stage:
    """Writes pages into `out`, and remembers what they lead to."""

    root: Path
    out: Path
    files: set[str] = field(default_factory=set)  # of code, for which a page is wanted
    folders: set[str] = field(default_factory=set)
    # page of a lesson -> pages of the playground that lead to it
    moving: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self):
        folder = order.PLAYGROUND[0]
        for page in sorted((self.root / folder).glob("*.md")):
            for lesson in re.findall(
                r"\]\(\.\./\.\./(lessons/[^)]+)\)", page.read_text(encoding="utf-8")
            ):
                self.moving.setdefault(lesson, []).append(f"{folder}/{page.name}")

    def write(self, name: str, text: str) -> None:
        """name: the page's file within the book."""
        target = self.out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def copy(self, name: str) -> None:
        """A picture, to the same place."""
        target = self.out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / name, target)

    def relinked(self, page: str, text: str) -> str:
        """The text of a page, its links changed so that they stay in the book. page: its file in
        the repository.
        """
        here = PurePosixPath(order.staged(page)).parent

        def relink(found: re.Match) -> str:
            file, hash_, anchor = found["target"].partition("#")
            place = self.place(page, file, is_image=bool(found["bang"]))
            if place is None:
                return found[0]
            target = f"{relpath(place, here)}{hash_}{anchor}{found['title'] or ''}"
            return f"{found['bang']}[{found['label']}]({target})"

        return outside_fences(text, lambda part: LINK.sub(relink, part))

    def place(self, page: str, file: str, is_image: bool) -> str | None:
        """Where the book has the file that a page links to; None: there is no such file."""
        path = (self.root / page).parent / file
        if not file or not path.exists():
            return None
        name = relpath(path.resolve(), self.root.resolve())
        if path.is_dir():
            if (path / "README.md").is_file():
                return order.staged(f"{name}/README.md")
            self.folders.add(name)
            return code.folder_page(name)
        if path.suffix in (".md", ".ipynb"):
            return order.staged(name)
        if is_image or path.suffix in (".svg", ".png"):
            self.copy(name)
            return name
        self.files.add(name)
        return code.file_page(name)

    def page(self, name: str, behind: str = "") -> None:
        """A page of the course. behind: what the book adds at its end."""
        text = translations.with_switch(self.root, name)
        text = PICTURE.sub(r"![\g<alt>](\g<file>)", text)
        if name in self.moving:
            heading, _, rest = text.partition("\n")
            text = f"{heading}\n\n{self.to_move(name)}\n{rest}"
        self.write(order.staged(name), self.relinked(name, text) + behind)

    def to_move(self, lesson: str) -> str:
        """A line that leads to the lesson's pages of the playground."""
        here, links = PurePosixPath(lesson).parent, []
        for page in self.moving[lesson]:
            title = (self.root / page).read_text(encoding="utf-8").partition("\n")[0]
            links.append(f"[{title.removeprefix('# ')}]({relpath(page, here)})")
        return f"*Move it yourself, in your browser*: {', '.join(links)}."

    def notebook(self, name: str) -> None:
        """A notebook as it was run, in English or Korean."""
        notebook = notebooks.staged(self.root, name)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.relinked(name, "".join(cell["source"]))
        notebooks.add_switch(self.root, name, notebook)
        for cell in notebook["cells"]:
            for output in cell.get("outputs", []):
                output.get("data", {}).pop(WIDGET, None)
        notebook["metadata"].pop("widgets", None)
        self.write(name, json.dumps(notebook, ensure_ascii=False))


def outside_fences(text: str, change) -> str:
    """The text, changed where it is no fenced code. change(part) -> part. Code in the line is not
    left out, because a link's label may be code. What looks like a link there names no file.
    """
    parts, end = [], 0
    for found in FENCED.finditer(text):
        parts += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(text[end:])])


def toctree(entries: list[str], caption: str = "") -> str:
    """A list of pages for the side of the book, in MyST. entries: "title <page>", or a page."""
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n\n```{toctree}", *head, "", *entries, "```", ""])


def stage(root: Path, out: Path) -> Stage:
    """Write the sources of the book. out: a new folder, or one with an earlier book, which is
    emptied. Raises ValueError for a folder with anything else.
    """
    if out.exists() and not (out / CONF).is_file() and any(out.iterdir()):
        raise ValueError(f"out: got {out}; accepted: a new folder, or one with an earlier book")
    shutil.rmtree(out, ignore_errors=True)
    stage = Stage(root, out)
    parts = order.parts(root)
    trees = "".join(toctree(part.entries(), part.caption) for part in parts)
    stage.page("README.md", behind=trees)
    for part in parts:
        for chapter in part.chapters:
            write_chapter(stage, chapter)
    api.write(stage)
    code.write(stage)
    here = Path(__file__).parent
    shutil.copyfile(here / CONF, out / CONF)
    shutil.copytree(here / "static", out / "_static")
    shutil.copytree(here / "templates", out / "_templates")
    for name, script in glossary.scripts(root).items():
        stage.write(f"_static/{name}", script)
    return stage


def write_chapter(stage: Stage, chapter: order.Chapter) -> None:
    """A page, and those below it."""
    below = toctree(chapter.entries()) if chapter.below else ""
    if chapter.page.endswith(".ipynb"):
        stage.notebook(chapter.page)
    elif chapter.page != api.PAGE:  # which is written out of code
        stage.page(chapter.page, behind=below)
    for part in chapter.below:
        write_chapter(stage, part)


def pages_of(out: Path) -> Iterator[Path]:
    """All pages that were written."""
    yield from (path for path in out.rglob("*") if path.suffix in (".md", ".ipynb"))


def main() -> None:
    """Write them, and say how many."""
    parser = OneLineParser(prog="python -m book.stage")
    parser.add_argument("out", type=Path, help="a new folder, or one with an earlier book")
    out = parser.parse_args().out
    try:
        stage(REPOSITORY, out)
    except ValueError as error:
        parser.error(str(error))
    print(f"book: {sum(1 for _ in pages_of(out))} pages")


if __name__ == "__main__":
    main()
