"""What the book shows when a reader rests on a term: the glossary's definition."""

import json
import re
from pathlib import Path

from book import translations
from book.links import LINK, slug

PAGE = "lessons/GLOSSARY.md"
LESSON = re.compile(r" \*(\[(?:Lesson|레슨) \d+\]\([^)]*\)|Lesson \d+)\*$")


def entries(page: str) -> dict[str, str]:
    """page: GLOSSARY.md -> {term: what is under it, in Markdown}, in the order of the page."""
    parts = (entry.partition("\n") for entry in page.split("\n### ")[1:])
    return {term: body.strip() for term, _, body in parts}


def definitions(root: Path, page: str = PAGE) -> dict[str, str]:
    """{anchor: the definition as plain text}; {} without such a page."""
    path = root / page
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return {slug(term): plain(body) for term, body in entries(text).items()}


def plain(markdown: str) -> str:
    """A definition without its links and emphasis, and without the lesson at its end."""
    text = LINK.sub(r"\g<label>", LESSON.sub("", markdown))
    return re.sub(r"\*+([^*]+)\*+|`([^`]+)`", lambda found: found[1] or found[2], text)


def scripts(root: Path) -> dict[str, str]:
    """The definitions of each language as a script, {its file's name: its text}. They are no JSON
    files, because a page that was opened from a folder may run a script beside it and may not read
    a file.
    """
    pages = {"en": PAGE, "ko": translations.place_of(PAGE)}
    return {
        f"glossary-{language}.js": "window.GLOSSARY = "
        f"{json.dumps(definitions(root, page), ensure_ascii=False)};\n"
        for language, page in pages.items()
    }
