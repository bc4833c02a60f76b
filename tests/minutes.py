"""How long a lesson takes, by one rule, so that its minutes follow its words.

    python -m tests.minutes      writes the minutes into all lessons and onto the front page

Reading: 200 words a minute of what is read from top to bottom, and a minute more for each figure
and for each step of the derivation, because these are worked through with a pencil. Code: the sum
of the exercises. Both are rounded up to five minutes. Plots are an estimate of the lesson's own.
"""

import json
import math
import re
from pathlib import Path

from tests.course_rules import Complaints, complete_rooms
from tests.text_rules import core_words

WORDS_A_MINUTE = 200
ROUNDED_TO = 5
LINE = re.compile(r"^Read (\d+) min · code (\d+) min · plot (\d+) min", re.MULTILINE)
FIGURE = re.compile(r"^!\[", re.MULTILINE)
STEP = re.compile(r"^\*\*Step \d", re.MULTILINE)
EXERCISE = re.compile(r"^<details><summary><b>[^<]*</b> · (\d+) minutes", re.MULTILINE)
ROW = re.compile(
    r"^(\| \[\d\d .*\]\(lessons/(l\d\d_\w+)/README\.md\) \|[^|]*\| )(\d+)(?= \|)", re.MULTILINE
)

# what a notebook's first cell says: of the exercises, or of the whole lesson
OF_EXERCISES = re.compile(
    r"(?:exercises|puzzles) take (?:about|under) ([\w ]+?)(?: and every|[.,])"
)
OF_ALL = re.compile(r"About ([\w ]+) with the exercises")
SPOKEN = {
    "an hour": 60,
    "an hour and a half": 90,
    "two hours": 120,
    "two hours and a quarter": 135,
    "two hours and twenty minutes": 140,
    "two and a half hours": 150,
    "three hours": 180,
}
NEAR = 15  # minutes that words may differ


def wrong_minutes(root: Path) -> Complaints:
    """Lessons whose minutes are not those of the rule."""
    complaints = []
    for room in complete_rooms(root):
        said = LINE.search((room / "README.md").read_text(encoding="utf-8"))
        found = said and tuple(map(int, said.groups()[:2]))
        if found != (wanted := minutes(room)):
            complaints.append(
                f"{room.name}/README.md: reading and code take {found} minutes; by the rule "
                f"{wanted}: python -m tests.minutes writes them"
            )
    return complaints


def minutes(room: Path) -> tuple[int, int]:
    """Minutes of reading and of code."""
    text = (room / "README.md").read_text(encoding="utf-8")
    pauses = len(FIGURE.findall(text)) + len(STEP.findall(text))
    code = sum(map(int, EXERCISE.findall(text)))
    return rounded(core_words(room) / WORDS_A_MINUTE + pauses), rounded(code)


def rounded(exact: float) -> int:
    return ROUNDED_TO * math.ceil(exact / ROUNDED_TO)


def wrong_notebooks(root: Path) -> Complaints:
    """Notebooks whose first cell says another time than their lesson."""
    complaints = []
    for room in complete_rooms(root):
        page = root / f"notebooks/{room.name[1:]}.ipynb"
        if not page.is_file():
            continue
        cell = json.loads(page.read_text(encoding="utf-8"))["cells"][0]
        text = " ".join("".join(cell["source"]).split())
        found = OF_EXERCISES.search(text) or OF_ALL.search(text)
        said = found[1] if found else ""
        wanted = minutes(room)[1] if OF_EXERCISES.search(text) else sum_of(room)
        if abs(spoken(said) - wanted) > NEAR:
            complaints.append(
                f"{page.name}: its first cell says {said!r}; by the lesson's README it is {wanted} "
                f"minutes (accepted: {', '.join(SPOKEN)}, or a number of minutes)"
            )
    return complaints


def spoken(text: str) -> int:
    """Minutes that words say; 0 for what is no time."""
    number = re.fullmatch(r"(\d+) minutes", text)
    return int(number[1]) if number else SPOKEN.get(text, 0)


def sum_of(room: Path) -> int:
    """Minutes of the whole lesson, as its README.md says them."""
    text = (room / "README.md").read_text(encoding="utf-8")
    return sum(map(int, LINE.search(text).groups()))


def write(root: Path) -> None:
    for room in complete_rooms(root):
        file, (read, code) = room / "README.md", minutes(room)
        text = file.read_text(encoding="utf-8")
        line = rf"Read {read} min · code {code} min · plot \3 min"
        file.write_text(LINE.sub(line, text, count=1), encoding="utf-8")
    front = root / "README.md"
    text = front.read_text(encoding="utf-8")
    text = ROW.sub(lambda row: f"{row[1]}{sum_of(root / 'lessons' / row[2])}", text)
    front.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[1])
