"""lessons/CHOOSING.md: its prices are those of lesson 1's planner."""

import re
from pathlib import Path

import pytest

from lessons.l01_roofline.calculators import cost_per_million_tokens
from lessons.l01_roofline.planner.models import MODELS
from lessons.l01_roofline.planner.plan import Plan, make_plan
from lessons.toolbox.measure.hardware import CHIPS

TEXT = (Path(__file__).resolve().parents[1] / "lessons/CHOOSING.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (Llama-3-\d+B), (\d) × H100, (\d+) bits \|(.+)\|$", TEXT, re.MULTILINE)
BATCHES = (1, 16, 64, 256)


def plan_of(name: str, gpus: str, bits: str, batch: int) -> Plan:
    model = MODELS[name.lower()]
    return make_plan(model, CHIPS["h100"], batch, 2048, int(gpus), int(bits), int(bits))


@pytest.mark.parametrize("name, gpus, bits, prices", ROWS)
def test_a_row_of_prices(name, gpus, bits, prices):
    printed = [float(price) for price in prices.split("|")]
    assert len(printed) == len(BATCHES)
    for batch, price in zip(BATCHES, printed):
        speed = plan_of(name, gpus, bits, batch).tokens_per_s
        assert price == round(cost_per_million_tokens(3 * int(gpus), speed, 0.5), 2)


def test_all_rows_are_there_and_the_text_says_what_fits():
    assert len(ROWS) == 4
    running = [plan_of(*row[:3], 256).running for row in ROWS]
    assert running == [206, 256, 214, 214]
    assert "206 for the first row, 214 for the last two" in TEXT
    falls = [float(row[3].split("|")[0]) / float(row[3].split("|")[2]) for row in ROWS]
    assert min(falls) > 29, "a factor of thirty or so"


def test_a_published_number_is_held_against_the_floor():
    """16,200 tokens/s: what is in the table of questions."""
    published = 16_200

    def floor(batch: int, context: int) -> Plan:
        return make_plan(MODELS["llama-3-8b"], CHIPS["h100"], batch, context, 1, 16, 16)

    speeds = {(256, context): floor(256, context).tokens_per_s for context in (2048, 1024, 512)}
    assert [round(speed) for speed in speeds.values()] == [9816, 17371, 26642]
    assert all(f"{speed:,.0f}" in TEXT for speed in speeds.values())
    assert speeds[256, 2048] < published < speeds[256, 1024]
    assert all(floor(batch, 2048).tokens_per_s <= speeds[256, 2048] for batch in (64, 200, 1000))
    gaps_ms = [1e3 * number / published for number in (256, 64)]
    least_ms = 1e3 * 64 / floor(64, 512).tokens_per_s
    assert [f"{gap:.1f} ms" for gap in (*gaps_ms, least_ms)] == ["15.8 ms", "4.0 ms", "5.8 ms"]
    assert all(f"{gap:.1f} ms" in TEXT for gap in (*gaps_ms, least_ms)) and gaps_ms[1] < least_ms
