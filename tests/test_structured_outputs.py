"""Structured outputs in the engine: whatever the scheduler does, whoever drafts and whoever shares the
batch, an answer is that of trying every token at every place, and others do not notice.
"""

import json
import re
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.sampling import sample
from lessons.l22_serving.grammar import matcher as matcher_module
from lessons.l22_serving.grammar import naive
from lessons.l22_serving.grammar.matcher import Matcher
from lessons.l22_serving.grammar.reading import compile_structure
from lessons.l22_serving.grammar.vocabulary import Vocabulary
from reference import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from reference.engine import Engine
from reference.speculative_engine import SpeculativeEngine
from reference.structured import Constraint
from tests import speculative_histories
from tests.engine_histories import LOGITS, VOCAB, Asked, History, House, hashes, new_engine
from tests.speculative_histories import DraftedHistory, Drafting

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import given

from tests.test_engine_histories import FAULTS, HOUSE, REQUESTS, histories
from tests.test_speculative_histories import DRAFTING

END = VOCAB - 1
WORDS = [
    "ab",
    "abc",
    "12",
    "123",
    "true",
    ", ",
    "[1",
    "]]",
    "((",
    "))",
    "d)",
    "c12",
    "é",
    "red",
    "🙂",
]
BYTES = b'abcdefghijklmnopqrstuvwxyz0123456789[](){}", :-.\n\xc3\xa9\xf0\x9f\x99\x82'
TOKENS = [*(bytes([byte]) for byte in BYTES), *(word.encode() for word in WORDS)]
TOKENS += [b"ab"] * (END - len(TOKENS)) + [None]
WISHES = [
    dict(regex=r"[a-d]+(, ?\d{1,3})*"),
    None,
    dict(grammar='root ::= "(" root ")" root | [a-d]{1,2}'),
    dict(choice=["red", "abc", "abcd 12", "é🙂"]),
    dict(json={"type": "array", "items": {"type": ["integer", "boolean"]}, "maxItems": 3}),
]


def wish(index: int) -> StructuredOutputsParams | None:
    wanted = WISHES[index % len(WISHES)]
    return wanted and StructuredOutputsParams(**wanted, disable_any_whitespace=True)


def mask_behind(sequence, output: list[int]) -> torch.Tensor | None:
    """Which tokens may follow, by trying each: [VOCAB] bool. None: any may."""
    wanted = sequence.params.structure
    if wanted is None or END in output:
        return None
    matcher = matchers(wanted)
    state = matcher.read(b"".join(TOKENS[token] for token in output))
    if state is None:  # drafted, and not allowed
        return None
    allowed = naive.unpacked(naive.token_mask(matcher, state, TOKENS), VOCAB)
    allowed[END] = state.may_end
    return allowed


def matchers(wanted: StructuredOutputsParams, known: dict = {}) -> Matcher:  # noqa: B006
    if wanted.key not in known:
        automaton = compile_structure(wanted.kind, getattr(wanted, wanted.kind), wanted.layout)
        known[wanted.key] = Matcher(automaton)
    return known[wanted.key]


def masked(logits: torch.Tensor, sequence, output: list[int]) -> torch.Tensor:
    allowed = mask_behind(sequence, output)
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)


class Structured:
    """A history in which four of five requests ask for a structure."""

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.engine.structures.vocabulary = Vocabulary(TOKENS)

    def params(self, index: int) -> SamplingParams:
        return replace(super().params(index), structured_outputs=wish(index))


class StructuredHistory(Structured, History):
    def alone(self, request) -> list[list[int]]:
        answers = []
        for sequence in request.sequences:
            output = []
            while len(output) < sequence.max_new_tokens and output[-1:] != [END]:
                last = hashes(sequence.prompt + output)[-1]
                logits = masked(LOGITS[last % len(LOGITS)][None], sequence, output)
                output += sample(logits, [sequence.sampling], [sequence.prompt], [output])
            answers.append(output)
        return answers


