"""The instructions of the copy kernel, as the slider shows them: what each does to a warp's
registers, and the sectors that its loads and stores ask for, counted where the compiled code runs.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from lessons.l00_gpu_and_triton.coalescing import sectors_of_stride
from lessons.l00_gpu_and_triton.lab import instructions
from lessons.l00_gpu_and_triton.lab.instructions import (
    CAPTION,
    GAPS,
    LAST,
    NEIGHBOURS,
    TITLES,
    YOURS,
    draw_banks,
    draw_still,
    load_of,
    show_banks,
    show_instructions,
)
from lessons.toolbox.draw.figure import alt_of, overlapping_texts, texts_outside
from lessons.toolbox.draw.steps import passes_of, steps_figure
from lessons.toolbox.exercises.exercise import SOLUTIONS, generate
from lessons.toolbox.gpu import another_process
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.gpu.words import in_words
from lessons.toolbox.measure.device import has_triton

PAGES = "".join(
    (Path(__file__).parents[1] / name).read_text("utf-8") for name in ("README.md", "MORE.md")
)
LAB = "lessons.l00_gpu_and_triton.lab.instructions"
needs_compiler = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton's compiler")


@pytest.fixture(scope="module")
def found():
    """The recordings, with the solution of exercise 0.1 in the learner's place."""
    if not has_triton():
        pytest.skip("NOT RUN: needs Triton's compiler")
    return call(f"{LAB}:recordings", "solutions", chip=90)


def step(recording, operation, operand=""):
    return recording.steps[instructions._step(recording, operation, operand)]


def whole(values):
    return np.broadcast_to(values, 32).tolist()


@pytest.mark.sample(1, of="compiled code")
def test_the_registers_are_those_of_the_warp(found):
    """Lane i is thread i; program 1 begins at element 128, and its mask ends at element 150."""
    last = found[LAST]
    lanes = list(range(32))
    assert whole(step(last, "mov", "%ctaid.x").written["%r3"]) == [1] * 32
    assert whole(step(last, "mov", "%tid.x").written["%r4"]) == lanes
    mask = step(last, "setp")
    (on,) = mask.written.values()
    assert on.tolist() == [128 + lane < 150 for lane in lanes]
    places = next(v for v in mask.read.values() if len(v) == 32)
    assert places.tolist() == [128 + lane for lane in lanes]
    load = last.steps[load_of(last)]
    assert load.lanes.tolist() == on.tolist() and load.request.lanes.tolist() == list(range(22))
    (values,) = load.written.values()
    assert values.view(np.float32)[:22].tolist() == [128.0 + lane for lane in range(22)]
    assert values[22:].tolist() == [0] * 10, "a lane that is off keeps `other`"


@pytest.mark.sample(1, of="compiled code")
def test_addresses_and_sectors(found):
    """4 bytes from lane to lane: 4 sectors; 32 bytes: 32. The store has no gaps in either."""
    for name, distance, sectors in ((NEIGHBOURS, 1, 4), (GAPS, 8, 32), (YOURS, 1, 4)):
        recording = found[name]
        load = recording.steps[load_of(recording)].request
        argument, offsets = recording.place_in(load.address)
        assert argument == "x_ptr" and offsets.tolist() == [4 * distance * i for i in range(32)]
        assert (load.counted["sectors"], load.counted["least_sectors"]) == (sectors, 4)
        store = next(s.request for s in recording.steps if s.instruction.op == "st")
        assert (store.kind, store.counted["sectors"]) == ("stored", 4)
        assert recording.place_in(store.address)[0] == "out_ptr"
    tail = found[LAST].steps[load_of(found[LAST])].request
    assert (tail.counted["requests"], tail.counted["sectors"], tail.counted["bytes"]) == (1, 3, 88)


@needs_compiler
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.sample(1, of="compiled code")
def test_the_sectors_of_the_prediction_are_the_counted_ones(itemsize):
    """Every distance and size that the picture of gaps is drawn for, and the text's and the
    quiz's.
    """
    distances = [1, 2, 3, 4, 8, 16, 32]
    counted = call(f"{LAB}:counted_sectors", distances, itemsize, chip=90)
    assert counted == [sectors_of_stride(distance, itemsize) for distance in distances]


