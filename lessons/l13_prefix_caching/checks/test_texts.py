"""Proves what the lesson's texts and pictures say of traffic, benchmarks and code."""

import random
from pathlib import Path

import pytest
import torch

from lessons.l11_cuda_graphs.lab.testing import new_model
from lessons.l13_prefix_caching.lab import pictures, traffic
from lessons.l13_prefix_caching.lab.cold_and_warm import five_ways
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.toolbox.draw.plotting import overlapping_texts, texts_outside
from lessons.toolbox.measure.records import read_json
from lessons.toolbox.proof.pages import pages


def test_the_rates_of_the_readme():
    """Per request and per token, in percent."""
    rates = {}
    for name, trace in traffic.TRACES.items():
        hits = traffic.replay(trace(random.Random(13)))
        rates[name] = round(100 * hits.rate_per_request, 1), round(100 * hits.rate_per_token, 1)
    assert rates == {
        "agent": (96.9, 89.0),
        "few-shot": (95.8, 89.1),
        "multi-turn": (95.8, 77.0),
        "documents": (95.8, 7.0),
        "random": (0.0, 0.0),
    }
    tight = traffic.replay(traffic.agent(random.Random(13)), num_blocks=96)
    assert round(100 * tight.rate_per_token, 1) == 73.0


@pytest.mark.parametrize("new_cache", [HashBlocks, RadixTree])
def test_where_a_stamp_stands_decides(new_cache):
    """A token that differs in every prompt: in front nothing is known, after the tools these
    are.
    """
    rates = {}
    for stamp_at in (None, 0, 320):
        hits = traffic.replay(traffic.agent(random.Random(13)), 4096, 16, new_cache, stamp_at)
        rates[stamp_at] = round(100 * hits.rate_per_token, 1)
    assert rates == {None: 89.0, 0: 0.0, 320: 53.4}


def test_five_ways_to_ask_four_questions(seed):
    """A cold run of one server is half warm, and the same run again is too warm. Tokens agree."""
    model = new_model(torch.float32, vocab_size=4096, max_position_embeddings=1024)
    ways = five_ways(model)
    assert {name: way.computed for name, way in ways.items()} == {
        "no cache": 2720,
        "cold: a fresh cache for each": 2720,
        "a naive cold run": 800,
        "warm: new questions": 160,
        "a naive warm run": 32,
    }
    assert all(way.answers == ways["no cache"].answers for way in ways.values())


@pytest.mark.parametrize("draw", [pictures.draw, pictures.draw_rates, pictures.draw_cascade])
@pytest.mark.sample(4, of="pictures")
def test_pictures_are_legible(draw):
    figure = draw()
    assert not texts_outside(figure) and not overlapping_texts(figure)


def test_the_numbers_of_the_bottleneck():
    """README.md's agent: eight prompts that repeat what was said, and what is new in them."""
    session, sent = traffic.agent(random.Random(13))[0], []
    traffic.play([session], lambda prompts, limits: [sent.extend(prompts)] and [[5] * limits[0]])
    assert len(session.opening) == 344 and len(sent) == 8
    new = len(sent[-1])  # the last prompt holds all others
    assert (sum(map(len, sent)), new) == (4640, 776)
    assert [len(prompt) for prompt in sent] == [384 + (40 + 16) * call for call in range(8)]


def test_which_traffic_gains_in_which_time():
    """README.md on the recorded times: agents gain more in the first token than in all, documents'
    first tokens come later, and a cached one hardly takes longer after a long prefix.
    """
    results = Path(__file__).parents[3] / "results" / "cpu"
    series = read_json(results / "l13_traces.json")["series"]
    gains = {
        (name, time): ways["no cache"][time] / ways["radix tree"][time]
        for name, ways in series.items()
        for time in ("ttft_s", "total_s")
    }
    assert gains["agent", "ttft_s"] > gains["agent", "total_s"] > 1
    assert gains["documents", "ttft_s"] < 1
    first = read_json(results / "l13_first_token.json")["series"]
    for name in ("hash blocks", "radix tree", "transformers, prefix copied"):
        points = first[name]["points"]
        assert points[-1]["median_s"] < 1.5 * points[0]["median_s"]


def test_the_excerpts_of_the_readme_are_the_code():
    room = Path(traffic.__file__).parents[1]
    source = "".join((room / name).read_text() for name in ("naive.py", "optimized.py"))
    known = {line.strip() for line in source.splitlines()}
    blocks = pages(room).split("```python\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    assert len(lines) > 5 and {line.strip() for line in lines} <= known
