"""The pictures can be read, and they count right."""

import pytest

from lessons.l03_kv_cache.lab.pictures import (
    PROMPT,
    draw,
    draw_bytes,
    draw_reserved,
    draw_step_bytes,
    draw_work,
    passes,
)
from lessons.l03_kv_cache.lab.testing import CONFIG
from lessons.l03_kv_cache.lab.traffic import mib_written
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside

PICTURES = {
    "passes": draw,
    "bytes": lambda: draw_bytes(CONFIG, [64, 128, 256]),
    "reserved": lambda: draw_reserved([(20, 30), (100, 60), (7, 200)], 1024),
    "work": draw_work,
    "one step": draw_step_bytes,
    "one sequence": lambda: draw_step_bytes(1, 128, bits=4),
}


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.sample(4, of="pictures")
def test_the_pictures_can_be_read(name):
    figure = PICTURES[name]()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_bytes_of_the_picture():
    """In MiB: every token once; what concatenating copies; what doubling moves."""
    one = CONFIG.kv_bytes_per_token(4) / 2**20
    written = mib_written(CONFIG, [64, 200])
    assert written["KVPool, reserved"] == [64 * one, 200 * one]
    assert written["KVPool, doubling"] == [64 * one, (200 + 64 + 128) * one]
    assert written["ConcatCache"] == [sum(range(65)) * one, sum(range(201)) * one]


@pytest.mark.parametrize("way, run", [("recompute", 18), ("concatenate", 6), ("preallocate", 6)])
def test_the_picture_counts_what_the_text_says(way, run):
    rows = passes(way)
    assert [len(row) for row in rows] == [PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 3]
    assert sum(row.count("runs through the model") for row in rows) == run
    copied = sum(row.count("copied to make room, then read") for row in rows)
    assert copied == (3 + 4 + 5 if way == "concatenate" else 0)
