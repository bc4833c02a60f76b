"""Proves that the lesson's picture is drawn whole, is the committed one, and shows what is so."""

import pytest

from lessons.l23_experts.lab import pictures
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import CHIPS


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn_whole(name):
    draw, alt = pictures.PICTURES[name]
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert alt in (pictures.HERE / f"{name}.svg").read_text(encoding="utf-8")


def test_every_token_of_the_picture_goes_to_two_experts():
    sent = pictures.routed(tokens=64, gpus=4)
    assert sent.sum(1).tolist() == [128] * 4


@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (128, 8), (1, 1)])
def test_where_arithmetic_takes_longer(num_experts, top_k):
    """From the title's number of tokens on, and not before; the figure fits."""
    figure, chip = pictures.draw_reads(num_experts, top_k), CHIPS["h100"]
    assert not texts_outside(figure) and not overlapping_texts(figure)
    edge = chip.bf16_flops_per_s / chip.memory_bytes_per_s * num_experts / top_k
    for tokens in (int(edge), int(edge) + 1):
        reads, computes = pictures.seconds_of(tokens, num_experts, top_k, chip)
        assert (computes > reads) == (tokens > edge)
