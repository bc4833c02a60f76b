"""reference.bench.apart: prefill and decode apart against mixed, in small."""

import json
from types import SimpleNamespace

import pytest

from lessons.l22_serving.load import Served
from lessons.toolbox.draw.figure import texts_outside
from reference.bench import apart
from reference.bench.apart_figure import draw_apart
from reference.bench.bench_load import BenchRequest


def a_record(itl_ms: dict[str, list[float]]) -> dict:
    entries = []
    for name, values in itl_ms.items():
        rates = [
            {
                "rate": rate,
                "sent": 0,
                "failed": 0,
                "ttft_s": dict.fromkeys(("p50", "p90", "p99"), 0.2),
                "itl_s": dict.fromkeys(("p50", "p90", "p99"), ms / 1000),
            }
            for rate, ms in enumerate(values, 1)
        ]
        entries.append({"name": name, "rates": rates})
    sizes = dict(requests=8, long=256, short=32, connector="TcpConnector")
    return dict(fingerprint={"device": "x"}, model="m", entries=entries, **sizes)


def test_the_headline_is_of_the_last_rate():
    figure = draw_apart(a_record({"mixed": [10.0, 40.0], "apart": [9.0, 10.0]}))
    assert "At 2 requests/s" in figure.get_suptitle() and "is 0.25 of" in figure.get_suptitle()
    assert not texts_outside(figure)


def test_percentiles_by_hand():
    """Tokens 10, 20 and 30 ms apart; a failed request counts as one alone."""
    history = [
        Served(1.0, 1.16, (1.1, 1.11, 1.13, 1.16)),
        Served(2.0, 3.0, why_not="HTTP 500"),
    ]
    found = apart.percentiles_of(history)
    assert found["failed"] == 1 and found["ttft_s"]["p50"] == pytest.approx(0.1)
    assert found["itl_s"]["p50"] == pytest.approx(0.02)
    assert apart.percentiles_of(history[1:])["ttft_s"]["p99"] is None


def test_the_same_prompts_are_new_at_each_rate():
    requests = [BenchRequest([1, 2, 3], 3, 4)] * 4
    rates = (1.0, 2.0)
    first = [tuple(one.prompt) for rate in rates for one in apart.fresh(requests, rate)]
    assert len(set(first)) == 8 and all(one[1:] == (2, 3) for one in first)


def test_half_of_the_prompts_are_long():
    args = SimpleNamespace(requests=7, seed=0, long=30, short=4, output_len=5)
    found = apart.new_requests(args, Words())
    assert sorted(one.prompt_tokens for one in found) == [4] * 4 + [30] * 3


class Words:
    all_special_ids = (0,)

    def __len__(self) -> int:
        return 50


def test_what_the_router_counts():
    text = (
        'router_prefills_total{outcome="sent",replica="a"} 3.0\n'
        'router_prefills_total{outcome="lost",replica="a"} 2.0\n'
        'router_prefills_created{outcome="sent",replica="a"} 9.0\n'
    )
    assert apart.sent_in(text) == 3


@pytest.mark.parametrize(
    "arguments",
    [["--requests", "1"], ["--rates", "0"], ["--long", "32"], ["--chunk", "63"]],
)
def test_sizes_that_cannot_be_measured_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        apart.main(arguments)
    assert arguments[0] in capsys.readouterr().err.strip().splitlines()[-1]


def test_both_ways_in_small(tmp_path, request):
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: takes a minute (make test-all)")
    sizes = ["--rates", "2", "--requests", "6", "--long", "200", "--output-len", "8"]
    assert apart.main([*sizes, "--out", str(tmp_path)]) == 0
    mixed, split = json.loads((tmp_path / "apart.json").read_text())["entries"]
    assert [mixed["name"], split["name"]] == list(apart.WAYS)
    assert mixed["rates"][0]["sent"] == 0 and split["rates"][0]["sent"] == 3
    assert not mixed["rates"][0]["failed"] and not split["rates"][0]["failed"]
    assert (tmp_path / "apart.svg").exists()
