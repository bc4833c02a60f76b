"""The numbers and the excerpts of the README are those of the code."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lessons.l00_gpu_and_triton import optimized
from lessons.l00_gpu_and_triton.coalescing import (
    LANES,
    moved_bytes,
    predicted_s,
    sectors,
    sectors_of_stride,
)
from lessons.l00_gpu_and_triton.lab import pictures
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.measure.hardware import lookup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def test_the_table_of_memories():
    for row in pictures.memory_table():
        assert f"| {' | '.join(row)} |" in README


def test_excerpts_are_the_sources():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    sources = [
        Path(__file__).with_name(f"{name}.py").read_text() for name in ("naive", "optimized")
    ]
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in source for source in sources), block


def test_the_bottleneck():
    h100 = lookup("h100")
    operations = h100.fp32_flops_per_s / h100.memory_bytes_per_s
    assert round(4 * operations) == 80 and round(12 * operations) == 240
    assert h100.fp32_flops_per_s == 67e12 and h100.memory_bytes_per_s == 3.35e12


def test_sectors_and_the_copy_with_gaps():
    assert [sectors_of_stride(s) for s in (1, 8, 32)] == [4, 32, 32]
    assert moved_bytes(8, 32) == 1024 + 128 and moved_bytes(1, 32) == 256
    assert moved_bytes(8, 32) / moved_bytes(1, 32) == 4.5
    # the quiz
    assert (sectors_of_stride(4, itemsize=2), sectors_of_stride(1, itemsize=2)) == (8, 2)
    assert round(1e3 * predicted_s(1, 16_777_216, lookup("h100")), 2) == 0.04
    at = 3 * 256 + np.arange(256)
    assert (at >= 1000).sum() == 24


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: addresses are seen in the interpreter")
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 8, 32])
def test_sectors_of_recorded_addresses(stride):
    """The first warp of the kernel fetches as many sectors as the formula says."""
    from lessons.toolbox.kernels.film import Film

    # x begins with a sector, as PyTorch's memory on a GPU does
    memory = torch.zeros(LANES * stride + 8)
    x = memory[(-memory.data_ptr() // 4) % 8 :]
    with Film() as film:
        optimized.every_nth(x, stride, LANES, block=LANES)
    load = next(access for access in film.accesses if access.kind == "load")
    assert sectors(load.addresses) == sectors_of_stride(stride)


def test_tf32_of_step_9():
    from lessons.l00_gpu_and_triton.naive import without_low_bits

    x = torch.tensor([1 + 2.0**-12, 1 + 2.0**-10])
    assert without_low_bits(x).tolist() == [1, 1 + 2.0**-10]


@pytest.mark.parametrize("draw", [pictures.draw_gpu, pictures.draw_gaps, pictures.draw_program])
def test_pictures_are_readable(draw):
    if (figure := draw()) is not None:
        assert not texts_outside(figure) and not overlapping_texts(figure)


@pytest.mark.parametrize("name", ["gpu", "program", "gaps"])
def test_the_readme_says_what_its_pictures_show(name):
    alt = getattr(pictures, f"{name.upper()}_ALT")
    assert f"![{alt}](lab/{name}.svg)" in README
    assert alt in getattr(pictures, f"{name.upper()}_SVG").read_text(encoding="utf-8")
