"""What lesson 8 says beyond its kernels: figures, the numbers of its text, and its part as a
learner's drop-in.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lessons.l08_online_softmax import naive, warp
from lessons.l08_online_softmax.lab import pictures as picture
from lessons.l08_online_softmax.lab import traffic
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import lookup

ROOM = Path(traffic.__file__).parents[1]
README = (ROOM / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "draw", [picture.draw_passes, picture.draw_butterfly, picture.draw_trees, picture.draw_overflow]
)
def test_figures_are_readable(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_picture_shows_the_passes_that_are_counted():
    for way, (reads, writes) in traffic.PASSES.items():
        sweeps = [what for _, what in picture.SWEEPS[way]]
        assert len(sweeps) == reads and sweeps.count(picture.WRITE) == writes
    assert "read 3, 2, 1 times" in picture.draw_passes().get_suptitle()


def test_the_trees_merge_every_part_once():
    assert "7 merges: one after the other, or 3 steps deep" in picture.draw_trees(8).get_suptitle()
    parts = [naive.from_scores(torch.randn(3), torch.randn(3, 2)) for _ in range(8)]
    calls = []
    original, naive.merge = naive.merge, lambda a, b: calls.append(1) or original(a, b)
    try:
        naive.merge_tree(parts)
    finally:
        naive.merge = original
    assert len(calls) == 7


def test_the_butterfly_reaches_a_lane_from_all_others():
    for lane in (0, 5, 31):
        assert picture._ancestors(lane, 0) == list(range(warp.LANES)) and picture._ancestors(
            lane, 5
        ) == [lane]


def test_numbers_of_the_text():
    """Those that are computed, not measured, wherever the README gives them."""
    batch = {way: traffic.softmax_bytes(64, 128256, 2, way) for way in traffic.PASSES}
    for way, size in batch.items():
        assert f"{size / 1e6:.1f} MB" in README, way
    least_us = batch["one block"] / lookup("h200").memory_bytes_per_s * 1e6
    assert f"`{least_us:.1f} µs`" in README
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert f"{traffic.largest_exponent(dtype):.2f}" in README
    # what rounding a log-sum-exp costs
    rounded = re.findall(r"lse of (\d+)(?![\d.]).*?by (?:up to )?([\de-]+)", README)
    assert [
        (size, f"{np.spacing(np.float32(size)) / 2:.0e}".replace("e-0", "e-"))
        for size, _ in rounded
    ] == rounded
    assert len(rounded) == 2
    assert math.isclose(math.log(8), 2.0794, abs_tol=1e-4)


def test_the_command_prints_the_table(capsys):
    traffic.main()
    printed = capsys.readouterr().out
    assert "three passes                  65.7 MB" in printed
    assert "float32       88.72   -103.97" in printed
