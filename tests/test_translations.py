"""Translated pages say what their sources say, as far as a program sees it, and name what is old.

The front page may not be stale. Of the others the stale ones are listed, and are not compared.
"""

import re
import warnings
from pathlib import Path

import pytest

from book import glossary, notebooks, order, translations
from book.agreement import differences
from tests.warned import TranslationWarning

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = translations.translated(REPOSITORY)
FRONT = "README.ko.md"


def test_the_front_page_is_of_today():
    assert FRONT in PAGES and FRONT not in translations.stale(REPOSITORY), (
        f"README.md has changed: say it in {FRONT}, too, then python -m book.translations stamp "
        f"{FRONT}"
    )


def test_what_is_missing_or_stale_is_listed():
    old = [f"stale: {page}" for page in translations.stale(REPOSITORY)]
    old += [f"missing: {page}" for page in translations.missing(REPOSITORY)]
    if old:
        warnings.warn("\n".join(old), TranslationWarning, stacklevel=1)


def test_the_edition_means_to_have_every_page_that_it_has():
    """So that one that is deleted is missing, a lesson's MORE, too."""
    meant = translations.wanted(REPOSITORY)
    assert sorted(meant) == sorted(translations.source_of(page) for page in PAGES)
    more = [page for page in meant if page.endswith("/MORE.md")]
    rooms = sorted(REPOSITORY.glob("lessons/l[0-9][0-9]_*"))
    assert [REPOSITORY / page for page in more] == [room / "MORE.md" for room in rooms]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_agrees_with_its_source(page):
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert translations.STAMP.match(text), f"{page} names no source in its first line"
    if page not in translations.stale(REPOSITORY):
        assert translations.complaints(REPOSITORY, page) == []


def test_every_page_leads_to_its_source():
    for page in PAGES:
        head = (REPOSITORY / page).read_text(encoding="utf-8")[:1000]
        (target,) = re.findall(r"^\[English\]\((.*)\)$", head, re.MULTILINE)
        source = REPOSITORY / translations.source_of(page)
        assert ((REPOSITORY / page).parent / target).resolve() == source


def test_terms_of_the_glossary_keep_their_names():
    """Because lessons link to them, and code and papers use them."""
    anchors = [
        translations.headings((REPOSITORY / page).read_text(encoding="utf-8"))[1:]
        for page in ("lessons/GLOSSARY.md", "ko/lessons/GLOSSARY.md")
        if (REPOSITORY / page).is_file()
    ]
    assert anchors[0] == anchors[-1]


def test_pages_of_the_book_lead_to_their_translations_and_back():
    for page in translations.wanted(REPOSITORY):
        text = translations.with_switch(REPOSITORY, page)
        place = REPOSITORY / translations.place_of(page)
        (target,) = re.findall(r"^\[한국어\]\((.*)\)$", text, re.MULTILINE)
        assert ((REPOSITORY / page).parent / target).resolve() == place
        assert (
            translations.with_switch(REPOSITORY, translations.place_of(page)).count("[한국어]") == 0
        )


def test_the_book_lists_korean_lessons_by_their_short_titles():
    chapters = order.korean(REPOSITORY)
    titles = {chapter.page: chapter.title for chapter in chapters}
    below = {chapter.page for each in chapters for chapter in each.below}
    translated = {notebooks.place_of(page) for page in notebooks.pages(REPOSITORY)}
    assert {*titles, *below} == {*PAGES, *translations.OWN, *translated}
    for page, title in titles.items():
        number = re.search(r"/l(\d\d)_", page)
        assert title.startswith(f"{number[1]} ") if number else title


def test_a_korean_definition_is_plain_text():
    korean = glossary.definitions(REPOSITORY, "ko/lessons/GLOSSARY.md")
    assert set(korean) == set(glossary.definitions(REPOSITORY))
    for anchor, said in korean.items():
        assert said and not re.search(r"\]\(|\*\[|\*\*|`|레슨 \d+\*$", said), (anchor, said)


# ---------------------------------------------------------------- the rules themselves

