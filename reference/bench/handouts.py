"""The quiz and the exercises of the lessons on paper, and their answers on other paper.

    python -m reference.bench.handouts [--out build/handouts] [--lesson 03]

Writes exercises.html, which holds no hint and no answer, and answers.html with the hints and the
solutions. A browser prints them, each lesson on new pages. They need no server and no network.
"""

import argparse
import html
import re
import sys
from collections.abc import Callable
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.exercises.exercise import Exercise
from lessons.toolbox.exercises.parts import hints_of, stub_of
from reference.bench.class_texts import COMMENT, chosen, quiz_of, solved, title_of

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")  # of no use on paper
# the first hint of an exercise: it and what follows is an answer's
HINTS = re.compile(r"<details><summary>Hint .*", re.DOTALL)
LINES = 4  # to write on, after a question
LOOK = """
body { max-width: 46em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 Georgia, serif;
  color: #111; background: #fff; }
h1, h2, h3, .effort { font-family: "DejaVu Sans", sans-serif; line-height: 1.25; }
h2 { font-size: 1.3em; } h3 { font-size: 1.05em; margin-bottom: .2em; }
pre { font: 12px/1.35 "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  border-left: 3px solid #999; padding-left: .8em; }
code { font: .85em "DejaVu Sans Mono", monospace; }
pre code { font: inherit; }
table { border-collapse: collapse; } td, th { border: 1px solid #999; padding: .2em .6em; }
.effort { color: #444; font-size: .85em; margin-top: 0; }
.lines { list-style: none; padding: 0; } .lines li { border-bottom: 1px solid #aaa; height: 2em; }
@media print {
  nav { display: none; }
  body { max-width: none; margin: 0; font-size: 11pt; } pre { font-size: 8.5pt; }
  section { break-before: page; } article { break-inside: avoid-page; }
  h2, h3 { break-after: avoid; }
}
"""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        "python -m reference.bench.handouts", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/handouts", help="a folder")
    parser.add_argument("--lesson", help="of one lesson only, for example 03; default: all")
    options = parser.parse_args(argv)
    return run_command("handouts", lambda: write(options))


def write(options: argparse.Namespace) -> int:
    """Write both pages."""
    lessons = chosen(options.lesson)
    check_writable(options.out)
    for name, title, part in (
        ("exercises.html", "Exercises", exercises_of),
        ("answers.html", "Answers", answers_of),
    ):
        path = options.out / name
        path.write_text(page(title, lessons, part), encoding="utf-8")
        print(path)
    return 0


def page(title: str, lessons: list[str], part: Callable[[str], list[str]]) -> str:
    """A page of HTML. part: the articles of a lesson."""
    links = " ".join(f'<a href="#l{lesson}">{int(lesson)}</a>' for lesson in lessons)
    body = [f"<h1>The Inference Ladder: {title.lower()}</h1>", f"<nav>Lessons: {links}</nav>"]
    for lesson in lessons:
        head = f"Lesson {int(lesson)}: {html.escape(title_of(lesson))}"
        articles = "\n".join(f"<article>{article}</article>" for article in part(lesson))
        body.append(f'<section id="l{lesson}"><h2>{head}</h2>\n{articles}</section>')
    head = (
        f'<meta charset="utf-8"><title>{title}: The Inference Ladder</title><style>{LOOK}</style>'
    )
    text = "\n".join(body)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{text}</body>\n</html>\n'


# ---------------------------------------------------------------- what students get


def exercises_of(lesson: str) -> list[str]:
    """The quiz and the exercises of a lesson, each with room to write or with the code to fill."""
    articles = ["<h3>Quiz</h3>"]
    for number, asked in enumerate(quiz_of(lesson), 1):
        articles.append(rendered(f"{number}\\. {asked.question}") + room())
    for entry, title, effort, statement in statements_of(lesson):
        articles.append(headed(entry, title, effort) + rendered(statement) + code(stub_of(entry)))
    return articles


def statements_of(lesson: str) -> list[tuple[Exercise, str, str, str]]:
    """Exercises in the order of the lesson: (exercise, title, minutes and stars, Markdown without
    the hints).
    """
    from lessons.toolbox.exercises.statements import statements  # needs nbformat

    found = []
    for entry, text in statements(lesson):
        head, effort, statement = text.split("\n", 2)
        title = head.removeprefix(f"### {entry.id} ")
        found.append((entry, title, effort, HINTS.sub("", statement)))
    return found


def room() -> str:
    """Lines for a pencil."""
    return '<ul class="lines" aria-hidden="true">' + "<li></li>" * LINES + "</ul>"


# ---------------------------------------------------------------- what the teacher keeps


def answers_of(lesson: str) -> list[str]:
    """The quiz with its answers, and the exercises with their hints and solutions."""
    articles = ["<h3>Quiz</h3>"]
    for number, asked in enumerate(quiz_of(lesson), 1):
        articles.append(rendered(f"{number}\\. {asked.question}\n\n{asked.answer}"))
    for entry, title, effort, _ in statements_of(lesson):
        hints = "\n".join(f"{number}. {hint}" for number, hint in enumerate(hints_of(entry), 1))
        articles.append(headed(entry, title, effort) + rendered(hints) + code(solved(entry)))
    return articles


# ---------------------------------------------------------------- HTML


def headed(entry: Exercise, title: str, effort: str) -> str:
    """An exercise's heading."""
    said = rendered(title).removeprefix("<p>").removesuffix("</p>\n")
    return f'<h3>{entry.id} {said}</h3><p class="effort">{html.escape(effort)}</p>'


def rendered(text: str) -> str:
    """Markdown as HTML, with labels in place of links."""
    from markdown_it import MarkdownIt

    text = LINK.sub(r"\1", COMMENT.sub("", text))
    return MarkdownIt("commonmark", {"html": False}).enable("table").render(text)


def code(source: str) -> str:
    """Python, as it is."""
    return f"<pre><code>{html.escape(source)}</code></pre>"


if __name__ == "__main__":
    sys.exit(main())
