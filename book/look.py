"""What a browser makes of the book, as JSON.

    python -m book.look /usr/bin/chromium build/book/html index.html api.html

It opens each page from its folder, without a server, at the width of a laptop and of a phone, in
light and in dark. It tells the errors on the console, how much wider than its window the page is,
which pictures did not load, how many bytes did, and what axe-core finds, which checks whether
everybody can read a page.
"""

import json
import sys
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import axe_playwright_python
from playwright.sync_api import Browser, sync_playwright

WIDTHS = 1280, 390  # pixels, of a laptop and of a phone
BROKEN = "[...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src)"
LANGUAGE = "(document.querySelector('article') || document.body).lang"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@cache
def axe() -> str:
    """The script of axe-core."""
    return next(Path(axe_playwright_python.__file__).parent.rglob("axe.min.js")).read_text()


def size_of(urls: set[str]) -> int:
    """Bytes of files that a page loaded from the disk."""
    paths = {Path(url2pathname(urlsplit(url).path)) for url in urls if url.startswith("file:")}
    return sum(path.stat().st_size for path in paths if path.is_file())


def look(browser: Browser, html: Path, page: str, width: int, scheme: str) -> dict:
    """What one page is in one window."""
    size = {"width": width, "height": 900}
    tab = browser.new_page(viewport=size, color_scheme=scheme)
    errors, loaded = [], set()
    tab.on("request", lambda request: loaded.add(request.url))
    tab.on("console", lambda said: said.type == "error" and errors.append(said.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"file://{html.resolve()}/{page}")
    tab.wait_for_load_state("networkidle")
    found = {"page": page, "width": width, "scheme": scheme, "errors": errors}
    found |= {"broken": tab.evaluate(BROKEN), "too_wide": tab.evaluate(TOO_WIDE)}
    found |= {"bytes": size_of(loaded), "language": tab.evaluate(LANGUAGE)}
    tab.evaluate(axe())
    # preload asks for style sheets again, which a page in a folder may not
    violations = tab.evaluate("axe.run(document, {preload: false})")["violations"]
    found["axe"] = [f"{one['id']}: {one['nodes'][0]['html'][:100]}" for one in violations]
    tab.close()
    return found


def term(browser: Browser, html: Path, page: str) -> str:
    """The definition that opens when the keyboard reaches the first term of a page."""
    tab = browser.new_page()
    tab.goto(f"file://{html.resolve()}/{page}")
    tab.focus("a.term")
    said = tab.inner_text("#definition")
    tab.keyboard.press("Escape")
    is_closed = tab.is_hidden("#definition")
    tab.close()
    return said if is_closed else f"still open: {said}"


def searched(browser: Browser, html: Path, page: str, word: str) -> dict:
    """Titles of the pages that the search finds for who looks for a word on a page, and what the
    console says.
    """
    tab, errors = browser.new_page(viewport={"width": WIDTHS[0], "height": 900}), []
    tab.on("console", lambda said: said.type == "error" and errors.append(said.text))
    tab.goto(f"file://{html.resolve()}/{page}")
    tab.fill("form[role=search] input[name=q]", word)
    tab.press("form[role=search] input[name=q]", "Enter")
    tab.wait_for_selector("#search-results ul li a", timeout=20_000)
    tab.wait_for_timeout(500)
    titles = tab.locator("#search-results ul li a").all_inner_texts()
    tab.close()
    return {"titles": titles, "errors": errors}


def main(chromium: str, html: Path, pages: list[str]) -> dict:
    """All pages in all windows, the first term of a lesson, and a search."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        windows = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]
        looks = [look(browser, html, page, *window) for page in pages for window in windows]
        lesson = "lessons/l09_flash_attention/README.html"
        found = {"looks": looks, "term": term(browser, html, lesson)}
        korean = f"ko/{lesson}"
        found["search"] = searched(browser, html, lesson, "preemption")
        found["search_ko"] = searched(browser, html, korean, "preemption")
        found["term_ko"] = term(browser, html, korean)
        browser.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
