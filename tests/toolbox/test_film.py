"""A film shows each access of each program where it happened, and a wrong mask without harm."""

import random

import numpy as np
import pytest
import torch

from lessons.toolbox.draw import film as drawing
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.draw.film import film, film_slider, film_text
from lessons.toolbox.kernels import film as recording
from lessons.toolbox.kernels.film import Film
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import interpreting

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="NOT RUN: kernels are compiled here"),
    pytest.mark.usefixtures("interpreted_films"),
]


@triton.jit
def copy(x_ptr, out_ptr, size, BLOCK: tl.constexpr, MASKED: tl.constexpr = True):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < size) | (not MASKED)
    x = tl.load(x_ptr + at, mask=inside, other=0)
    tl.store(out_ptr + at, x, mask=inside)


@triton.jit
def tiles(x_ptr, out_ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :])
    tl.store(out_ptr + rows[:, None] * stride + columns[None, :], x)


@triton.jit
def histogram(x_ptr, counts_ptr):
    tl.atomic_add(counts_ptr + tl.load(x_ptr + tl.program_id(0)), 1)


@triton.jit
def walk(x_ptr, out_ptr, size, wrong_step):
    total = tl.zeros([4], tl.float32)
    for step in range(6):
        shift = tl.where(step == wrong_step, size, 0)
        total += tl.load(x_ptr + step * 4 + shift + tl.arange(0, 4))
    tl.store(out_ptr + tl.arange(0, 4), total)


def copied(size, block, masked=True):
    x, out = torch.arange(float(size)), torch.full((size,), -7.0)
    grid = (triton.cdiv(size, block),)
    return x, out, lambda: copy[grid](x, out, size, block, masked)


def test_every_access_of_every_program_in_order(seed):
    size, block = random.randint(1, 70), random.choice([8, 16, 32])
    x, out, launch = copied(size, block)
    with Film() as kept:
        launch()
    assert torch.equal(x, out)
    assert kept.programs() == [(i, 0, 0) for i in range(triton.cdiv(size, block))]
    assert kept.kernels() == ["copy"] and set(kept.arguments) == {"x_ptr", "out_ptr"}
    for i, *_ in kept.programs():
        load, store = (a for a in kept.accesses if a.program == (i, 0, 0))
        want = torch.zeros(size, dtype=torch.int64)
        want[i * block : (i + 1) * block] = 1
        assert torch.equal(load.elements(x), want) and torch.equal(store.elements(out), want)
        assert not load.elements(out).any() and not store.elements(x).any()
        assert (load.kind, store.kind) == ("load", "store")
        assert load.line.startswith("x = tl.load(") and store.line.startswith("tl.store(out_ptr")


def test_what_lies_outside_is_kept_and_not_touched():
    """A load gets NaN there, even under `other`; a store goes nowhere, not into the neighbour."""
    memory = torch.full((64,), 3.0)
    x, out = torch.arange(10.0), torch.zeros(32)
    with Film() as kept:
        copy[(2,)](x, out, 10, 8, False)
    assert out[:10].tolist() == list(range(10)) and out[10:16].isnan().all()
    load = next(a for a in kept.accesses if a.program == (1, 0, 0) and a.kind == "load")
    assert len(load.outside) == 6 and load.offsets_outside(x).tolist() == [10, 11, 12, 13, 14, 15]
    with Film() as kept:
        copy[(2,)](memory, x, 10, 8, False)
    assert sorted(len(a.outside) for a in kept.accesses if a.kind == "store") == [0, 6]
    assert x.tolist() == [3.0] * 10


