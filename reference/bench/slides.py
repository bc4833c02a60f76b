"""Slides of every lesson for a projector: PNGs, slides.pdf, and index.html with arrow keys.

    python -m reference.bench.slides [--out build/slides] [--lesson 03]

A lesson begins with what students will be able to do and the question that they guess at. Its
figures follow without the captions under them, then the guessed question's answer and the exercise
for class. Draws the lessons' own pictures, and the records under results/. Nothing is measured
again. A caption names the machine and the versions, so show the recorded figure too when a student
asks.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.draw.figure import pictures_to
from reference.bench.class_texts import aims_of, chosen, first_question, plain, plan_of, title_of
from reference.bench.deck import Deck

ROOT = Path(__file__).parents[2]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser("python -m reference.bench.slides", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/slides", help="a folder")
    parser.add_argument("--lesson", help="of one lesson only, for example 03; default: all")
    options = parser.parse_args(argv)
    return run_command("slides", lambda: draw_all(options))


def draw_all(options: argparse.Namespace) -> int:
    """Draw what was asked for behind a progress bar; print what has no figure of its own."""
    from rich.progress import track

    works = dict(works_of(options.lesson))
    check_writable(options.out)
    left = []
    with Deck(options.out) as deck:
        for name, draw in track(works.items(), description="drawing"):
            try:
                draw(deck)
            except (KeyError, TypeError, ValueError):
                left.append(name)  # a record of another shape, which its own program draws
    print(f"{len(deck.slides)} slides in {options.out}: index.html, slides.pdf")
    if left:
        print(f"without a figure of their own kind: {', '.join(left)}")
    return 0


def rooms() -> list[Path]:
    """The lessons that have pictures."""
    return [file.parents[1] for file in sorted((ROOT / "lessons").glob("l*/lab/pictures.py"))]


def works_of(lesson: str | None) -> Iterator[tuple[str, Callable[[Deck], int]]]:
    """(name, function that adds its slides to a deck and returns how many) in the order of the
    deck: of one lesson ("03"), or of all and then of the engine. Raises ValueError for an unknown
    lesson.
    """
    pictures = {room.name[1:3]: room for room in rooms()}
    records = sorted((ROOT / "results").glob("*/*.json"))
    of_lessons = {
        path for path in records if path.name.startswith("l") and path.name[1:3].isdigit()
    }
    for number in chosen(lesson):
        yield f"opening {number}", partial(open_lesson, number)
        if number in pictures:
            yield pictures[number].name, partial(draw_pictures, pictures[number])
        for path in records:
            if path in of_lessons and path.name[1:3] == number:
                yield f"{path.parent.name}/{path.stem}", partial(draw_record, path)
        yield f"closing {number}", partial(close_lesson, number)
    if lesson is None:
        yield "architecture", draw_engine
        for path in records:
            if path not in of_lessons:
                yield f"{path.parent.name}/{path.stem}", partial(draw_record, path)


def open_lesson(lesson: str, deck: Deck) -> int:
    """What students will be able to do, and what they guess at first."""
    deck.part = lesson
    title = f"Lesson {int(lesson)}: {title_of(lesson)}"
    lines = ["You will be able to", *(f"•  {aim}" for aim in aims_of(lesson))]
    deck.add_words(f"l{lesson}_0_opening", title, lines)
    question = first_question(lesson).question
    deck.add_words(f"l{lesson}_0_question", "Write down your guess", [question])
    return 2


def close_lesson(lesson: str, deck: Deck) -> int:
    """The answer, and the exercise for class."""
    asked, exercise = first_question(lesson), plain(plan_of(lesson)["Exercise"])
    deck.add_words(f"l{lesson}_9_answer", asked.question, [asked.answer])
    deck.add_words(f"l{lesson}_9_exercise", "Your turn", [f"Exercise {exercise}"])
    return 2


def programs_of(room: Path) -> list[Path]:
    """The programs that draw a lesson's pictures: of its README first, then of pages below it."""
    return sorted((room / "lab").glob("*picture*.py"), key=lambda file: file.stem != "pictures")


def draw_pictures(room: Path, deck: Deck) -> int:
    """The pictures of a lesson, by running the programs that draw them. Raises ValueError."""
    taken: list[str] = []

    def take(figure, path: Path) -> None:
        taken.append(path.stem)
        deck.add(figure, f"{room.name}_{path.stem}")

    with pictures_to(take):
        for program in programs_of(room):
            run_program(room, program)
    return len(taken)


def run_program(room: Path, program: Path) -> None:
    """Run a program as its command does. Raises ValueError if it fails."""
    arguments, sys.argv = sys.argv, [str(program)]
    try:
        runpy.run_path(str(program), run_name="__main__")  # also if a later lesson has imported it
    except SystemExit as end:
        if end.code:
            raise ValueError(f"{room.name}: its pictures cannot be drawn") from None
    finally:
        sys.argv = arguments


def draw_engine(deck: Deck) -> int:
    """The picture of the front page."""
    from reference.engine import architecture

    deck.part = "engine"
    deck.add(architecture.draw(), "architecture")
    return 1


def draw_record(path: Path, deck: Deck) -> int:
    """The figures of a record; returns how many. Raises ValueError, KeyError or TypeError for a
    record that has none of a kind which is known here.
    """
    from lessons.l04_positions.lab.figures import extrapolation_plot
    from lessons.l05_gqa.lab.figures import quality_figure
    from lessons.toolbox.measure import records
    from reference.bench import bench_figures
    from reference.ladder import ladder_report

    data = json.loads(path.read_text(encoding="utf-8"))
    if "points" in data:  # of bench_serving
        figures = bench_figures.figures_of(data)
        for name, (figure, _) in figures.items():
            deck.add(figure, f"{path.parent.name}_{path.stem}_{name}")
        return len(figures)
    if path.stem == "ladder":
        figure = ladder_report.figure_of(ladder_report.load(path))
    elif path.stem == "l04_extrapolation":
        figure = extrapolation_plot(data)
    elif path.stem == "l05_quality":
        figure = quality_figure(data, records.read_json(path.with_name("l05_step.json")))
    else:
        figure = records.figure_of(data)
    deck.add(figure, f"{path.parent.name}_{path.stem}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
