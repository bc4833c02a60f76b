"""reference.bench.routes: chats behind a router, in small."""

import json
import random

import pytest

from reference.bench import routes
from reference.bench.routes_figure import draw_routes, hit_rate, waits_ms


def a_turn(found: int, asked: int = 100, waits=(0.1,)) -> dict:
    return {"found_tokens": found, "asked_tokens": asked, "ttft_s": list(waits)}


def test_rates_and_waits():
    turns = [a_turn(0), a_turn(50, waits=(0.1, 0.3)), a_turn(100, waits=(0.2,))]
    assert hit_rate(turns[1:]) == 0.75 and hit_rate([]) == 0.0
    assert waits_ms(turns[1:], 50) == pytest.approx(200)


@pytest.mark.parametrize(
    "told", [[("kv, weight 1", 90)], [("kv, weight 8", 90), ("kv, weight 1", 70)]]
)
def test_the_headline_leaves_out_the_first_turn(told):
    entries = [
        {"name": name, "failed": 0, "turns": [a_turn(0), a_turn(found), a_turn(found)]}
        for name, found in (("round-robin", 30), ("prefix", 60), *told)
    ]
    record = dict(fingerprint={"device": "x"}, model="m", replicas=3, chats=9, turns=3)
    title = draw_routes(record | {"entries": entries}).get_suptitle()
    assert "90%" in title and "60%" in title and "30%" in title
    assert ("weight 8" in title) == (len(told) > 1)


def test_a_counter_of_metrics():
    text = '# TYPE x\nvllm:prefix_cache_hits_total{a="b"} 32.0\n'
    assert routes.counter(text, "hits") == 32 and routes.counter(text, "queries") == 0


def test_no_two_chats_begin_alike():
    args = routes.parse_args(["--chats", "12", "--turns", "3", "--seed", "5"])
    firsts = [chat[0][:40] for nth in range(3) for chat in routes.new_chats(args, nth)]
    assert len(set(firsts)) == 36
    assert routes.new_chats(args, 1) == routes.new_chats(args, 1)
    assert [len(chat) for chat in routes.new_chats(args, 0)] == [3] * 12


@pytest.mark.parametrize(
    "arguments", [["--chats", "2"], ["--turns", "1"], ["--replicas", "1"], ["--kv-weights", "-1"]]
)
def test_sizes_that_cannot_be_measured_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        routes.main(arguments)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert arguments[0] in said and "at least" in said


def test_chats_behind_a_router_in_small(tmp_path, request):
    """With real servers, of which one is killed and started again."""
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: takes a minute (make test-all)")
    sizes = ["--chats", "6", "--turns", "4", "--replicas", "2", "--clients", "2"]
    seed = ["--seed", str(random.randrange(1000))]
    assert routes.main([*sizes, *seed, "--out", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "routes.json").read_text())["entries"]
    assert [entry["name"] for entry in entries] == list(routes.policies_of(routes.parse_args([])))
    assert not any(entry["failed"] for entry in entries)
    assert all(hit_rate(entry["turns"][1:]) > 0.2 for entry in entries)
