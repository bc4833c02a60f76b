"""Proves that the pictures of MORE.md are drawn whole, are the committed ones, and are true."""

import json

import pytest

from lessons.l23_experts.lab import balance, large, more_pictures
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside

PAGE = (more_pictures.HERE.parent / "MORE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", more_pictures.PICTURES)
def test_pictures_are_drawn_whole(name):
    draw, alt = more_pictures.PICTURES[name]
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    file = more_pictures.HERE / f"{name}.svg"
    assert alt in file.read_text(encoding="utf-8").replace("&apos;", "'")
    assert f"![{alt}](lab/{name}.svg)" in PAGE


def test_the_pictures_show_what_their_titles_say():
    """Copies help with fresh statistics, and less with old ones; the network overtakes computing
    between 64 and 144 GPUs, and most tokens of a GPU are at 64.
    """
    record = json.loads(balance.RECORD.read_text(encoding="utf-8"))
    fresh, old = record["balance"], record["stale"]["placed for modules, serving lessons"]
    assert all(row["32"] < 1.1 for row in fresh.values()) and 1.25 < old["32"] < 1.35
    steps = json.loads(large.RECORD.read_text(encoding="utf-8"))["decode"]
    two = {int(gpus): step["two"] for gpus, step in steps.items() if step["batch"]}
    slower = {gpus: step["network_ms"] > step["compute_ms"] for gpus, step in two.items()}
    assert slower == {16: False, 32: False, 64: False, 144: True, 320: True}
    assert max(two, key=lambda gpus: two[gpus]["tokens_per_s"]) == 64
    assert {gpus for gpus in two if steps[str(gpus)]["gain"] < 1} == {16}


@pytest.mark.parametrize("gpus, batch", [(32, 16), (144, 128), (320, 64)])
def test_other_time_lines_fit(gpus, batch):
    figure = more_pictures.draw_halves(1, gpus, batch)
    assert not texts_outside(figure) and not overlapping_texts(figure)
