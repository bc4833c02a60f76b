"""The sources of the book: every page and notebook of the course, with links that stay inside it.

    python -m book.stage build/book/source

Sphinx reads what this writes. It needs nothing but Python. Pages keep their places, so that a
link between two pages stays as it is; the front page alone becomes index.md. A link to a file of
code leads to a page that shows it, and a link to a folder to a list of what is in it.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path, PurePosixPath

from book import api, code, glossary, order

REPOSITORY = Path(__file__).resolve().parents[1]
# whether it is an image, its label, the file, the anchor
LINK = re.compile(
    r"(?P<bang>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]"
    r"\((?P<file>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)"
)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# what a widget would need a kernel for; its picture stays
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass
class Stage:
    """Writes pages into `out`, and remembers what they lead to."""

    root: Path
    out: Path
    files: set[str] = field(default_factory=set)  # of code, for which a page is wanted
    folders: set[str] = field(default_factory=set)

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

    def led(self, page: str, text: str) -> str:
        """The text of a page whose links stay in the book. page: its file in the repository."""

        def leads(found: re.Match) -> str:
            target = self.target(page, found["file"], is_image=bool(found["bang"]))
            if target is None:
                return found[0]
            here = PurePosixPath(order.staged(page)).parent
            return (
                f"{found['bang']}[{found['label']}]({relpath(target, here)}{found['anchor'] or ''})"
            )

        return outside_fences(text, lambda part: LINK.sub(leads, part))

    def target(self, page: str, link: str, is_image: bool) -> str | None:
        """Where a link of a page leads within the book; None: it is no link to a file."""
        path = (self.root / page).parent / link
        if not path.exists():
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
        text = (self.root / name).read_text(encoding="utf-8")
        self.write(order.staged(name), self.led(name, text) + behind)

    def notebook(self, name: str) -> None:
        """A notebook as it was run."""
        notebook = json.loads((self.root / name).read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.led(name, "".join(cell["source"]))
            for output in cell.get("outputs", []):
                output.get("data", {}).pop(WIDGET, None)
        notebook["metadata"].pop("widgets", None)
        self.write(name, json.dumps(notebook, ensure_ascii=False))


def outside_fences(text: str, change) -> str:
    """The text, changed where it is no fenced code: change(part) -> part. Between other code and a
    link whose label is code only the file tells, which has to be there.
    """
    parts, end = [], 0
    for found in FENCED.finditer(text):
        parts += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(text[end:])])


def toctree(entries: list[str], caption: str = "") -> str:
    """A list of pages for the side of the book. entries: "title <page>", or a page."""
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n\n```{toctree}", *head, "", *entries, "```", ""])


def stage(root: Path, out: Path) -> Stage:
    """Write the sources of the book. out: a folder, which is emptied first."""
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
    shutil.copyfile(here / "conf.py", out / "conf.py")
    shutil.copytree(here / "static", out / "_static")
    stage.write("_static/glossary.js", glossary.script(root))
    return stage


def write_chapter(stage: Stage, chapter: order.Chapter) -> None:
    """A page, and those below it."""
    below = toctree(chapter.entries()) if chapter.below else ""
    if chapter.page.endswith(".ipynb"):
        stage.notebook(chapter.page)
    elif (stage.root / chapter.page).is_file():
        stage.page(chapter.page, behind=below)
    for part in chapter.below:
        write_chapter(stage, part)


def pages_of(out: Path) -> Iterator[Path]:
    """All pages that were written."""
    yield from (path for path in out.rglob("*") if path.suffix in (".md", ".ipynb"))


def main() -> None:
    """Write them, and say how many."""
    parser = argparse.ArgumentParser(prog="python -m book.stage")
    parser.add_argument("out", type=Path, help="a folder, which is emptied first")
    out = parser.parse_args().out
    stage(REPOSITORY, out)
    print(f"book: {sum(1 for _ in pages_of(out))} pages")


if __name__ == "__main__":
    main()
