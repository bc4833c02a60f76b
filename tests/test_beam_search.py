"""Beam search of the engine: the beams of a search that recomputes everything, on shared blocks,
and none of them left behind.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l12_paged_kv.more.branches import Beam
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l24_structured_outputs import matcher as matcher_module
from lessons.l24_structured_outputs import naive as grammar
from lessons.l24_structured_outputs.languages.reading import compile_structure
from lessons.l24_structured_outputs.matcher import Matcher
from lessons.l24_structured_outputs.optimized import TokenMasks
from reference import LLM
from reference.features.beam_search import BeamSearch, BeamSearchParams, Search
from tests.engine_cases import assert_clean, greedy, new_engine, new_model

pytestmark = pytest.mark.usefixtures("seed")

FIT = dict(regex="a")
MODEL = str(Path(__file__).resolve().parents[1] / "models/tiny")


@pytest.fixture(scope="module")
def model() -> Decoder:
    """In float64, so that two beams change places only if their scores are equal."""
    return new_model().double()


WAYS = {
    "roomy": dict(num_blocks=400, block_size=3),
    "blocks of one": dict(num_blocks=400, block_size=1, cache=HashBlocks),
    "one prompt at a time": dict(num_blocks=40, block_size=4),
    "prompts in chunks": dict(
        num_blocks=60, block_size=16, max_num_seqs=6, max_num_batched_tokens=7
    ),
}


def searched(engine, prompts, params):
    """[(tokens of the answer, logprob, finish_reason)] of each prompt, and what was said of it."""
    searching = BeamSearch(engine, params)
    waiting = searches = [searching.new_search(prompt) for prompt in prompts]
    while group := searching.next_group(waiting):
        searching.run(group)
        waiting = waiting[len(group) :]
    assert_clean(engine)
    return [
        [(s.tokens[len(prompt) :], s.cum_logprob, s.finish_reason) for s in found.sequences]
        for prompt, found in zip(prompts, [search.output(None) for search in searches])
    ]


def recomputed(model, prompt, width, limit, stop, length_penalty):
    """The same search by the definition: every beam's logits from the whole of its tokens."""
    running, ended = [([], 0.0)], []
    for _ in range(limit):
        heirs = []
        for tokens, total in running:
            whole = torch.tensor(prompt + tokens)
            hidden = model(whole, whole_sequence(model, len(whole)))
            logprobs = model.logits(hidden[-1:])[0].log_softmax(-1)
            likeliest = logprobs.argsort(descending=True)[: 2 * width].tolist()
            heirs += [([*tokens, t], total + logprobs[t].item()) for t in likeliest]
        heirs.sort(key=lambda heir: heir[1], reverse=True)
        ended += [heir for heir in heirs if heir[0][-1] in stop]
        running = [heir for heir in heirs if heir[0][-1] not in stop][:width]

    def score(heir):
        length = len(prompt) + len(heir[0]) - (heir[0][-1] in stop)
        return heir[1] / length**length_penalty

    return sorted(ended + running, key=score, reverse=True)[:width]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length_penalty", [1.0, -1.5])
def test_the_beams_of_a_search_that_recomputes(model, way, length_penalty):
    prompts = [random.choices(range(60), k=k) for k in (1, 9, 20)]
    engine = new_engine(model, **WAYS[way])
    params = BeamSearchParams(3, 8, length_penalty=length_penalty)
    for prompt, found in zip(prompts, searched(engine, prompts, params)):
        wanted = recomputed(model, prompt, 3, 8, (60,), length_penalty)
        assert [tokens for tokens, _, _ in found] == [tokens for tokens, _ in wanted]
        for (tokens, logprob, reason), (_, want) in zip(found, wanted):
            assert logprob == pytest.approx(want, abs=1e-9)
            assert reason == ("stop" if tokens[-1] == 60 else "length")


def test_no_stop_token_ends_a_beam_that_ignores_it(model):
    engine = new_engine(model, **WAYS["roomy"])
    prompts = [random.choices(range(60), k=5) for _ in range(4)]
    for found in searched(engine, prompts, BeamSearchParams(4, 9, ignore_eos=True)):
        assert [(len(tokens), reason) for tokens, _, reason in found] == [(9, "length")] * 4


def test_a_width_of_one_is_greedy_and_the_longest_model_len_ends_it(model):
    engine = new_engine(model, num_blocks=40, block_size=4)
    prompt = random.choices(range(60), k=55)
    [[(tokens, _, reason)]] = searched(engine, [prompt], BeamSearchParams(1, 30, ignore_eos=True))
    assert (len(tokens), reason) == (64 - 55, "length")
    engine.add_request("a", prompt, replace(greedy(9), ignore_eos=True))
    while engine.has_unfinished_requests:
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == tokens


def test_a_prompt_is_kept_once(model):
    """Three beams of 22 + 5 tokens: 5 whole blocks of the prompt are shared, two are not."""
    engine = new_engine(model, num_blocks=60, block_size=4)
    searching = BeamSearch(engine, BeamSearchParams(3, 6, ignore_eos=True))
    search, most, step = searching.new_search([1] * 22), 0, searching.runner.step

    def counted(new):
        nonlocal most
        logits = step(new)
        most = max(most, engine.scheduler.blocks.num_blocks - engine.scheduler.blocks.num_free)
        return logits

    searching.runner.step = counted
    searching.run([search])
    assert 5 < most <= 5 + 3 * 2


