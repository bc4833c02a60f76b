"""A copy kernel's compiled code, instruction by instruction: what each does to the registers of one
warp, and which sectors of memory its loads and stores ask for.

    show_instructions()                    in a notebook: a slider
    python -m lessons.l00_gpu_and_triton.lab.instructions

writes instructions.svg beside this file. Nothing is timed, and no GPU is needed: the code for an
H100 runs on the CPU.
"""

from pathlib import Path

import torch

from lessons.l00_gpu_and_triton import optimized
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.slider import slider
from lessons.toolbox.draw.steps import steps_figure
from lessons.toolbox.exercises.exercise import ExerciseError, all_exercises
from lessons.toolbox.exercises.loading import folder_of, load_exercise, load_file
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.gpu.recorder import Recording, record_warp

CHIP = 90
COUNT, BLOCK = 150, 128  # 128 threads a program: each has one element
NEIGHBOURS, LAST, GAPS = "neighbours", "the last program", "every eighth element"
YOURS = "your copy"
LAUNCHES = {NEIGHBOURS: (1, 0), LAST: (1, 1), GAPS: (8, 0)}  # distance of the elements, program
TITLES = {
    NEIGHBOURS: "A warp copies 32 neighbours",
    LAST: "The last program: its mask is off from lane 22 on",
    GAPS: "A warp copies every eighth element",
    YOURS: "Your kernel of exercise 0.1: its first warp",
}
INSTRUCTIONS_SVG = Path(__file__).parent / "instructions.svg"
INSTRUCTIONS_ALT = (
    "Four instructions of a copy kernel with the registers of one warp. Each lane gets its number. "
    "A mask is off in the lanes behind the end. The load of neighbours asks for 4 sectors, that of "
    "every eighth element for 32."
)
CAPTION = f"compiled for an H100, run on a CPU · {COUNT} elements, {BLOCK} a program, 4 warps"


def recordings(impl: str | None = "exercises") -> dict[str, Recording]:
    """{name: the steps of one warp} of the lesson's copies; of the learner's first, once exercise
    0.1 in the folder `impl` is solved (None: without). To be called where kernels are compiled.
    """
    x = torch.arange(8.0 * COUNT)
    found = {}
    for name, (distance, program) in LAUNCHES.items():
        found[name] = record_warp(
            lambda distance=distance: optimized.every_nth(x, distance, COUNT, BLOCK), program
        )
    return _learners(impl, x) | found if impl else found


def _learners(impl: str, x: torch.Tensor) -> dict[str, Recording]:
    """The same of exercise 0.1, if it is solved and does no harm."""
    (entry,) = all_exercises("0.1")
    try:
        load_exercise(folder_of(impl), entry)
    except (NotImplementedError, ExerciseError):
        return {}
    kernel = load_file(folder_of(impl) / entry.file).copy_kernel
    out = torch.empty(COUNT)
    grid = (-(-COUNT // BLOCK),)
    try:
        return {YOURS: record_warp(lambda: kernel[grid](x[:COUNT].clone(), out, COUNT, BLOCK))}
    except Exception:  # whatever a learner's kernel raises: `check` says what is wrong with it
        return {}


def counted_sectors(distances: list[int], itemsize: int) -> list[int]:
    """Sectors that the first warp of a copy asks for, for each distance of the elements that it reads,
    of `itemsize` bytes each: counted. To be called where kernels are compiled.
    """
    dtype = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[itemsize]
    found = []
    for distance in distances:
        x, out = torch.zeros(BLOCK * distance, dtype=dtype), torch.empty(BLOCK, dtype=dtype)
        arguments = (x, out, BLOCK, distance, BLOCK)
        recording = record_warp(lambda given=arguments: optimized.every_nth_kernel[(1,)](*given))
        found.append(recording.steps[load_of(recording)].request.counted["sectors"])
    return found


def load_of(recording: Recording) -> int:
    """The step, from 0, that loads from memory."""
    return next(
        i for i, s in enumerate(recording.steps) if s.request and s.request.kind == "loaded"
    )


def _step(recording: Recording, operation: str, operand: str = "") -> int:
    """The first step with this operation, of which an operand is this one."""
    return next(
        i
        for i, s in enumerate(recording.steps)
        if s.instruction.op == operation and operand in ("", *s.instruction.operands)
    )


def draw_still(found: dict[str, Recording]) -> ClassFigure:
    """Four steps of the lesson's kernel that one should have seen."""
    near, last, far = (found[name] for name in (NEIGHBOURS, LAST, GAPS))
    shown = [
        (near, _step(near, "mov", "%tid.x")),
        (last, _step(last, "setp")),
        (near, load_of(near)),
        (far, load_of(far)),
    ]
    few, many = (r.steps[load_of(r)].request.counted["sectors"] for r in (near, far))
    title = f"The same load: {few} sectors for neighbours, {many} for every eighth element"
    return steps_figure(shown, title, CAPTION, around=0)


def show_instructions() -> None:
    """A slider over the instructions. Where the code cannot be compiled or run, one line says why and
    the committed picture is shown.
    """
    try:
        found = call(f"{__name__}:recordings", chip=CHIP)
    except RuntimeError as error:
        from IPython.display import SVG, display

        print(f"No slider over the compiled instructions: {error}. A picture in its place:")
        display(SVG(filename=str(INSTRUCTIONS_SVG)))
        return

    def draw(kernel: str, step: int) -> ClassFigure:
        recording = found[kernel]
        at = min(step, len(recording.steps)) - 1
        return steps_figure([(recording, at)], TITLES[kernel], CAPTION)

    most = max(len(recording.steps) for recording in found.values())
    slider(draw, kernel=list(found), step=(1, most, 1, 1), still=lambda: draw_still(found))


if __name__ == "__main__":
    own = "lessons.l00_gpu_and_triton.lab.instructions"
    lessons_own = call(f"{own}:recordings", None, chip=CHIP)
    save_svg(draw_still(lessons_own), INSTRUCTIONS_SVG, alt=INSTRUCTIONS_ALT)
