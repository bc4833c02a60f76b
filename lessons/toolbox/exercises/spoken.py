"""Exercises and what their checks say, in the learner's language (lessons/toolbox/language.py)."""

from collections.abc import Iterator, Mapping

from lessons.toolbox.exercises.exercise import Exercise
from lessons.toolbox.exercises.parts import hints_of, title_of
from lessons.toolbox.language import SOURCE, language, said


def statement_of(entry: Exercise) -> dict[str, str]:
    """An exercise's title and hints, translated: the lesson's README has them in each language."""
    code = language()
    if code == SOURCE:
        return {}
    english = [entry.title, *hints_of(entry)]
    translated = [title_of(entry, code), *hints_of(entry, code)]
    return dict(zip(english, translated)) if len(english) == len(translated) else {}


def message_of(record: Mapping[str, str], statement: Mapping[str, str]) -> Iterator[str]:
    """What a check says, line by line. record: its properties; statement: see statement_of."""
    first, *others = record["message"].splitlines() or [""]
    check, why = record.get("check", ""), record.get("why", "")
    label = f"{check}, {why}: " if why else f"{check}: "
    if check and first.startswith(label):
        rest = said(first.removeprefix(label), statement)
        yield f"{check}, {said(why)}: {rest}" if why else f"{check}: {rest}"
    else:
        yield said(first, statement)
    for line in others:
        bare = line.lstrip(" ")
        yield line[: len(line) - len(bare)] + said(bare, statement)
