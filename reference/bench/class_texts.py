"""What a class sees of a lesson's texts: its title, its aims, its quiz, the teacher's question, and
its exercises without and with their answers.
"""

import ast
import re
from dataclasses import dataclass

from lessons.toolbox.exercises.exercise import GAP, ROOT, SOLUTIONS, Exercise
from lessons.toolbox.exercises.parts import names_of, undecorated

COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# one line of a quiz up to its fold, whose beginning may be on the same line or on the next one
QUESTION = re.compile(
    r"^\d\. (.+?)\s*<details><summary>Answer</summary>(.+?)</details>", re.DOTALL | re.MULTILINE
)
IN_BRACKETS = re.compile(r"\s*\(([^()]*(?:\([^()]*\)[^()]*)*[.?!])\)")  # a sentence in brackets


@dataclass(frozen=True)
class Asked:
    """A question and its answer, in Markdown."""

    question: str
    answer: str


def numbers() -> list[str]:
    """The lessons that there are: "00", "01"."""
    return [readme.parent.name[1:3] for readme in sorted((ROOT / "lessons").glob("l*/README.md"))]


def chosen(lesson: str | None) -> list[str]:
    """One lesson or all. Raises ValueError for one that there is not."""
    if lesson is None:
        return numbers()
    if lesson.zfill(2) not in numbers():
        raise ValueError(f"--lesson: got {lesson!r}; accepted: {', '.join(numbers())}")
    return [lesson.zfill(2)]


def readme_of(lesson: str) -> str:
    """A lesson's text without the sources of its numbers, which are comments."""
    (path,) = (ROOT / "lessons").glob(f"l{lesson}_*/README.md")
    return COMMENT.sub("", path.read_text(encoding="utf-8"))


def title_of(lesson: str) -> str:
    """What the lesson shows, as a sentence."""
    return plain(readme_of(lesson).partition("\n")[0].removeprefix("# "))


def aims_of(lesson: str) -> list[str]:
    """What a reader will be able to do."""
    lines = section(readme_of(lesson), "You will be able to").splitlines()
    return [plain(line.removeprefix("- ")) for line in lines if line.startswith("- ")]


def quiz_of(lesson: str) -> list[Asked]:
    """The questions at its end, with their answers."""
    found = QUESTION.findall(section(readme_of(lesson), "Quiz"))
    return [Asked(question, answer.strip()) for question, answer in found]


def plan_of(lesson: str) -> dict[str, str]:
    """The teacher's plan: {"Ask first": text, "Show": …}."""
    text = (ROOT / "lessons/TEACHING.md").read_text(encoding="utf-8")
    found = re.search(rf"^### Lesson {int(lesson)}:.*\n((?:- .*\n)+)", text, re.MULTILINE)
    return dict(re.findall(r"^- \*\*([^*]+)\.\*\* (.+)$", found[1], re.MULTILINE))


def first_question(lesson: str) -> Asked:
    """What the class guesses before it learns. In the plan each answer is in brackets."""
    text = plain(plan_of(lesson)["Ask first"])
    return Asked(IN_BRACKETS.sub("", text), " ".join(IN_BRACKETS.findall(text)))


def solved(entry: Exercise) -> str:
    """The code of an exercise with its answer, and without the marks around it."""
    source = (SOLUTIONS / entry.file).read_text(encoding="utf-8")
    text = GAP.sub(lambda gap: gap[3].rstrip("\n"), source)
    nodes = [n for n in ast.parse(text).body if getattr(n, "name", None) in names_of(entry)]
    return "\n\n\n".join(undecorated(text, node) for node in nodes)


def section(text: str, heading: str) -> str:
    """What is below a heading of the second level. Raises ValueError if there is none."""
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise ValueError(f"there is no part {heading!r}")
    return found[1]


def plain(text: str) -> str:
    """Markdown as words: labels in place of links, no stars, no backticks."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|`|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)", "", text).strip()
