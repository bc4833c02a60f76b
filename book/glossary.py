"""What the book shows when a reader rests on a term: the glossary's definition."""

import json
import re
from pathlib import Path

ENTRY = re.compile(r"^### (.+)\n(.+)$", re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that a heading gets on GitHub. Its links count by their labels."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def definitions(root: Path) -> dict[str, str]:
    """{anchor: plain text}."""
    text = (root / "lessons/GLOSSARY.md").read_text(encoding="utf-8")
    return {slug(term): plain(body) for term, body in ENTRY.findall(text)}


def plain(markdown: str) -> str:
    """A definition without its links, emphasis and lesson."""
    text = re.sub(r" \*\[?Lesson \d+\]?(\([^)]*\))?\*$", "", markdown)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    return re.sub(r"\*([^*]+)\*|`([^`]+)`", lambda found: found[1] or found[2], text)


def script(root: Path) -> str:
    """A file that a page loads without a server: fetch does not work from a folder."""
    return f"window.GLOSSARY = {json.dumps(definitions(root), ensure_ascii=False)};\n"
