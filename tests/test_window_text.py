"""What the texts say of window groups is what the code computes."""

from pathlib import Path

import pytest

from lessons.l01_roofline.planner.plan import make_plan
from lessons.l01_roofline.planner.windows import BLOCK_SIZE, WINDOWED
from lessons.l27_states.lab.pictures import PICTURES
from lessons.l27_states.lab.windows import CHIP, CONTEXT, TIMES, WINDOW, draw_pages, rows, table
from lessons.l27_states.lab.windows import SIZE as PAGE
from lessons.toolbox.draw.figure import alt_of, overlapping_texts, texts_outside
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.model.window_groups import blocks_for, first_page, groups_of
from reference.features.states.shapes import QWEN3_NEXT
from reference.features.windows.blocks import GroupBlocks

LESSONS = Path(__file__).resolve().parents[1] / "lessons"
MORE = (LESSONS / "l27_states/MORE.md").read_text(encoding="utf-8")
ROWS = {row.name: row for row in rows()}


def test_the_table():
    assert table() in MORE, "python -m lessons.l27_states.lab.windows prints it"
    plan = make_plan(QWEN3_NEXT, lookup(CHIP), 1, CONTEXT, gpus=1, bits_per_weight=8)
    kinds = f"{QWEN3_NEXT.num_kv_layers} + {QWEN3_NEXT.num_state_layers} states"
    assert f"| {QWEN3_NEXT.name} | {kinds} | | | {plan.sequences} | |" in MORE
    assert f"An H200, {CONTEXT:,} tokens each" in MORE and CHIP == "h200"


@pytest.mark.parametrize("page", ["l27_states/README.md", "CHOOSING.md"])
def test_the_requests_of_gemma(page):
    text, row = (LESSONS / page).read_text(encoding="utf-8"), ROWS["gemma-3-27b"]
    said = f"{row.in_groups} requests of", f"in place of {row.in_one}"
    assert all(part in text for part in said) and f"{CONTEXT:,} tokens" in text


def test_the_groups_that_the_text_names():
    gemma, oss = ROWS["gemma-3-27b"], ROWS["gpt-oss-120b"]
    assert (
        f"has {oss.full_layers} full layers and {oss.window_layers} with a window, so a page holds "
        f"{oss.layers_each} layers, and there are two groups"
        in MORE
        and oss.groups == 2
    )
    assert f"has {gemma.full_layers} full layers and {gemma.window_layers} with a window" in MORE
    assert f"A page holds {gemma.layers_each} layers, and there are {gemma.groups} groups" in MORE
    places = (gemma.groups - 1) * gemma.layers_each
    assert gemma.groups == 1 + 6, "one full, six with a window"
    assert f"six groups with a window {places - gemma.window_layers} of {places}" in MORE
    assert f"after {ROWS['mistral-7b-v0.1'].window:,} tokens" in MORE


def test_the_rule_by_the_manager():
    """(n - w + 1) // 16 pages are gone when the token at n runs."""
    assert f"before (n − w + 1) // {BLOCK_SIZE} go" in MORE
    groups = groups_of(WINDOWED["gpt-oss-120b"].layer_windows)
    blocks, window = GroupBlocks(groups, 64, 200, BLOCK_SIZE), 128
    for n in range(300):
        blocks.grow(0, n, n + 1)
        assert blocks.tables[0].groups[1].count(-1) == max(0, n - window + 1) // BLOCK_SIZE


def test_the_picture():
    full = blocks_for(TIMES[-1], PAGE)
    kept = [blocks_for(held, PAGE) - first_page(WINDOW, held, PAGE) for held in TIMES]
    alt = alt_of(LESSONS / "l27_states/lab/pages.svg")
    assert full == 11 and "keeps all eleven" in alt and max(kept) == 3 and "at most three" in alt
    assert f"a window of {WINDOW}" in alt and TIMES.step == 4 and "each four tokens" in alt
    figure = draw_pages()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert PICTURES["pages"] == (draw_pages, None)


def test_a_page_is_in_the_glossary():
    text = (LESSONS / "GLOSSARY.md").read_text(encoding="utf-8")
    assert (
        "### window group\n" in text
        and "Lesson 27](l27_states/README.md)" in text.partition("### window group\n")[2][:600]
    )