class StructuredDraftedHistory(Structured, DraftedHistory):
    def alone(self, request) -> list[list[int]]:
        plain = speculative_histories.logits_behind

        def logits_behind(table, sequence, output):
            logits = plain(table, sequence, output)
            allowed = mask_behind(sequence, output)
            if allowed is None:
                return logits
            if not allowed[:END].any():  # nothing but the end may follow, however early
                last = hashes(sequence.prompt + output)[-1]
                logits = table[last % len(table)][None].clone()
            return logits.masked_fill(~allowed, -torch.inf)

        speculative_histories.logits_behind = logits_behind
        try:
            return super().alone(request)
        finally:
            speculative_histories.logits_behind = plain


# ---------------------------------------------------------------- histories


def test_random_histories(request):
    @histories(2000 if request.config.getoption("--all") else 25)
    @given(HOUSE, REQUESTS, FAULTS)
    def check(house, requests, faults):
        StructuredHistory(house, requests, faults).run()

    check()


def test_random_histories_with_drafts(request):
    """Each drafted position is masked by what stands in front of it."""

    @histories(2000 if request.config.getoption("--all") else 25)
    @given(HOUSE, REQUESTS, FAULTS, DRAFTING)
    def check(house, requests, faults, drafting):
        StructuredDraftedHistory(house, requests, faults, drafting).run()

    check()


class ForgetsWhatItRead(Engine):
    """A preempted answer begins its text anew."""

    def run(self, step):
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.constraint and sequence.preemptions and not sequence.computed:
                sequence.constraint.state = sequence.constraint.masks.start
        return super().run(step)


class SharesAConstraint(Engine):
    """All answers of a request follow one state."""

    def new_sequences(self, request, priority):
        sequences = super().new_sequences(request, priority)
        for sequence in sequences:
            sequence.constraint = sequences[0].constraint
        return sequences


class ShiftsTheMasks(Engine):
    """Each row has the constraint of its neighbour."""

    def sample(self, step, hidden, sampled):
        if len(sampled) > 1:
            constraints = [sequence.constraint for sequence in sampled]
            for at, sequence in enumerate(sampled):
                sequence.constraint = constraints[at - 1]
            found = super().sample(step, hidden, sampled)
            for sequence, own in zip(sampled, constraints):
                sequence.constraint = own
            return found
        return super().sample(step, hidden, sampled)


@pytest.mark.parametrize("kind", [ForgetsWhatItRead, SharesAConstraint, ShiftsTheMasks])
def test_a_planted_slip_is_seen(kind):
    house = House(7, 3, 4, 8)
    requests = [Asked(0, 5, 10, answers=3 if index == 2 else 1) for index in range(6)]
    StructuredHistory(house, requests, {}).run()
    with pytest.raises(AssertionError):
        StructuredHistory(house, requests, {}, kind).run()


def test_a_draft_that_is_masked_by_its_first_place_is_seen(monkeypatch):
    """The slip: all rows of a draft have the mask of the answer in front of it."""
    row = Constraint.row
    requests = [Asked(0, 5, 12) for _ in range(5)]
    arguments = House(40, 3, 4, 40), requests, {}, Drafting("drawn", 3)
    StructuredDraftedHistory(*arguments).run()
    monkeypatch.setattr(Constraint, "row", lambda self, ahead=(): row(self))
    with pytest.raises((AssertionError, ValueError)):
        StructuredDraftedHistory(*arguments).run()


# ---------------------------------------------------------------- one engine, several wishes


def engine_of_tokens(kind=Engine) -> Engine:
    engine = new_engine(House(80, 4, 8, 64, enable_chunked_prefill=False), {}, kind)
    engine.runner.rules = type("None", (), {"check": lambda self, step: None})()
    engine.structures.vocabulary = Vocabulary(TOKENS)
    return engine


def answers_of(engine: Engine, *params: SamplingParams) -> list:
    for index, each in enumerate(params):
        engine.add_request(str(index), [index, 5, 6], replace(each, detokenize=False))
    found = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            found[int(output.request_id)] = output.outputs
    return [found[index] for index in range(len(params))]


def text_of(answer) -> str:
    return b"".join(TOKENS[token] or b"" for token in answer.token_ids).decode()


def test_whoever_asks_for_nothing_does_not_notice():
    """Tokens and log-probabilities are the same bits beside requests with structures."""
    free = SamplingParams(max_tokens=9, seed=3, temperature=0.9, top_p=0.9, logprobs=3)
    bound = SamplingParams(max_tokens=9, seed=4, structured_outputs=wish(0))
    (alone,) = answers_of(engine_of_tokens(), free)[0]
    (beside,) = answers_of(engine_of_tokens(), free, bound, bound)[0]
    assert beside.token_ids == alone.token_ids and beside.logprobs == alone.logprobs


