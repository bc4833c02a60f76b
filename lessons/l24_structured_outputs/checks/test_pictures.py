"""The picture of token masks fits, and says what the code finds."""

from lessons.l24_structured_outputs.lab import pictures
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside


def test_the_picture_fits():
    figure = pictures.draw_masks()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert "2 states: 5 and 7 of 10 tokens" in figure.get_suptitle()
