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
HANGUL = re.compile("[가-힣]")
LARGEST = 2**20  # bytes that a page may load
# a folder of pictures shows all of them
GALLERY, LARGEST_GALLERY = "code/results/h200/index.html", 2 * LARGEST
# of the search page, whose heading is the theme's
MEANT = dict.fromkeys(("search.html", "search.html?lang=ko"), ("page-has-heading-one",))
ROOMS = "lessons/l09_flash_attention", "lessons/l27_states", "lessons/l12_paged_kv"
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
    "ko/lessons/l09_flash_attention/README.html",
    *(f"{room}/{page}.html" for room in ROOMS for page in ("README", "MORE")),
]


@pytest.fixture(scope="module")
def looked(request) -> dict:
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: a browser takes a minute (make test-all)")
    if not PYTHON.exists() or not (HTML / "index.html").exists():
        pytest.skip("NOT RUN: there is no book here (make book)")
    command = [PYTHON, "-m", "book.look", CHROMIUM, HTML, *PAGES]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@in_a_browser
def test_every_page_is_whole_in_every_window(looked):
    assert {look["page"] for look in looked["looks"]} == set(PAGES)
    assert len(looked["looks"]) == 4 * len(PAGES)  # two widths, light and dark
    for look in looked["looks"]:
        where = f"{look['page']}, {look['width']} wide, {look['scheme']}"
        assert not look["errors"] and not look["broken"], f"{where}: {look}"
        assert look["too_wide"] <= 0, f"{where}: {look['too_wide']} pixels wider than the window"
        assert look["language"] == ("ko" if look["page"].startswith("ko/") else ""), where
        largest = LARGEST_GALLERY if look["page"] == GALLERY else LARGEST
        assert look["bytes"] <= largest, f"{where}: {look['bytes']} bytes"


@in_a_browser
def test_everybody_can_read_it(looked):
    """Contrast, names, order and keyboard, as far as axe-core finds what is wrong."""
    for look in looked["looks"]:
        meant = MEANT.get(look["page"], ())
        found = [said for said in look["axe"] if not said.startswith(meant or ("?",))]
        assert not found, f"{look['page']}, {look['width']} wide, {look['scheme']}: {found}"


@in_a_browser
def test_a_term_opens_for_the_keyboard_and_closes(looked):
    for said, page in (("term", "lessons/GLOSSARY.md"), ("term_ko", "ko/lessons/GLOSSARY.md")):
        assert looked[said] in glossary.definitions(REPOSITORY, page).values()


@in_a_browser
def test_the_search_finds_without_a_server(looked):
    titles, found = looked["search"]["titles"], " ".join(looked["search"]["titles"])
    assert "Glossary" in found and "Lesson 15" in found and not HANGUL.search(found), titles
    assert looked["search"]["errors"] == []


@in_a_browser
def test_a_korean_page_searches_in_korean_pages(looked):
    titles, found = looked["search_ko"]["titles"], " ".join(looked["search_ko"]["titles"])
    assert "용어집" in found and "레슨 15" in found and "Lesson" not in found, titles
    assert looked["search_ko"]["errors"] == []


def test_the_book_names_what_looks_at_it():
    wanted = (REPOSITORY / "book/requirements.txt").read_text(encoding="utf-8")
    for package in ("Sphinx", "myst-nb", "furo", "playwright", "axe-playwright-python"):
        assert f"\n{package}==" in wanted
