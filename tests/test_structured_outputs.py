"""Structured outputs beside other wishes, what is refused, and what they cost; others in the batch
do not notice them.
"""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from lessons.l24_structured_outputs import matcher as matcher_module
from lessons.l24_structured_outputs.vocabulary import Vocabulary
from reference import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from reference.bench import structured_speed
from reference.engine.engine import Engine
from reference.speculation.speculation import Speculation
from tests import speculative_histories
from tests.engine_histories import LOGITS, House, hashes, new_engine
from tests.speculative_histories import Drafting
from tests.structured_cases import TOKENS, WISHES, wish

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


def test_a_request_without_a_structure_does_not_notice():
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


@pytest.mark.parametrize("kind", [Engine, Speculation])
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
    (dict(json={"uniqueItems": True}), "json: got 'uniqueItems'"),
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
    monkeypatch.setattr("reference.features.structured.MOST_KEPT", 2)
    engine.structures.prepare(StructuredOutputsParams(regex="b"))
    assert len(engine.structures.compiled) == 2 and once not in engine.structures.compiled.values()


def test_a_structure_that_is_there_waits_for_no_other_one(monkeypatch):
    """While one thread compiles a large schema, another gets a structure that is compiled already.
    And who compiles the same at the same time gets the same masks.
    """
    structures = engine_of_tokens().structures
    there = structures.prepare(wish(0))
    begun, go_on, compile_it = threading.Semaphore(0), threading.Event(), structures.compile

    def slowly(params):
        begun.release()
        assert go_on.wait(60)
        return compile_it(params)

    monkeypatch.setattr(structures, "compile", slowly)
    with ThreadPoolExecutor(3) as threads:
        large = [threads.submit(structures.prepare, wish(3)) for _ in range(2)]
        try:
            for _ in large:
                assert begun.acquire(timeout=20)
            assert threads.submit(structures.prepare, wish(0)).result(20) is there
        finally:
            go_on.set()
        assert large[0].result() is large[1].result() is structures.prepare(wish(3))


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


def test_the_speed_is_compared_at_equal_lengths(monkeypatch, tmp_path, capsys):
    """Two rows: the record has what the table prints, and the rows without a structure have as many
    tokens as those with one.
    """
    monkeypatch.setattr(structured_speed, "ROWS", 2)
    monkeypatch.setattr(structured_speed, "TOKENS", 6)
    monkeypatch.setattr(structured_speed, "ROUNDS", 1)
    wishes = {"regex": StructuredOutputsParams(regex="[a-z]{2}\\(x\\)")}
    monkeypatch.setattr(structured_speed, "WISHES", wishes)
    plain, seen = structured_speed.generate, []

    def generate(llm, params):
        seconds, answers = plain(llm, params)
        seen.append([len(tokens) for tokens in answers])
        return seconds, answers

    monkeypatch.setattr(structured_speed, "generate", generate)
    assert structured_speed.main(["--out", str(tmp_path)]) == 0
    assert "% fewer than without" in capsys.readouterr().out
    record = json.loads((tmp_path / "structured_speed.json").read_text())
    warm, bound, free = seen
    assert bound == free and sum(bound) == record["engine"]["regex"]["tokens"] and len(warm) == 2
    masks = record["masks"]["regex"]
    assert 0 < masks["new_state_us"] < masks["every_token_us"]
