"""The records that lesson 26 quotes from the simulator can be made again, and say what is drawn."""

import json

import pytest

from lessons.l26_kv_transfer.lab.simulated import LOOKS, draw_apart, earlier_up_to, rows_of
from reference.simulator import apart


def recorded() -> list[dict]:
    return json.loads(apart.RECORD.read_text(encoding="utf-8"))["rows"]


def test_the_record_has_every_run():
    assert [(row["prompt"], row["rate"], row["way"]) for row in recorded()] == [
        (prompt, rate, way.name)
        for prompt in apart.LOADS
        for rate in apart.LOADS[prompt]
        for way in apart.WAYS
    ]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.sample(2)
def test_a_row_of_the_record_is_simulated_again(index):
    row = recorded()[30 + index]  # short prompts take the fewest seconds
    (way,) = [way for way in apart.WAYS if way.name == row["way"]]
    again = apart.simulated(row["prompt"], row["rate"], way)
    assert again.pop("way") == row.pop("way")
    assert again == pytest.approx(row, rel=1e-3, abs=0.02)


def test_the_title_is_what_the_lines_show():
    up_to = earlier_up_to(4096)
    assert f"up to {up_to:g} requests/s" in draw_apart().get_suptitle()
    mixed, other = (rows_of(4096, way) for way in list(LOOKS)[:2])
    earlier = {a["rate"]: b["ttft_p99_ms"] < a["ttft_p99_ms"] for a, b in zip(mixed, other)}
    assert all(is_earlier == (rate <= up_to) for rate, is_earlier in earlier.items())
    assert 0 < up_to < max(earlier)
