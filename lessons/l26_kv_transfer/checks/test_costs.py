"""What tokens cost: each way by its definition, the lower edge against a search, and wrong prices
refused.
"""

import random

import pytest

from lessons.l01_roofline.planner.models import find_model
from lessons.l15_chunked_prefill.lab.costs import StepCost
from lessons.l26_kv_transfer.costs import (
    LINKS,
    MODELS,
    PRICES,
    Token,
    Way,
    cheapest,
    crossing_s,
    in_words,
    main,
    memory_in_and_out_s,
    token_of,
    ways,
)
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.proof.refusals import assert_message


def test_a_token_is_lesson_15s():
    cost = StepCost()
    token = token_of("llama-3-8b", context=2000)
    assert token.compute_s == pytest.approx(cost.recompute_s(2000) / 2000)
    assert 2 * token.move_s(64e9) == pytest.approx(cost.swap_s(1))


def test_ways_by_their_definition():
    """A token of 1 GB on a GPU of 3600 dollars an hour, so of 1 a second."""
    token = Token(1e9, 3.0)
    prices = dict(gpu_hour=3600, host_gb=10.0, disk_gb=1.0, years=1)
    found = ways(token, link=1e9, disk_link=2e9, **prices)
    year_s = 365 * 24 * 3600
    assert found == [
        Way("HBM", 0.0, 1 / 80),
        Way("host", 2.0, pytest.approx(10 / year_s)),
        Way("disk", 2.0 + 1.0, pytest.approx(1 / year_s)),
        Way("compute", 3.0, 0.0),
    ]
    hidden = ways(token, link=1e9, disk_link=2e9, waiting=0, **prices)
    assert [way.once for way in hidden] == [0, 0, 0, 3]


def test_the_lower_edge_is_the_lowest_line_everywhere(seed):
    """Random lines, among them equal ones and ones that are never the cheapest."""
    for _ in range(200):
        lines = [
            Way(str(n), random.choice((0.0, 1.0, random.random())), random.choice((0.0, 0.5, 2.0)))
            for n in range(random.randint(1, 6))
        ]
        found = cheapest(lines)
        assert found[0][1] == 0 and [since for _, since in found] == sorted(s for _, s in found)
        by_name = {line.name: line for line in lines}
        for pause in [0.0, *(random.expovariate(0.3) for _ in range(20))]:
            name = [name for name, since in found if since <= pause][-1]
            lowest = min(line.dollars(pause) for line in lines)
            assert by_name[name].dollars(pause) == pytest.approx(lowest, abs=1e-12)


def test_the_first_crossing_knows_no_model():
    """And without host memory's price it is twice the memory over the link."""
    times = set()
    for model, bits in MODELS.values():
        hbm, host, *_ = ways(token_of(model, bits))
        times.add(round(crossing_s(hbm, host), 6))
    assert len(times) == 1
    hbm, host, *_ = ways(token_of("llama-3-8b"), host_gb=1e-12)
    assert crossing_s(hbm, host) == pytest.approx(memory_in_and_out_s())
    assert memory_in_and_out_s(CHIPS["h200"], 32e9) == 2 * 141e9 / 32e9


def test_every_price_has_a_source_and_a_date():
    for price in PRICES:
        assert price.dollars > 0 and price.unit and price.source and price.date[:2] == "20"


def test_pauses_in_words():
    said = {0.0: "0.0 s", 2.51: "2.5 s", 90: "90 s", 890: "15 min", 7300: "2.0 h", 4e5: "4.6 days"}
    assert {seconds: in_words(seconds) for seconds in said} == said


def test_refuses_what_is_no_price():
    token = token_of(find_model("llama-3-8b"))
    for name in ("gpu_hour", "host_gb", "disk_gb", "years", "link", "disk_link"):
        for wrong in (0, -1.0, float("nan"), "2"):
            assert_message(ways, {"token": token, name: wrong}, f"{name}: got")
    assert_message(ways, dict(token=token, waiting=1.5), "waiting: got 1.5")
    assert_message(memory_in_and_out_s, dict(link=0), "link: got 0")
    same = Way("a", 0.0, 1.0)
    assert_message(crossing_s, dict(one=same, other=same), "other: got 'a'")


def test_the_table_prints_all_models_and_links(capsys):
    main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*MODELS, *LINKS))
