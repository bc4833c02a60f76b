"""The command that draws a room's pictures again: `python -m lessons.lNN_topic.lab.pictures`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.draw.figure import save_svg


def draw_again(
    folder: Path, doc: str, figures: Mapping[str, Callable[[], Figure]], argv: list[str] | None
) -> int:
    """Write {name: what draws it} into a room's folder `lab`. doc: of the module, its first
    paragraph is the help. argv: a command line without arguments. Returns the exit code.
    """
    prog = f"python -m lessons.{folder.parent.name}.lab.pictures"
    OneLineParser(prog, description=doc.split("\n\n")[0]).parse_args(argv)

    def draw_all() -> int:
        for name, draw in figures.items():
            save_svg(draw(), folder / f"{name}.svg")
        return 0

    return run_command("pictures", draw_all)
