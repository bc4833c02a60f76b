"""The pages of the playground by themselves, without the book around them.

    python -m book.playground.alone build/playground
    python -m book.playground.alone build/playground --pictures /usr/bin/chromium

The second also takes the pictures of the front page. It needs nothing but Python, and a browser.
"""

import html
import shutil
import subprocess
import tempfile
from pathlib import Path

from lessons.toolbox.command import OneLineParser

PAGES = Path(__file__).parent
STATIC = PAGES.parent / "static/playground"
NAMES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
# of the front page: page -> (where its sliders are, width and height in pixels)
PICTURES = {"roofline": ("", (780, 930)), "speculation": ("", (780, 820))}
BODY = "body { font: 16px/1.5 'DejaVu Sans', sans-serif; max-width: 46em; margin: 1em auto; }"


def write(out: Path, after: str = "") -> None:
    """All pages below `out`, in places like those of the book. after: a script that runs last."""
    shutil.copytree(STATIC, out / "_static/playground", dirs_exist_ok=True)
    folder = out / "book/playground"
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.html").write_text(page(name, after), encoding="utf-8")
    links = "".join(f'<li><a href="book/playground/{n}.html">{title(n)}</a></li>' for n in NAMES)
    (out / "index.html").write_text(framed("Playground", f"<ul>{links}</ul>"), encoding="utf-8")


def page(name: str, after: str = "") -> str:
    """A page: its heading, and what moves."""
    lines = (PAGES / f"{name}.md").read_text(encoding="utf-8").splitlines()
    moving = "\n".join(line for line in lines if line.startswith("<"))
    last = f"addEventListener('DOMContentLoaded', () => {{ {after} }});" if after else ""
    return framed(title(name), f"{moving}\n<script>{last}</script>")


def title(name: str) -> str:
    """The heading of a page."""
    return (PAGES / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def framed(heading: str, body: str) -> str:
    """HTML. Errors of its scripts are shown in #errors."""
    said = html.escape(heading)
    watch = (
        '<pre id="errors"></pre><script>onerror = (m) => (errors.textContent += m); '
        "onunhandledrejection = (e) => onerror(e.reason);</script>"
    )
    head = f'<meta charset="utf-8"><title>{said}</title><style>{BODY}</style>'
    return f'<!doctype html><html lang="en">{head}<h1>{said}</h1>{watch}\n{body}</html>\n'


def take_pictures(browser: str, out: Path, into: Path = PAGES) -> None:
    """Pictures of pages that were written below `out`. Raises CalledProcessError."""
    for name, (place, (width, height)) in PICTURES.items():
        address = f"{(out / 'book/playground' / name).resolve().as_uri()}.html#{place}"
        with tempfile.TemporaryDirectory() as profile:
            shot = [f"--screenshot={into / name}.png", f"--window-size={width},{height}"]
            command = [browser, *FLAGS, f"--user-data-dir={profile}", "--hide-scrollbars", *shot]
            subprocess.run([*command, address], check=True, capture_output=True, timeout=120)
        print(into / f"{name}.png")


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = OneLineParser("python -m book.playground.alone", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="a folder")
    parser.add_argument("--pictures", metavar="BROWSER", help="Chromium, to take pictures with")
    options = parser.parse_args(argv)
    write(options.out)
    print(f"open {options.out}/index.html")
    if options.pictures:
        take_pictures(options.pictures, options.out)


if __name__ == "__main__":
    main()