def test_log_probabilities_are_those_of_the_raw_logits():
    ask = SamplingParams(max_tokens=6, temperature=0, logprobs=0, structured_outputs=wish(0))
    (answer,) = answers_of(engine_of_tokens(), ask)[0]
    context = [0, 5, 6]
    for token, logprobs in zip(answer.token_ids, answer.logprobs):
        raw = LOGITS[hashes(context)[-1] % len(LOGITS)].log_softmax(-1)
        assert abs(logprobs[token].logprob - raw[token].item()) < 1e-5
        context.append(token)


def test_top_p_counts_allowed_tokens_only():
    """A top-p of 0.01 keeps the likeliest allowed token, however unlikely it is."""
    ask = SamplingParams(max_tokens=8, seed=1, structured_outputs=wish(0))
    found = answers_of(engine_of_tokens(), replace(ask, top_p=0.01), replace(ask, temperature=0))
    first, greedy = found[0][0], answers_of(engine_of_tokens(), replace(ask, temperature=0))[0][0]
    assert first.token_ids == greedy.token_ids


def test_other_wishes_beside_a_structure():
    """n answers, biases, penalties, stop tokens that are text, and min_tokens."""
    ask = SamplingParams(max_tokens=12, seed=1, structured_outputs=wish(0))
    comma = TOKENS.index(b", ")
    found = answers_of(
        engine_of_tokens(),
        replace(ask, n=4),
        replace(ask, logit_bias={TOKENS.index(b"z"): 100, TOKENS.index(b"c"): 100}),
        replace(ask, repetition_penalty=1.5, presence_penalty=1.0),
        replace(ask, stop_token_ids=(comma,), logit_bias={comma: 100}),
        replace(ask, min_tokens=8),
        replace(ask, structured_outputs=wish(3), min_tokens=12),
    )
    pattern = re.compile(WISHES[0]["regex"])
    finished = [a for row in found[:3] for a in row if a.finish_reason == "stop"]
    assert finished and all(pattern.fullmatch(text_of(answer)) for answer in finished)
    assert len({tuple(answer.token_ids) for answer in found[0]}) > 1
    assert "z" not in text_of(found[1][0]) and "c" in text_of(found[1][0])
    assert found[3][0].stop_reason == comma
    assert len(found[4][0].token_ids) >= 8
    # A text that is complete and cannot go on ends, also before min_tokens.
    assert text_of(found[5][0]) in WISHES[3]["choice"] and found[5][0].finish_reason == "stop"
    assert len(found[5][0].token_ids) < 12


@pytest.mark.parametrize("kind", [Engine, SpeculativeEngine])
def test_a_grammar_that_fails_ends_its_answer_only(kind, monkeypatch):
    """It is aborted, and its stop_reason says why; others go on."""
    house, ask = House(80, 4, 8, 64), SamplingParams(max_tokens=30, detokenize=False)
    if kind is Engine:
        engine = new_engine(house, {}, Engine)
    else:
        drafting = Drafting("sure", 2)
        engine = speculative_histories.new_engine(house, {}, drafting, kind, None)
    engine.runner.rules = type("None", (), {"check": lambda self, step: None})()
    engine.structures.vocabulary = Vocabulary(TOKENS)
    monkeypatch.setattr(matcher_module, "MOST_ITEMS", 30)
    ambiguous = StructuredOutputsParams(grammar='root ::= root root root | "a" | ""')
    asks = replace(ask, structured_outputs=ambiguous, min_tokens=20), replace(ask, temperature=0)
    failed, other = (row[0] for row in answers_of(engine, *asks))
    assert failed.finish_reason == "abort" and "too ambiguous" in failed.stop_reason
    assert "\n" not in failed.stop_reason and set(text_of(failed)) <= {"a"}
    assert other.finish_reason in ("stop", "length")


# ---------------------------------------------------------------- refusals

