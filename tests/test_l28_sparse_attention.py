"""Lesson 28: excerpts are lines of the sources, and its texts quote what the code says."""

import json
from pathlib import Path

import pytest

from lessons.l01_roofline.planner.models import find_model
from lessons.l07_kernel_fusion.lab.launches import LAUNCH_S
from lessons.l28_sparse_attention.checks.test_choices import outlier_errors
from lessons.l28_sparse_attention.costs import (
    H100,
    V32_LAYER,
    crossing,
    full,
    most,
    prompt_crossing,
    sparse,
    top_k_s,
)
from lessons.l28_sparse_attention.lab.pictures import CHOICES, PICTURES, TOY, top
from lessons.l28_sparse_attention.lab.quality import KEYS, OUT
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from tests.excerpts import plain_readme, stray_excerpts

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "lessons/l28_sparse_attention"
README = plain_readme(ROOM)
LONG, LAYERS = 131072, 61
ROW, INDEX = V32_LAYER.row_bytes, V32_LAYER.index_row_bytes
READ = INDEX + 24  # and a score, written once and read five times


def said(text: str) -> None:
    assert text in README, text


def test_the_excerpts_are_lines_of_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_bottleneck():
    part = full(LONG)
    said(f"a step reads {part.bytes / 1e6:.0f} MB in each layer, for each sequence")
    said(f"An H100 needs {1e6 * part.seconds():.1f} µs for it, and")
    said(f"{1e3 * LAYERS * part.seconds():.1f} ms for {LAYERS} layers")
    assert find_model("deepseek-v3").num_hidden_layers == LAYERS


def test_the_toy_of_the_picture():
    assert top(TOY, 2) == {0, 3} and top(TOY, 3) == {0, 2, 3}
    said("score     5    0    2    8    0    2        top 2: keys 0 and 3")


def test_step_8():
    gain = ROW - READ
    assert (ROW, INDEX, READ) == (1152, 132, 156)
    parts = sparse(1.0)
    assert parts["indexer"].bytes + parts["top k"].bytes == READ
    said(f"equal at 2048 · 1152 / {gain} = {2048 * ROW / gain:,.0f} keys")
    assert crossing() == pytest.approx(2048 * ROW / gain)
    said(f"the ratio approaches 1152 / 156 = {most():.1f}")


def test_step_9():
    keys = 2 * LAUNCH_S * H100.memory_bytes_per_s / ROW
    said(f"in which an H100 reads the latents of {keys:,.0f} keys")
    said(f"so 131,072 scores take at least {1e6 * top_k_s(LONG):.0f} µs")
    late = crossing(launch_s=LAUNCH_S, one_sm_a_row=True)
    said(f"move the crossing to {late:,.0f} keys")
    said(f"meets it at {late:,.0f}")


def test_the_table_of_batches():
    batches = (1, 8, 32, 128)
    found = [crossing(batch, launch_s=LAUNCH_S, one_sm_a_row=True) for batch in batches]
    said(f"| sequences in a step | {' | '.join(map(str, batches))} |")
    said(f"| pays from, keys | {' | '.join(f'{keys:,.0f}' for keys in found)} |")


def test_where_it_loses():
    said(f"a pair costs {V32_LAYER.row_flops:,} FLOPs, expanded {V32_LAYER.pair_flops:,}")
    said(f"By FLOPs a prompt pays from {prompt_crossing():,.0f} tokens on")
    said(f"An index key makes a token `{100 * INDEX / ROW:.0f} %` larger")


def test_the_quiz():
    said(f"2048 · 656 / (656 − 156) = {2048 * 656 / 500:,.0f} keys, and at most 656 / 156 =")
    said(f"656 / 156 = {656 / READ:.1f} times")
    said(f"32 · 131,072 · 4 · 5 = {32 * LONG * 20 / 1e6:.1f} MB")
    said(f"The scores of one layer are {32 * LONG * 4 / 1e6:.1f} MB")
    said(f"which an H100 reads in {1e6 * full(4096).seconds():.1f} µs")
    assert full(4096).seconds() < 2 * LAUNCH_S
    said(f"131,072 · 132 · 61 = {LONG * INDEX * LAYERS / 1e9:.2f} GB, beside")
    said(f"beside {LONG * ROW * LAYERS / 1e9:.2f} GB of latents")


@pytest.mark.parametrize("name", PICTURES)
def test_figures_are_legible_and_drawn_anew(name):
    figure = PICTURES[name][0]()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    svg = (ROOM / f"lab/{name}.svg").read_text(encoding="utf-8")
    title = figure.get_suptitle()
    assert " ".join(title.split())[:40] in " ".join(svg.split())


# ---------------------------------------------------------------- MORE.md


def test_hadamard_in_more():
    errors = {name: outlier_errors(name, 10.0) for name in ("fp8", "int8")}
    (plain, turned), (whole, spread) = errors["fp8"], errors["int8"]
    said(f"The error of the scores is {100 * plain:.1f} % in FP8, and {100 * turned:.1f} %")
    said(f"In INT8 it is {100 * whole:.1f} %, and {100 * spread:.1f} % with it")


def test_the_museum():
    share = V32_LAYER.index_row_flops / V32_LAYER.row_flops
    said(f"Per key that is {100 * share:.0f} % of full attention's FLOPs and")
    said(f"and {100 * READ / ROW:.0f} % of its bytes, scores included")
    said("five passes on one SM take at least 21 µs, half of what")
    assert 0.4 < top_k_s(LONG) / full(LONG).seconds() < 0.5
    said(f"{V32_LAYER.index_row_flops:,} FLOPs for {INDEX + 4} bytes")


# ---------------------------------------------------------------- the record of quality


def rows() -> dict[tuple[str, int], dict]:
    record = json.loads(OUT.read_text(encoding="utf-8"))
    return {(row["choice"], row["keys"]): row for row in record["rows"]}


def test_the_record_is_what_the_text_says_of_it():
    """Best choice below indexer below windows, and more keys hold more of the weights."""
    found = rows()
    for k in KEYS:
        added = [found[name, k]["added"] for name in ("oracle", "indexer", "last")]
        assert added == sorted(added), k
    for name in CHOICES:
        masses = [found[name, k]["mass"] for k in KEYS]
        assert masses == sorted(masses), name
