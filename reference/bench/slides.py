"""Every figure of the course as a PNG for a projector, without the caption under it.

    python -m reference.bench.slides [--out build/slides] [--lesson 03]

Draws the lessons' own pictures, and the records under results/. Nothing is measured again. A
caption names the machine and the versions, so show the recorded figure too when a student asks.
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from lessons.toolbox.command import OneLineParser, check_writable, run_command
from lessons.toolbox.draw.figure import foot, pictures_to, style

ROOT = Path(__file__).parents[2]
SLIDE_PIXELS = 1920  # the width of most projectors


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
    if not works:
        lessons = ", ".join(room.name[1:3] for room in rooms())
        raise ValueError(f"--lesson: got {options.lesson!r}; accepted: {lessons}")
    check_writable(options.out)
    written, left = 0, []
    for name, draw in track(works.items(), description="drawing"):
        try:
            written += draw(options.out)
        except (KeyError, TypeError, ValueError):
            left.append(name)  # a record of another shape, which its own program draws
    print(f"{written} slides in {options.out}")
    if left:
        print(f"without a figure of their own kind: {', '.join(left)}")
    return 0


def rooms() -> list[Path]:
    """The lessons that have pictures."""
    return [file.parents[1] for file in sorted((ROOT / "lessons").glob("l*/lab/pictures.py"))]


def works_of(lesson: str | None) -> Iterator[tuple[str, Callable[[Path], int]]]:
    """(name, function that draws its slides into a folder and returns how many) of each room with
    pictures and of each record, of one lesson ("03") or of all, and then of the engine, too.
    """
    for room in rooms():
        if lesson in (None, room.name[1:3]):
            yield room.name, partial(draw_pictures, room)
    if lesson is None:
        yield "architecture", draw_engine
    for path in sorted((ROOT / "results").glob("*/*.json")):
        is_of = path.name[1:3] if path.name.startswith("l") and path.name[1:3].isdigit() else None
        if lesson in (None, is_of):
            yield f"{path.parent.name}/{path.stem}", partial(draw_record, path)


def draw_pictures(room: Path, out: Path) -> int:
    """The pictures of a lesson, by running the program that draws them."""
    taken: list[Path] = []

    def take(figure, path: Path) -> None:
        taken.append(out / f"{room.name}_{path.stem}.png")
        save_slide(figure, taken[-1])

    arguments, sys.argv = sys.argv, [str(room / "lab/pictures.py")]
    try:
        with pictures_to(take):
            runpy.run_module(f"lessons.{room.name}.lab.pictures", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise ValueError(f"{room.name}: its pictures cannot be drawn") from None
    finally:
        sys.argv = arguments
    return len(taken)


def draw_engine(out: Path) -> int:
    """The picture of the front page."""
    from reference.engine import architecture

    save_slide(architecture.draw(), out / "architecture.png")
    return 1


def draw_record(path: Path, out: Path) -> int:
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
            save_slide(figure, out / f"{path.parent.name}_{path.stem}_{name}.png")
        return len(figures)
    if path.stem == "ladder":
        figure = ladder_report.figure_of(ladder_report.load(path))
    elif path.stem == "l04_extrapolation":
        figure = extrapolation_plot(data)
    elif path.stem == "l05_quality":
        figure = quality_figure(data, records.read_json(path.with_name("l05_step.json")))
    else:
        figure = records.figure_of(data)
    save_slide(figure, out / f"{path.parent.name}_{path.stem}.png")
    return 1


def save_slide(fig: Figure, path: Path) -> None:
    """Write a figure as a PNG of a projector's width, without the line under it."""
    foot(fig, "")
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        fig.savefig(path, dpi=SLIDE_PIXELS / fig.get_figwidth())


if __name__ == "__main__":
    sys.exit(main())
