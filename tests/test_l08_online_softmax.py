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
from tests.excerpts import excerpts, plain_readme, stray_excerpts

ROOM = Path(traffic.__file__).parents[1]
README = plain_readme(ROOM)


@pytest.mark.parametrize(
    "draw", [picture.draw_passes, picture.draw_butterfly, picture.draw_overflow]
)
@pytest.mark.sample(4, of="pictures")
def test_figures_are_readable(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


@pytest.mark.parametrize("seen", range(1, 9))
def test_the_slider_along_the_row(seen):
    figure = picture.draw_online(seen)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    scores = torch.tensor([0, 1, -1, 3, 2, 3.5, 0.5, 2.5])[:seen]
    _, l = naive.online_sums(scores)
    assert f"m = {scores.max():g} and l = {l:.3f};" in figure.get_suptitle()


def test_the_picture_shows_the_passes_that_are_counted():
    for way, (reads, writes) in traffic.PASSES.items():
        sweeps = [what for _, what in picture.SWEEPS[way]]
        assert len(sweeps) == reads and sweeps.count(picture.WRITE) == writes
    assert "read 3, 2, 1 times" in picture.draw_passes().get_suptitle()


def test_the_trees_merge_every_part_once():
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


# ---------------------------------------------------------------- the README


def part(scores, values):
    """The Partial of scores and values given as numbers."""
    return naive.from_scores(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64)[:, None],
    )


def said(text):
    """The README says this, word by word."""
    assert text in README, text


def test_the_excerpts_of_the_readme_are_the_code():
    assert len(excerpts(README)) == 2 and not stray_excerpts(ROOM)


def test_the_derivation_on_paper():
    """Steps 1 to 8: what each example says, computed."""
    pair = torch.softmax(torch.tensor([200.0, 201.0]), 0).tolist()
    said(f"softmax = ({pair[0]:.3f}, {pair[1]:.3f})")
    before, after = part([0, 1], [4, 2]), part([0, 1, 3], [4, 2, 6])
    said(f"l = e⁻¹ + 1 = {before.l:.3f}")
    said(f"l′ = {before.l:.3f} · 0.135 + 1 = {after.l:.3f}")
    assert f"{math.exp(-2):.3f}" == "0.135"
    said(f"before: acc = 4 · e⁻¹ + 2 = {before.acc.item():.3f}")
    out, lse = (number.item() for number in naive.finish(after))
    said(
        f"+ 6 = {after.acc.item():.3f};   out = {after.acc.item():.3f} / {after.l:.3f} = {out:.2f}"
    )
    said(f"l · e^m = {after.l:.3f} · e³ = {math.exp(lse):.1f};")
    said(f"lse = 3 + log {after.l:.3f} = {lse:.3f}")
    a, b = part([0, math.log(2)], [8, 5]), part([math.log(4), 0], [2, 0])
    said(f"m = log 2, l = {a.l:.3g} and acc = {a.acc.item():.3g}")
    said(f"m = log 4, l = {b.l:.3g} and acc = {b.acc.item():.3g}")
    both = naive.merge(a, b)
    out, _ = naive.finish(both)
    said(f"m = log 4, l = {both.l:.3g}, acc = {both.acc.item():.3g}, out = {out.item():.3g}")
    (out_a, lse_a), (out_b, lse_b) = naive.finish(a), naive.finish(b)
    said(f"out {out_a.item():.3g} and {out_b.item():.3g}, exp(lse) {lse_a.exp().item():.3g} and")
    weights = torch.softmax(torch.stack([lse_a, lse_b]), 0)
    assert math.isclose(weights @ torch.cat([out_a, out_b]), 3.25, rel_tol=1e-12)
    assert math.exp(lse_b) == pytest.approx(5)


def test_the_answers_of_the_quiz():
    a, b = naive.Partial(*torch.tensor([3.0, 2, 0])[:, None]), torch.tensor([3.0, 5, 0])[:, None]
    merged = naive.merge(a._replace(acc=a.acc[None]), naive.Partial(b[0], b[1], b[2][None]))
    said(f"m = {merged.m.item():.3g} and l = {merged.l.item():.3g}. Both have the same maximum")
    moved = {way: traffic.softmax_bytes(64, 151936, 4, way) / 1e6 for way in traffic.PASSES}
    said(f"bytes = {moved['softmax · V in one pass']:.1f} MB")
    said(f"3 reads and 1 write, {moved['three passes']:.0f} MB")
    said(f"2 + 1, {moved['online, two passes']:.0f} MB")
    lse_a, lse_b = math.log(3), math.log(5)
    said(f"the line gives {(6 * lse_a + 1.6 * lse_b) / (lse_a + lse_b):.2f} instead of 3.25")
    assert traffic.way_of(32768) == "one block" and traffic.way_of(32769) == "online, two passes"
    said("such as 32,768 scores in our kernel")
    said(f"2^4.5 = {2**4.5:.1f}, and not e^4.5 = {math.exp(4.5):.0f}")
    said(f"the lse is {4.5 * math.log(2):.2f}")


def test_what_the_museum_shows_is_wrong():
    true = torch.softmax(torch.tensor([0.0, 2.0]), 0).tolist()
    said(f"gives (0.5, 0.5). The softmax is ({true[0]:.3f}, {true[1]:.3f})")
    overflow = torch.tensor(89.0)
    assert overflow.bfloat16().exp().isinf() and overflow.exp().isinf()
    assert not torch.tensor(88.0).exp().isinf()
    weights = torch.exp(torch.full((4,), -2000.0) - 0)
    assert (weights / weights.sum()).isnan().all(), "a maximum that starts at 0"
    assert naive.softmax_online(torch.full((4,), -2000.0)).tolist() == [0.25] * 4
