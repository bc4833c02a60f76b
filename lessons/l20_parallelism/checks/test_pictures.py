"""Proves that the lesson's pictures are drawn whole, are the committed ones, and show what is
so.
"""

from itertools import pairwise

import pytest

from lessons.l20_parallelism.lab import figures, pictures
from lessons.l20_parallelism.pipeline import schedule
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside


@pytest.mark.parametrize("name", pictures.PICTURES)
@pytest.mark.sample(4, of="pictures")
def test_pictures_are_drawn_whole(name):
    draw, alt = pictures.PICTURES[name]
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert alt in (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_ring_of_the_picture_adds_and_tells(size):
    """After P − 1 steps rank r has all of piece r; a step changes one piece of each rank."""
    steps = figures.ring_counts(size)
    assert len(steps) == 2 * size - 1 and steps[0] == [[1] * size] * size
    for rank, pieces in enumerate(steps[size - 1]):
        assert [piece for piece, count in enumerate(pieces) if count == size] == [rank]
    assert steps[-1] == [[size] * size] * size
    for before, after in pairwise(steps):
        for old, new in zip(before, after):
            assert sum(a != b for a, b in zip(old, new)) == 1


def test_the_rows_of_a_schedule():
    rows = pictures.gantt_rows(schedule([1, 1], 2), "m = 2", 2)
    assert rows == {
        "m = 2, stage 0": [(0, 1, "micro-batch 0"), (1, 2, "micro-batch 1")],
        "m = 2, stage 1": [(1, 2, "micro-batch 0"), (2, 3, "micro-batch 1")],
    }
