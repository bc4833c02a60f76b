"""What a browser makes of a page of the book: one line of JSON for each window.

    python -m book.look /usr/bin/chromium build/book/html whole index.html
    python -m book.look /usr/bin/chromium build/book/html term INSTALL.html
    python -m book.look /usr/bin/chromium build/book/html search api.html preemption
    python -m book.look /usr/bin/chromium build/book/html used book/playground/lanes.html

`whole` opens the page from its folder, without a server, at the width of a laptop and of a phone,
in light and in dark. It tells the errors on the console, how much wider than its window the page
is, which pictures did not load, how many bytes did, and what axe-core finds, which checks whether
everybody can read a page. `term` opens a definition by the keyboard, `search` looks for a word, and
`used` moves every slider of a page to both its ends, presses its buttons and drags its bars.
`printed` prints it.
The steps are said on the standard error, so that a look that was stopped tells where it was.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import axe_playwright_python
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = 1280, 390  # pixels, of a laptop and of a phone
WINDOWS = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]
PAPER = 680  # of a sheet between its margins
PATIENCE = 60_000  # ms that one step may take where other programs run, too
# Pictures that wait for a reader are loaded, too, so that one that is missing is seen.
ALL_PICTURES = "document.querySelectorAll('img').forEach((i) => (i.loading = 'eager'))"
ARE_LOADED = "[...document.images].every((i) => i.complete)"
BROKEN = "[...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)"
CUT = """[...document.querySelectorAll('article pre')]
  .filter((code) => code.scrollWidth > code.clientWidth + 1).map((code) => code.textContent)"""
UNSIZED = "[...document.querySelectorAll('article img:not([width])')].map((i) => i.src)"
# how much of a page moved while it came, as Chromium counts it: 0.1 is the most that is called good
MOVED = """new Promise((answer) => {
  let sum = 0;
  const add = (list) => list.getEntries().forEach((shift) => (sum += shift.value));
  new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
  setTimeout(() => answer(sum), 100);
})"""
# words of a drawing that is moved: less than 10 pixels high, or outside the drawing
UNREADABLE = """[...document.querySelectorAll('.playground svg text')].filter((words) => {
  const at = words.getBoundingClientRect(), all = words.ownerSVGElement.getBoundingClientRect();
  const isSmall = words.getScreenCTM().a * parseFloat(getComputedStyle(words).fontSize) < 10;
  const isCut = at.left < all.left - 1 || at.right > all.right + 1 || at.bottom > all.bottom + 1;
  return words.textContent && (isSmall || isCut);
}).map((words) => words.textContent)"""
LANGUAGE = "(document.querySelector('article') || document.body).lang"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# a page that runs Python says so until it has answered
ANSWERED = "!(document.getElementById('said')?.textContent || '').startsWith('Python starts')"
IDS = "(kind) => [...document.querySelectorAll(`.playground ${kind}`)].map((one) => one.id)"
BARS = "[...document.querySelectorAll('.track[data-bar]')].map((bar) => bar.dataset.bar)"
OUTPUTS = "Object.fromEntries([...document.querySelectorAll('output')].map((o) => [o.id, o.value]))"
RESULTS = "#search-results ul li a"
# preload asks for style sheets again, which a page in a folder may not; the rules are Lighthouse's
AXE = {
    "preload": False,
    "rules": {name: {"enabled": True} for name in ("target-size", "td-has-header")},
}


@cache
def axe() -> str:
    """The script of axe-core."""
    return next(Path(axe_playwright_python.__file__).parent.rglob("axe.min.js")).read_text()


def size_of(urls: set[str]) -> int:
    """Bytes of files that a page loaded from the disk."""
    paths = {Path(url2pathname(urlsplit(url).path)) for url in urls if url.startswith("file:")}
    return sum(path.stat().st_size for path in paths if path.is_file())


def step(*words: object) -> None:
    """Says on the standard error what comes next."""
    print(*words, sep=", ", file=sys.stderr, flush=True)


def new_tab(browser: Browser, width: int = WIDTHS[0], scheme: str = "light") -> tuple[Page, list]:
    """A tab, and the list that the errors of its console are written to."""
    size, errors = {"width": width, "height": 900}, []
    tab = browser.new_page(viewport=size, color_scheme=scheme)
    tab.set_default_timeout(PATIENCE)
    tab.on("console", lambda said: said.type == "error" and errors.append(said.text))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    return tab, errors


def whole(browser: Browser, html: Path, page: str) -> Iterator[dict]:
    """What a page is in each window."""
    for window in WINDOWS:
        yield in_window(browser, html, page, *window)


def in_window(browser: Browser, html: Path, page: str, width: int, scheme: str) -> dict:
    """What a page is in one window."""
    where = page, f"{width} wide", scheme
    step(*where, "opening it")
    tab, errors = new_tab(browser, width, scheme)
    loaded = set()
    tab.on("request", lambda request: loaded.add(request.url))
    tab.goto(f"file://{html.resolve()}/{page}")
    tab.wait_for_load_state("networkidle")
    step(*where, "waiting for its Python")
    tab.wait_for_function(ANSWERED)
    moved = tab.evaluate(MOVED)
    step(*where, "loading its pictures")
    tab.evaluate(ALL_PICTURES)
    tab.wait_for_function(ARE_LOADED)
    step(*where, "measuring it")
    found = {"page": page, "width": width, "scheme": scheme, "errors": errors, "moved": moved}
    found |= {"broken": tab.evaluate(BROKEN), "unsized": tab.evaluate(UNSIZED)}
    found |= {"too_wide": tab.evaluate(TOO_WIDE), "unreadable": tab.evaluate(UNREADABLE)}
    found |= {"bytes": size_of(loaded), "language": tab.evaluate(LANGUAGE)}
    step(*where, "axe-core looks at it")
    tab.evaluate(axe())
    violations = tab.evaluate(f"axe.run(document, {json.dumps(AXE)})")["violations"]
    found["axe"] = [f"{one['id']}: {one['nodes'][0]['html'][:100]}" for one in violations]
    tab.close()
    return found


def term(browser: Browser, html: Path, page: str) -> Iterator[dict]:
    """The definition that opens when the keyboard reaches the first term of a page, and whether
    Escape closes it.
    """
    step(page, "reaching a term")
    tab, errors = new_tab(browser)
    tab.goto(f"file://{html.resolve()}/{page}")
    tab.focus("a.term")
    said = tab.inner_text("#definition")
    step(page, "closing its definition")
    tab.keyboard.press("Escape")
    yield {"said": said, "is_closed": tab.is_hidden("#definition"), "errors": errors}


def search(browser: Browser, html: Path, page: str, word: str) -> Iterator[dict]:
    """Titles of the pages that are found for who looks for a word on a page."""
    step(page, f"looking for {word}")
    tab, errors = new_tab(browser)
    tab.goto(f"file://{html.resolve()}/{page}")
    tab.fill("form[role=search] input[name=q]", word)
    tab.press("form[role=search] input[name=q]", "Enter")
    step(page, f"waiting for pages with {word}")
    tab.wait_for_selector(RESULTS)
    tab.wait_for_timeout(500)  # they come one after the other
    yield {"titles": tab.locator(RESULTS).all_inner_texts(), "errors": errors}


def printed(browser: Browser, html: Path, page: str) -> Iterator[dict]:
    """On paper: lines of code that are cut, what lies over the text, pictures that are missing."""
    step(page, "opening it")
    tab, errors = new_tab(browser, PAPER)
    tab.goto(f"file://{html.resolve()}/{page}")
    step(page, "printing it")
    tab.pdf()  # which also loads pictures that wait for a reader
    tab.emulate_media(media="print")
    step(page, "measuring it")
    found = {"cut": tab.evaluate(CUT), "missing": tab.evaluate(BROKEN), "errors": errors}
    yield found | {"over": tab.is_visible(".skip-to-content")}


def used(browser: Browser, html: Path, page: str) -> Iterator[dict]:
    """What a page of the playground is after each thing that a visitor can do, by width."""
    for width in WIDTHS:
        where = page, f"{width} wide"
        step(*where, "opening it")
        tab, errors = new_tab(browser, width)
        tab.goto(f"file://{html.resolve()}/{page}")
        tab.wait_for_function(ANSWERED)
        done, wrong = [], []
        for what in visit(tab):
            step(*where, what)
            done.append(what)
            wrong += [f"{what}: {words}" for words in tab.evaluate(UNREADABLE)]
            wrong += [f"{what}: {error}" for error in errors]
            errors.clear()
            if (wider := tab.evaluate(TOO_WIDE)) > 0:
                wrong.append(f"{what}: {wider} pixels wider than the window")
        shown = tab.evaluate(OUTPUTS)
        yield {"page": page, "width": width, "done": done, "wrong": wrong, "shown": shown}
        tab.close()


def visit(tab: Page) -> Iterator[str]:
    """Does one thing after the other, and says which."""
    for name in tab.evaluate(IDS, "input"):
        for key in ("Home", "End"):
            tab.press(f"#{name}", key)
            yield f"{name} at {key}"
    for name in tab.evaluate(IDS, "button"):
        button = tab.locator(f".playground #{name}")
        if button.count() and button.is_enabled():
            button.click()
            yield f"{name} pressed"
    for name in tab.evaluate(BARS):
        at = tab.locator(f".track[data-bar={name}]").bounding_box()
        middle = at["x"] + at["width"] / 2
        tab.mouse.move(middle, at["y"] + at["height"] - 3)
        tab.mouse.down()
        tab.mouse.move(middle, at["y"] + 1, steps=4)
        tab.mouse.up()
        yield f"bar {name} dragged to its top"


LOOKS = {"whole": whole, "term": term, "search": search, "used": used, "printed": printed}


def main(chromium: str, html: str, name: str, *words: str) -> None:
    """One look. words: the page, and what a search looks for."""
    step(words[0], "starting the browser")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for found in LOOKS[name](browser, Path(html), *words):
            print(json.dumps(found), flush=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
