"""Lesson 25: excerpts are lines of the sources, and the README quotes what the code says."""

import json
from pathlib import Path

from lessons.l01_roofline.planner.models import find_model
from lessons.l25_one_step_ahead.lab.experiments import LATENCIES_MS, first_tokens_ms, step_ms
from lessons.l25_one_step_ahead.lab.testing import DEVICE_SLIPS, LOOP_SLIPS
from lessons.toolbox.measure.hardware import CHIPS
from solutions.l25_one_step_ahead import two_time_lines
from tests.excerpts import plain_readme, stray_excerpts

ROOM = Path(__file__).parents[1] / "lessons/l25_one_step_ahead"
README = plain_readme(ROOM)
FIRST_TOKENS = {device_ms: first_tokens_ms(device_ms) for device_ms in (2, 5, 20)}


def test_the_excerpts_are_lines_of_the_sources():
    assert not stray_excerpts(ROOM)


def test_the_readme_quotes_the_step_of_a_model():
    """The bottleneck: a step reads all weights once, but for the input embedding (lesson 1), and a
    host of 2 ms comes on top.
    """
    weights = 2 * find_model("llama-3-8b").params_read(1)
    memory = CHIPS["h100"].memory_bytes_per_s
    device_ms = 1e3 * weights / memory
    assert f"takes at least {device_ms:.1f} ms" in README
    assert f"it reads {weights / 1e9:.1f} GB of weights at {memory / 1e12:.2f} TB/s" in README
    assert f"the device idles {2 / (2 + device_ms):.0%} of the time" in README
    half = device_ms / 2
    assert f"a step takes {half:.1f} ms, and they idle {2 / (2 + half):.0%} of the time" in README


def test_the_measured_figure_shows_what_its_description_says():
    """Faster everywhere, near the device alone from 5 ms on; and where it beats the table."""
    record = json.loads((ROOM.parents[1] / "results/cpu/l25_steps.json").read_text())
    in_turns, ahead = (
        {point["x"]: point["median_s"] for point in record["series"][label]["points"]}
        for label in ("one after the other", "one step ahead")
    )
    for device_ms, alone in zip(record["x"], record["floor_s"]):
        assert ahead[device_ms] < in_turns[device_ms]
        assert (ahead[device_ms] <= 1.125 * alone) == (device_ms >= 5)
        if device_ms in (5, 20):
            assert in_turns[device_ms] / ahead[device_ms] > (2 + device_ms) / device_ms
    assert "From five milliseconds on it takes at most an eighth more" in README


def test_the_readme_quotes_what_the_clock_says():
    """The table of step 2, the masks of step 8, the first tokens, and the quiz."""
    for device_ms in LATENCIES_MS:
        serial, ahead = step_ms(device_ms)
        row = f"| {device_ms} | {serial:.0f} | {ahead:.0f} | {serial / ahead:.2f} |"
        assert row in README, row
    for masks_ms in (2, 4):
        _, ahead = step_ms(5, masks_ms)
        assert f"{masks_ms} ms" in README and f"{ahead:.0f} ms" in README
    assert step_ms(5, 2).ahead < 5.01 and 5.99 < step_ms(5, 4).ahead < 6.01
    serial, ahead = FIRST_TOKENS[5]
    assert f"comes after `{ahead:.1f} ms` on average, instead of `{serial:.1f} ms`" in README
    serial, ahead = FIRST_TOKENS[20]
    assert f"with a device of `20 ms` after `{ahead:.0f} ms` instead of `{serial:.0f} ms`" in README
    later = {device_ms: times.ahead - times.serial for device_ms, times in FIRST_TOKENS.items()}
    assert later[2] < 0 < later[5] < 5 and 0 < later[20] < 20  # where passes are long
    in_turns, one_ahead = two_time_lines([3.0] * 400, [9.0] * 400)
    assert f"12 / 9 = {in_turns[-1] / one_ahead[-1]:.2f}" in README
    assert f"{64 // 2} of {64 * 100 + 64 // 2}" in README
    assert f"1 / 0.0018 s = {1 / 0.0018:.0f} tokens/s" in README


def test_more_counts_the_planted_slips():
    words = {4: "four", 5: "five"}
    assert f"{words[len(LOOP_SLIPS)]} loops and {words[len(DEVICE_SLIPS)]} devices" in README
