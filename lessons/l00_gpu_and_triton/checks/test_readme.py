"""The numbers and the excerpts of the README are those of the code."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from lessons.l00_gpu_and_triton import optimized
from lessons.l00_gpu_and_triton.coalescing import (
    LANES,
    moved_bytes,
    predicted_s,
    sectors,
    sectors_of_stride,
)
from lessons.l00_gpu_and_triton.lab import pictures
from lessons.l00_gpu_and_triton.lab.fun import mandelbrot
from lessons.l00_gpu_and_triton.lab.puzzles import show
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.exercises.exercise import SOLUTIONS, generate
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.proof.pages import pages

README = pages(Path(__file__).parents[1])


def test_the_table_of_memories():
    for row in pictures.memory_table():
        assert f"| {' | '.join(row)} |" in README


def test_excerpts_are_the_sources():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    sources = [
        (Path(__file__).parents[1] / f"{name}.py").read_text() for name in ("naive", "optimized")
    ]
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in source for source in sources), block


def test_the_bottleneck():
    h100 = lookup("h100")
    operations = h100.fp32_flops_per_s / h100.memory_bytes_per_s
    assert round(4 * operations) == 80 and round(12 * operations) == 240
    assert h100.fp32_flops_per_s == 67e12 and h100.memory_bytes_per_s == 3.35e12


def test_sectors_and_the_copy_with_gaps():
    assert [sectors_of_stride(s) for s in (1, 8, 32)] == [4, 32, 32]
    assert moved_bytes(8, 32) == 1024 + 128 and moved_bytes(1, 32) == 256
    assert moved_bytes(8, 32) / moved_bytes(1, 32) == 4.5
    # the quiz
    assert (sectors_of_stride(4, itemsize=2), sectors_of_stride(1, itemsize=2)) == (8, 2)
    assert round(1e3 * predicted_s(1, 16_777_216, lookup("h100")), 2) == 0.04
    at = 3 * 256 + np.arange(256)
    assert (at >= 1000).sum() == 24


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: addresses are seen in the interpreter")
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 32])
def test_sectors_of_recorded_addresses(stride):
    """The first warp of the kernel fetches as many sectors as the formula says."""
    from lessons.toolbox.kernels.film import Film

    # x begins with a sector, as PyTorch's memory on a GPU does
    memory = torch.zeros(LANES * stride + 8)
    x = memory[(-memory.data_ptr() // 4) % 8 :]
    with Film() as film:
        optimized.every_nth(x, stride, LANES, block=LANES)
    load = next(access for access in film.accesses if access.kind == "load")
    assert sectors(load.addresses) == sectors_of_stride(stride)


def test_tf32_of_step_9():
    from lessons.l00_gpu_and_triton.naive import without_low_bits

    x = torch.tensor([1 + 2.0**-12, 1 + 2.0**-10])
    assert without_low_bits(x).tolist() == [1, 1 + 2.0**-10]


@pytest.mark.parametrize("draw", [pictures.draw_gpu, pictures.draw_gaps])
@pytest.mark.sample(4, of="pictures")
def test_pictures_are_readable(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: the film is drawn beside the interpreter")
@pytest.mark.sample(1, of="compiled code")
def test_the_film_of_the_readme():
    """4 warps hold the 16 elements, 2 sectors: each asks for both. Of the store only one warp
    does.
    """
    figure = pictures.draw_program()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    texts = [" ".join(t.get_text().split()) for t in figure.findobj(Text)]
    for title in ("1. load x 8/2 sectors", "1. load x 4/1 sectors", "2. store out 2 sectors"):
        assert title in texts
        numbers = title.split("x ")[-1].split("out ")[-1]
        assert numbers in (pictures.HERE / "program.svg").read_text(encoding="utf-8")
    assert "compiled for an H100, run on a CPU" in " ".join(texts)
    assert "the load asks for 8 sectors, and its 16 elements would fit into 2" in README


# ---------------------------------------------------------------- pictures of puzzles


@pytest.mark.usefixtures("interpreted_films")
def test_a_puzzle_is_drawn_as_it_stands_in_the_file(tmp_path, capsys):
    """To do, then solved, then wrong, then unreadable: each time the file is read anew."""
    if not interpreting():
        pytest.skip("NOT RUN: addresses are seen in the interpreter")
    file = tmp_path / "l00_gpu_and_triton.py"
    solved = (SOLUTIONS / file.name).read_text(encoding="utf-8")
    titles = []
    for text in (
        generate(SOLUTIONS / file.name),
        solved,
        solved.replace("inside = at < n", "inside = at >= 0"),
    ):
        file.write_text(text, encoding="utf-8")
        figure = show("0.1", impl=str(tmp_path))
        texts = [t.get_text() for t in figure.findobj(Text)]
        titles.append((figure.get_suptitle(), sum("14 outside" in t for t in texts)))
    assert [title.split(":")[0] for title, _ in titles] == [
        "0.1, to do",
        "0.1, yours",
        "0.1, yours",
    ]
    assert [outside for _, outside in titles] == [0, 0, 2]
    file.write_text("def copy(x):\n    return x.nothing\n")
    assert show("0.1", impl=str(tmp_path)) is None
    assert "'Tensor' object has no attribute 'nothing'" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"exercise_id is '0\.11'; accepted: 0\.1, "):
        show("0.11")


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: addresses are seen in the interpreter")
@pytest.mark.parametrize("exercise_id", ["0.2", "0.4", "0.6", "0.9"])
@pytest.mark.sample(1, of="compiled code")
def test_a_puzzles_picture_is_readable(exercise_id):
    figure = show(exercise_id, impl="solutions")
    assert not texts_outside(figure) and not overlapping_texts(figure)


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: addresses are seen in the interpreter")
@pytest.mark.sample(1, of="compiled code")
def test_a_learners_file_is_compiled_as_it_stands(tmp_path, capsys):
    """Solved, then of a type that only the interpreter accepts: one line, and the interpreter's
    film.
    """
    file = tmp_path / "l00_gpu_and_triton.py"
    solved = (SOLUTIONS / file.name).read_text(encoding="utf-8")
    # an integer before the loop and a float in it: no type for the compiler
    loop = "best = 0\n    for _ in range(2):\n        best = best + 0.5\n    inside = at < n"
    captions = []
    for text in (solved, solved.replace("inside = at < n", loop)):
        file.write_text(text, encoding="utf-8")
        figure = show("0.1", impl=str(tmp_path))
        texts = [" ".join(t.get_text().split()) for t in figure.findobj(Text)]
        captions += [text for text in texts if "copy_kernel, 4 programs" in text]
    assert captions[0].startswith("compiled for an H100, run on a CPU")
    assert captions[1].startswith("recorded in Triton's interpreter")
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "Loop-carried variable best" in said


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: addresses are seen in the interpreter")
@pytest.mark.usefixtures("interpreted_films")
def test_the_gaps_of_a_view_are_drawn():
    figure = show("0.4", impl="solutions")
    caption = " ".join(t.get_text() for t in figure.findobj(Text))
    assert "x [4, 12], out [4, 6]" in " ".join(caption.split())


def test_the_mandelbrot_set_does_not_depend_on_the_tile():
    views = [mandelbrot(tile=tile, shade=False, most=6) for tile in (64, 128)]
    assert torch.equal(*views) and views[0].max() == 6 and views[0].min() < 3