SOURCE = """# Title

It takes 3.5 ms<!-- results/a.json#x --> of [time](b.md#time), `f(x)` and 12 bytes.

| a | 5 |
|---|---|

![A picture](c.svg)

```python
f(x)
```
"""
SLIPS = {
    "a number": (("3.5 ms", "3.6 ms"), "number '3.5' is in the source alone"),
    "a comment": (("#x", "#y"), "comment '<!-- results/a.json#x -->' is in the source alone"),
    "code in the line": (("`f(x)`", "f"), "code '`f(x)`' is in the source alone"),
    "a link": (("b.md#time", "b.md"), "link '(b.md#time)' is in the source alone"),
    "a picture": (("c.svg", "d.svg"), "link '!(c.svg)' is in the source alone"),
    "a row": (("|---|---|\n", "|---|---|\n| b | |\n"), "rows of tables: 2 in the source, 3 here"),
    "a cell": (("| a | 5 |", "| a | 5 | |"), "rows of tables: 2 in the source, 2 here"),
    "a line below a head": (("| a | 5 |\n|---|---|", "|---|---|\n| a | 5 |"), "or other cells"),
    "a number of a row": (
        ("12 bytes.\n\n| a | 5 |", "5 bytes.\n\n| a | 12 |"),
        "row 1: number '5' is",
    ),
    "a heading": (("# Title", "## Title"), "levels of headings: [1] in the source, [2] here"),
    "a line of code": (("\nf(x)\n", "\nf(y)\n"), "code 1: "),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_differs_is_seen(slip):
    (old, new), why = SLIPS[slip]
    assert differences(SOURCE, SOURCE) == []
    assert any(why in found for found in differences(SOURCE, SOURCE.replace(old, new)))


def test_the_words_of_a_picture_in_html_are_translated():
    picture = '<img alt="{}" src="{}">'
    assert differences(picture.format("30 s", "a.svg"), picture.format("초", "a.svg")) == []
    (_, why) = differences(picture.format("30 s", "a.svg"), picture.format("초", "b.svg"))
    assert "b.svg" in why


def test_a_word_may_become_a_digit():
    assert differences("a power of two", "2의 거듭제곱") == []
    assert differences("a power of two", "22의 거듭제곱, 2와 2") != []


@pytest.fixture
def course(tmp_path):
    """Two English pages, of which the second is translated."""
    (tmp_path / "lessons").mkdir()
    (tmp_path / "ko/lessons").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Front\n")
    (tmp_path / "lessons/A.md").write_text("# A\n\n[b](B.md#two) [code](x.py) [it](#a)\n")
    (tmp_path / "lessons/x.py").write_text("")
    (tmp_path / "lessons/B.md").write_text("# B\n\n## Two\n")
    (tmp_path / "ko/lessons/B.md").write_text("# 비\n\n## 둘\n")
    return tmp_path


def test_links_lead_to_korean_pages_where_there_are_some(course):
    page = course / "ko/lessons/A.md"
    page.write_text("# 에이\n\n[이것](#a) [코드](x.py) [비](B.md#two)\n")
    assert translations.stamp_all(course, ["ko/lessons/A.md"]) == []
    text = page.read_text(encoding="utf-8")
    assert "[이것](#에이) [코드](../../lessons/x.py) [비](B.md#둘)" in text
    assert text.startswith("<!-- source: lessons/A.md sha256: ")
    assert translations.complaints(course, "ko/lessons/A.md") == []
    page.write_text(text.replace("[비](B.md#둘)", "[비](../../lessons/B.md#two)"))
    (why,) = translations.complaints(course, "ko/lessons/A.md")
    assert "a link could lead to a Korean page" in why


def test_a_page_that_is_not_translated_is_missing(course):
    room = course / "lessons/l00_a"
    room.mkdir()
    for name in ("README", "MORE"):
        (room / f"{name}.md").write_text("# A\n")
    there = course / "ko/lessons/l00_a"
    there.mkdir()
    assert "lessons/l00_a/MORE.md" in translations.missing(course)
    (there / "MORE.md").write_text("# 에이\n")
    assert "lessons/l00_a/README.md" in translations.missing(course)
    assert "lessons/l00_a/MORE.md" not in translations.missing(course)


def test_a_page_is_stale_when_its_source_has_changed(course):
    page = "ko/lessons/B.md"
    assert translations.stale(course) == [page]
    assert translations.stamp_all(course, [page]) == [] == translations.stale(course)
    (course / "lessons/B.md").write_text("# B\n\n## Two of them\n")
    assert translations.stale(course) == [page]
    (course / "lessons/B.md").write_text("# B\n\n## Two\n\n3 more\n")
    (why,) = translations.stamp_all(course, [page])
    assert "number '3' is in the source alone" in why and translations.stale(course) == [page]
