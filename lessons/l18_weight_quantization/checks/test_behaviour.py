"""The judges of behaviour_tasks.py by hand; wrong judges show; MORE.md says what was counted."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l18_weight_quantization.lab import behaviour, behaviour_tasks
from lessons.l18_weight_quantization.lab.behaviour_tasks import items
from lessons.toolbox.model.checkpoint import REPOSITORY
from lessons.toolbox.model.config import ModelConfig
from lessons.toolbox.proof.pages import pages
from lessons.toolbox.proof.planted import with_bug

ROOM = Path(__file__).parents[1]

# judge: [(what it is given, what a model wrote, whether that is right)]
JUDGED = {
    "closes": [
        ("(", "a, b)", True),
        ("([", "a](b) + c)", True),
        ("([", "a) ]", False),
        ("([", "a] + b", False),
        ("(", "')' + \"(\" + x", False),
        ("(", "')')", True),
        ("{(", "x): [1, 2]}", True),
        ("(", "a, b", False),
        ("(", "", False),
    ],
    "is_literal": [
        ('    {"a": ', '3, "b": [1, "}"]},\n    {"c', True),
        ('    {"a": ', "3, None}", False),
        ('    {"a": ', "f(3)}", False),
        ('    {"a": ', "{1: 2}}, 7", True),
        ('    {"a": ', '3, "b"', False),
    ],
    "starts_with": [
        ("count", "count)\n", True),
        ("count", "count", True),
        ("count", "counter)", False),
        ("count", "count_of)", False),
        ("count", "size)", False),
        ("count", " count)", False),
    ],
    "names_exist": [
        ("def f(size, path):\n    ", "return size + len(path)\n    nothing_of(this)", True),
        ("def f(size, path):\n    ", "return size + width", False),
        ("def f(size):\n    ", "total = size * 2", True),
        ("def f(size):\n    ", "for item in size.items():", True),
        ("def f(size):\n    ", "if size is None:", True),
        ("def f(size):\n    ", "return unknown.size", False),
        ("def f(size):\n    ", "if not isinstance(size, (int, ", True),
        ("def f(size):\n    ", "", False),
        ("def f(size):\n    ", '"""Say it again."""', False),
    ],
    "goes_on": [
        ("def f(x):\n    ", "return x\n\n\ndef g(:\n", True),
        ("def f(x):\n    ", "if x:\n        return (1 +\n", True),
        ("def f(x):\n    ", "if x\n        return 1\n", False),
        ("def f(x):\n    ", "return x]\n    y = 1\n", False),
        ("def f(x):\n    ", "x = 1\n      y = 2\n", False),
        ("def f(x):\n    ", "return x", False),  # no complete line: nothing was judged
    ],
}


def check_judges(module) -> None:
    for name, cases in JUDGED.items():
        for given, text, right in cases:
            assert getattr(module, name)(given, text) is right, (name, given, text)


def test_judges():
    check_judges(behaviour_tasks)


BUGS = {
    "any bracket closes any": ("if CLOSES[stack.pop()] != character:", "if not stack.pop():"),
    "quotes count": ('elif character in "\'\\"":', 'elif character in "":'),
    "the innermost alone": ("            if not stack:\n", "            if True:\n"),
    "whatever begins so": (
        'return text.startswith(word) and not (rest[:1].isalnum() or rest[:1] == "_")',
        "return text.startswith(word)",
    ),
    "the first bracket ends it": (
        "except (ValueError, SyntaxError):\n                continue",
        "except (ValueError, SyntaxError):\n                return False",
    ),
    "attributes are names": ('and before != "." ', ""),
    "every line of the answer": (
        "line = text.splitlines()[0] if text.strip()",
        "line = text if text.strip()",
    ),
    "what follows the function": (
        "(n for n, line in enumerate(lines) if n and line[:1].strip())",
        "iter(())",
    ),
    "an empty answer is right": ("return bool(complete.strip())", "return True"),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_judges_are_rejected(name, tmp_path):
    wrong = with_bug(behaviour_tasks, tmp_path, *BUGS[name])
    with pytest.raises(AssertionError):
        check_judges(wrong)


def test_items_are_the_same_in_every_call_and_can_be_solved():
    """What a module says next is right, for the brackets; and a copied name is in its prompt."""
    found = items(6)
    assert [item.prompt for item in found] == [item.prompt for item in items(6)]
    tasks = {item.task for item in found}
    assert len(found) == 6 * len(tasks) and len(tasks) == 5
    sources = "\n".join(behaviour_tasks.corpus()[1])
    for item in found:
        assert not item.judge("")
        if item.task == "brackets":
            start = sources.index(item.prompt) + len(item.prompt)
            assert item.judge(sources[start : start + 2000]), item.prompt[-80:]
        if item.task == "copies":
            (second,) = item.judge.args
            first = item.prompt.rpartition("print(")[2]
            assert item.prompt.startswith(f"{first}{second} = ") and item.judge(f"{second})\n")
        if item.task == "literals":
            assert item.judge('1, "b": [2]}')


def test_measures():
    assert behaviour.first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert behaviour.first_difference([1, 2], [1, 2]) == 2
    assert behaviour.first_difference([5, 2], [1, 2]) == 0
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    assert behaviour.accepted([p.log()], [q.log()]) == pytest.approx(0.5)
    assert behaviour.accepted([p.log(), q.log()], [p.log(), q.log()]) == pytest.approx(1)
    wider = torch.tensor([[0.25, 0.25, 0.25, 0.25]])  # a row more, which is no token
    assert behaviour.accepted([p.log()], [wider.log()]) == pytest.approx(0.5)


@pytest.fixture
def short(monkeypatch):
    """Two short answers, and few tokens of each item."""
    few = dict(LONG=8, PROMPTS=2, WINDOWS=1, NEW_TOKENS=4, CALIBRATION=1)
    for name, value in few.items():
        monkeypatch.setattr(behaviour, name, value)


def test_a_model_beside_itself_loses_nothing(short):
    """One item of each task: the model as it is."""
    yardstick = behaviour.Yardstick(draft=None, count=1)
    row = yardstick.judge(yardstick.model)
    assert all(task["lost"] == task["gained"] == 0 for task in row["tasks"].values())
    assert row["first_difference"] == [8, 8] and row["same_tokens"] == 8
    assert row["accepted_as_draft"] == pytest.approx(1) and "accepts" not in row


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small random Llama as Hugging Face lays it out: several files, an index, a tokenizer. Its
    matrices have 192 columns, which are no multiple of 128.
    """
    out = tmp_path_factory.mktemp("llama")
    tiny = REPOSITORY / "models/tiny"
    for file in tiny.glob("tokenizer*.json"):
        shutil.copyfile(file, out / file.name)
    sizes = dict(hidden_size=192, intermediate_size=192, num_hidden_layers=1, head_dim=48)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1200)
    raw = json.loads((tiny / "config.json").read_text()) | sizes | dict(tie_word_embeddings=False)
    (out / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    config = ModelConfig("llama", raw["vocab_size"], 192, 1, 4, 2, 48, 192, 1200)
    named = {f"model.{name}": x for name, x in Decoder(config).state_dict().items()}
    named["lm_head.weight"] = named.pop("model.lm_head.weight").clone()
    weight_map = {}
    for index, names in enumerate((list(named)[::2], list(named)[1::2]), 1):
        file = f"model-{index:05}-of-00002.safetensors"
        save_file({name: named[name] for name in names}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return out


def test_a_folder_of_hugging_face(short, folder, monkeypatch, capsys):
    """A table on the way out, nothing written, and what does not fit said in a line."""
    monkeypatch.setattr(behaviour, "items", partial(behaviour_tasks.items, 1))
    monkeypatch.setattr(behaviour, "write_json", None)
    assert behaviour.main(["--model", str(folder), "int4-g32", "int4-g128"]) == 0
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert first.startswith("reference") and "32.00 bits" in first and "same tokens 8 of 8" in first
    assert second.startswith("int4-g32") and " 4.75 bits" in second and "accepts" not in second
    assert said.err.startswith("int4-g128 is left out: group_size: got 128; accepted: a divisor")
    assert said.err.count("\n") == 1


def test_a_folder_that_cannot_be_judged_is_one_line(short, folder, tmp_path, capsys):
    raw = json.loads((folder / "config.json").read_text()) | dict(max_position_embeddings=256)
    for file in folder.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for name, said in ((tmp_path, "accepted: at most 256"), (tmp_path / "none", "unknown model")):
        assert behaviour.main(["--model", str(name)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1 and error.startswith("behaviour: ")


def test_help_names_its_peer(capsys):
    with pytest.raises(SystemExit):
        behaviour.main(["--help"])
    assert "lm_eval --model hf" in capsys.readouterr().out


def test_an_unknown_name_is_one_line(capsys):
    assert behaviour.main(["int5"]) == 2
    assert "NAME: got int5; accepted: fp8-row" in capsys.readouterr().err


def test_the_text_says_what_was_counted():
    rows = {row["name"]: row for row in behaviour.recorded()["rows"]}
    text = pages(ROOM)
    reference, broken = rows["reference"], rows["int4-tensor"]
    right = {name: row["total"]["right"] for name, row in rows.items()}
    assert right["int4-tensor"] < 0.7 * right["reference"]
    four_bits = ("int4-g32", "nvfp4", "mxfp4", "gptq-int4-g128", "int4-row")
    for name in four_bits:
        assert right[name] > 0.9 * right["reference"], name
        assert rows[name]["same_tokens"] < 32, "the text says that they part early"
        assert reference["accepts"] - rows[name]["accepts"] < 0.02
        assert rows[name]["accepted_as_draft"] > 0.85
    assert broken["accepts"] < 0.55
    for name in rows:
        assert f"#rows.name={name}.same_tokens" in text, name
