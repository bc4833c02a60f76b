"""The open tasks: what a command accepts is right, what it refuses is one line, and the model
reports say what the commands say.
"""

import json
import re
import shutil

import pytest

from lessons.toolbox.measure.device import has_triton
from reference.bench.open_tasks import board, detective, sizing
from reference.bench.open_tasks.__main__ import main

REPORTS = board.START.parent / "reports"
needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")


def test_the_detective_knows_who_wrote_what(tmp_path, capsys):
    assert main(["detective", "--seed", "7", "--out", str(tmp_path)]) == 0
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"detective_7_{letter}.csv" for letter in "ABC"]
    capsys.readouterr()
    for answer, code, said in (
        ("whole,chunks,waves", 0, "3 of 3"),
        ("waves,chunks,whole", 1, "1 of 3"),
        ("a,b,c", 2, "each of waves, whole, chunks once"),
    ):
        assert main(["detective", "--seed", "7", "--answer", answer]) == code
        found = capsys.readouterr()
        assert said in found.out + found.err and (found.out + found.err).count("\n") == 1


@pytest.mark.parametrize("seed", range(3))
def test_each_scheduler_leaves_its_trace(seed):
    """What the model report looks for, in tasks of other numbers, too."""
    logs = detective.logs_of(seed)
    together = {}
    for name, log in logs.items():
        starts = [round(time_s, 6) for time_s in log.token_s[log.first]]
        together[name] = max(map(starts.count, starts))
    assert together["waves"] >= 16 and max(together["whole"], together["chunks"]) < 8
    longest_s = {name: log.itl_s.max() for name, log in logs.items()}
    assert longest_s["whole"] > 2 * longest_s["chunks"]


def test_letters_do_not_follow_from_the_order():
    assert len({tuple(detective.names_of(seed)) for seed in range(40)}) == 6


def test_the_model_plan_holds_and_is_cheaper_than_a_plain_search(tmp_path, capsys):
    report = (REPORTS / "sizing.md").read_text()
    path = tmp_path / "plan.json"
    path.write_text(re.search(r"```json\n(.*?)```", report, re.DOTALL)[1])
    assert main(["sizing", "--seed", "7", "--plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert "$4.00 an hour" in out and "$5.80 (2 x h100)" in out and "It holds." in out
    plan = json.loads(path.read_text()) | {"gpus_per_replica": 2}
    path.write_text(json.dumps(plan))
    assert main(["sizing", "--seed", "7", "--plan", str(path)]) == 1
    assert "It does not hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "h900"}, "l40s, a100, h100, h200"),
        ({"replicas": 0}, "a whole number, 1 to 64"),
        ({"policy": "magic"}, "static, dynamic, continuous"),
        ({"more": 1}, "gpu, gpus_per_replica"),
        (None, "no JSON"),
    ],
)
def test_what_is_no_plan_is_one_line(change, said, tmp_path, capsys):
    plan = dict(zip(sizing.FIELDS, ("h100", 2, 3, "chunked", 1024)))
    path = tmp_path / "plan.json"
    path.write_text("{" if change is None else json.dumps(plan | change))
    assert main(["sizing", "--plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


ONE_PASS = """
import torch
from lessons.toolbox.kernels.triton_ import tl, triton

@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    x = tl.load(x_ptr + row + at, mask=at < columns, other=float("-inf"))
    e = tl.exp(x - tl.max(x))
    tl.store(out_ptr + row + at, e / tl.sum(e), mask=at < columns)

def softmax(x):
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    softmax_kernel[(len(x),)](x, out, x.shape[1], BLOCK=block, num_warps=4)
    return out
"""


@needs_triton
@pytest.mark.sample(1, of="compiled code")
def test_the_board_counts_what_the_model_report_says(tmp_path, capsys):
    report, mine = (REPORTS / "board.md").read_text(), tmp_path / "mine.py"
    assert board.run(mine, tmp_path) == 0 and mine.read_text() == board.START.read_text()
    mine.write_text(ONE_PASS)
    assert board.run(mine, tmp_path) == 0, capsys.readouterr()
    given, faster = json.loads((tmp_path / "board.json").read_text())
    assert faster["us"] < 0.8 * given["us"], "the goal is one idea away"
    for row in (given, faster):
        for count in ("sectors", "instructions"):
            assert f"{row[count]:,}" in report
        assert f"{row['us']:.2f} µs" in report


@needs_triton
@pytest.mark.sample(1, of="compiled code")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("e / tl.sum(e)", "e"), "not right: AssertionError: rows of 5"),
        ((", mask=at < columns)", ")"), "not right"),
        (("    return out", "    return out * 1.0"), "PyTorch computes, too: mul"),
        (("def softmax(x)", "def softmax(x"), "not right: SyntaxError"),
    ],
)
def test_what_does_not_count_is_not_on_the_board(change, said, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(ONE_PASS.replace(*change))
    assert board.run(mine, tmp_path) == 1
    out = capsys.readouterr().out
    assert said in out and not (tmp_path / "board.json").exists()


def test_the_first_version_is_given_once(tmp_path):
    """A learner's file is never written over."""
    shutil.copy(board.START, tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text("def softmax(:")
    assert board.run(tmp_path / "mine.py", tmp_path) == 1
    assert (tmp_path / "mine.py").read_text() == "def softmax(:"
