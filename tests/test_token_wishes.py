"""What a request may say of single tokens: which are allowed, which words are banned, when a stop
counts, and what log-probabilities say of each.
"""

from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch

from reference import LLM, SamplingParams
from reference.engine.sampler import adjust
from reference.engine.text import Detokenizer
from reference.features.bans import Bans, spellings
from reference.features.token_texts import text_of
from reference.speculation.verification import adjust_rows
from tests.test_llm import MODEL

PROMPTS = ["def quicksort(", "import os\n", "class Stack:\n"]
EOS = 0
WAYS = {
    "alone": {},
    "one step ahead": {"async_scheduling": True},
    "with drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module", params=WAYS)
def llm(request) -> LLM:
    how = dict(max_num_seqs=4, kv_cache_memory_bytes=20_000_000, dtype="float32", device="cpu")
    return LLM(MODEL, **how, **WAYS[request.param])


def answers(llm: LLM, **wishes) -> list:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12} | wishes)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_no_other_token_is_sampled(llm):
    for temperature in (0, 1):
        for answer in answers(llm, allowed_token_ids=[5, 77, 300], temperature=temperature, seed=3):
            assert set(answer.token_ids) <= {5, 77, 300}


def test_allowed_tokens_are_the_likeliest_of_them(llm):
    """As a bias would choose them that takes all others far away."""
    allowed = [10, 199, 277, 281, 365]
    bias = {token: 100.0 for token in allowed}
    for one, other in zip(
        answers(llm, allowed_token_ids=allowed), answers(llm, logit_bias=bias, ignore_eos=True)
    ):
        assert one.token_ids == other.token_ids


def test_a_bad_word_never_comes(llm):
    """Of one token, of several, and a word that an answer would have said."""
    plain = answers(llm)
    tokenizer = llm.get_tokenizer()
    for answer in plain:
        several = tokenizer.decode(answer.token_ids[2:4])
        one = tokenizer.decode(answer.token_ids[1:2])
        for word in (one, several):
            banned = spellings(tokenizer, word)
            for other in answers(llm, bad_words=[word]):
                ids = other.token_ids
                for tokens in banned:
                    spans = [ids[at : at + len(tokens)] for at in range(len(ids))]
                    assert tokens not in spans


def test_only_the_last_token_of_a_bad_word_is_banned(llm):
    """So the beginning of one may still come."""
    tokenizer, met = llm.get_tokenizer(), 0
    for which, plain in enumerate(answers(llm)):
        for at in range(10):
            pair = plain.token_ids[at : at + 2]
            word = tokenizer.decode(pair)
            if not word.strip() or word != word.lstrip() or spellings(tokenizer, word)[0] != pair:
                continue
            ids = answers(llm, bad_words=[word])[which].token_ids
            assert ids[: at + 1] == plain.token_ids[: at + 1] and ids[at + 1] != pair[1]
            met += 1
            break
    assert met


@pytest.mark.parametrize(
    "output, ahead, banned",
    [([], [], [5]), ([1], [], [2, 5]), ([2], [], [5]), ([1], [3], [5]), ([2], [1], [2, 5]),
     ([1, 3], [], [5]), ([1], [3, 1], [2, 5]), ([0, 1], [3], [4, 5])],
)  # fmt: skip
def test_a_ban_reads_the_output_and_the_drafted_tokens(output, ahead, banned):
    bans = Bans(None, [[1, 2], [0, 1, 3, 4], [5]])
    sequence = new_sequence(output, bans=bans)
    logits = torch.zeros(1, 8)
    adjust(logits, 0, sequence, ahead)
    assert logits[0].isinf().nonzero()[:, 0].tolist() == banned


def new_sequence(output: list[int], bans: Bans | None = None, **wishes) -> SimpleNamespace:
    """As much of one as `adjust` reads. Token 7 ends a text."""
    params = SamplingParams(**wishes)
    return SimpleNamespace(
        bias=None, output=output, params=params, late_token_ids={7}, bans=bans, constraint=None
    )


def test_each_row_of_drafts_reads_its_own():
    """A ban and the least length look at the drafts before a row, and at no others."""
    rows = [
        SimpleNamespace(sequence=new_sequence(output, **wishes), ahead=ahead)
        for wishes in ({"bans": Bans(None, [[1, 2], [3, 1, 4]])}, {"min_tokens": 4})
        for output, ahead in (([3], []), ([3], [1]), ([3], [1, 0]), ([3], [1, 0, 1]))
    ]
    logits = torch.zeros(len(rows), 8)
    adjust_rows(logits, rows)
    found = [row.isinf().nonzero()[:, 0].tolist() for row in logits]
    assert found == [[], [2, 4], [], [2], [7], [7], [7], []]


def test_where_nothing_else_is_left_a_ban_gives_way(llm):
    """Else the step would have no token, and all its requests would end."""
    for answer in answers(llm, allowed_token_ids=[EOS], min_tokens=3):
        assert answer.token_ids == [EOS] * 3  # the third may end it
    for answer in answers(llm, allowed_token_ids=[88], bad_words=["x"], max_tokens=3):
        assert answer.token_ids == [88] * 3


def test_min_tokens_keeps_the_end_away_even_if_it_is_ignored(llm):
    likely = {"logit_bias": {EOS: 100.0}, "ignore_eos": True, "min_tokens": 5}
    for answer in answers(llm, **likely):
        assert EOS not in answer.token_ids[:5] and answer.token_ids[5:] == [EOS] * 7


