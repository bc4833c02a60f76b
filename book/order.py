"""In which order a reader meets the pages, as the front page has them."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path, PurePosixPath

from book import api, notebooks, translations

# a row of the front page's table: its title, its room
ROW = re.compile(r"^\| \[(\d\d [^\]]+)\]\(lessons/(l\d\d_\w+)/README\.md\)", re.MULTILINE)
KOREAN = "한국어"
KOREAN_ROW = re.compile(ROW.pattern.replace("lessons/", "(?:ko/)?lessons/", 1), re.MULTILINE)
KOREAN_TITLES = {
    "README.ko.md": "처음",
    "ko/INSTALL.md": "시작하는 방법",
    "ko/lessons/GLOSSARY.md": "용어집",
    "ko/lessons/NOTATION.md": "표기법",
    "ko/lessons/GUIDES.md": "가이드에 적힌 것과 사실",
    "ko/lessons/PROFILING.md": "프로파일 읽기",
    "ko/lessons/CHOOSING.md": "엔진 고르기",
    "ko/lessons/TEACHING.md": "가르치는 분께",
    "ko/CONTRIBUTING.md": "기여하기",
    "ko/notebooks/engine.ipynb": "엔진 지켜보기",
    "ko/TERMS.md": "용어표",
}
TITLES = {
    "INSTALL.md": "Install",
    "AGENTS.md": "With an AI assistant",
    "CONTRIBUTING.md": "Contributing",
    "CHANGELOG.md": "Changes",
    "lessons/GLOSSARY.md": "Glossary",
    "lessons/NOTATION.md": "Notation",
    "lessons/GUIDES.md": "What guides print, and what is true",
    "lessons/PROFILING.md": "How to read a profile",
    "lessons/CHOOSING.md": "Which engine for which job",
    "lessons/TEACHING.md": "For teachers",
    "lessons/toolbox/gpu/README.md": "Compiled code on a CPU",
    "exercises/README.md": "Exercises",
    "reference/README.md": "The engine",
    "results/README.md": "Measurements and proofs",
    "models/README.md": "The embedded models",
    "deploy/README.md": "Deployment",
}

PLAYGROUND = "book/playground", {"book/playground/README.md"}


@dataclass(frozen=True)
class Chapter:
    """A page, and the pages below it."""

    page: str  # its file in the repository
    title: str = ""  # for the side of the book; without it the page's heading
    below: "tuple[Chapter, ...]" = ()

    def entries(self) -> list[str]:
        """Lines of the list of what is below."""
        return [chapter.entry(self.page) for chapter in self.below]

    def entry(self, beside: str) -> str:
        """Its line in the list of another page."""
        here = PurePosixPath(staged(beside)).parent
        name = relpath(PurePosixPath(staged(self.page)).with_suffix(""), here)
        return f"{self.title} <{name}>" if self.title else name


@dataclass(frozen=True)
class Part:
    """Chapters under one caption."""

    caption: str
    chapters: tuple[Chapter, ...]

    def entries(self) -> list[str]:
        """Lines of the list on the front page."""
        return [chapter.entry("README.md") for chapter in self.chapters]


def staged(page: str) -> str:
    """The name of a page in the book."""
    return "index.md" if page == "README.md" else page


def lessons(root: Path) -> list[Chapter]:
    """All lessons in the order of the front page, each with its notebook and its other pages."""
    front = (root / "README.md").read_text(encoding="utf-8")
    chapters = []
    for title, room in ROW.findall(front):
        below = [Chapter(f"notebooks/{room[1:]}.ipynb", "Notebook")]
        if (root / f"lessons/{room}/MORE.md").is_file():
            below.append(Chapter(f"lessons/{room}/MORE.md", f"More on lesson {int(room[1:3])}"))
        page = f"lessons/{room}/README.md"
        below += others(root, f"lessons/{room}", {page, *(chapter.page for chapter in below)})
        chapters.append(Chapter(page, title, tuple(below)))
    return chapters


def others(root: Path, folder: str, known: Collection[str]) -> list[Chapter]:
    """The pages in a folder and its subfolders, but for the known ones. Their titles are their
    headings.
    """
    paths = sorted((root / folder).rglob("*.md"))
    names = [path.relative_to(root).as_posix() for path in paths]
    return [Chapter(name) for name in names if name not in known]


def titled(root: Path, page: str, folder: str | None = None, first: list = ()) -> Chapter:
    """A page of TITLES. folder: whose other pages stand below it, behind those of `first`."""
    below = others(root, folder, TITLES) if folder else []
    return Chapter(page, TITLES[page], (*first, *below))


def korean(root: Path) -> list[Chapter]:
    """The Korean edition in the order of reading, its lessons with the titles of its front page.
    Notebooks of no lesson and the table of its terms come last.
    """
    front = root / translations.place_of("README.md")
    titles = dict(KOREAN_TITLES)
    if front.is_file():
        for title, room in KOREAN_ROW.findall(front.read_text(encoding="utf-8")):
            titles[translations.place_of(f"lessons/{room}/README.md")] = title
    pages = [translations.place_of(source) for source in translations.wanted(root)]
    pages += [page for page in translations.translated(root) if page not in pages]
    there = [page for page in [*pages, *translations.OWN] if (root / page).is_file()]
    there[-1:-1] = [
        notebooks.place_of(page)
        for page in notebooks.pages(root)
        if not (root / f"lessons/l{PurePosixPath(page).stem}").is_dir()
    ]
    more = {page for page in there if page.endswith("/MORE.md")}
    return [
        Chapter(page, titles.get(page, ""), korean_below(root, page, more))
        for page in there
        if page not in more
    ]


def korean_below(root: Path, page: str, more: Collection[str]) -> tuple[Chapter, ...]:
    """Below a Korean lesson: its notebook and its MORE, as far as they are translated."""
    folder = PurePosixPath(page).parent
    notebook = f"notebooks/{folder.name[1:]}.ipynb"
    below = []
    if notebook in notebooks.pages(root):
        below.append(Chapter(notebooks.place_of(notebook), "노트북"))
    if f"{folder}/MORE.md" in more:
        below.append(Chapter(f"{folder}/MORE.md", "더 보기"))
    return tuple(below)


def parts(root: Path) -> list[Part]:
    """The whole book."""
    of_engine = [Chapter("notebooks/engine.ipynb", "Notebook"), Chapter(api.PAGE, "Interface")]
    engine = [
        titled(root, "reference/README.md", "reference", of_engine),
        titled(root, "deploy/README.md", "deploy"),
    ]
    beside = [titled(root, page) for page in TITLES if page.startswith("lessons/")]
    beside += [
        titled(root, "exercises/README.md"),
        titled(root, "models/README.md", "models"),
        titled(root, "results/README.md"),
        titled(root, "CONTRIBUTING.md"),
        titled(root, "CHANGELOG.md"),
    ]
    begin = [titled(root, page) for page in ("INSTALL.md", "AGENTS.md")]
    play = [Chapter("book/playground/README.md", "Playground", tuple(others(root, *PLAYGROUND)))]
    by_caption = {"Begin": begin + play, "Lessons": lessons(root), "The engine": engine}
    by_caption |= {"Beside the lessons": beside, KOREAN: korean(root)}
    return [Part(caption, tuple(chapters)) for caption, chapters in by_caption.items()]