def test_a_step_that_raises_leaves_no_block_behind(model):
    engine = new_engine(model, num_blocks=60, block_size=4)
    searching = BeamSearch(engine, BeamSearchParams(3, 6))
    search, step, calls = searching.new_search([1, 2, 3]), searching.runner.step, []

    def fails(new):
        calls.append(new)
        return step(new) if len(calls) < 3 else 1 / 0

    searching.runner.step = fails
    with pytest.raises(ZeroDivisionError):
        searching.run([search])
    assert_clean(engine)


# ---------------------------------------------------------------- LLM.beam_search


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, max_num_seqs=8, kv_cache_memory_bytes=40_000_000, dtype="float64")


def test_the_beams_of_transformers(llm):
    """Without stop tokens: with them, transformers ends a search sooner than vLLM does."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    prompts = ["def quicksort(", "import os\n"]
    outputs = llm.beam_search(prompts, BeamSearchParams(4, 10, ignore_eos=True))
    for output in outputs:
        tokens = [sequence.tokens for sequence in output.sequences]
        prompt = torch.tensor([tokens[0][:-10]])
        peer.generation_config.eos_token_id = None
        want = peer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=10,
            do_sample=False,
            pad_token_id=0,
        )
        assert tokens == want.tolist()


STRUCTURES = [
    dict(regex=r"[a-z]{1,3}\((x|y, z)?\)"),
    dict(choice=["a", "ab", "abc = 1"]),
    dict(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
]


def constrained(llm, prompt, width, limit, wanted):
    """The search by its definition, every token tried: [(answer, its logprob)], best score
    first.
    """
    model, (end,) = llm.engine.runner.model, llm.engine.runner.model.config.eos_token_ids
    matcher = Matcher(compile_structure(wanted.kind, getattr(wanted, wanted.kind), wanted.layout))
    vocabulary = llm.engine.structures.vocabulary.tokens
    running, ended = [([], 0.0)], []
    for _ in range(limit):
        heirs = []
        for tokens, total in running:
            whole = torch.tensor(prompt + tokens)
            hidden = model(whole, whole_sequence(model, len(whole)))
            logprobs = model.logits(hidden[-1:])[0].log_softmax(-1)
            state = matcher.read(b"".join(vocabulary[token] for token in tokens))
            mask = grammar.unpacked(grammar.token_mask(matcher, state, vocabulary), len(logprobs))
            mask[end] = state.may_end
            logprobs[~mask] = -torch.inf
            likeliest = logprobs.argsort(descending=True)[: 2 * width].tolist()
            heirs += [([*tokens, t], total + logprobs[t].item()) for t in likeliest if mask[t]]
        heirs.sort(key=lambda heir: heir[1], reverse=True)
        ended += [heir for heir in heirs if heir[0][-1] == end]
        running = [heir for heir in heirs if heir[0][-1] != end][:width]

    def score(heir):
        return heir[1] / (len(prompt) + len(heir[0]) - (heir[0][-1] == end))

    return sorted(ended + running, key=score, reverse=True)[:width]


def answer_of(llm, sequence, prompt) -> str:
    """Its text without the prompt and the end."""
    tokens = sequence.tokens[len(prompt) :]
    return llm.get_tokenizer().decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("wanted", STRUCTURES, ids=lambda wanted: next(iter(wanted)))
@pytest.mark.sample(1)
def test_beams_follow_a_structure(llm, wanted):
    """The beams and scores of a search that tries every token; those that ended fit."""
    name = random.choice(["structured_outputs", "guided_decoding"])
    params = BeamSearchParams(3, 7, **{name: wanted})
    _, prompt, _ = llm.engine.read_prompt("def f(")
    [output] = llm.beam_search([prompt], params)
    found = [(s.tokens[len(prompt) :], s.cum_logprob) for s in output.sequences]
    want = constrained(llm, prompt, 3, 7, params.structure)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    assert [one for _, one in found] == pytest.approx([one for _, one in want], abs=1e-9)
    assert_clean(llm.engine)
    if "choice" in wanted:
        texts = {answer_of(llm, s, prompt) for s in output.sequences if s.finish_reason == "stop"}
        assert texts <= set(wanted["choice"]) and len(texts) > 1
    free = llm.beam_search("def f(", BeamSearchParams(3, 7))[0]
    assert free != output


def test_fewer_answers_than_beams(llm):
    """What is forbidden fills no place."""
    _, prompt, _ = llm.engine.read_prompt("def f(")
    [output] = llm.beam_search(
        [prompt], BeamSearchParams(4, 5, structured_outputs=dict(choice=["a"]))
    )
    assert [answer_of(llm, s, prompt) for s in output.sequences] == ["a"]
    assert output.sequences[0].cum_logprob > -1e9


def test_what_cannot_be_checked_is_no_answer(llm, monkeypatch):
    """A grammar that gets too ambiguous has no mask, and its text may not end there."""
    plain = TokenMasks.mask

    def mask(self, state):
        if state is not self.start:
            raise matcher_module.TooAmbiguous
        return plain(self, state)

    monkeypatch.setattr(TokenMasks, "mask", mask)
    params = BeamSearchParams(3, 9, structured_outputs=dict(regex="[0-9]{30}"))
    [output] = llm.beam_search("def f(", params)
    assert output.sequences == []
    assert_clean(llm.engine)


def test_text_and_the_forms_of_a_prompt(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=5, temperature=0.5)
    [output] = llm.beam_search("def f(", params)
    tokens = output.sequences[0].tokens
    texts = [llm.get_tokenizer().decode(tokens, skip_special_tokens=skip) for skip in (True, False)]
    assert output.sequences[0].text == texts[0]
    shown = BeamSearchParams(beam_width=2, max_tokens=5, skip_special_tokens=False)
    assert llm.beam_search("def f(", shown)[0].sequences[0].text == texts[1] != texts[0]
    prompt = {"prompt_token_ids": tokens[:-5]}
    for same in ([{"prompt": "def f("}], [tokens[:-5]], prompt, [prompt]):
        assert llm.beam_search(same, params) == [output]


def test_no_prompt_has_no_answer(llm):
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []


def test_the_stop_token_is_shown_only_if_asked_for(model):
    class Tokenizer:
        def decode(self, tokens, skip_special_tokens):
            return " ".join(map(str, tokens))

    for is_shown in (False, True):
        engine = new_engine(model, **WAYS["roomy"])
        params = BeamSearchParams(61, 1, include_stop_str_in_output=is_shown)
        engine.scheduler.max_num_seqs = 61
        searching = BeamSearch(engine, params)
        search = searching.new_search([1, 2])
        searching.run([search])
        ended = [s for s in search.output(Tokenizer()).sequences if s.finish_reason == "stop"]
        assert [(s.tokens, s.stop_reason) for s in ended] == [([1, 2, 60], 60)]
        assert ended[0].text == ("1 2 60" if is_shown else "1 2")


@pytest.mark.parametrize(
    "params, said",
    [
        (dict(beam_width=0), "beam_width: got 0; accepted: a whole number, 1 or more"),
        (dict(beam_width=2.0), "beam_width: got 2.0"),
        (dict(max_tokens=True), "max_tokens: got True"),
        (dict(ignore_eos=1), "ignore_eos: got 1; accepted: True or False"),
        (dict(temperature=-0.1), "temperature: got -0.1; accepted: a finite number, 0 or more"),
        (dict(length_penalty=float("nan")), "length_penalty: got nan; accepted: a number from"),
        (dict(include_stop_str_in_output="no"), "True or False"),
        (dict(structured_outputs=dict(regexp="a")), "structured_outputs: got 'regexp'; accepted: "),
        (dict(structured_outputs=3), "structured_outputs: got 3; accepted: None or Structured"),
        (dict(structured_outputs=FIT, guided_decoding=FIT), "guided_decoding: got"),
        (dict(guided_decoding=FIT, ignore_eos=True), "ignore_eos: got True; accepted: False"),
    ],
)
def test_params_that_cannot_work(params, said):
    with pytest.raises(ValueError) as error:
        BeamSearchParams(**dict(beam_width=2, max_tokens=3) | params)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "prompts, params, said",
    [
        ([[1], []], BeamSearchParams(2, 3), "prompts[1]: prompt: got []"),
        ([{"text": "x"}], BeamSearchParams(2, 3), "prompts[0]: prompt: got {'text': 'x'}"),
        ([[1] * 2048], BeamSearchParams(2, 3), "accepted: at most 2047"),
        ("x", BeamSearchParams(9, 3), "beam_width: got 9; accepted: at most 8 (max_num_seqs)"),
        ("x", None, "params: got None; accepted: BeamSearchParams"),
    ],
)
def test_searches_that_cannot_work(llm, prompts, params, said):
    with pytest.raises(ValueError) as error:
        llm.beam_search(prompts, params)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert_clean(llm.engine)


def test_a_search_wants_an_idle_engine_and_room_for_its_beams(model):
    engine = new_engine(model, num_blocks=10, block_size=4)
    with pytest.raises(ValueError, match=r"4 beams of 3 \+ 9 tokens may need 12 blocks; .*most 10"):
        BeamSearch(engine, BeamSearchParams(4, 9)).new_search([1, 2, 3])
    engine.add_request("a", [1], greedy(3))
    with pytest.raises(ValueError, match="engine: 1 requests are not finished"):
        BeamSearch(engine, BeamSearchParams(2, 3))


def test_a_stop_token_does_not_count_in_the_length():
    search = Search([1, 2], 5, BeamSearchParams(2, 5, length_penalty=2.0), frozenset({60}))
    assert search.score(Beam(-18.0, [3, 60])) == -18 / 3**2
    assert search.score(Beam(-18.0, [3, 4])) == -18 / 4**2
