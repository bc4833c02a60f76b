"""Translated pages: which page is whose, which are stale, and whether they agree with their source.

    python -m book.translations              # what is missing, stale or different
    python -m book.translations stamp PAGE…  # a page agrees with its source of today
    python -m book.translations links        # lead to Korean pages that are new

`ko/lessons/GLOSSARY.md` translates `lessons/GLOSSARY.md`; the front page alone is `README.ko.md`,
beside README.md. A translated page begins with a comment that names its source and the hash of the
source that it was made from. `stamp` renews that comment, and points links to Korean pages where
there are some. It refuses a page whose headings, code, numbers or links differ from the source's;
whether the words say the same, it cannot know. How to translate: ko/TERMS.md.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from os.path import normpath, relpath
from pathlib import Path

from book.agreement import FENCE, Complaints, differences
from book.links import LINK, slug
from lessons.toolbox.command import OneLineParser

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = "ko"
FRONT = {"README.ko.md": "README.md"}
OWN = ("ko/TERMS.md",)  # which translates no page
BESIDE = ("GLOSSARY", "NOTATION", "GUIDES", "PROFILING", "CHOOSING")  # the lessons
CELLS = "ko/notebooks/"  # cells of notebooks: see book/notebooks.py
STAMP = re.compile(r"<!-- source: (\S+) sha256: ([0-9a-f]{64}) -->\n")
# the line that leads to the same page in the other language
SWITCH = re.compile(r"^\[(?:한국어|English)\]\([^)\s]+\)\n+", re.MULTILINE)


def source_of(page: str) -> str | None:
    """The English page that `page` translates; None if it is no translation. Both are files in the
    repository.
    """
    if page in FRONT:
        return FRONT[page]
    is_ours = page.startswith(f"{FOLDER}/") and page.endswith(".md") and page not in OWN
    is_ours &= not page.startswith(CELLS)
    return page.removeprefix(f"{FOLDER}/") if is_ours else None


def place_of(source: str) -> str:
    """Where the translation of an English page belongs."""
    places = {source: page for page, source in FRONT.items()}
    return places.get(source, f"{FOLDER}/{source}")


def translated(root: Path) -> list[str]:
    """All translated pages that are there."""
    pages = [path.relative_to(root).as_posix() for path in sorted((root / FOLDER).rglob("*.md"))]
    front = [page for page in FRONT if (root / page).is_file()]
    return [page for page in front + pages if source_of(page)]


def wanted(root: Path) -> list[str]:
    """The English pages that the Korean edition means to have, in the order of reading."""
    rooms = [path.relative_to(root) for path in sorted(root.glob("lessons/l[0-9][0-9]_*"))]
    pages = [f"{room}/{name}.md" for room in rooms for name in ("README", "MORE")]
    there = [page for page in pages if (root / page).is_file()]
    beside = [f"lessons/{name}.md" for name in BESIDE]
    return ["README.md", "INSTALL.md", *beside, *there, "CONTRIBUTING.md", "lessons/TEACHING.md"]


def missing(root: Path) -> list[str]:
    """Those of them that are not translated."""
    return [source for source in wanted(root) if not (root / place_of(source)).is_file()]


def stale(root: Path) -> list[str]:
    """Translated pages whose source has changed since, or that name no source."""
    return [page for page in translated(root) if _stamp(root, page) != _stamped(root, page)]


def _stamp(root: Path, page: str) -> str:
    """The first line of a page that agrees with its source of today."""
    source = source_of(page)
    path = root / source
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else 64 * "0"
    return f"<!-- source: {source} sha256: {digest} -->\n"


def _stamped(root: Path, page: str) -> str:
    found = STAMP.match((root / page).read_text(encoding="utf-8"))
    return found[0] if found else ""


def with_switch(root: Path, page: str) -> str:
    """The text of a page, with a line below its heading that leads to its translation if it has
    one. Translated pages and the front page have such a line of their own.
    """
    text = (root / page).read_text(encoding="utf-8")
    place = place_of(page)
    if source_of(page) or SWITCH.search(text) or not (root / place).is_file():
        return text
    switch = f"\n[한국어]({relpath(place, Path(page).parent)})\n"
    return re.sub(r"^# .*\n", lambda found: found[0] + switch, text, count=1, flags=re.MULTILINE)


# ---------------------------------------------------------------- links


def headings(text: str) -> list[str]:
    """The anchors of a page, in its order."""
    return [
        slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    ]


def english(root: Path, page: str, target: str) -> str:
    """What a link of a page, translated or not, means: a place within the repository, with an
    English anchor. A target that leads nowhere is read as its source would read it; one that
    leads nowhere there, either, means itself.
    """
    if re.match(r"\w+:", target):
        return target
    file, hash_, anchor = target.partition("#")
    source = source_of(page) or page
    path = normpath(Path(page).parent / file) if file else page
    if not (root / path).exists():
        path = normpath(Path(source).parent / file)
    if not (root / path).exists():
        return target  # code that looks like a link, such as `kernel[grid](x)`
    path = source_of(path) or path
    translation = root / place_of(path)
    if anchor and translation.is_file():
        theirs, ours = _anchors(root / path), _anchors(translation)
        if anchor not in theirs and anchor in ours and len(ours) == len(theirs):
            anchor = theirs[ours.index(anchor)]
    return f"{path}{'/' if file.endswith('/') else ''}{hash_}{anchor}"


def korean(root: Path, page: str, place: str) -> str:
    """How a translated page links to a place that `english` gave: to its translation, if any."""
    if re.match(r"\w+:", place):
        return place
    path, hash_, anchor = place.partition("#")
    if not (root / path).exists():
        return place
    translation = place_of(path)
    if (root / translation).is_file():
        if anchor:
            theirs, ours = _anchors(root / path), _anchors(root / translation)
            if anchor in theirs and len(ours) == len(theirs):
                anchor = ours[theirs.index(anchor)]
        path = translation
    if path == page and anchor:
        return f"#{anchor}"
    slash = "/" if path.endswith("/") else ""
    return f"{relpath(path, Path(page).parent)}{slash}{hash_}{anchor}"


def _anchors(path: Path) -> list[str]:
    return headings(path.read_text(encoding="utf-8"))


def relinked(root: Path, page: str, text: str) -> str:
    """The text of a translated page with links that lead to Korean pages where there are some."""

    def relink(found: re.Match) -> str:
        target = korean(root, page, english(root, page, found["target"]))
        return f"{found['bang']}[{found['label']}]({target}{found['title'] or ''})"

    switch = SWITCH.search(text)
    start = switch.end() if switch else 0
    return text[:start] + _outside_code(text[start:], lambda part: LINK.sub(relink, part))


def _outside_code(text: str, change) -> str:
    parts, end = [], 0
    for found in FENCE.finditer(text):
        parts += [change(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(text[end:])])


def meanings(root: Path, page: str, text: str) -> str:
    """A page's text with each link's meaning in the place of its target, so that the links of two
    languages can be compared.
    """

    def mean(found: re.Match) -> str:
        place = english(root, page, found["target"])
        return f"{found['bang']}[{found['label']}]({place}{found['title'] or ''})"

    return _outside_code(SWITCH.sub("", text, count=1), lambda part: LINK.sub(mean, part))


# ---------------------------------------------------------------- the command


def complaints(root: Path, page: str) -> Complaints:
    """What a translated page says otherwise than its source of today: its headings, code, numbers,
    links and pictures. [] if they agree.
    """
    text = STAMP.sub("", (root / page).read_text(encoding="utf-8"), count=1)
    source = source_of(page)
    theirs = meanings(root, source, (root / source).read_text(encoding="utf-8"))
    found = differences(theirs, meanings(root, page, text))
    if relinked(root, page, text) != text:
        found.append("a link could lead to a Korean page, or leads nowhere: stamp mends it")
    return found


def stamp(root: Path, page: str) -> None:
    """Mend the links of a translated page, and write which source it agrees with."""
    path = root / page
    text = STAMP.sub("", path.read_text(encoding="utf-8"), count=1)
    path.write_text(_stamp(root, page) + relinked(root, page, text), encoding="utf-8")


def mend_links(root: Path) -> None:
    """Point the links of all translated pages to Korean pages. Their stamps stay."""
    for page in translated(root):
        path = root / page
        text = path.read_text(encoding="utf-8")
        path.write_text(relinked(root, page, text), encoding="utf-8")


def report(root: Path) -> Iterator[str]:
    """What is missing, stale or different, a line each."""
    yield from (f"missing: {place_of(source)}" for source in missing(root))
    old = stale(root)
    for page in translated(root):
        if page in old:
            yield f"stale: {page}"
        else:
            yield from (f"{page}: {why}" for why in complaints(root, page))


def stamp_all(root: Path, pages: Iterable[str]) -> Complaints:
    """Stamp pages that agree with their sources. Complaints of those that do not, which keep their
    stamps.
    """
    found = []
    for page in pages:
        path = root / page
        before = path.read_text(encoding="utf-8")
        stamp(root, page)
        if why := complaints(root, page):
            path.write_text(before, encoding="utf-8")
            found += [f"{page}: {line}" for line in why]
    return found


def main() -> None:
    """Say what is to be done, or stamp pages."""
    parser = OneLineParser(prog="python -m book.translations")
    parser.add_argument("command", nargs="?", choices=["list", "stamp", "links"], default="list")
    parser.add_argument("pages", nargs="*", help="translated pages, such as README.ko.md")
    args = parser.parse_args()
    if args.command == "list":
        print("\n".join(report(REPOSITORY)) or "all pages are translated and of today")
    elif args.command == "links":
        mend_links(REPOSITORY)
    elif args.command == "stamp":
        stamp_pages(parser, args.pages)


def stamp_pages(parser: OneLineParser, pages: list[str]) -> None:
    """The command stamp, which ends with 2 and one line for a page that it refuses."""
    known = translated(REPOSITORY)
    for page in pages:
        if page not in known:
            parser.error(f"pages: got {page}; accepted: a translated page, such as {known[0]}")
    if found := stamp_all(REPOSITORY, pages):
        parser.error("\n".join(found))


if __name__ == "__main__":
    main()
