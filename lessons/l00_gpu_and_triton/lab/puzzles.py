"""The ten Triton puzzles as pictures: which inputs they are shown on, and what a learner's kernel
reads and writes there.

    show("0.3")        in a notebook: the film of your kernel, or, while it is to do, of a right one
"""

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lessons.toolbox.draw.film import film
from lessons.toolbox.exercises.exercise import ExerciseError, all_exercises
from lessons.toolbox.exercises.loading import describe, folder_of, load_exercise
from lessons.toolbox.measure.device import default_device


@dataclass(frozen=True)
class Puzzle:
    """inputs: {argument: its shape}; programs: those that are drawn; message: what one should see."""

    inputs: dict[str, tuple[int, ...]]
    programs: tuple
    message: str
    view: Callable[[Tensor], Tensor] = lambda x: x

    def tensors(self) -> dict[str, Tensor]:
        """{argument: [...]} as a kernel gets them: 0, 1, 2, … in each."""
        device = default_device()
        return {
            name: self.view(
                torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).view(
                    shape
                )
            )
            for name, shape in self.inputs.items()
        }


PUZZLES = {
    "0.1": Puzzle({"x": (50,)}, (0, 3), "The last program stops where x ends"),
    "0.2": Puzzle(
        {"x": (20,), "y": (20,)}, (0, 1), "Two loads, one store, each with the same mask"
    ),
    "0.3": Puzzle({"x": (4, 6)}, (0, 3), "One program a row: 6 loads, 1 store"),
    "0.4": Puzzle(
        {"x": (4, 12)},
        (0, 3),
        "The strides skip every second column; the result has no gaps",
        lambda x: x[:, ::2],
    ),
    "0.5": Puzzle({"x": (12,), "y": (20,)}, ((0, 0), (1, 2)), "A tile needs a piece of x and of y"),
    "0.6": Puzzle({"x": (12, 20)}, ((0, 1), (1, 2)), "Tile (i, j) of x becomes tile (j, i) of out"),
    "0.7": Puzzle({"x": (3, 10)}, (1,), "A row is loaded once and stored once"),
    "0.8": Puzzle({"x": (2, 40)}, (0,), "Three steps along a row, the last one with a tail"),
    "0.9": Puzzle(
        {"a": (32, 48), "b": (48, 32)}, ((1, 0),), "A row of tiles of a, a column of tiles of b"
    ),
    "0.10": Puzzle({"a": (20, 24), "b": (24, 20)}, ((1, 1),), "The same with tails on three sides"),
}


def show(exercise_id: str, impl: str = "exercises") -> Figure | None:
    """The film of a puzzle: of the kernel in `impl`, or of the solution while it is still a stub.

    Says in one line what keeps it from being drawn. Raises ValueError for an unknown puzzle.
    """
    if exercise_id not in PUZZLES:
        raise ValueError(f"exercise_id is {exercise_id!r}; accepted: {', '.join(PUZZLES)}")
    puzzle = PUZZLES[exercise_id]
    (entry,) = all_exercises(exercise_id)
    _forget(folder_of(impl) / entry.file)
    try:
        function, whose = load_exercise(folder_of(impl), entry), "yours"
    except NotImplementedError:
        function, whose = load_exercise(folder_of("solutions"), entry), "to do"
    except ExerciseError as error:
        print(error)
        return None
    inputs = puzzle.tensors()
    title = f"{exercise_id}, {whose}: {puzzle.message}"
    try:
        return film(lambda: function(**inputs), inputs, programs=puzzle.programs, title=title)
    except Exception as error:  # whatever a learner's kernel raises
        print(f"{exercise_id}: {describe(error, folder_of(impl) / entry.file)}")
        return None


def _forget(path: Path) -> None:
    """Let the next load read the file anew: it may have been edited since the notebook began."""
    sys.modules.pop(f"{path.parent.name}.{path.stem}", None)
    linecache.checkcache(str(path))  # Triton reads a kernel's source through it