@needs_compiler
def test_the_table_of_counts():
    """MORE.md's rows, counted again."""
    for row in call(f"{LAB}:counted_rows", chip=90):
        assert f"| {' | '.join(row)} |" in PAGES, row


@pytest.fixture(scope="module")
def summed():
    if not has_triton():
        pytest.skip("NOT RUN: needs Triton's compiler")
    return call(f"{LAB}:sum_over_rows", chip=90)


def test_banks(summed):
    """The passes that are drawn are those that are counted. Of the picture: a pass of 32 banks, and
    lanes 64 bytes apart, of which eight want different words of one bank.
    """
    shared = [s.request for s in summed.steps if s.request and s.request.kind == "shared"]
    assert len(shared) > 10 and {request.size for request in shared} == {4, 16}
    for request in shared:
        assert len(passes_of(request)) == request.counted["passes"]
    title = draw_banks(summed).get_suptitle()
    assert title == "32 words in 1 pass, 16 in 8: a bank conflict"
    worst = max(shared, key=lambda request: request.counted["passes"])
    assert set(np.diff(worst.address)) == {64} and worst.counted["least_passes"] == 1
    answered = passes_of(worst)
    assert [sorted(one) for one in answered] == [[0, 16]] * 8
    lanes = [lane for one in answered for answer in one.values() for lane in answer]
    assert sorted(lanes) == list(range(16))


def test_floats_of_shared_memory_are_read_as_floats(summed):
    """Column c of the input holds c: the first warp stores the sum of its 8 rows, 8c."""
    store = next(s for s in summed.steps if s.request and s.request.kind == "shared")
    value = store.instruction.operands[1]
    assert value in summed.floats and store.instruction.operands[0].base not in summed.floats
    assert store.read[value].view(np.float32)[:16].tolist() == [32.0 * lane for lane in range(16)]


@pytest.mark.sample(1, of="compiled code")
def test_every_instruction_has_words_that_name_its_registers(found):
    for recording in found.values():
        for one in recording.steps:
            words = in_words(one.instruction)
            assert "manual" not in words, one.instruction.text
            for register in one.written:
                assert register in words, words


@pytest.mark.sample(4, of="pictures")
def test_steps_are_readable(found, summed):
    figures = [draw_still(found), draw_banks(summed)]
    asking = [at for at, one in enumerate(summed.steps) if one.request]
    figures += [steps_figure([(summed, at)], "A sum", CAPTION) for at in asking]
    for name, recording in found.items():
        for at in (0, load_of(recording), len(recording.steps) - 1):
            figures.append(steps_figure([(recording, at)], TITLES[name], CAPTION))
    for figure in figures:
        assert not texts_outside(figure) and not overlapping_texts(figure)
    assert figures[0].get_suptitle().startswith("The same load: 4 sectors for neighbours, 32 for")
    assert re.search(r"from lane (\d+)", TITLES[LAST])[1] == "22"


def test_without_a_compiler_one_line_and_the_committed_picture(monkeypatch, capsys):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    monkeypatch.setattr(another_process, "has_triton", lambda: False)
    for show, path in (
        (show_instructions, instructions.INSTRUCTIONS_SVG),
        (show_banks, instructions.BANKS_SVG),
    ):
        show()
        said = capsys.readouterr().out
        assert said.count("\n") == 1
        assert "Triton is not installed, so no kernel can be compiled" in said
        assert alt_of(path) in shown.pop().data


@needs_compiler
def test_an_unsolved_exercise_shows_the_lessons_copy_alone(tmp_path):
    """Its stub is never run, and its solution is not shown before it is written."""
    name = "l00_gpu_and_triton.py"
    (tmp_path / name).write_text(generate(SOLUTIONS / name), encoding="utf-8")
    names = list(call(f"{LAB}:recordings", str(tmp_path), chip=90))
    assert YOURS not in names and names[0] == NEIGHBOURS
    with pytest.raises(RuntimeError, match="nothing"):
        call(f"{LAB}:nothing", chip=90)
    with pytest.raises(ValueError, match="chip: got 12; accepted: 75, 80"):
        call(f"{LAB}:recordings", chip=12)
