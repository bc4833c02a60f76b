"""Our engine and vLLM's CPU build, asked the same: `make peers`, then
`pytest tests/test_vllm_peer.py --all`. LADDER_SEED=… draws the same requests again.
"""

import itertools

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from reference import LLM
from reference.bench.peers.differences import DIFFERENCES, Difference, table
from reference.bench.peers.differential import (
    CLOSE,
    FAITHFUL,
    Judge,
    compare,
    compare_places,
    ours,
)
from reference.bench.peers.processes import PYTHON, REPOSITORY, vllm
from reference.bench.peers.wishes import requests
from tests.seeds import seed_of
from tests.test_llm import MODEL

BATCHES, BATCH = 24, 50


@pytest.fixture(scope="module")
def theirs(request):
    if not PYTHON.exists():
        pytest.skip("NOT RUN: needs vLLM, which make peers installs")
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: vLLM takes long to start, make test-all")
    with vllm(MODEL, **FAITHFUL) as asked:
        yield asked


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", device="cpu", max_num_seqs=32, num_gpu_blocks_override=2000)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(Decoder.from_pretrained(MODEL, dtype=torch.float64))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_field_of_the_answers_is_vllms(theirs, llm, judge, batch):
    seed = seed_of(f"vLLM {batch}")
    asked = list(requests(seed, BATCH))
    wrong = []
    for request, mine, other in zip(asked, ours(llm, asked), theirs(asked)):
        found, _ = compare(request, mine, other, judge)
        wrong += [f"{request} (seed {seed}): {line[:300]}" for line in found]
    assert not wrong, "\n".join(wrong)


def differ(one: Difference, mine: dict, other: dict, judge: Judge) -> bool:
    """Whether the field that a row of DIFFERENCES names differs."""
    if one.field == "error" or "error" in mine or "error" in other:
        return one.field == "error" and ("error" in mine) != ("error" in other)
    first, second = (answer["outputs"][0] for answer in (mine, other))
    if one.field != "logprobs":
        return first[one.field] != second[one.field]
    prompt = mine["prompt_token_ids"]
    text = [*prompt, *first["token_ids"]]
    return bool(compare_places("logprobs", first, second, text, len(prompt), judge))


@pytest.mark.parametrize("one", DIFFERENCES, ids=lambda one: one.what)
def test_every_known_difference_is_still_there(theirs, llm, judge, one):
    """Else its row has to go."""
    (mine,), (other,) = ours(llm, [one.request]), theirs([one.request])
    assert differ(one, mine, other, judge), (mine, other)


@pytest.mark.parametrize("one", DIFFERENCES, ids=lambda one: one.what)
def test_what_the_table_says_of_errors_holds_here(llm, one):
    (mine,) = ours(llm, [one.request])
    assert ("error" in mine) is (one.ours == "refused")
    assert "\n" not in mine.get("error", "")


def test_the_page_has_the_table():
    page = (REPOSITORY / "reference/bench/peers/README.md").read_text(encoding="utf-8")
    assert table() in page, "python -m reference.bench.peers.differences prints it"


def test_equal_seeds_ask_the_same_and_ours_agrees_with_itself(llm, judge):
    asked = list(requests(3, 12))
    assert asked == list(requests(3, 12)) != list(requests(4, 12))
    mine = ours(llm, asked)
    for request, one, other in zip(asked, mine, ours(llm, asked)):
        assert compare(request, one, other, judge) == ([], False)


