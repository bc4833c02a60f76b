"""/v1/completions: its answers are the engine's, however they are asked for."""

import re

import pytest

from reference import SamplingParams
from tests.paces import for_readers
from tests.server.live import events

PROMPT = "def quicksort("
GREEDY = dict(model="tiny", prompt=PROMPT, temperature=0, max_tokens=12)


def text_of(live, ids) -> str:
    return live.service.tokens.decode(ids, skip_special=True)


def streamed(chunks: list[dict], index: int = 0) -> str:
    return "".join(
        choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_the_answer_is_the_engines_whole_and_streamed(live):
    want = live.tokens_of(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0]
    whole = live.post("/v1/completions", GREEDY).json()
    assert whole["choices"][0]["text"] == text_of(live, want)
    assert whole["object"] == "text_completion" and whole["model"] == "tiny"
    assert whole["choices"][0]["finish_reason"] == "length"
    prompt_tokens = len(live.service.tokens.encode("prompt", PROMPT))
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 12)
    with for_readers(live.service.engine):
        response = live.post("/v1/completions", GREEDY | dict(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = events(response.text)
    assert streamed(chunks) == whole["choices"][0]["text"] and len(chunks) > 6
    assert all("usage" not in chunk for chunk in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "length"]


def test_many_prompts_and_answers_keep_their_places(live):
    prompts = [PROMPT, "import os\n", "class Stack:\n"]
    body = dict(prompt=prompts, n=3, temperature=1.0, seed=5, max_tokens=6)
    want = []
    for prompt in prompts:
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6)
        want += [text_of(live, ids) for ids in live.tokens_of(prompt, params)]
    whole = live.post("/v1/completions", body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(9))
    assert [choice["text"] for choice in whole["choices"]] == want and len(set(want)) > 6
    options = dict(stream=True, stream_options=dict(include_usage=True))
    with for_readers(live.service.engine):
        chunks = events(live.post("/v1/completions", body | options).text)
    assert [streamed(chunks, index) for index in range(9)] == want
    order = [chunk["choices"][0]["index"] for chunk in chunks[:-1]]
    assert order != sorted(order), "they come beside one another"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 54
    assert whole["usage"]["completion_tokens"] == 54


def test_prompts_of_token_ids(live):
    ids = live.service.tokens.encode("prompt", PROMPT)
    text = live.post("/v1/completions", GREEDY).json()["choices"][0]["text"]
    for prompt in (ids, [ids, ids]):
        choices = live.post("/v1/completions", GREEDY | dict(prompt=prompt)).json()["choices"]
        assert {choice["text"] for choice in choices} == {text}
    one = live.post("/v1/completions", GREEDY | dict(return_token_ids=True)).json()["choices"][0]
    assert one["prompt_token_ids"] == ids and len(one["token_ids"]) == 12
    cut = live.post("/v1/completions", GREEDY | dict(truncate_prompt_tokens=2)).json()
    assert cut["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_log_probabilities(live, stream):
    body = GREEDY | dict(echo=True, logprobs=2, max_tokens=4, stream=stream)
    response = live.post("/v1/completions", body)
    choices = [c["choices"][0] for c in (events(response.text) if stream else [response.json()])]
    text = "".join(choice["text"] for choice in choices)
    assert text.startswith(PROMPT)
    found = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values)
    start = found["tokens"].index("def")
    assert "".join(found["tokens"][start:]) == text
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value < 0 for value in found["token_logprobs"][1:])
    for token, offset in list(zip(found["tokens"], found["text_offset"]))[start:]:
        assert text[offset:].startswith(token)
    rows = zip(*(found[name] for name in ("tokens", "token_logprobs", "top_logprobs")))
    for token, value, top in list(rows)[1:]:
        assert top[token] == value and 2 <= len(top) <= 3
    # of a character of several tokens the last one has it all
    parts = live.service.tokens.encode("prompt", "漢", special=False)
    body = GREEDY | dict(prompt=[*parts, *parts], echo=True, logprobs=0, max_tokens=0)
    found = live.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert len(parts) > 1 and found["tokens"][len(parts) :] == [*[""] * (len(parts) - 1), "漢"]
    body = GREEDY | dict(echo=True, max_tokens=0, return_token_ids=True)
    none = live.post("/v1/completions", body | dict(stop_token_ids=[*range(4096)])).json()
    (choice,) = none["choices"]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == (PROMPT, [], None)
    assert none["usage"]["completion_tokens"] == 0


