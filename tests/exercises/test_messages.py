"""Catalogues of messages: what they translate is in the code, and what checks say of wrong answers
to the first lessons is Korean.
"""

import re
import warnings

import pytest

from lessons.toolbox import language
from lessons.toolbox.exercises import report
from lessons.toolbox.exercises.exercise import all_exercises
from lessons.toolbox.exercises.progress import FAIL, PASS
from lessons.toolbox.exercises.spoken import message_of, statement_of
from lessons.toolbox.language import PLACE, Message, read_po, said
from tests.exercises import messages
from tests.exercises.running import checks_of, explained, forget_outcomes, run_check
from tests.exercises.wrong import answers_of
from tests.warned import MessageWarning

HANGUL = re.compile("[가-힣]")
# what a kernel did, access by access, and the fault of a machine: they stay English
RECORD = re.compile(
    r"program (\(.*\)|\d+)$|  +\d+\. |     |\w+: fault: |  line \d+: |  \.\.\. \d+ more"
)
NAMES = [name for name in messages.names() if messages.messages_of(name)]
LESSONS = [name for name in NAMES if name != messages.TOOLBOX]


@pytest.fixture
def korean(monkeypatch):
    monkeypatch.setenv("INFERENCE_LADDER_LANG", "ko")


def test_what_is_missing_or_stale_is_listed():
    lines = [f"{name}: stale: {text}" for name in NAMES for text in messages.stale(name)]
    lines += [f"{name}: missing: {text}" for name in NAMES for text in messages.missing(name)]
    if lines:
        warnings.warn("\n".join(lines), MessageWarning, stacklevel=1)


def test_lines_without_words_are_not_missed():
    lines = ["{1} {2}", "torch.{1} {2}", "{1}: 3", "값", "torch.{1} {2}"]
    assert messages.with_words(lines) == ["torch.{1} {2}", "값"]


@pytest.mark.parametrize("name", NAMES)
def test_a_translation_has_the_places_of_its_line(name):
    found = messages.messages_of(name)
    for message in found:
        assert message.translated, message.english
        assert set(PLACE.findall(message.translated)) == set(PLACE.findall(message.english)), (
            message.english
        )
    lines = [message.english for message in found]
    assert len(lines) == len(set(lines)), "a line is there twice"


@pytest.mark.parametrize("name", LESSONS)
def test_what_checks_say_of_wrong_answers_is_korean(name, korean):
    """Of one wrong answer to each exercise, and of each of its failure's lines."""
    for entry in all_exercises(name):
        statement, checks = statement_of(entry), checks_of(entry)
        assert HANGUL.search(statement[entry.title]) and len(statement) == 4
        answers = answers_of(entry.lesson).wrong_for(entry.id)
        check, answer, outcome = next(
            (check, answer, outcome)
            for check in checks
            for answer in answers[:2]
            if (outcome := run_check(check, lambda a=answer: a.function, 0)).status == FAIL
        )
        others = f"it passes for a, b; not for c: {check.why}" if check.why else None
        for slip in (answer.hint, None):
            text = explained(outcome, entry, slip, others)
            record = {"message": text, "check": check.name, "why": check.why}
            for line in message_of(record, statement):
                assert HANGUL.search(line) or RECORD.match(line), (entry.id, line)
    forget_outcomes()


def test_a_learner_reads_korean(korean, monkeypatch, capsys):
    entry = all_exercises("2.1")[0]
    failed = {"exercise": "2.1", "status": FAIL, "check": "values[square]"}
    failed |= {"why": "as many queries as keys", "prints": "mine\n"}
    label = "values[square], as many queries as keys: "
    failed["message"] = label + "your result has shape [2], expected [3]\n  hint: yours is empty"
    passed = {"exercise": "2.1", "status": PASS}
    monkeypatch.setattr(report, "records_of", lambda *args: [failed, passed])
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert not report.run_checks("2.1", "solutions")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (f"✗ 실패    2.1  {statement_of(entry)[entry.title]}  검사 2개 중 1개 통과")
    assert [line.strip() for line in lines[1:5]] == [
        "values[square], 쿼리와 키의 수가 같음: 결과: 모양이 [2], 기댓값은 [3]",
        "힌트: 비어 있습니다",
        "출력한 것:",
        "mine",
    ]
    assert lines[5].strip().startswith("다시 검사하기: ") and lines[-1] == "✗ 1 실패"


# ---------------------------------------------------------------- the rules themselves


@pytest.fixture
def catalogue(monkeypatch):
    """A catalogue of a few lines."""

    def of(**lines):
        made = language.catalogue_of([Message(key, value) for key, value in lines.items()])
        return lambda text: made.said(text, {})[0]

    return of


def test_values_take_their_places(catalogue):
    say = catalogue(**{"{1} has shape {2}": "{2}: {1}의 모양", "your result": "결과"})
    assert say("your result has shape [2, 3]") == "[2, 3]: 결과의 모양"
    assert say("its mask has shape [2]") == "[2]: its mask의 모양"
    assert say("nothing fits") == "nothing fits"


def test_the_reading_that_explains_more_counts(catalogue):
    lines = {"hint: {1}": "힌트: {1}", "{1} of dimension {2}": "차원 {2}의 {1}"}
    lines |= {"at indices {1} to {2}": "인덱스 {1}–{2}", "{1} of {2}": "{2}개 중 {1}개"}
    say = catalogue(**lines)
    assert say("hint: at indices 0 to 2 of dimension 1") == "힌트: 차원 1의 인덱스 0–2"
    assert say("3 of 4") == "4개 중 3개" and say("out of bounds") == "out of bounds"


def test_a_place_that_comes_twice_holds_the_same(catalogue):
    say = catalogue(**{"{2} entries have 0 to {2} - 1": "{2}개는 {2} - 1까지"})
    assert say("5 entries have 0 to 5 - 1") == "5개는 5 - 1까지"
    assert say("5 entries have 0 to 6 - 1") == "5 entries have 0 to 6 - 1"


PO = """# a comment
msgid ""
msgstr "Language: ko\\n"

#: a.py
msgid "one "
"line\\n"
msgstr "한 줄\\n"

#, fuzzy
msgid "two"
msgstr "둘"
"""


def test_a_catalogue_is_read():
    found = list(read_po(PO))
    assert found == [Message("one line\n", "한 줄\n"), Message("two", "둘", is_fuzzy=True)]
    with pytest.raises(ValueError, match="accepted: msgid, msgstr or a string"):
        list(read_po("msgid bare\n"))


def test_what_is_written_is_read():
    message = Message('a "b" \\ {1}\n', "ㄱ")
    assert list(read_po(messages.entry_of(message))) == [message]


def test_a_line_that_changed_is_missing_and_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "KOREAN", tmp_path)
    (hint, *_) = messages.wanted("l02")
    entries = [Message(hint, "쿼리"), Message("said no more", "옛말"), Message("two", "둘")]
    text = "\n".join(map(messages.entry_of, entries))
    (tmp_path / "l02.po").write_text(text, encoding="utf-8")
    assert hint not in messages.missing("l02") and len(messages.missing("l02")) > 100
    assert messages.stale("l02") == ["said no more", "two"]


@pytest.mark.parametrize(
    "variables, code",
    [
        ({"INFERENCE_LADDER_LANG": "ko"}, "ko"),
        ({"LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE"}, "en"),
        ({"LANG": "../"}, "en"),
        ({}, "en"),
    ],
)
def test_the_language_is_the_learners(monkeypatch, variables, code):
    for name in language.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert language.language() == code
    assert said("it printed:") == ("출력한 것:" if code == "ko" else "it printed:")