PLAIN = {"prompt": "def f(", "params": {"temperature": 0, "max_tokens": 6, "logprobs": 2}}
CHANGES = {
    "text": lambda one: one.update(text=one["text"] + "x"),
    "token_ids": lambda one: one["token_ids"].__setitem__(3, 7),
    "finish_reason": lambda one: one.update(finish_reason="stop"),
    "stop_reason": lambda one: one.update(stop_reason=3),
    "index": lambda one: one.update(index=1),
    "cumulative_logprob": lambda one: one.update(cumulative_logprob=-1.0),
    "logprobs[0]": lambda one: one["logprobs"][0].reverse(),
    "logprobs[1]": lambda one: one["logprobs"][1][0].__setitem__(2, 9),
    "logprobs[2]": lambda one: one["logprobs"][2][0].__setitem__(3, None),
    "logprobs": lambda one: one["logprobs"].pop(),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_in_any_field_is_seen(field, llm, judge):
    (mine,), (other,) = ours(llm, [PLAIN]), ours(llm, [PLAIN])
    CHANGES[field](other["outputs"][0])
    wrong, met_tie = compare(PLAIN, mine, other, judge)
    assert not met_tie and any(line.startswith(field) for line in wrong), wrong


def test_a_refusal_by_one_alone_is_a_difference(llm, judge):
    asked = [PLAIN, {"prompt": "x", "params": {"top_p": 0}}]
    mine, refused = ours(llm, asked)
    assert refused["error"].startswith("ValueError: top_p: got 0")
    assert compare(PLAIN, mine, refused, judge)[0]
    assert not compare(PLAIN, refused, refused, judge)[0]


def test_tokens_closer_than_rounding_are_a_tie_and_others_are_not(llm, judge):
    mine = ours(llm, [PLAIN])[0]
    ids = mine["outputs"][0]["token_ids"]
    first, second = (entry[0] for entry in mine["outputs"][0]["logprobs"][0])
    assert not judge.is_tie(PLAIN, mine["prompt_token_ids"], [], [first, second])
    # a bias that makes the two equal makes them a tie
    gap = [entry[1] for entry in mine["outputs"][0]["logprobs"][0]]
    even = {"params": {"temperature": 0, "logit_bias": {str(second): gap[0] - gap[1]}}}
    assert judge.is_tie(even, mine["prompt_token_ids"], [], [first, second])
    assert ids[0] == first


@pytest.fixture(scope="module")
def likely(llm) -> tuple[list[int], list]:
    """(PLAIN's prompt, the 20 likeliest tokens after it)."""
    (mine,) = ours(llm, [PLAIN | {"params": PLAIN["params"] | {"logprobs": 20}}])
    return mine["prompt_token_ids"], mine["outputs"][0]["logprobs"][0]


def test_ranks_differ_by_as_many_tokens_as_are_that_close_and_by_no_more(likely, judge):
    prompt, here = likely
    gaps = [a[1] - b[1] for a, b in itertools.pairwise(here)]
    far = next(at for at in range(19) if min(gaps[max(at - 1, 0)], gaps[at]) > 2 * CLOSE)
    other = [list(entry) for entry in here]
    other[far][2] += 1
    compared = ({"x": [here]}, {"x": [other]}, prompt, len(prompt))
    assert compare_places("x", *compared, judge)

    class Even(Judge):
        """All tokens of the list are within rounding."""

        def may_have(self, tokens, token, logprob, rank):
            assert tokens == prompt
            return rank <= 20

    assert not compare_places("x", *compared, Even(judge.model))


def test_entries_change_places_only_where_the_model_finds_them_tied(likely, judge):
    prompt, here = likely
    # a list that names another token with the same number is wrong although its numbers are close
    other = [[7, *here[0][1:3], "c"], *here[1:]]
    assert here[0][0] != 7
    assert compare_places("x", {"x": [here]}, {"x": [other]}, prompt, len(prompt), judge)
    assert not compare_places("x", {"x": [here]}, {"x": [here]}, prompt, len(prompt), judge)


def test_the_places_before_a_tie_are_compared(llm, judge):
    (mine,), (other,) = ours(llm, [PLAIN]), ours(llm, [PLAIN])

    class Tied(Judge):
        def is_tie(self, *_):
            return True

    other["outputs"][0]["token_ids"][3] = 7
    other["outputs"][0]["logprobs"][4].pop()  # after the tie: another text
    tied = Tied(judge.model)
    assert compare(PLAIN, mine, other, tied) == ([], True)
    other["outputs"][0]["logprobs"][2].pop()
    wrong, met_tie = compare(PLAIN, mine, other, tied)
    assert met_tie and len(wrong) == 1 and wrong[0].startswith("logprobs[2]")
