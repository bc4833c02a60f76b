"""Proves that the pictures fit: no text outside, none over another one."""

import pytest

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
@pytest.mark.sample(8, of="pictures")
def test_the_pictures_fit(draw):
    if draw is pictures.draw_pareto and not FILE.exists():
        pytest.skip("NOT RUN: results/counted/l18_quality.json is not recorded")
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
