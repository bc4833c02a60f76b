"""Handouts have every exercise, and no answer is on the students' page."""

import html
import re
from html.parser import HTMLParser

import pytest

from lessons.toolbox.exercises.exercise import GAP, SOLUTIONS, all_exercises, generate
from lessons.toolbox.exercises.parts import hints_of
from reference.bench import handouts
from reference.bench.class_texts import numbers, quiz_of, section, solved

VOID = {"meta", "br", "hr", "img"}


class Words(HTMLParser):
    """The words of a page; raises for a tag that is not closed in its order."""

    def __init__(self):
        super().__init__()
        self.open, self.found = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.get_starttag_text()

    def handle_data(self, data):
        self.found.append(data)


def words_of(page: str) -> str:
    """What is read on a page, with single spaces."""
    parser = Words()
    parser.feed(page)
    assert not parser.open
    return " ".join(" ".join(parser.found).split())


def said(markdown: str) -> str:
    """The words of a text in Markdown."""
    return words_of(handouts.rendered(markdown))


def leaked(lesson: str, page: str) -> list[str]:
    """Answers of a lesson that a page shows: of the quiz, hints, and lines of solutions that the
    stub has not.
    """
    shown, found = words_of(page), []
    found += [asked.answer for asked in quiz_of(lesson)]
    for entry in all_exercises(lesson):
        found += hints_of(entry)
    # a short one may be said elsewhere, too
    secrets = [text for text in found if len(said(text)) > 40 and said(text) in shown]
    lines = set(html.unescape(page).splitlines())
    for file in {entry.file for entry in all_exercises(lesson)}:
        given = set(generate(SOLUTIONS / file).splitlines())
        for gap in GAP.finditer((SOLUTIONS / file).read_text(encoding="utf-8")):
            own = {line for line in gap[3].splitlines() if len(line.strip()) > 25}
            secrets += sorted(own & lines - given)
    return secrets


@pytest.mark.parametrize("lesson", numbers())
def test_every_exercise_is_there_and_no_answer(lesson):
    page = handouts.page("Exercises", [lesson], handouts.exercises_of)
    shown = words_of(page)
    for entry in all_exercises(lesson):
        assert f"{entry.id} " in shown and f"{entry.name}" in page
        assert f"Exercise {entry.id}:" in html.unescape(page)  # its stub
    for asked in quiz_of(lesson):
        assert said(asked.question) in shown
    assert not leaked(lesson, page)
    assert "<details" not in page and ".md)" not in shown


@pytest.mark.parametrize("lesson", numbers())
def test_the_answers_have_all_of_them(lesson):
    page = handouts.page("Answers", [lesson], handouts.answers_of)
    shown = words_of(page)
    for asked in quiz_of(lesson):
        assert said(asked.answer) in shown
    for entry in all_exercises(lesson):
        assert len(hints_of(entry)) == 3
        assert all(said(hint) in shown for hint in hints_of(entry))
        assert solved(entry) in html.unescape(page)
        assert 'NotImplementedError("Exercise' not in solved(entry) and "# END" not in solved(entry)


def test_an_answer_on_the_wrong_page_is_seen():
    page = handouts.page("Exercises", ["10"], handouts.answers_of)
    found = leaked("10", page)
    assert any("exp(lse), relative to" in text for text in found)
    assert any("torch" in text for text in found) and any("33 splits are" in text for text in found)


def test_both_pages_are_written_and_an_unknown_lesson_is_refused(tmp_path, capsys):
    assert handouts.main(["--lesson", "3", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"exercises.html", "answers.html"}
    capsys.readouterr()
    assert handouts.main(["--lesson", "99", "--out", str(tmp_path)]) == 2
    assert "got '99'; accepted: 00, 01" in capsys.readouterr().err


def test_a_part_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no part 'Quizz'"):
        section("## Quiz\n", "Quizz")


def test_a_statement_cannot_write_into_the_page():
    text = handouts.rendered("[label](link.md) <script>x</script> `a<b`<!-- a source -->")
    assert "<script" not in text and "label" in text and "link.md" not in text
    assert "source" not in text and re.search("<code>a&lt;b</code>", text)