REFUSED = [
    (dict(structured_outputs={}), "structured_outputs: got .*one of json, regex"),
    (dict(structured_outputs=dict(regex="a", choice=["b"])), "one of json, regex"),
    (
        dict(structured_outputs=dict(regexp="a")),
        "structured_outputs: got 'regexp'; accepted: the keys",
    ),
    (dict(structured_outputs="a"), "structured_outputs: got 'a'"),
    (dict(structured_outputs=dict(json_object="yes")), "json_object"),
    (dict(structured_outputs=dict(structural_tag="x")), "structural_tag"),
    (dict(structured_outputs=dict(regex="a", whitespace_pattern=3)), "whitespace_pattern"),
    (dict(structured_outputs=dict(regex="a"), guided_decoding=dict(regex="a")), "guided_decoding"),
    (dict(structured_outputs=dict(regex="a"), ignore_eos=True), "ignore_eos: got True"),
]
REFUSED_BY_THE_ENGINE = [
    (dict(regex="(a"), "regex: got"),
    (dict(regex=["a"]), "regex: got"),
    (dict(json={"not": {}}), "json: got 'not'"),
    (dict(json={"a": {1, 2}}), "json: .*not JSON serializable"),
    (dict(json="{"), "json: got"),
    (dict(json={"type": "null"}, whitespace_pattern="("), "whitespace_pattern: got"),
    (dict(grammar="x"), "grammar: got"),
    (dict(choice=[]), "choice: got"),
    (dict(regex="A"), "regex: the grammar needs byte 0x41"),
]


@pytest.mark.parametrize("arguments, said", REFUSED)
def test_parameters_that_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said) as caught:
        SamplingParams(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wanted, said", REFUSED_BY_THE_ENGINE)
def test_structures_that_are_refused(wanted, said):
    engine = engine_of_tokens()
    with pytest.raises(ValueError, match=said) as caught:
        engine.add_request("a", [1, 2], SamplingParams(structured_outputs=wanted))
    assert "\n" not in str(caught.value) and not engine.requests and engine.scheduler.is_idle


def test_engines_without_text_or_end_are_refused():
    ask = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a", backend="xgrammar"))
    engine = engine_of_tokens()
    engine.structures.vocabulary = None
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.add_request("a", [1, 2], ask)
    engine = engine_of_tokens()
    engine.structures.vocabulary = Vocabulary([*TOKENS[:-1], b"end"])
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        engine.add_request("a", [1, 2], ask)


def test_equal_structures_are_compiled_once_and_few_are_kept(monkeypatch):
    engine = engine_of_tokens()
    schema = {"type": "null"}
    engine.structures.vocabulary = Vocabulary([bytes([byte]) for byte in range(256)])
    once = engine.structures.prepare(StructuredOutputsParams(json=schema))
    assert engine.structures.prepare(GuidedDecodingParams(json={"type": "null"})) is once
    compact = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert engine.structures.prepare(compact) is not once
    monkeypatch.setattr("reference.structured.MOST_KEPT", 2)
    engine.structures.prepare(StructuredOutputsParams(regex="b"))
    assert len(engine.structures.compiled) == 2 and once not in engine.structures.compiled.values()


# ---------------------------------------------------------------- the embedded model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
}


def test_the_embedded_model_follows():
    """Every answer that ends fits; one that is cut short says so."""
    llm = LLM(model="models/tiny", max_num_seqs=8, num_gpu_blocks_override=60)
    pattern = r"[a-z_]{2,8}\((\d, ){0,3}\d\)"
    asks = [
        StructuredOutputsParams(json=PERSON),
        StructuredOutputsParams(json=json.dumps(PERSON), whitespace_pattern=r"[ ]?"),
        StructuredOutputsParams(regex=pattern),
        StructuredOutputsParams(choice=["positive", "negative"]),
        StructuredOutputsParams(regex=r"日本(é|🙂){2}"),
    ]
    params = [SamplingParams(temperature=0, max_tokens=90, structured_outputs=ask) for ask in asks]
    params.append(replace(params[2], max_tokens=2))
    outputs = llm.generate(["def f("] * len(params), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop"] * 5 + ["length"]
    for text in texts[:2]:
        found = json.loads(text)
        assert 0 <= found["size"] <= 99 and len(found["name"]) <= 8
    assert "\n" not in texts[1]
    assert re.fullmatch(pattern, texts[2]) and texts[3] in asks[3].choice
    assert re.fullmatch(asks[4].regex, texts[4])
