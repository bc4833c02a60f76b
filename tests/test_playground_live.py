"""Pages whose answers the lessons' Python computes in the browser: they are those of CPython."""

import random
import re
import sys
from collections import Counter

import pytest

from book.playground import live, packing
from book.playground.elsewhere import Elsewhere
from tests.test_playground import opened, shown
from tests.test_trace import in_a_browser


def test_what_stands_for_pytorch_computes_nothing():
    torch = Elsewhere("torch")
    assert (torch.Tensor | None) is not None and torch.inference_mode()(len) is not None
    for wrong in (lambda: bool(torch.x), lambda: list(torch.x), lambda: torch.x + 1):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()


def test_modules_that_a_page_imports_are_the_courses():
    files = packing.course()
    for name in packing.MODULES.split():
        whole = packing.source_of(name)
        assert files[name][1].replace("from __future__ import annotations\n", "") == whole
        for module in packing.imported(whole):
            known = module in files or module.partition(".")[0] in sys.stdlib_module_names
            assert known, f"{name} imports {module}"
    assert "Elsewhere" in files["torch"][1] and files["lessons"][1] == ""


REQUESTS = [[100, 400, 8], [0, 32, 16], [0, 128, 4]]
RUN = {
    "places": 2,
    "budget": 512,
    "blocks": 96,
    "cost": [0.004, 0.00002, 0.0],
    "requests": REQUESTS,
}
POLICIES = ("static waves", "waves with a window", "continuous", "prompts first", "chunks")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_time_line_has_every_token_in_the_visitors_order(policy):
    found = live.answer("timeline", RUN | {"policy": policy})
    ran = Counter()
    for one in found["passes"]:
        for row, count, _ in one["chunks"]:
            ran[row] += count
    # all tokens but the last of an answer, from which nothing is computed
    assert ran == {row: prompt + output - 1 for row, (_, prompt, output) in enumerate(REQUESTS)}
    assert all(one["first"] <= one["left"] for one in found["rows"])
    padded = policy in POLICIES[:2]
    assert (found["totals"]["wasted"] > 0) == padded
    used = max(one["used"] for one in found["passes"])
    assert (used == 0) == padded and used <= 96


def test_a_time_line_tells_what_cannot_be_served():
    said = live.answer("timeline", RUN | {"policy": "prompts first", "budget": 256})["error"]
    assert "accepted without chunked prefill: at most 256" in said
    said = live.answer("timeline", RUN | {"policy": "chunks", "blocks": 24})["error"]
    assert "accepted: at most 24, the whole pool" in said


def test_blocks_are_forked_copied_swapped_and_refused():
    fork = [["new", 6], ["fork", 0], ["grow", 1]]
    found = live.answer("blocks", {"actions": fork})
    assert found["copies"] == [[1, 2]] and found["tables"] == [[0, 6, [0, 1]], [1, 7, [0, 2]]]
    assert found["owners"][:3] == [2, 1, 1] and found["filled"][:3] == [4, 2, 3]
    swapped = [*fork, ["out", 0], ["new", 4], ["back", 0]]
    found = live.answer("blocks", {"actions": swapped})
    assert found["away"] == [] and found["tables"][0] == [0, 6, [4, 5]]
    full = live.answer("blocks", {"actions": [["new", 48], ["grow", 0]]})
    assert "refused: 1 blocks wanted, 0 of 12 free" in full["said"]
    assert full["tables"] == [[0, 48, list(range(12))]] and full["next"] == []


# when Python has made it
CLICKED = (
    "const timer = setInterval(() => {{ const button = document.getElementById('{}'); "
    "if (button) {{ clearInterval(timer); button.click(); }} }}, 100);"
)


@in_a_browser
def test_a_time_line_in_a_page_is_pythons(tmp_path):
    policy, requests = random.randrange(5), random.sample(range(8), k=4)
    rows = [[20 * one, 2 ** (4 + one % 5), 2 ** (one % 6)] for one in requests]
    state = {"policy": policy, "places": 1, "budget": 2, "blocks": 3}
    state["r"] = "_".join(".".join(map(str, row)) for row in rows)
    found = opened("timeline", tmp_path, state)
    asked = RUN | {"policy": POLICIES[policy], "cost": packing.cost(), "requests": rows}
    wanted = live.answer("timeline", asked | {"blocks": 192})
    totals = wanted["totals"]
    assert found["said"].startswith(
        f"{totals['passes']} passes of the model in {shown(totals['makespan'])} ms: "
        f"{totals['rate']} tokens/s"
    )
    drawn = Counter()
    for row, tokens in re.findall(r'data-row="(\d+)" data-tokens="(\d+)"', found["picture"]):
        drawn[int(row)] += int(tokens)
    assert drawn == {row: prompt + output - 1 for row, (_, prompt, output) in enumerate(rows)}


@in_a_browser
def test_requests_come_and_go_by_buttons(tmp_path):
    state = {"r": "0.64.8_20.32.4", "arrival": 0, "prompt": 1, "output": 2}
    found = opened("timeline", tmp_path, state, CLICKED.format("add"))
    assert "passes of the model" in found["said"]
    assert found["said"] == opened("timeline", tmp_path, {"r": "0.64.8_20.32.4_0.32.4"})["said"]
    found = opened("timeline", tmp_path, state, CLICKED.format("remove0"))
    assert found["said"] == opened("timeline", tmp_path, {"r": "20.32.4"})["said"]


@in_a_browser
def test_blocks_in_a_page_are_pythons(tmp_path):
    actions = [["new", 9], ["fork", 0], ["grow", 1], ["out", 0], ["new", 3], ["back", 0]]
    do = "_".join(f"{name}{number}" for name, number in actions)
    found = opened("blocks", tmp_path, {"do": do}, CLICKED.format("free1"))
    wanted = live.answer("blocks", {"actions": [*actions, ["free", 1]]})
    assert wanted["said"] in found["said"]
    owned = [[block, row] for row, _, table in wanted["tables"] for block in table]
    drawn = re.findall(r'data-block="(\d+)" data-row="(\d+)"', found["picture"])
    assert sorted(owned) == sorted([int(block), int(row)] for block, row in drawn)
