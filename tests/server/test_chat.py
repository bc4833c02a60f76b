"""Conversations: /v1/chat/completions, /v1/responses and /v1/messages give the same answer to the
same conversation.
"""

import json

import pytest

from reference import SamplingParams
from tests.paces import for_readers
from tests.server.live import ask, events

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f("}]
CHAT = dict(model="tiny", messages=MESSAGES, temperature=0, max_tokens=10)
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}}  # fmt: skip


def prompt_ids(live, **more) -> list[int]:
    return live.post("/tokenize", dict(messages=MESSAGES, **more)).json()["tokens"]


def offline(live, ids, **wishes) -> str:
    params = SamplingParams(temperature=0, max_tokens=10, **wishes)
    return live.service.tokens.decode(live.tokens_of(ids, params)[0], skip_special=True)


def test_the_answer_is_the_engines_behind_the_template(live):
    ids = prompt_ids(live)
    text = live.service.tokens.decode(ids)
    assert text == ("<|endoftext|>### System:\nBe brief.\n\n### User:\ndef f(\n\n### Assistant:\n")
    want = offline(live, ids)
    answer = live.post("/v1/chat/completions", CHAT).json()
    assert answer["choices"][0]["message"]["content"] == want
    assert answer["usage"]["prompt_tokens"] == len(ids)
    newer = {**CHAT, "max_completion_tokens": 10}
    del newer["max_tokens"]
    assert live.post("/v1/chat/completions", newer).json()["choices"] == answer["choices"]
    with for_readers(live.service.engine):
        chunks = events(live.post("/v1/chat/completions", CHAT | dict(stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == want
    assert [delta.get("role") for delta in deltas[:2]] == ["assistant", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_other_apis_give_the_same_answer(live):
    want = live.post("/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"]
    user = MESSAGES[1:]
    # Fmt: skip.
    response = dict(
        model="tiny", instructions="Be brief.", input=user, temperature=0, max_output_tokens=10
    )
    answer = live.post("/v1/responses", response).json()
    assert answer["output"][0]["content"][0]["text"] == want
    assert answer["status"] == "incomplete" and answer["usage"]["output_tokens"] == 10
    found = events(live.post("/v1/responses", response | dict(stream=True)).text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == want
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == want
    message = dict(model="tiny", system="Be brief.", messages=user, temperature=0, max_tokens=10)
    answer = live.post("/v1/messages", message).json()
    assert answer["content"] == [{"type": "text", "text": want}]
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 10
    found = events(live.post("/v1/messages", message | dict(stream=True)).text)
    assert [event["type"] for event in found[:2]] == ["message_start", "content_block_start"]
    # Fmt: skip.
    assert [event["type"] for event in found[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta") == want
    del message["max_tokens"], message["temperature"]
    count = live.post("/v1/messages/count_tokens", message).json()["input_tokens"]
    assert count == len(prompt_ids(live))
    # Fmt: skip.
    stopped = live.post(
        "/v1/messages", message | dict(max_tokens=10, temperature=0, stop_sequences=[want[2:5]])
    )
    assert stopped.json()["stop_reason"] == "stop_sequence"
    assert stopped.json()["stop_sequence"] == want[2:5]


def test_log_probabilities(live):
    body = CHAT | dict(logprobs=True, top_logprobs=2)
    whole = live.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    chunks = events(live.post("/v1/chat/completions", body | dict(stream=True)).text)
    streamed = [entry for c in chunks for entry in c["choices"][0]["logprobs"]["content"]]
    assert streamed == whole and len(whole) == 10
    for entry in whole:
        # Fmt: skip.
        assert (
            entry["top_logprobs"][0]["logprob"] == entry["logprob"]
            and len(entry["top_logprobs"]) == 2
        )
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]


def test_a_streamed_response_tells_the_log_probabilities_of_tokens_without_text(live):
    """Half a character has none, nor has the end, and neither is told twice."""
    form = {"type": "json_schema", "name": "a", "schema": {"const": "éé"}}
    body = dict(input="x", temperature=0, top_logprobs=1, max_output_tokens=9)
    body |= dict(text={"format": form}, include=["message.output_text.logprobs"])
    whole = live.post("/v1/responses", body).json()
    wanted = whole["output"][0]["content"][0]["logprobs"]
    assert len(wanted) == whole["usage"]["output_tokens"] > 4
    assert [one["token"] for one in wanted].count("") > 1, "no token without text"
    found = events(live.post("/v1/responses", body | dict(stream=True)).text)
    deltas = [e["logprobs"] for e in found if e["type"] == "response.output_text.delta"]
    assert [one for logprobs in deltas for one in logprobs] == wanted
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == wanted


def test_a_stream_tells_all_tokens_where_text_is_held_back(live):
    """A stop string that may have begun holds text back, and so does half a character."""
    ids = prompt_ids(live)
    plain = live.tokens_of(ids, SamplingParams(temperature=0, max_tokens=10))[0]
    start = live.service.tokens.decode(plain[3:4])
    wishes = dict(stop=[start + "never" * 9], return_token_ids=True)
    for more in ({}, dict(logit_bias={str(token): 100 for token in range(195, 198)})):
        whole = live.post("/v1/chat/completions", CHAT | wishes | more).json()
        chunks = events(
            live.post("/v1/chat/completions", CHAT | wishes | more | dict(stream=True)).text
        )
        told = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert told == whole["choices"][0]["token_ids"] and len(told) == 10
        assert whole["prompt_token_ids"] == chunks[0]["choices"][0]["prompt_token_ids"] == ids


def test_log_probabilities_of_the_prompt_are_beside_the_choices(live):
    answer = live.post("/v1/chat/completions", CHAT | dict(prompt_logprobs=1)).json()
    ids, found = prompt_ids(live), answer["prompt_logprobs"]
    assert found[0] is None and len(found) == len(ids)
    for token, here in zip(ids[1:], found[1:]):
        assert here[str(token)]["decoded_token"] == live.service.tokens.text_of(token)


def test_a_message_that_is_gone_on_with(live):
    begun = [*MESSAGES, {"role": "assistant", "content": "def g(x):"}]
    body = dict(CHAT, messages=begun, continue_final_message=True, add_generation_prompt=False)
    ids = live.post("/tokenize", dict(messages=begun, continue_final_message=True)).json()["tokens"]
    assert live.service.tokens.decode(ids).endswith("### Assistant:\ndef g(x):")
    want = offline(live, ids)
    assert (
        live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == want
    )
    message = dict(messages=begun[1:], system="Be brief.", max_tokens=10, temperature=0)
    assert live.post("/v1/messages", message).json()["content"][0]["text"] == want


@pytest.mark.sample(1, of="calls of functions")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call(live, choice):
    body = dict(CHAT, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=80)
    answer = live.post("/v1/chat/completions", body).json()["choices"][0]
    calls = answer["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "add" and answer["message"]["content"] is None
    assert json.loads(calls[0]["function"]["arguments"])["a"] in (1, 2)
    assert answer["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    chunks = events(live.post("/v1/chat/completions", body | dict(stream=True)).text)
    told = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"] for call in told] == [call["function"] for call in calls]
    assert [call["index"] for call in told] == list(range(len(told)))


@pytest.mark.sample(1, of="calls of functions")
def test_a_call_that_the_model_makes_itself(live):
    made = '<tool_call>\\n\\{"name": "add", "arguments": \\{"a": [12]\\}\\}\\n</tool_call>'
    body = dict(CHAT, tools=[TOOL], guided_regex="So: " + made, max_tokens=100)
    prompt = live.post("/tokenize", dict(messages=MESSAGES, tools=[TOOL])).json()["tokens"]
    assert '"name": "add"' in live.service.tokens.decode(prompt)
    answer = live.post("/v1/chat/completions", body).json()["choices"][0]
    assert answer["message"]["content"].strip() == "So:" and answer["finish_reason"] == "tool_calls"
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])["a"] in (1, 2)
    chunks = events(live.post("/v1/chat/completions", body | dict(stream=True)).text)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text.strip() == "So:" and any("tool_calls" in c["choices"][0]["delta"] for c in chunks)
    untold = live.post("/v1/chat/completions", body | dict(tool_choice="none")).json()["choices"][0]
    assert "<tool_call>" in untold["message"]["content"]
    items = [
        {"role": "user", "content": "2?"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    tool = dict(TOOL["function"], type="function")
    forced = dict(
        input=items, tools=[tool], tool_choice="required", max_output_tokens=80, temperature=0
    )
    output = live.post("/v1/responses", forced).json()["output"]
    assert output[0]["type"] == "function_call" and output[0]["name"] == "add"
    found = events(live.post("/v1/responses", forced | dict(stream=True)).text)
    assert found[-1]["response"]["output"][0]["arguments"] == output[0]["arguments"]
    use = dict(
        messages=[
            {"role": "user", "content": "2?"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        ],
        tools=[{"name": "add", "input_schema": TOOL["function"]["parameters"]}],
        tool_choice={"type": "tool", "name": "add"}, max_tokens=80, temperature=0,
    )  # fmt: skip
    answer = live.post("/v1/messages", use).json()
    assert answer["content"][0]["type"] == "tool_use" and answer["stop_reason"] == "tool_use"
    found = events(live.post("/v1/messages", use | dict(stream=True)).text)
    (part,) = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert json.loads(part) == answer["content"][0]["input"]


def test_a_clients_own_template(running):
    own, trusted = "{{ messages[0].content }}!", dict(trust_request_chat_template=True)
    body = dict(messages=MESSAGES, chat_template=own)
    refusal = ask(running.service, "POST", "/tokenize", json=body)
    assert refusal.status_code == 400 and "--trust-request-chat-template" in refusal.text
    answer = ask(running.service, "POST", "/tokenize", trusted, json=body)
    assert running.service.tokens.decode(answer.json()["tokens"]) == "Be brief.!"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ ('a' * 10**9) | length }}",
        "{{ 10**(10**10) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{% if %}",
    ],
)
@pytest.mark.sample(2)
def test_templates_that_attack(running, template):
    body = dict(messages=MESSAGES, chat_template=template)
    answer = ask(
        running.service, "POST", "/tokenize", dict(trust_request_chat_template=True), json=body
    )
    # Fmt: skip.
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(
        "chat_template: got one"
    )
    assert answer.elapsed.total_seconds() < 3