def test_best_of_stop_and_bias(live):
    text = live.post("/v1/completions", GREEDY).json()["choices"][0]["text"]
    stop = text[4:7]
    for kept in (False, True):
        wishes = dict(stop=[stop, "never"], include_stop_str_in_output=kept)
        for stream in (False, True):
            response = live.post("/v1/completions", GREEDY | wishes | dict(stream=stream))
            chunks = events(response.text) if stream else [response.json()]
            assert streamed(chunks) == text[: text.index(stop)] + stop * kept
            last = chunks[-1]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    best = dict(GREEDY, temperature=1.0, n=1, best_of=4, seed=1)
    params = SamplingParams(temperature=1.0, best_of=4, seed=1, max_tokens=12)
    want = text_of(live, live.tokens_of(PROMPT, params)[0])
    assert live.post("/v1/completions", best).json()["choices"][0]["text"] == want
    forced = live.service.tokens.encode("prompt", " x", special=False)[-1]
    biased = live.post("/v1/completions", GREEDY | dict(logit_bias={str(forced): 100})).json()
    assert biased["choices"][0]["text"] == live.service.tokens.text_of(forced) * 12
    alone = live.post("/v1/completions", GREEDY | dict(allowed_token_ids=[forced])).json()
    assert alone["choices"][0]["text"] == biased["choices"][0]["text"]
    banned = live.post("/v1/completions", GREEDY | dict(bad_words=[text.split()[0]])).json()
    assert text.split()[0] not in banned["choices"][0]["text"]


def test_adapters_answer_to_their_names(live):
    texts = {}
    for name in ("tiny", "base", "sql", "tests"):
        body = GREEDY | dict(model=name, max_tokens=5)
        answer = live.post("/v1/completions", body).json()
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
        lora = live.service.models.adapters.get(name)
        params = SamplingParams(temperature=0, max_tokens=5)
        assert texts[name] == text_of(live, live.tokens_of(PROMPT, params, lora)[0])
    assert texts["tiny"] == texts["base"] and texts["sql"] != texts["tiny"]


def test_forms_of_an_answer(live):
    def text(**form):
        # Fmt: skip.
        return live.post("/v1/completions", GREEDY | dict(max_tokens=40) | form).json()["choices"][
            0
        ]["text"]

    assert text(guided_choice=["red", "green"]) in ("red", "green")
    assert text(structured_outputs=dict(regex="[0-9]{4}")).isdigit()
    # Fmt: skip.
    assert (
        text(
            response_format=dict(
                type="json_schema", json_schema=dict(name="n", schema={"enum": [7, 8]})
            )
        )
        in "78"
    )
    refusal = live.post("/v1/completions", GREEDY | dict(guided_regex="a", guided_choice=["b"]))
    assert refusal.status_code == 400 and "one form" in refusal.text
    assert "['guided_regex', 'guided_choice']" in refusal.text


TOOL = {"name": "f", "parameters": {"uniqueItems": True}}
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"uniqueItems": True}}}
WRONG = [
    ("/v1/completions", dict(guided_regex="(a"), "guided_regex: got '(a'"),
    ("/v1/completions", dict(guided_json={"uniqueItems": True}), "guided_json: got 'uniqueItems'"),
    ("/v1/completions", dict(guided_json={"pattern": "("}), "guided_json: pattern"),
    ("/v1/completions", dict(structured_outputs=dict(regex="(a")), "structured_outputs.regex: got"),
    (
        "/v1/completions",
        dict(guided_json={}, guided_whitespace_pattern="("),
        "guided_whitespace_pattern: got",
    ),
    ("/v1/chat/completions", dict(response_format=SCHEMA), "response_format: got 'uniqueItems'"),
    (
        "/v1/chat/completions",
        dict(tools=[{"type": "function", "function": TOOL}], tool_choice="required"),
        "tools: got 'uniqueItems'",
    ),
    (
        "/v1/responses",
        dict(text={"format": {"type": "json_schema"} | SCHEMA["json_schema"]}),
        "text.format: got 'uniqueItems'",
    ),
    ("/generate", dict(parameters=dict(grammar=dict(type="regex", value="(a"))), "grammar: got"),
]


@pytest.mark.parametrize("path, form, said", WRONG)
def test_a_form_that_is_wrong_is_named_as_it_was_sent(live, path, form, said):
    prompt = {
        "/v1/completions": dict(prompt="x"),
        "/v1/chat/completions": dict(messages=MESSAGES),
        "/v1/responses": dict(input="x"),
        "/generate": dict(inputs="x"),
    }[path]
    refusal = live.post(path, prompt | form)
    error = refusal.json()["error"]
    assert refusal.status_code == 400, error
    if path == "/generate":
        assert error.startswith(said)
    else:
        assert error["message"].startswith(said)
        assert error["param"] == re.match(r"\w+", said)[0]


def test_usage_grows_from_chunk_to_chunk(live):
    options = dict(include_usage=True, continuous_usage_stats=True)
    body = dict(prompt="def f(", max_tokens=9, temperature=0, stream=True, stream_options=options)
    chunks = events(live.post("/v1/completions", body | dict(ignore_eos=True)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 9 and len(chunks[0]["choices"]) == 1