def test_a_stop_string_counts_if_it_ends_after_min_tokens(llm):
    tokenizer = llm.get_tokenizer()
    for at, plain in enumerate(answers(llm)):
        stop = tokenizer.decode(plain.token_ids[4:5])
        if stop in tokenizer.decode([*plain.token_ids[:4], *plain.token_ids[5:]]):
            continue
        for least, is_cut in ((4, True), (5, False)):
            answer = answers(llm, stop=[stop], min_tokens=least)[at]
            assert (answer.finish_reason == "stop") is is_cut
            assert len(answer.token_ids) == (5 if is_cut else 12)


def test_of_stop_strings_the_first_to_end_counts(llm):
    """Also where a longer one began before it, and in the request's order where both end there."""
    tokenizer = llm.get_tokenizer()
    (token,) = tokenizer.backend_tokenizer.encode("return", add_special_tokens=False).ids
    for stops, said, text in (
        (("eturn", "tu"), "tu", "re"),
        (("tu", "etu"), "tu", "re"),
        (("etu", "tu"), "etu", "r"),
    ):
        detokenizer = Detokenizer(tokenizer, [199], stops)
        assert detokenizer.append(token) == said and detokenizer.text == text


def test_log_probabilities_name_their_tokens(llm):
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    answer = output.outputs[0]
    assert output.prompt_logprobs[0] is None
    for places, ids in (
        (answer.logprobs, answer.token_ids),
        (output.prompt_logprobs[1:], output.prompt_token_ids[1:]),
    ):
        for here, token in zip(places, ids):
            assert next(iter(here)) == token  # the answer's own is the first
            assert here[token].decoded_token == tokenizer.decode([token])
    assert "".join(here[t].decoded_token for here, t in zip(answer.logprobs, answer.token_ids)) == (
        answer.text
    )


def test_without_text_tokens_have_no_names(llm):
    params = dict(logprobs=1, prompt_logprobs=1, detokenize=False)
    output = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=2, **params), use_tqdm=False
    )[0]
    for here in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
        assert all(value.decoded_token is None for value in here.values())


def test_a_token_that_ends_a_character_has_it_whole(llm):
    tokenizer = llm.get_tokenizer()
    for text in ("漢", "é", "😀"):
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        texts = [text_of(tokenizer, token, ids[:at]) for at, token in enumerate(ids)]
        assert texts == [""] * (len(ids) - 1) + [text]
        assert text_of(tokenizer, ids[-1], [88, *ids[:-1]]) == text
    assert text_of(tokenizer, ids[-1], [88]) == ""


def test_flat_log_probabilities_say_the_same(llm):
    wishes = dict(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    plain, flat = (
        llm.generate(PROMPTS[0], SamplingParams(**wishes, flat_logprobs=way), use_tqdm=False)[0]
        for way in (False, True)
    )
    found, want = flat.outputs[0].logprobs, plain.outputs[0].logprobs
    ids = [list(here) for here in want]
    assert len(found) == 5 and [list(here) for here in found] == ids
    numbers = [[astuple(value) for value in here.values()] for here in found]
    assert numbers == [[astuple(value) for value in here.values()] for here in want]
    assert [list(here) for here in found[1:3]] == ids[1:3]
    assert [list(here) for here in found[:2] + found[2:]] == ids
    assert flat.prompt_logprobs[0] == {} and len(flat.prompt_logprobs) == len(plain.prompt_logprobs)


def test_all_log_probabilities(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    with pytest.raises(ValueError, match=r"logprobs: got -1; accepted: 0 to max_logprobs \(20\)"):
        llm.generate(PROMPTS[0], params)
    llm.max_logprobs = -1
    here = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].logprobs[0]
    llm.max_logprobs = 20
    assert len(here) == 4096
    assert sorted(value.rank for value in here.values()) == list(range(1, 4097))


def test_a_prompt_that_ends_amid_a_character_is_no_part_of_the_answer(llm):
    """The stream of text would hold it back and give it with the answer's first tokens."""
    ids = llm.get_tokenizer().backend_tokenizer.encode("ab漢", add_special_tokens=False).ids[:-1]
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={88: 50.0})
    answer = llm.generate([ids], params, use_tqdm=False)[0].outputs[0]
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids) == "x" * 8


@pytest.mark.parametrize(
    "wishes, said",
    [
        (dict(allowed_token_ids=[]), "allowed_token_ids: got []; accepted: None, or a list of"),
        (dict(allowed_token_ids=[-1]), "allowed_token_ids: got [-1]"),
        (dict(allowed_token_ids=[1], structured_outputs={"regex": "a"}), "None with structured"),
        (dict(bad_words=["a", ""]), "bad_words: got ('a', ''); accepted: strings, none empty"),
        (dict(bad_words=3), "bad_words: got 3"),
        (dict(flat_logprobs=1), "flat_logprobs: got 1"),
        (dict(logprobs=-2), "logprobs: got -2"),
        (dict(skip_reading_prefix_cache=3), "skip_reading_prefix_cache: got 3"),
    ],
)
def test_wishes_that_cannot_work(wishes, said):
    with pytest.raises(ValueError) as error:
        SamplingParams(**wishes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_tokens_that_the_model_has_not(llm):
    for wishes, said in (
        (dict(allowed_token_ids=[4096]), "allowed_token_ids: got 4096"),
        (dict(bad_words=[" "]), "bad_words: got ''; accepted: words of one token at least"),
    ):
        with pytest.raises(ValueError) as error:
            answers(llm, **wishes)
        assert said in str(error.value)


def test_a_prefix_cache_that_is_not_read(llm):
    long = "x = 1\n" * 20
    for skip, is_read in ((None, True), (True, False), (False, True)):
        params = SamplingParams(temperature=0, max_tokens=1, skip_reading_prefix_cache=skip)
        llm.generate(long, params, use_tqdm=False)
        (output,) = llm.generate(long, params, use_tqdm=False)
        assert (output.num_cached_tokens > 0) is is_read
