"""What the compiler says of the kernels, for five GPU generations; and whether the picture can be
read.
"""

import pytest

from lessons.l03_kv_cache.lab.pictures import PROMPT, SVG, draw, passes
from lessons.l03_kv_cache.lab.specs import KERNELS
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.kernels.compile_check import check_all


@pytest.mark.compiler
def test_the_compiler_gives_wide_loads_without_spills():
    for report in check_all(KERNELS):
        if (report.error or "").startswith("not run"):
            pytest.skip(report.error)
        assert report.fits, f"{report.name} on sm_{report.chip}: {report}"
        # A row of 128 values is one for each of a program's threads.
        wide = "2x64" not in report.name or "decode" in report.name
        found = f"{report.loads_128bit} loads of 16 bytes"
        assert bool(report.loads_128bit) == wide, f"{report.name} on sm_{report.chip}: {found}"


def test_the_picture_can_be_read():
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert SVG.exists()


@pytest.mark.parametrize("way, run", [("recompute", 18), ("concatenate", 6), ("preallocate", 6)])
def test_the_picture_counts_what_the_text_says(way, run):
    rows = passes(way)
    assert [len(row) for row in rows] == [PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 3]
    assert sum(row.count("runs through the model") for row in rows) == run
    copied = sum(row.count("copied to make room, then read") for row in rows)
    assert copied == (3 + 4 + 5 if way == "concatenate" else 0)
