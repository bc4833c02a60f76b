"""The open tasks of choosing: a model report holds, each planted wrong one is refused by the line
that names what is wrong, and bad files are one line.
"""

import json
import re
from functools import lru_cache

import pytest
import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l02_naive_attention.rope import rotation
from lessons.l19_kv_quantization.formats import FORMATS, kv_bytes_per_token
from lessons.l19_kv_quantization.kivi.kivi import KiviCache
from lessons.toolbox.measure.device import has_triton, version_of
from reference.bench.open_tasks import cache_format, coded_cache, drafter, tiles
from reference.bench.open_tasks.__main__ import main
from reference.bench.open_tasks.board import START
from reference.bench.open_tasks.coded_cache import Choice, CodedCache, cache_bytes

REPORTS = START.parent / "reports"
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
TASKS = ("cache", "tiles", "drafter")


@lru_cache
def model_report(task: str) -> str:
    """What the model report hands in, as JSON."""
    text = (REPORTS / f"{task}.md").read_text(encoding="utf-8")
    return re.search(r"```json\n(.*?)```", text, re.DOTALL)[1]


def handed_in(task: str, tmp_path, text: str, capsys, flag: str = "--plan") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command over a file of this text."""
    file = tmp_path / f"{task}.json"
    file.write_text(text, encoding="utf-8")
    code = main([task, "--seed", "7", flag, str(file)])
    said = capsys.readouterr()
    return code, said.out, said.err


# ---------------------------------------------------------------- bad files


def without_a_number(found):
    found["tried"][0]["numbers"].popitem()


def a_text_for_a_number(found):
    found["tried"][0]["numbers"][next(iter(found["tried"][0]["numbers"]))] = "12"


def not_a_number(found):
    found["tried"][0]["numbers"][next(iter(found["tried"][0]["numbers"]))] = float("nan")


def without_choices(found):
    del found["tried"]


def too_few(found):
    found["tried"] = found["tried"][:3]


def the_same_name(found):
    found["tried"][1]["name"] = found["tried"][0]["name"]


def the_same_choice(found):
    found["tried"][1]["choice"] = found["tried"][0]["choice"]


def one_field_more(found):
    found["tried"][0]["choice"]["speed"] = 1


def a_choice_without_a_field(found):
    found["tried"][0]["choice"].popitem()


def no_object(found):
    found["tried"][2] = 5


def another_chosen(found):
    names = found["chosen"]
    found["chosen"] = dict.fromkeys(names, "x") if isinstance(names, dict) else "x"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_number, "numbers: {last} is missing; needed: "),
        (a_text_for_a_number, ": {first}: got '12'; accepted: a number"),
        (not_a_number, ": {first}: got nan; accepted: a number"),
        (without_choices, "tried is missing; needed: tried, chosen"),
        (too_few, "tried: got 3; accepted: a list of 4 to 24 choices"),
        (the_same_name, "choice 2 of tried: '{name}' is the name of an earlier one, too"),
        (the_same_choice, ": the same choice as '{name}'"),
        (one_field_more, "'{name}': choice: got a field 'speed'; accepted: "),
        (a_choice_without_a_field, "'{name}': choice: {field} is missing; needed: "),
        (no_object, "choice 3 of tried: got 5; accepted: an object with name, choice, numbers"),
        (another_chosen, "got 'x'; accepted: the name of a choice in tried"),
    ],
)
def test_what_is_no_report_is_one_line(task, change, said, tmp_path, capsys):
    found = json.loads(model_report(task))
    row = json.loads(model_report(task))["tried"][0]
    names = dict(
        first=next(iter(row["numbers"])),
        last=list(row["numbers"])[-1],
        name=row["name"],
        field=list(row["choice"])[-1],
    )
    change(found)
    code, _, error = handed_in(task, tmp_path, json.dumps(found), capsys)
    assert (code, error.count("\n")) == (2, 1) and said.format(**names) in error, error


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("", "no JSON"),
        ("[1, 2]", "accepted: an object of JSON"),
        (100_000 * "[", "no JSON"),
        ("{'tried': 1}", "no JSON"),
    ],
)
def test_what_is_no_json_is_one_line(task, text, said, tmp_path, capsys):
    for flag in ("--plan", "--measure"):
        code, _, error = handed_in(task, tmp_path, text, capsys, flag)
        assert (code, error.count("\n")) == (2, 1) and said in error, error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cache", "--plan", "nowhere.json"], "No such file"),
        (["cache", "--plan", "."], "directory"),
        (["sizing", "--measure", "a.json"], "accepted: with cache, tiles, drafter"),
        (["tiles", "--measure", "a", "--plan", "b"], "got both"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("task", "field", "value", "said"),
    [
        ("cache", "k", "int3", "accepted: one of auto, fp8, int8, int4, kivi4, kivi2, or a list"),
        ("cache", "v", ["int8"] * 5, "a list of 6, one for each layer"),
        ("cache", "v", [["int8"]] * 6, "a list of 6, one for each layer"),
        ("cache", "sinks", -1, "a whole number, 0 to 512"),
        ("cache", "recent", True, "a whole number, 0 to 512"),
        ("tiles", "block_m", 48, "accepted: 16, 32, 64, 128, 256"),
        ("tiles", "num_warps", [4], "accepted: 1, 2, 4, 8, 16"),
        ("tiles", "num_warps", True, "accepted: 1, 2, 4, 8, 16"),
        ("drafter", "method", "oracle", "accepted: none, ngram, suffix, draft"),
        ("drafter", "method", ["ngram"], "accepted: none, ngram, suffix, draft"),
        ("drafter", "workload", "images", "accepted: code, text"),
        ("drafter", "num_speculative_tokens", 17, "a whole number, "),
    ],
)
def test_a_value_that_cannot_be_is_one_line(task, field, value, said, tmp_path, capsys):
    found = json.loads(model_report(task))
    found["tried"][-1]["choice"][field] = value
    code, _, error = handed_in(task, tmp_path, json.dumps(found), capsys)
    assert (code, error.count("\n")) == (2, 1) and said in error, error


# ---------------------------------------------------------------- the model reports


@pytest.fixture
def counted_once(monkeypatch):
    """The tiles of the model report are compiled once for all tests."""
    monkeypatch.setattr(tiles, "counted", counted_for_all)


REALLY_COUNTED = tiles.counted


@lru_cache
def counted_as_text(task, choices):
    return json.dumps(REALLY_COUNTED(task, list(choices)))


def counted_for_all(task, choices):
    return json.loads(counted_as_text(task, tuple(choices)))


def with_this_triton(text: str) -> str:
    """A report of tiles names the version that wrote its code."""
    return re.sub(r'"triton": "[^"]*"', f'"triton": "{version_of("triton")}"', text)


@pytest.mark.sample(1, of="open tasks")
@pytest.mark.parametrize("task", ("cache", "drafter"))
def test_the_model_report_holds_and_no_wrong_one(task, tmp_path, capsys):
    text = model_report(task)
    code, out, error = handed_in(task, tmp_path, text, capsys)
    assert code == 0 and out.endswith("\nIt holds.\n") and not error, out
    for row in range(len(json.loads(text)["tried"])):
        for name in json.loads(text)["tried"][row]["numbers"]:
            found = json.loads(text)
            found["tried"][row]["numbers"][name] *= 1.1
            found["tried"][row]["numbers"][name] += 40 if name == "same_tokens" else 0.04
            refused(task, found, f"{found['tried'][row]['name']}: {name} does not hold: ",
                    tmp_path, capsys)  # fmt: skip


def refused(task, found, said, tmp_path, capsys) -> None:
    """One line says so, the last one that it does not hold."""
    code, out, error = handed_in(task, tmp_path, json.dumps(found), capsys)
    lines = out.splitlines()
    assert code == 1 and lines[-1] == "It does not hold." and not error
    assert sum(said in line for line in lines) == 1, out
