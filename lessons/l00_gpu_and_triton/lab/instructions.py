"""A copy kernel's compiled code, instruction by instruction: what each does to the registers of one
warp, and which sectors of memory its loads and stores ask for.

    show_instructions()                    in a notebook: a slider
    show_banks()                           and what shared memory answers in one pass, and in eight

pictures.py writes instructions.svg and banks.svg. Nothing is timed, and no GPU is needed: the code
for an H100 runs on the CPU.
"""

import linecache
from collections import Counter
from pathlib import Path

import torch

from lessons.l00_gpu_and_triton import optimized
from lessons.l00_gpu_and_triton.lab import profile as profile_of
from lessons.toolbox.draw.figure import ClassFigure
from lessons.toolbox.draw.slider import slider
from lessons.toolbox.draw.steps import steps_figure
from lessons.toolbox.exercises.exercise import ExerciseError, all_exercises
from lessons.toolbox.exercises.loading import folder_of, load_exercise, load_file
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.gpu.counters import WORD
from lessons.toolbox.gpu.recorder import Recording, record_warp
from lessons.toolbox.profile.__main__ import profiled

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
KERNELS = {
    "`scale`": profile_of.optimized,
    "`every_nth`, distance 8": profile_of.gaps,
    "`row_max`": profile_of.rows,
    "`column_sums`": profile_of.columns,
    "`tile_product`": profile_of.tiles,
}
INSTRUCTIONS_SVG = Path(__file__).parent / "instructions.svg"
BANKS_SVG = Path(__file__).parent / "banks.svg"
ROWS, COLUMNS = 32, 64  # of the sum: one step of its loop
BANKS_CAPTION = f"compiled for an H100, run on a CPU · column_sums of {ROWS} × {COLUMNS}, 4 warps"
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
    """Sectors that the first warp of a copy asks for, for each distance of the elements that it
    reads, of `itemsize` bytes each: counted. To be called where kernels are compiled.
    """
    dtype = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[itemsize]
    found = []
    for distance in distances:
        x, out = torch.zeros(BLOCK * distance, dtype=dtype), torch.empty(BLOCK, dtype=dtype)
        arguments = (x, out, BLOCK, distance, BLOCK)
        recording = record_warp(lambda given=arguments: optimized.every_nth_kernel[(1,)](*given))
        found.append(recording.steps[load_of(recording)].request.counted["sectors"])
    return found


def sum_over_rows() -> Recording:
    """The steps of a warp of `column_sums`. To be called where kernels are compiled."""
    x = torch.arange(float(COLUMNS)).repeat(ROWS, 1)
    return record_warp(lambda: optimized.column_sums(x))


def counted_rows() -> list[list[str]]:
    """The table of MORE.md: what the kernels of lab/profile.py ask of memory, counted, and what
    would do for the same bytes. To be called where kernels are compiled.
    """
    rows = []
    for name, function in KERNELS.items():
        (profile,) = profiled(function, "h100")[0]
        loads, stores = Counter(), Counter()
        for line, row in profile.lines.items():
            is_store = line and "tl.store" in linecache.getline(line.file, line.number)
            (stores if is_store else loads).update(row)
        pairs = [
            (loads["sectors"], loads["least_sectors"]),
            (stores["sectors"], stores["least_sectors"]),
            (profile.total["passes"], profile.total["least_passes"]),
        ]
        rows.append([name, *(f"{many:,} / {least:,}" if many else "0" for many, least in pairs)])
    return rows


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


def draw_banks(recording: Recording) -> ClassFigure:
    """Of the sum's accesses to shared memory the one with the fewest passes, of as many lanes as
    there are, and the one with the most.
    """
    asking = [(i, s.request) for i, s in enumerate(recording.steps) if s.request]
    shared = [(i, r) for i, r in asking if r.kind == "shared" and r.size == WORD]
    best, _ = min(shared, key=lambda pair: (pair[1].counted["passes"], -len(pair[1].lanes)))
    worst, request = max(shared, key=lambda pair: pair[1].counted["passes"])
    few = recording.steps[best].request
    title = (
        f"{len(few.lanes)} words in {few.counted['passes']} pass, "
        f"{len(request.lanes)} in {request.counted['passes']}: a bank conflict"
    )
    return steps_figure([(recording, best), (recording, worst)], title, BANKS_CAPTION, around=0)


def draw_recorded_still() -> ClassFigure:
    """The four steps, recorded now. Raises RuntimeError where no code is compiled."""
    return draw_still(call(f"{__name__}:recordings", None, chip=CHIP))


def draw_recorded_banks() -> ClassFigure:
    """The two accesses, recorded now. Raises RuntimeError where no code is compiled."""
    return draw_banks(call(f"{__name__}:sum_over_rows", chip=CHIP))


def show_banks() -> None:
    """The picture of banks: recorded now, or the committed one, after one line that says why."""
    from IPython.display import SVG, display

    try:
        display(draw_recorded_banks())
    except RuntimeError as error:
        print(f"Shared memory's banks are not recorded here: {error}. A picture in its place:")
        display(SVG(filename=str(BANKS_SVG)))


def show_instructions() -> None:
    """A slider over the instructions. Where the code cannot be compiled or run, one line says why
    and the committed picture is shown.
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
