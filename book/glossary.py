"""What the book shows when a reader rests on a term: the glossary's definition."""

import json
import re
from pathlib import Path

from book.links import LINK, slug

LESSON = re.compile(r" \*(\[Lesson \d+\]\([^)]*\)|Lesson \d+)\*$")


def entries(page: str) -> dict[str, str]:
    """page: GLOSSARY.md -> {term: what is under it, in Markdown}, in the order of the page."""
    parts = (entry.partition("\n") for entry in page.split("\n### ")[1:])
    return {term: body.strip() for term, _, body in parts}


def definitions(root: Path) -> dict[str, str]:
    """{anchor: the definition as plain text}."""
    page = (root / "lessons/GLOSSARY.md").read_text(encoding="utf-8")
    return {slug(term): plain(body) for term, body in entries(page).items()}


def plain(markdown: str) -> str:
    """A definition without its links and emphasis, and without the lesson at its end."""
    text = LINK.sub(r"\g<label>", LESSON.sub("", markdown))
    return re.sub(r"\*([^*]+)\*|`([^`]+)`", lambda found: found[1] or found[2], text)


def script(root: Path) -> str:
    """The definitions as a script. It is no JSON file, because a page that was opened from a folder
    may run a script beside it and may not read a file.
    """
    return f"window.GLOSSARY = {json.dumps(definitions(root), ensure_ascii=False)};\n"
