"""Files that are handed in for an open task of choosing, and are none: each is one line."""

import json

import pytest

from reference.bench.open_tasks.__main__ import main
from tests.open_task_cases import TASKS, handed_in, model_report


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
