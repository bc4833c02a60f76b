"""Proves that the pictures fit: no text outside, none over another one or over a point."""

import pytest
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from lessons.l18_weight_quantization.lab import pictures
from lessons.l18_weight_quantization.lab.methods import FILE
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside


@pytest.mark.parametrize(
    "draw",
    [
        pictures.draw_formats,
        pictures.draw_grids,
        pictures.draw_feedback,
        pictures.draw_floor,
        lambda: pictures.draw_floor("a100"),
        pictures.draw_pareto,
    ],
    ids=["formats", "grids", "feedback", "floor", "floor of an A100", "pareto"],
)
@pytest.mark.sample(4, of="pictures")
def test_the_pictures_fit(draw):
    if draw is pictures.draw_pareto and not FILE.exists():
        pytest.skip("NOT RUN: results/counted/l18_quality.json is not recorded")
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def covered_points(figure) -> list[tuple[str, float, float]]:
    """(label, x, y) of each point whose dot or interval a label touches, also by less than 2
    pixels.
    """
    figure.draw_without_rendering()
    found = []
    for ax in figure.axes:
        bars = [bar for drawn in ax.containers for bar in drawn.lines[2][0].get_segments()]
        dots = [(x, y) for drawn in ax.containers for x, y in zip(*drawn.lines[0].get_data())]
        boxes = [(text.get_text(), text) for text in ax.findobj(Annotation)]
        for label, text in boxes:
            own = Text.get_window_extent(text).padded(2)  # without the line to its own point
            for (x, y), bar in zip(dots, bars):
                (left, low), (_, high) = ax.transData.transform(bar)
                middle = ax.transData.transform((x, y))[1]
                line = Bbox.from_extents(left - 1, low, left + 1, high)
                dot = Bbox.from_extents(left - 5, middle - 5, left + 5, middle + 5)
                if own.overlaps(line) or own.overlaps(dot):
                    found.append((label, x, y))
    return found


def test_labels_leave_the_points_free():
    if not FILE.exists():
        pytest.skip("NOT RUN: results/counted/l18_quality.json is not recorded")
    assert not covered_points(pictures.draw_pareto())
