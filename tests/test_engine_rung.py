"""The ladder's last rung gives the tokens of lesson 2, through the engine: greedy and sampled, with
more requests than places, and each token reported once.
"""

import random

import pytest

from lessons.l02_naive_attention import naive
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l11_cuda_graphs.lab.testing import new_model, new_prompts
from reference.ladder import engine_rung
from reference.ladder.engine_rung import generate


@pytest.fixture
def job(seed):
    """A model, prompts of which two begin alike, and limits of which one is 0."""
    prompts = new_prompts(3, 17, 1, 9, 5)
    prompts.append([*prompts[1], 7])
    return new_model(), prompts, [random.randint(1, 12) for _ in range(4)] + [0, 6]


def test_tokens_are_those_of_lesson_2_and_each_is_reported_once(job):
    model, prompts, limits = job
    seen = [[] for _ in prompts]
    expected = naive.generate(model, prompts, limits)
    assert generate(model, prompts, limits, None, lambda row, t: seen[row].append(t)) == expected
    assert seen == expected and seen[4] == []


def test_sampled_requests_draw_what_they_draw_alone(job, monkeypatch):
    """On two places, so that requests wait for each other."""
    monkeypatch.setattr(engine_rung, "MAX_NUM_SEQS", 2)
    model, prompts, limits = job
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=row, ignore_eos=row % 2 == 0)
        for row in range(len(prompts))
    ]
    expected = naive.generate(model, prompts, limits, sampling)
    assert generate(model, prompts, limits, sampling) == expected


def test_what_lesson_2_refuses_is_refused_and_nothing_asked_is_nothing(seed):
    model = new_model()
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, [[1]], -1)
    assert generate(model, [[1], [2]], 0) == [[], []]


def test_no_call_finds_what_an_earlier_one_computed(job, monkeypatch):
    """Or a second pass of the ladder would measure a warm cache."""
    model, prompts, limits = job
    computed = []
    monkeypatch.setattr(
        engine_rung, "serve", lambda engine, *rest: computed.append(run(engine, *rest))
    )
    for _ in range(2):
        generate(model, prompts, limits)
    assert computed[0] == computed[1]


def run(engine, requests, on_token) -> list[int]:
    """Serve them; the tokens of each step."""
    counts, runner = [], engine.runner

    def counting(step, tables):
        counts.append(sum(chunk.count for chunk in step.chunks))
        return runner(step, tables)

    counting.logits, counting.model, engine.runner = runner.logits, runner.model, counting
    SERVE(engine, requests, on_token)
    engine.runner = runner
    return counts


SERVE = engine_rung.serve
