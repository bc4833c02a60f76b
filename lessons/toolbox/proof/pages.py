"""What a lesson says: its core, README.md, and the page beside it, MORE.md."""

from pathlib import Path


def pages(room: Path) -> str:
    """The text of a lesson's README.md and, where there is one, of its MORE.md."""
    files = (room / "README.md", room / "MORE.md")
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.exists())
