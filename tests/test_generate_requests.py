"""Every rung of the ladder stops where it should, reports each token, refuses the same mistakes."""

from dataclasses import replace

import pytest

from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from tests.test_generate import CONFIG, RUNGS, new_model, new_prompts

pytestmark = pytest.mark.usefixtures("seed")


# ---------------------------------------------------------------- stops and callbacks


@pytest.mark.parametrize("name", RUNGS)
def test_stop_tokens(name):
    """A stop token ends its row and is included: the model's own, unless ignored, and the
    request's.
    """
    generate, model, prompts = RUNGS[name], new_model(), new_prompts(3, 8)
    free = generate(model, prompts, 20)
    stop = free[0][6]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len(cut[0]) <= 7
    assert (
        generate(model, prompts, 20, SamplingParams(temperature=0, stop_token_ids=(stop,))) == cut
    )
    model.config = replace(model.config, eos_token_ids=(stop, 96))
    cut = [
        row[: next((i for i, token in enumerate(row) if token in (stop, 96)), 19) + 1]
        for row in free
    ]
    assert generate(model, prompts, 20) == cut
    assert generate(model, prompts, 20, SamplingParams(temperature=0, ignore_eos=True)) == free
    both = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(stop, 96))
    # ignore_eos says nothing about the request's own stop tokens
    assert generate(model, prompts, 20, both) == cut
    one = [SamplingParams(temperature=0, ignore_eos=True), SamplingParams(temperature=0)]
    assert generate(model, prompts, 20, one) == [free[0], cut[1]]


@pytest.mark.parametrize("name", RUNGS)
def test_on_token_reports_each_token_once_in_order(name):
    seen = [[], [], []]
    out = RUNGS[name](
        new_model(),
        new_prompts(2, 5, 1),
        [4, 0, 6],
        on_token=lambda row, token: seen[row].append(token),
    )
    assert seen == out and [len(row) for row in out] == [4, 0, 6]


@pytest.mark.parametrize("name", RUNGS)
def test_nothing_asked_nothing_computed(name):
    model = new_model()
    model.forward = None  # would fail if it were called
    assert RUNGS[name](model, [[1], [2, 3]], 0) == [[], []]


def test_prompts_are_left_alone():
    prompts = new_prompts(3, 5)
    before = [list(prompt) for prompt in prompts]
    for generate in RUNGS.values():
        generate(new_model(), prompts, 4)
    assert prompts == before


# ---------------------------------------------------------------- bad input

BAD = {
    "no prompts": (dict(prompts=[]), r"prompts: got \[\]; accepted: a list of one or more prompts"),
    "text": (dict(prompts="abc"), "prompts: got 'abc'; accepted"),
    "one flat prompt": (
        dict(prompts=[1, 2]),
        r"prompts\[0\]: got 1; accepted: a list of one or more token ids",
    ),
    "empty prompt": (
        dict(prompts=[[1], []]),
        r"prompts\[1\]: got \[\]; accepted: a list of one or more token ids",
    ),
    "token too large": (
        dict(prompts=[[1, 97]]),
        r"prompts\[0\]\[1\]: got 97; accepted: a token id from 0 to 96",
    ),
    "negative token": (dict(prompts=[[-1]]), r"prompts\[0\]\[0\]: got -1; accepted"),
    "token that is no integer": (dict(prompts=[[1.0]]), r"prompts\[0\]\[0\]: got 1.0; accepted"),
    "too long": (
        dict(prompts=[[1] * 60], max_new_tokens=5),
        r"prompts\[0\], max_new_tokens: 60 tokens and 5 new ones make 65; accepted: at",
    ),
    "prompt alone too long": (
        dict(prompts=[[1] * 65], max_new_tokens=0),
        r"prompts\[0\], max_new_tokens: 65 tokens and 0 new",
    ),
    "negative count": (
        dict(max_new_tokens=-1),
        "max_new_tokens: got -1 for prompt 0; accepted: 0 or more",
    ),
    "one negative count": (dict(max_new_tokens=[1, -2]), "max_new_tokens: got -2 for prompt 1"),
    "too few counts": (
        dict(max_new_tokens=[1]),
        "max_new_tokens: got 1 for 2 prompts; accepted: one int, or one per prompt",
    ),
    "count that is no integer": (
        dict(max_new_tokens=2.5),
        "max_new_tokens: got 2.5; accepted: int",
    ),
    "too many params": (
        dict(sampling=[SamplingParams()] * 3),
        "sampling: got 3 for 2 prompts; accepted: one SamplingParams",
    ),
    "params of another kind": (dict(sampling=0.7), "sampling: got 0.7; accepted: SamplingParams"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, message = BAD[name]
    arguments = dict(prompts=[[1], [2, 3]], max_new_tokens=2) | change
    for generate in RUNGS.values():
        with pytest.raises(ValueError, match=message) as error:
            generate(new_model(), **arguments)
        assert "\n" not in str(error.value)


def test_the_longest_request_that_fits():
    (request,) = read_requests(CONFIG, [[1] * 60], 4)
    assert len(request.prompt) + request.max_new_tokens == CONFIG.max_position_embeddings
