"""A notebook's excerpt is the source as it is now."""

import pytest

from lessons.l01_roofline import naive
from lessons.l01_roofline.optimized import scale_copy_kernel
from lessons.toolbox.draw.excerpt import excerpt


def test_an_excerpt_is_cut_by_its_lines(capsys):
    excerpt(naive.stopwatch_ms, "start =", "launch()")
    assert capsys.readouterr().out == "start = time.perf_counter()\nlaunch()\n"
    excerpt(naive.stopwatch_ms, "launch()\n".strip(), None)
    assert capsys.readouterr().out.endswith("* 1e3\n")


def test_a_kernel_is_shown_as_it_is_written(capsys):
    excerpt(scale_copy_kernel, "if start + TILE <= n:", "if start")
    assert capsys.readouterr().out == "if start + TILE <= n:\n"


@pytest.mark.parametrize("first, last", [("no such line", None), ("start =", "no such line")])
def test_a_line_that_is_gone_is_named(first, last):
    with pytest.raises(ValueError, match="is 'no such line'; accepted: a part of a line"):
        excerpt(naive.stopwatch_ms, first, last)
