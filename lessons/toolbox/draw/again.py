"""The command that draws a room's pictures again: `python -m lessons.lNN_topic.lab.pictures`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.draw.figure import save_svg

# what draws it, and its alt text (None: what the page says)
Picture = tuple[Callable[[], Figure], str | None]


def draw_again(
    file: str, doc: str, pictures: Mapping[str, Picture], argv: list[str] | None = None
) -> int:
    """Write {name: picture} as SVG files beside a module of a room's `lab`. file: the module's.
    doc: its docstring, of which the first paragraph is the help. argv: a command line without
    arguments. Returns the exit code.
    """
    path = Path(file)
    prog = f"python -m lessons.{path.parts[-3]}.lab.{path.stem}"
    OneLineParser(prog, description=doc.split("\n\n")[0]).parse_args(argv)

    def draw_all() -> int:
        for name, (draw, alt) in pictures.items():
            save_svg(draw(), path.with_name(f"{name}.svg"), alt=alt)
        return 0

    return run_command(path.stem, draw_all)
