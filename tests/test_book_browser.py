"""The book in a browser, for make test-all: `make book` first, and Chromium."""

import json
import re
import subprocess

import pytest

from book import glossary
from book.playground import alone
from book.stage import REPOSITORY
from tests.test_trace import CHROMIUM, in_a_browser

PYTHON = REPOSITORY / ".venv-book/bin/python"
HTML = REPOSITORY / "build/book/html"
SECONDS = 300  # that one page may take in all its windows; alone on a machine it takes ten
HANGUL = re.compile("[가-힣]")
LARGEST = 2**20  # bytes that a page may load
# a folder of pictures shows all of them
GALLERY, LARGEST_GALLERY = "code/results/h200/index.html", 2 * LARGEST
# of the search page, whose heading is the theme's
MEANT = dict.fromkeys(("search.html", "search.html?lang=ko"), ("page-has-heading-one",))
ROOMS = "lessons/l09_flash_attention", "lessons/l27_states", "lessons/l12_paged_kv"
LESSON = f"{ROOMS[0]}/README.html"
PAGES = [
    "index.html",
    "search.html",
    "search.html?lang=ko",
    "api.html",
    "lessons/GLOSSARY.html",
    "ko/lessons/GLOSSARY.html",
    "results/README.html",
    GALLERY,
    "code/lessons/l02_naive_attention/decoder.py.html",
    "notebooks/09_flash_attention.html",
    *(f"book/playground/{name}.html" for name in alone.NAMES),
    f"ko/{LESSON}",
    *(f"{room}/{page}.html" for room in ROOMS for page in ("README", "MORE")),
]


@pytest.fixture(scope="module")
def book(request) -> list[str]:
    """How to look at a page of the book that was made here: the command without its last words."""
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: a browser takes a minute (make test-all)")
    if not PYTHON.exists() or not (HTML / "index.html").exists():
        pytest.skip("NOT RUN: there is no book here (make book)")
    return [str(PYTHON), "-m", "book.look", CHROMIUM, str(HTML)]


def looked(book: list[str], *words: str, seconds: float = SECONDS) -> list[dict]:
    """What a look finds. If it stops or takes too long, the test fails with the step it was at."""
    command = [*book, *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=REPOSITORY, **pipes) as running:
        try:
            answers, steps = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            _, steps = running.communicate()
            last = steps.strip().rpartition("\n")[2] or "before its first step"
            pytest.fail(f"{' '.join(words)}: not done after {seconds} s: {last}", pytrace=False)
    if running.returncode:
        pytest.fail(f"{' '.join(words)} stopped: {steps}", pytrace=False)
    return [json.loads(line) for line in answers.splitlines()]


def faults(look: dict) -> list[str]:
    """What is wrong with a page in one window; each names the check."""
    page, found = look["page"], []
    found += [f"console: {one}" for one in look["errors"]]
    found += [f"picture that did not load: {one}" for one in look["broken"]]
    found += [f"picture without a size, which moves what follows: {one}" for one in look["unsized"]]
    if look["moved"] > 0.1:
        found.append(f"moved while it came: {look['moved']:.2f}, of at most 0.1")
    found += [f"words that are cut or too small: {one}" for one in look["unreadable"]]
    if look["too_wide"] > 0:
        found.append(f"width: {look['too_wide']} pixels wider than the window")
    if look["language"] != ("ko" if page.startswith("ko/") else ""):
        found.append(f"language: {look['language']!r}")
    largest = LARGEST_GALLERY if page == GALLERY else LARGEST
    if look["bytes"] > largest:
        found.append(f"size: {look['bytes']} bytes, of at most {largest}")
    # contrast, names, order and keyboard
    meant = MEANT.get(page, ())
    found += [f"axe-core: {one}" for one in look["axe"] if one.partition(":")[0] not in meant]
    return found


@in_a_browser
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_and_readable_in_every_window(page, book):
    looks = looked(book, "whole", page)
    assert len(looks) == 4  # two widths, light and dark
    wrong = [
        f"{page}, {look['width']} wide, {look['scheme']}: {fault}"
        for look in looks
        for fault in faults(look)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@in_a_browser
@pytest.mark.parametrize("name", [name for name in alone.NAMES if name != "trace"])
def test_a_visitor_moves_everything_to_its_ends(name, book):
    """With the keyboard and the mouse, at two widths: no error, no word cut or too small."""
    looks = looked(book, "used", f"book/playground/{name}.html")
    assert len(looks) == 2
    for look in looks:
        assert not look["wrong"], f"{name}, {look['width']} wide:\n" + "\n".join(look["wrong"])
        assert len(look["done"]) >= 3, look["done"]
        if name == "speculation":
            assert look["shown"]["q2-shown"] == "1.0" and look["shown"]["q1-shown"] == "0.0"


@in_a_browser
@pytest.mark.parametrize("page", [LESSON, f"{ROOMS[0]}/MORE.html"])
def test_a_lesson_can_be_printed(page, book):
    (found,) = looked(book, "printed", page)
    assert found == {"cut": [], "missing": [], "errors": [], "over": False}


@in_a_browser
@pytest.mark.parametrize("at", ["", "ko/"])
def test_a_term_opens_for_the_keyboard_and_closes(at, book):
    (found,) = looked(book, "term", at + LESSON)
    assert found["said"] in glossary.definitions(REPOSITORY, f"{at}lessons/GLOSSARY.md").values()
    assert found["is_closed"] and found["errors"] == []


@in_a_browser
def test_the_search_finds_without_a_server(book):
    (found,) = looked(book, "search", LESSON, "preemption")
    titles = " ".join(found["titles"])
    assert "Glossary" in titles and "Lesson 15" in titles and not HANGUL.search(titles), titles
    assert found["errors"] == []


@in_a_browser
def test_a_korean_page_searches_in_korean_pages(book):
    (found,) = looked(book, "search", f"ko/{LESSON}", "preemption")
    titles = " ".join(found["titles"])
    assert "용어집" in titles and "레슨 15" in titles and "Lesson" not in titles, titles
    assert found["errors"] == []


@in_a_browser
def test_a_look_that_takes_too_long_names_its_page_and_its_step(book):
    with pytest.raises(pytest.fail.Exception, match=r"whole index\.html: not done after 0\.9 s: ."):
        looked(book, "whole", "index.html", seconds=0.9)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)none\.html stopped: .*opening it"):
        looked(book, "whole", "none.html")


def test_the_book_names_what_looks_at_it():
    wanted = (REPOSITORY / "book/requirements.txt").read_text(encoding="utf-8")
    for package in ("Sphinx", "myst-nb", "furo", "playwright", "axe-playwright-python"):
        assert f"\n{package}==" in wanted
