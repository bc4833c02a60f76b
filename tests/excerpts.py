"""What a README says: its words without links to the glossary, and whether its excerpts of source
code are in a file of its room, line by line.
"""

import re
import textwrap
from pathlib import Path

from lessons.toolbox.proof.pages import pages


def plain_readme(room: Path) -> str:
    """A room's README, in which a term that is linked to the glossary is a word like any other."""
    text = pages(room)
    return re.sub(r"\[([^\]]*)\]\([./]*GLOSSARY\.md#[^)]*\)", r"\1", text)


def excerpts(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a README in one language."""
    return [block.split("```")[0] for block in text.split(f"```{language}\n")[1:]]


def stray_excerpts(room: Path, *elsewhere: Path) -> list[str]:
    """Excerpts of a room's README that are no run of lines of any of its Python files, or of files
    elsewhere; how far they are indented does not matter.
    """
    files = [*sorted(room.rglob("*.py")), *elsewhere]
    sources = [file.read_text(encoding="utf-8") for file in files]
    text = pages(room)
    return [code for code in excerpts(text) if not any(_holds(s, code) for s in sources)]


def _holds(source: str, code: str) -> bool:
    """Whether the lines of `code` follow each other in `source`."""
    lines, count = source.splitlines(keepends=True), len(code.splitlines())
    runs = ("".join(lines[start : start + count]) for start in range(len(lines) - count + 1))
    return any(textwrap.dedent(run) == code for run in runs)
