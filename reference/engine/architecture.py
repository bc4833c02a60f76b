"""The picture of the engine's parts and their files, which the front page shows.

    python -m reference.engine.architecture

writes architecture.svg beside this file.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.patches import Rectangle

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.draw.figure import GREY, SMALL, ClassFigure, frame, save_svg, style

HERE = Path(__file__).parent
ALT = (
    "Requests go from clients through a router and a server to the async engine. Below it, in a "
    "process of its own, runs the engine's loop: the scheduler chooses, the model runner computes, "
    "the sampler draws, and each names its file and the files of the parts that it uses."
)
WIDTH, HEIGHT = 3.0, 0.74  # of a box, in units of the axes
WHITE, PALE, PALER = "#FFFFFF", "#DDE7EE", "#F4F4F4"


class Box(NamedTuple):
    """A part. x, y: its middle. file: from the repository's root."""

    name: str
    file: str
    x: float
    y: float

    @property
    def shown(self) -> str:
        """The file, as short as it can be found by: `reference/` and a lesson's topic are left
        out.
        """
        top, rest = self.file.split("/", 1)
        if top == "reference":
            return rest
        room, name = rest.split("/", 1)
        return f"lesson {int(room[1:3])}: {name}"


PEOPLE = (
    Box("load client", "reference/bench/bench_serving.py", 1.85, 9.1),
    Box("router", "reference/router/forward.py", 5.1, 9.1),
    Box("server", "reference/server/app.py", 8.3, 9.1),
    Box("async engine", "reference/engine/async_engine.py", 11.55, 9.1),
)
PROCESS = Box("engine's process", "reference/engine/process/core.py", 11.55, 7.45)
STEP = (
    Box("scheduler", "lessons/l15_chunked_prefill/optimized.py", 2.2, 5.6),
    Box("model runner", "reference/engine/model_runner.py", 6.7, 5.6),
    Box("sampler", "reference/engine/sampler.py", 11.2, 5.6),
)
PARTS = (
    Box("blocks of the cache", "lessons/l12_paged_kv/blocks.py", 2.2, 4.4),
    Box("prefix cache", "lessons/l13_prefix_caching/cache.py", 2.2, 3.5),
    Box("turns of users", "lessons/l22_serving/fair.py", 2.2, 2.6),
    Box("decoder", "lessons/l02_naive_attention/decoder.py", 6.7, 4.4),
    Box("attention, kernels", "lessons/l12_paged_kv/optimized.py", 6.7, 3.5),
    Box("CUDA graphs", "reference/features/decode_graphs.py", 6.7, 2.6),
    Box("structured outputs", "reference/features/structured.py", 11.2, 4.4),
    Box("drafts, verification", "reference/speculation/speculation.py", 11.2, 3.5),
    Box("text of tokens", "reference/engine/text.py", 11.2, 2.6),
)
WHOLE = (
    Box("quantized weights", "reference/weights/quantization.py", 2.2, 1.0),
    Box("LoRA adapters", "reference/features/lora.py", 6.7, 1.0),
    Box("workers, many GPUs", "reference/parallel/engine.py", 11.2, 1.0),
)
BOXES = (*PEOPLE, PROCESS, *STEP, *PARTS, *WHOLE)


@style()
def draw() -> ClassFigure:
    """The engine, from the clients to the kernels."""
    fig, ax = frame(
        "An event loop hears all clients; one engine loop schedules, runs and samples for all of "
        "them",
        "below each part its file: of reference/, or of a lesson",
        (12, 8.4),
    )
    ax.set_xlim(0, 13.4)
    ax.set_ylim(0.1, 10.3)
    ax.axis("off")
    area(ax, 0.05, 8.45, 13.3, 1.65, "people: any number of them, at any speed")
    area(ax, 0.05, 0.25, 13.3, 6.5, "the engine's loop (engine.py): one step for all requests")
    for box in BOXES:
        put(ax, box, PALE if box in STEP else WHITE)
    for row, shape in ((PEOPLE, "<|-|>"), (STEP, "-|>")):
        for before, after in pairwise(row):
            half = WIDTH / 2
            arrow(ax, (before.x + half, before.y), (after.x - half, after.y), shape)
    for box in STEP:
        arrow(ax, (box.x, 4.4 + HEIGHT / 2), (box.x, box.y - HEIGHT / 2), "-")
    first, last, top = STEP[0], STEP[-1], STEP[0].y + HEIGHT / 2
    ax.plot([last.x, last.x, first.x], [top, top + 0.2, top + 0.2], color="black", lw=1.4)
    arrow(ax, (first.x, top + 0.2), (first.x, top), "-|>")
    for upper, below_y in ((PEOPLE[-1], PROCESS.y + HEIGHT / 2), (PROCESS, 6.78)):
        arrow(ax, (upper.x, upper.y - HEIGHT / 2), (upper.x, below_y), "<|-|>")
    look = dict(size=SMALL, color=GREY, va="center")
    beside = PROCESS.x - WIDTH / 2 - 0.2, PROCESS.y
    ax.text(*beside, "requests and aborts down, newest answers up", ha="right", **look)
    ax.text(0.7, 1.65, "what changes the model under all of it", ha="left", **look)
    return fig


def area(ax, x: float, y: float, width: float, height: float, name: str) -> None:
    """A frame around parts that share a loop."""
    ax.add_patch(Rectangle((x, y), width, height, fc=PALER, ec=GREY, ls="--", lw=1.2, zorder=0))
    ax.text(x + 0.15, y + height - 0.27, name, color=GREY, fontweight="bold", va="center")


def put(ax, box: Box, colour: str) -> None:
    """A box with its name and its file."""
    corner = box.x - WIDTH / 2, box.y - HEIGHT / 2
    ax.add_patch(Rectangle(corner, WIDTH, HEIGHT, fc=colour, ec="black", lw=1.4, zorder=2))
    ax.text(box.x, box.y + 0.17, box.name, ha="center", va="center", fontweight="bold", zorder=3)
    ax.text(box.x, box.y - 0.19, box.shown, ha="center", va="center", size=SMALL, zorder=3)


def arrow(ax, begin: tuple[float, float], end: tuple[float, float], shape: str) -> None:
    """A line between two boxes. shape: matplotlib's name of its ends."""
    props = {"arrowstyle": shape, "color": "black", "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, begin, arrowprops=props, zorder=1)


def main(argv: list[str] | None = None) -> int:
    """The command line, which takes no arguments; returns the exit code."""
    prog = "python -m reference.engine.architecture"
    OneLineParser(prog, description=__doc__.split("\n\n")[0]).parse_args(argv)
    return run_command("architecture", save)


def save() -> int:
    """Draw it and write it."""
    save_svg(draw(), HERE / "architecture.svg", alt=ALT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
