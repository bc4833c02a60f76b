"""Proves that the examples and excerpts of README.md are those of the code."""

from pathlib import Path

import pytest
import torch

from lessons.l10_flash_decoding.lab.occupancy import (
    IN_FLIGHT_BYTES,
    LATENCY_S,
    Decode,
    busy_share,
    predicted_s,
    slots,
    split_pieces,
)
from lessons.l10_flash_decoding.naive import combine
from lessons.l10_flash_decoding.splits import cdiv, split_bounds, wave_efficiency
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.proof.pages import pages

ROOM = Path(__file__).parents[1]
README = pages(ROOM)
H200 = CHIPS["h200"]


def test_the_excerpts_of_the_readme_are_the_code():
    """But for white space, because an excerpt stands further to the left."""
    code = "".join((ROOM / name).read_text("utf-8") for name in ("naive.py", "optimized.py"))
    excerpts = [block.split("```")[0] for block in README.split("```python\n")[1:]]
    assert len(excerpts) == 3
    for excerpt in excerpts:
        assert "".join(excerpt.split()) in "".join(code.split()), excerpt


def test_the_examples_on_paper():
    """Steps 1 to 8 and 10 of the derivation, in its order."""
    work = Decode(65536)
    assert (slots(H200), work.kv_bytes) == (264, 268_435_456)
    assert f"{busy_share(split_pieces(work, 1), 264):.0%}" == "3%"
    assert f"{IN_FLIGHT_BYTES / LATENCY_S / 1e9:.1f} GB/s" == "65.5 GB/s"
    alone_us, together_us = 1e6 * predicted_s(work, 1), 1e6 * work.kv_bytes / 4.8e12
    assert f"= {alone_us:.0f} µs" in README and f"4.8 TB/s: {together_us:.0f} µs" in README
    assert 264 / 8 == 33 and f"{wave_efficiency(8 * 34, 264):.0%}" == "52%"

    values = torch.tensor([3.0, 9.0]).double().view(1, 1, 2, 1)
    out, lse = combine(values, torch.tensor([2.0, 6.0]).double().log().view(1, 1, 2))
    assert (out.item(), lse.exp().item()) == pytest.approx((7.5, 8.0), rel=1e-12)

    short = Decode(4096)
    share = 2 * short.partial_bytes(32) / short.kv_bytes
    assert share == pytest.approx(4 * 4 * 32 / (4096 * 2), rel=0.01) and f"{share:.0%}" == "6%"
    assert f"{(0.1 + 0.2) + 0.3} " in README and f"= {0.1 + (0.2 + 0.3)}\n" in README


def test_the_picture_and_the_counts_that_the_readme_names():
    ends_us = {s: 1e6 * max(p.end_s for p in split_pieces(Decode(65536), s)) for s in (1, 32, 36)}
    assert (round(ends_us[1]), round(ends_us[32])) == (512, 56) and ends_us[36] > ends_us[32]
    assert 8 * 36 - 264 == 24
    shown = [1e6 * max(p.end_s for p in split_pieces(Decode(65536), s)) for s in (33, 34, 36)]
    said = "33 splits end after {:.1f} µs, 34 after {:.1f}, 36 after {:.1f}"
    assert said.format(*shown) in README
    third = 24 * IN_FLIGHT_BYTES / LATENCY_S / 4.8e12
    assert abs(third - 1 / 3) < 0.01
    # 64 tiles: 12 splits are as long as 11, so the last one is empty
    assert cdiv(64, 11) == cdiv(64, 12) == 6
    assert split_bounds(64 * 16, 12, block_n=16)[-1] == (1024, 1024)
    assert cdiv(1024, 512) * 8 == 16  # slots that 1024 keys in splits of 512 fill
