"""The five versions in CUDA C++: each against the oracle, and what their page says of them."""

import json
from functools import partial

import pytest
import torch

from lessons.l09_flash_attention.lab import worklog
from lessons.l09_flash_attention.naive import attention
from lessons.l09_flash_attention.worklog.cuda_flash import VERSIONS, flash_attention_cuda
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.compile_check import check_cuda
from lessons.toolbox.measure.device import default_device
from lessons.toolbox.proof.numerics import draw, prove

PAGE = (worklog.SVG.parent / "README.md").read_text(encoding="utf-8")
RECORD = json.loads(worklog.RECORD.read_text(encoding="utf-8"))
FILES = list(dict.fromkeys(version.source for version in VERSIONS.values()))
# (queries, keys): around the tiles of 64 queries and of 32 or 64 keys, and queries without a key
SHORT = [(1, 1), (3, 40), (40, 17)]
LONG = [(64, 64), (70, 130), (130, 70), (129, 129)]


@pytest.mark.cuda_cpp
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "version, num_queries, num_keys",
    [
        # the first version runs a key after the other, so long inputs take long on a CPU
        (name, *lengths)
        for name in VERSIONS
        for lengths in (SHORT if name == "naive" else SHORT + LONG)
    ],
)
@pytest.mark.sample(1)
def test_a_version_equals_the_oracle(version, num_queries, num_keys, head_dim, seed):
    shapes = (num_queries, 4, head_dim), (num_keys, 2, head_dim), (num_keys, 2, head_dim)
    given = [
        draw("normal", shape, seed=seed + i).to(default_device(), torch.bfloat16)
        for i, shape in enumerate(shapes)
    ]
    for causal in (True, False):
        prove(
            partial(flash_attention_cuda, causal=causal, version=version),
            partial(attention, causal=causal),
            given,
            floor=2e-5,
        )


def test_an_unknown_version_is_refused():
    q, k, v = torch.zeros(3, 4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="version: got 'fast'; accepted: naive, tiled"):
        flash_attention_cuda(q, k, v, version="fast")


@pytest.mark.compiler
@pytest.mark.parametrize("chip", [80, 89, 90])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.sample(1)
def test_the_versions_compile(file, chip):
    """From an A100 on: older chips have neither cp.async nor bfloat16 products."""
    (report,) = check_cuda(file.read_text(encoding="utf-8"), [chip], file.name)
    if (report.error or "").startswith("not run"):
        pytest.skip(report.error)
    assert report.fits and report.shared_bytes < 48 * 1024, report


def test_the_table_is_the_record():
    for name, found in RECORD.items():
        assert worklog.row(name, found) in PAGE, worklog.row(name, found)
    assert list(RECORD) == list(VERSIONS)


@pytest.mark.compiler
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.sample(0)  # up to a minute each
def test_the_record_is_counted_again(version):
    """Its counts, to the last one; registers are another assembler's matter."""
    found = call("lessons.l09_flash_attention.lab.worklog:counted", version, chip=90)
    for name in ("asked_bytes", "least_bytes", "passes", "least_passes", "shared_bytes"):
        assert found[name] == RECORD[version][name], name
    assert found["issued"] == pytest.approx(RECORD[version]["issued"], rel=0.05)


def test_the_numbers_of_the_page():
    naive, tiled, rows, swizzled, pipelined = RECORD.values()
    assert round(naive["asked_bytes"] / naive["least_bytes"]) == 881 and "881 times" in PAGE
    assert round(naive["least_bytes"] / 1e6, 2) == 0.66 and "0.66 MB" in PAGE
    assert round(naive["asked_bytes"] / tiled["asked_bytes"]) == 110 and "110 times" in PAGE
    assert round(100 * rows["issued"] / tiled["issued"]) == 4 and "to 4 % of" in PAGE
    assert round(100 * (swizzled["issued"] / rows["issued"] - 1)) == 16 and "16 % more" in PAGE
    bound = max(pipelined["floors_s"].values())
    assert round(bound / pipelined["floors_s"]["matrix units"], 1) == 3.2 and "3.2 times" in PAGE
    assert pipelined["shared_bytes"] - swizzled["shared_bytes"] == 16 * 1024


def test_the_picture_can_be_read():
    figure = worklog.draw(RECORD)
    assert not texts_outside(figure) and not overlapping_texts(figure)
    ticks = {label.get_text() for label in figure.axes[0].get_xticklabels()}
    assert {"0.1", "1", "10"} <= ticks
