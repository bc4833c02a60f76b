"""The index of the search in two parts, one for each language of the book.

Sphinx writes one index of all pages, searchindex.js, which the next build reads again. The search
page loads searchindex-en.js or searchindex-ko.js in its place, because both together are more than
a page may load, and because a reader asks for pages that they can read.
"""

import json
from pathlib import Path

from book.translations import FOLDER, FRONT

WHOLE = "searchindex.js"
LANGUAGES = "en", "ko"
BEGIN, END = "Search.setIndex(", ")"  # a script, because a page in a folder may read no file
OF_PAGES = "docnames", "filenames", "titles"  # lists, by the number of a page
OF_WORDS = "terms", "titleterms"  # {word: a number of a page, or several}


def language_of(page: str) -> str:
    """page: its name in the book, without an ending: "ko/lessons/GLOSSARY"."""
    return "ko" if page.startswith(f"{FOLDER}/") or f"{page}.md" in FRONT else "en"


def part_of(index: dict, language: str) -> dict:
    """What an index has of the pages of a language, which are numbered anew."""
    kept = [n for n, page in enumerate(index["docnames"]) if language_of(page) == language]
    number_of = {old: new for new, old in enumerate(kept)}

    def numbers(found: int | list[int]) -> int | list[int]:
        """One number by itself, as Sphinx writes it."""
        found = [
            number_of[n] for n in ([found] if isinstance(found, int) else found) if n in number_of
        ]
        return found[0] if len(found) == 1 else found

    part = index | {name: [index[name][n] for n in kept] for name in OF_PAGES}
    for name in OF_WORDS:
        words = {word: numbers(found) for word, found in index[name].items()}
        part[name] = {word: found for word, found in words.items() if found != []}
    titles = {
        title: [[number_of[n], anchor] for n, anchor in places if n in number_of]
        for title, places in index["alltitles"].items()
    }
    return part | {"alltitles": {title: places for title, places in titles.items() if places}}


def split(html: Path) -> None:
    """Write the indexes of both languages beside the one of all pages. html: the book."""
    script = (html / WHOLE).read_text(encoding="utf-8")
    index = json.loads(script.removeprefix(BEGIN).removesuffix(END))
    for language in LANGUAGES:
        part = json.dumps(part_of(index, language), ensure_ascii=False, separators=(",", ":"))
        (html / f"searchindex-{language}.js").write_text(f"{BEGIN}{part}{END}", encoding="utf-8")
