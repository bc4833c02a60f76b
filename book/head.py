"""What a page of the book gets before a browser reads it, so that it is there soon and stays still.

A page tells the sizes of its pictures, so that nothing moves when they come, and loads those that
are further down when a reader comes near. Only notebooks load the style of notebooks. A search
engine is told what a page begins with.
"""

import html
import re
import struct
from functools import cache
from pathlib import Path

from book.search import language_of

IMAGE = re.compile(r'<img\b(?P<rest>[^>]*?\bsrc="[^"]*?_images/(?P<name>[^"]+)"[^>]*?)\s*/?>')
AT_ONCE = 1  # pictures of a page that are loaded with it, the others when a reader comes near
PIXELS = {"pt": 4 / 3, "px": 1, "": 1}  # of a browser
SVG_TAG, SVG_SIZE = re.compile(r"<svg\b[^>]*>"), re.compile(r'\s(width|height)="([\d.]+)(\w*)"')
FACTS = " · "  # between those of a line about a lesson: its minutes, what it needs
LETTERS = 60, 160  # of a description: at least, at most


@cache
def size_of(picture: Path) -> tuple[int, int] | None:
    """Width and height of a PNG or an SVG in a browser's pixels; None: it does not say."""
    if picture.suffix == ".png":
        return struct.unpack(">II", picture.read_bytes()[16:24])
    if picture.suffix != ".svg":
        return None
    tag = SVG_TAG.search(picture.read_text(encoding="utf-8"))
    sides = {
        side: round(float(number) * PIXELS[unit])
        for side, number, unit in SVG_SIZE.findall(tag[0] if tag else "")
        if unit in PIXELS
    }
    return (sides["width"], sides["height"]) if len(sides) == 2 else None


def with_sizes(body: str, files: dict[str, Path]) -> str:
    """The HTML of a page whose pictures have sizes. files: where the pictures are, by their names
    in the book.
    """
    count = 0

    def sized(found: re.Match) -> str:
        nonlocal count
        count += 1
        said = found["rest"]
        size = size_of(files[found["name"]]) if found["name"] in files else None
        if size and "width=" not in said:
            said += f' width="{size[0]}" height="{size[1]}"'
        if count > AT_ONCE:
            said += ' loading="lazy"'
        return f"<img{said}>"

    return IMAGE.sub(sized, body)


def description(paragraphs: list[str]) -> str:
    """What a page begins with, in a line: the first of its paragraphs that says something."""
    least, most = LETTERS
    for paragraph in paragraphs:
        said = " ".join(paragraph.split())
        if len(said) >= least and FACTS not in said:
            return said if len(said) <= most else f"{said[:most].rpartition(' ')[0]} …"
    return ""


def prepare(app, page: str, template: str, context: dict, doctree) -> None:
    """What Sphinx calls before it writes a page."""
    files = {name: Path(app.srcdir, uri) for uri, name in app.builder.images.items()}
    if body := context.get("body"):
        body = with_sizes(body, files)
        # before a script could say so, because lines of Korean break elsewhere
        is_korean = language_of(page) == "ko"
        context["body"] = f'<div lang="ko">{body}</div>' if is_korean else body
    if not page.startswith(("notebooks/", "ko/notebooks/")):
        styles = context["css_files"]
        context["css_files"] = [one for one in styles if "mystnb" not in str(one.filename)]
    if doctree:
        from docutils import nodes

        said = description([one.astext() for one in doctree.findall(nodes.paragraph)])
        if said:
            tag = f'<meta name="description" content="{html.escape(said)}">'
            context["metatags"] = context.get("metatags", "") + tag
