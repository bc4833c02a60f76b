"""The front page agrees with the lessons and with what the demo recorded."""

import json
import re
from pathlib import Path

import pytest

from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from reference.engine import architecture
from tests import minutes
from tests.course_rules import complete_rooms

REPOSITORY = Path(__file__).resolve().parents[1]
FRONT = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_minutes_are_those_of_the_lessons():
    rows = {room: int(said) for _, room, said in minutes.ROW.findall(FRONT)}
    rooms = complete_rooms(REPOSITORY)
    assert rows == {room.name: minutes.sum_of(room) for room in rooms}


def test_the_length_of_the_demos_prompts():
    tokenizers = pytest.importorskip("tokenizers", reason="NOT RUN: tokenizers is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(REPOSITORY / "models/tiny/tokenizer.json"))
    requests = json.loads((REPOSITORY / "models/prompts.json").read_text(encoding="utf-8"))
    lengths = [len(tokenizer.encode(request["prompt"]).ids) for request in requests]
    assert f"{len(lengths)} requests" in FRONT
    assert f"{sum(lengths) / len(lengths):.0f} tokens of prompt in the mean" in FRONT


def test_every_recorded_step_without_a_gain_is_explained():
    """Of the rungs beyond lesson 3, by a word of their names in the fold under the figure."""
    (fold,) = re.findall(r"<summary>Why some rungs gain.*?</details>", FRONT, re.DOTALL)
    words = {"rotated": "rotation", "repeated": "groups", "groups": "groups", "layers": "layers"}
    words |= {"FlashAttention": "FlashAttention", "splits": "splits", "graphs": "graphs"}
    words |= {"softmax": "softmax", "paged": "paged", "prefix": "prefix", "chunked": "chunked"}
    words |= {"n-grams": "n-grams", "continuous": "continuous"}
    ladder = json.loads((REPOSITORY / "results/cpu/ladder.json").read_text(encoding="utf-8"))
    flat = [rung["name"] for rung in ladder["rungs"][1:] if rung["step"] < 1.1]
    assert len(flat) > 5
    for name in flat:
        found = [known for word, known in words.items() if word in name]
        assert found and found[0] in fold, f"{name}: why does it gain nothing?"


def test_the_picture_of_the_engine_is_whole_and_drawn_anew():
    """Every box names a file that is there, and the committed picture is that of the code."""
    figure = architecture.draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    svg = (architecture.HERE / "architecture.svg").read_text(encoding="utf-8")
    for box in architecture.BOXES:
        assert (REPOSITORY / box.file).is_file(), box.file
        assert f"<!-- {box.name} -->" in svg and f"<!-- {box.shown} -->" in svg
    written = re.findall(r"<!-- (.+?) -->", svg)
    assert len(written) == len(figure.findobj(lambda artist: getattr(artist, "get_text", str)()))
    assert (
        architecture.ALT in svg
        and f"![{architecture.ALT}](reference/engine/architecture.svg)" in FRONT
    )
    assert len({box.file for box in architecture.BOXES}) == len(architecture.BOXES)