def test_integers_outside_are_minus_one():
    x, out = torch.arange(4, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with Film():
        copy[(1,)](x, out, 4, 8, False)
    assert out.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


def test_the_memory_of_an_earlier_launch_is_foreign():
    launch = copied(16, 16)[2]
    other = torch.zeros(8)
    with Film() as kept:
        launch()
        copy[(1,)](other, other, 16, 16)
    assert [len(a.outside) for a in kept.accesses] == [0, 0, 8, 8]


def test_views_are_drawn_in_their_own_shape():
    """Columns of a larger tensor, and a transposed one: rows of the film are rows of the view."""
    whole = torch.randn(8, 16)
    out = torch.zeros_like(whole)
    with Film() as kept:
        tiles[(2, 2)](whole, out, 16, 4, 8)
    load = next(a for a in kept.accesses if a.program == (1, 0, 0) and a.kind == "load")
    assert load.elements(whole)[4:, :8].all() and load.elements(whole).sum() == 32
    assert load.elements(whole[:, 4:12])[4:, :4].all()
    assert load.elements(whole[:, 4:12]).sum() == 16
    assert load.elements(whole.T)[:8, 4:].all() and load.elements(whole.T).sum() == 32


def test_an_atomic_is_neither_a_load_nor_a_store():
    x, counts = torch.tensor([2, 2, 0]), torch.zeros(4, dtype=torch.int32)
    text = film_text(lambda: histogram[(3,)](x, counts), programs=[1])
    assert counts.tolist() == [1, 0, 2, 0]
    assert "2. atomic counts" in text and "··A·" in text


def test_text_shows_a_wrong_mask():
    x, out, launch = copied(20, 16, masked=False)
    lines = film_text(launch, {"x": x, "out": out}, programs=[1]).split("\n")
    assert lines[:2] == ["program 1", "  1. load x, 12 OUTSIDE"]
    assert lines[3].strip() == "·" * 16 and lines[4].strip() == "R" * 4 + "!" * 12
    assert lines[5] == "  2. store out, 12 OUTSIDE" and lines[-1].strip() == "W" * 4 + "!" * 12
    good = film_text(copied(20, 16)[2], programs=[1])
    assert "!" not in good and "OUTSIDE" not in good


def test_text_names_a_load_whose_mask_excludes_everything():
    x, out = torch.randn(16), torch.zeros(16)
    text = film_text(lambda: copy[(2,)](x, out, 8, 8, True), {"x": x, "out": out}, programs=[1])
    assert text.count("no element, because its mask is False everywhere") == 2
    assert "a load of no element" in text and "a store of no element" in text
    assert "no element" not in film_text(copied(20, 16)[2], programs=[1])


def test_text_shows_the_last_access_and_those_outside():
    """Seven accesses, of which the fourth is wrong: the strip may be cut, but not there."""
    x, out = torch.zeros(24), torch.zeros(4)
    full = film_text(lambda: walk[(1,)](x, out, 24, 3), {"x": x, "out": out}, most=7)
    assert "more" not in full and full.count(" load x") == 6
    cut = film_text(lambda: walk[(1,)](x, out, 24, 3), {"x": x, "out": out}, most=2)
    steps = [line.strip() for line in cut.split("\n") if line[:3] == "  ." or line[2:3].isdigit()]
    assert steps == [
        "1. load x",
        "... 2 more",
        "4. load x, 4 OUTSIDE",
        "... 2 more",
        "7. store out",
    ]


def test_text_puts_equal_rows_together():
    x, out = torch.randn(16, 16), torch.zeros(16, 16)
    text = film_text(lambda: tiles[(2, 1)](x, out, 16, 8, 16), {"x": x}, programs=[1])
    rows = [line.strip() for line in text.split("\n")[3:]]
    assert rows == ["·" * 16 + "  (8 rows)", "R" * 16 + "  (8 rows)"]


def test_pale_is_what_the_program_touched_before():
    x = torch.randn(4, 4)

    @triton.jit
    def twice(x_ptr, BLOCK: tl.constexpr):
        first = tl.load(x_ptr + tl.arange(0, BLOCK))
        tl.store(x_ptr + 2 + tl.arange(0, BLOCK), first)

    with Film() as kept:
        twice[(1,)](x, 4)
    load, store = drawing.panels(kept, {"x": x}, (0, 0, 0))
    assert load.cells.tolist()[0] == [drawing.LOAD] * 4
    assert store.cells.tolist()[0] == [drawing.BEFORE] * 2 + [drawing.STORE] * 2
    assert store.cells.tolist()[1] == [drawing.STORE] * 2 + [drawing.UNTOUCHED] * 2


@pytest.mark.parametrize("size", [5, 50, 700, 5000])
@pytest.mark.parametrize("masked", [True, False])
def test_vectors_make_a_readable_figure(size, masked):
    x, out, launch = copied(size, 16, masked)
    figure = film(launch, {"x": x, "an output of a long name": out})
    assert not texts_outside(figure) and not overlapping_texts(figure)
    texts = " ".join(t.get_text() for t in figure.findobj() if hasattr(t, "get_text"))
    assert "1. load\nx" in texts and "2. store" in texts
    assert ("outside the tensor" in texts) == (not masked and size % 16 > 0)


@pytest.mark.parametrize("shape", [(8, 16), (32, 8), (64, 128), (2, 4, 8, 16)])
def test_tiles_make_a_readable_figure(shape):
    x = torch.randn(shape)
    rows, columns = x.numel() // shape[-1], shape[-1]

    def launch():
        out = torch.empty_like(x)
        tiles[(rows // 4, columns // 8)](x, out, columns, 4, 8)
        return out

    figure = film(launch, {"x": x}, programs=[0, (1, 0)])
    assert not texts_outside(figure) and not overlapping_texts(figure)
    texts = [t.get_text() for t in figure.findobj() if hasattr(t, "get_text")]
    assert "2. store\nout" in texts, "what the launch returns is drawn under its name"
    assert ("program (1, 0)" if columns > 8 else "program 1") in texts


def test_loads_and_stores_differ_in_greyscale():
    load, store = (drawing.LOOKS[kind][0] for kind in (drawing.LOAD, drawing.STORE))
    grey = [
        np.dot([int(look["facecolor"][i : i + 2], 16) for i in (1, 3, 5)], [0.3, 0.59, 0.11])
        for look in (load, store)
    ]
    assert abs(grey[0] - grey[1]) > 80 and load.get("hatch") != store.get("hatch")


def test_cells_are_covered_once_and_all(seed):
    hit = torch.rand(random.randint(1, 9), random.randint(1, 9)) > 0.4
    for lined in (True, False):
        covered = np.zeros(hit.shape, int)
        for corners in drawing._boxes(hit.numpy(), lined):
            (left, top), (right, bottom) = corners[0], corners[2]
            covered[top:bottom, left:right] += 1
        assert np.array_equal(covered, hit.numpy().astype(int))


def test_a_long_strip_is_cut_and_the_caption_says_so():
    x = torch.randn(32, 4)

    @triton.jit
    def walk(x_ptr, steps):
        for step in range(steps):
            tl.store(x_ptr + step * 4 + tl.arange(0, 4), tl.zeros([4], tl.float32))

    figure = film(lambda: walk[(1,)](x, 32), {"x": x})
    texts = [t.get_text() for t in figure.findobj() if hasattr(t, "get_text")]
    assert "32. store\nx" in texts and "14. store\nx" not in texts
    assert any("15 of 32 accesses drawn" in text for text in texts)


def test_wrong_arguments_are_told_in_one_line():
    x, _, launch = copied(50, 16)
    with pytest.raises(ValueError, match="programs has 4, which touches nothing; accepted: 0, 1"):
        film(launch, {"x": x}, programs=[4])
    with pytest.raises(ValueError, match="kernel is 'cpoy'; accepted: copy"):
        film(launch, {"x": x}, kernel="cpoy")
    with pytest.raises(ValueError, match=r"tensors\['x'\] is list; accepted: a tensor"):
        film(launch, {"x": x.tolist()})
    with pytest.raises(ValueError, match="touch none of the tensors"):
        film(launch, {"x": torch.zeros(3)})


def test_without_an_interpreter_one_line_says_so(monkeypatch, capsys):
    """The launch runs all the same: a notebook goes on with its result."""
    monkeypatch.setattr(recording, "interpreting", lambda: False)
    ran = []
    assert film(lambda: ran.append(1), {"x": torch.zeros(3)}) is None
    assert film_slider(lambda: ran.append(1)) is None and film_text(lambda: ran.append(1)) == ""
    printed = capsys.readouterr().out.strip().split("\n")
    assert len(ran) == 3 and len(printed) == 3
    assert printed[0].startswith("No film of loads and stores: kernels are compiled here")
    monkeypatch.setattr(recording, "has_triton", lambda: False)
    assert film(lambda: ran.append(1)) is None and len(ran) == 3
    assert "Triton is not installed" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no film: Triton is not installed"):
        Film()
