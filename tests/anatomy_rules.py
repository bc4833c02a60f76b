"""The anatomy of a complete lesson: its files, and the fourteen points of its README.md and
MORE.md.

The course reports what a lesson lacks as a warning, because a lesson may have good reasons.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from book.links import LINK
from tests.course_rules import Complaints, complete_rooms
from tests.link_rules import rows_of_tests
from tests.markdown import section, sections

HEADINGS = {  # in this order
    "README.md": (
        "You will be able to",
        "The bottleneck",
        "The idea in one picture",
        "Derivation",
        "Code",
        "Exercises",
        "Measured",
        "Where it loses",
        "Quiz",
        "Next",
    ),
    "MORE.md": ("What must hold", "In production", "Museum"),
}
# What times a lesson that has no lab/benchmark.py: lesson 20's measurements are of processes, which
# its own commands start.
MEASURED_BY = {"l20_parallelism": "lab/experiments.py"}
OPENING = {
    "how long it takes": r"\d+ (?:min|h)",
    "whether a CPU is enough": r"\bCPU\b",
    "what it needs": r"(?i)\bneeds?\b",
}
QUIZ_ITEMS = 5
# a link, or a title in italics
SOURCE = r"\]\(https?://|<https?://|(?<!\*)\*\w[^*]+\*(?!\*)"


def missing_parts(root: Path) -> Complaints:
    """Files that a complete lesson lacks."""
    missing = []
    for room in complete_rooms(root):
        number, topic = room.name[:3], room.name
        measured_by = MEASURED_BY.get(topic, "lab/benchmark.py")
        wanted = [
            f"lessons/{topic}/{name}"
            for name in ("naive.py", "optimized.py", "test_equivalence.py", measured_by)
        ]
        wanted += [
            f"notebooks/{topic[1:]}.ipynb",
            f"solutions/{topic}.py",
            f"exercises/{topic}.py",
            f"tests/exercises/test_{number}.py",
            f"tests/exercises/wrong/{number}.py",
        ]
        missing += [f"{topic}: {name} is missing" for name in wanted if not (root / name).exists()]
    return missing


def bad_readmes(root: Path) -> Complaints:
    """What the README.md and MORE.md of a complete lesson lack of the fourteen points."""
    complaints = []
    for room in complete_rooms(root):
        for name, lacks in (("README.md", _readme), ("MORE.md", _more)):
            file = room / name
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            complaints += [f"{room.name}/{name}: {complaint}" for complaint in lacks(text)]
    return complaints


def _more(text: str) -> Iterator[str]:
    yield from _headings(list(sections(text)), HEADINGS["MORE.md"])
    rows = rows_of_tests(text)
    if not rows:
        yield "What must hold: there is no table"
    for row in rows:
        if "test_" not in row:
            yield f"What must hold: no test is named in the row {row!r}"


def _readme(text: str) -> Iterator[str]:
    opening = text.split("\n## ")[0]
    title = opening.partition("\n")[0]
    if not title.startswith("# ") or len(title.split()) < 5:
        yield f"the title {title!r} makes no claim (a sentence, not a topic)"
    for said, pattern in OPENING.items():
        if not re.search(pattern, opening):
            yield f"the lines under the title do not say {said}"
    yield from _headings(list(sections(text)), HEADINGS["README.md"])
    if not any(bang for bang, *_ in LINK.findall(section(text, "The idea in one picture"))):
        yield "The idea in one picture: shows no image"
    exercises = section(text, "Exercises")
    if exercises.count("<details>") < 3:
        yield "Exercises: fewer than three folded hints"
    if "make check" not in exercises:
        yield "Exercises: no command that checks them (make check ...)"
    if (count := section(text, "Quiz").count("<details>")) != QUIZ_ITEMS:
        yield f"Quiz: {count} folded answers, not {QUIZ_ITEMS}"
    if len(re.findall(SOURCE, section(text, "Next"))) < 3:
        yield "Next: fewer than three primary sources (a link, or the title in italics)"


def _headings(names: list[str], headings: tuple[str, ...]) -> Iterator[str]:
    found = []
    for name in names:
        found += [wanted for wanted in headings if name.lower().startswith(wanted.lower())]
    if missing := [wanted for wanted in headings if wanted not in found]:
        yield f"headings are missing: {', '.join(missing)}"
    elif found != list(headings):
        yield f"headings are not in the order {', '.join(headings)}"
