"""lessons/CHOOSING.md: its prices are those of lesson 1's planner."""

import re
from pathlib import Path

import pytest

from lessons.l01_roofline.calculators import cost_per_million_tokens
from lessons.l01_roofline.models import MODELS
from lessons.l01_roofline.plan import Plan, make_plan
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
