"""Proves that the lesson's picture is drawn whole, is the committed one, and shows what is so."""

import pytest

from lessons.l23_experts.lab import pictures
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn_whole(name):
    draw, alt = pictures.PICTURES[name]
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert alt in (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")


def test_every_token_of_the_picture_goes_to_two_experts():
    sent = pictures.routed(tokens=64, gpus=4)
    assert sent.sum(1).tolist() == [128] * 4
