"""What clients send and what changes no answer is accepted, and named in a header."""

import json
from pathlib import Path

import pytest

from reference.server import effects
from tests.server.live import ask, events

README = Path(effects.__file__).with_name("README.md")
USER = {"role": "user", "content": "def f("}
CHAT = dict(messages=[USER], max_tokens=4, temperature=0)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(answer) -> list[str]:
    """The fields that the header names."""
    return sorted(filter(None, answer.headers.get("x-without-effect", "").split(", ")))


@pytest.mark.parametrize(
    "path, body, hints",
    [
        ("chat/completions", CHAT, dict(store=True, metadata={"a": "b"}, verbosity="low")),
        ("chat/completions", CHAT, dict(reasoning_effort="high", service_tier="flex",
            prediction={"type": "content", "content": "x"}, include_reasoning=False)),
        ("chat/completions", CHAT, dict(prompt_cache_retention="24h", length_penalty=2.0,
            guided_decoding_backend="xgrammar", vllm_xargs={"a": 1})),
        ("responses", dict(input="def f(", max_output_tokens=4, temperature=0),
            dict(store=True, truncation="auto", reasoning={"effort": "low"}, max_tool_calls=3,
            service_tier="priority", stream_options={"include_obfuscation": True})),
        ("messages", dict(messages=[USER], max_tokens=4, temperature=0),
            dict(thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto",
            context_management={"edits": []}, speed="fast")),
        ("embeddings", dict(input="def f("), dict(priority=3)),
    ],
)  # fmt: skip
def test_hints_change_no_answer_and_are_named(live, path, body, hints):
    plain, hinted = (live.post(f"/v1/{path}", body | more) for more in ({}, hints))
    assert hinted.status_code == 200, hinted.text
    assert said(plain) == [] and said(hinted) == sorted(hints)
    skipped = ("id", "created", "created_at", "output")

    def compared(answer) -> dict:
        return {key: value for key, value in answer.json().items() if key not in skipped}

    assert compared(plain) == compared(hinted)
    if path == "responses":
        one, other = ([item["content"] for item in a.json()["output"]] for a in (plain, hinted))
        assert one == other


def test_a_stream_has_the_header_too(live):
    answer = live.post("/v1/chat/completions", CHAT | dict(stream=True, store=True))
    assert said(answer) == ["store"] and events(answer.text)


def test_a_field_with_an_effect_is_not_named(live):
    more = dict(parallel_tool_calls=False, prompt_cache_key="k", safety_identifier="s", user="u")
    answer = live.post("/v1/chat/completions", CHAT | more | dict(seed=-1, top_k=5))
    assert answer.status_code == 200 and said(answer) == []


@pytest.mark.parametrize(
    "path, body, names",
    [
        ("chat/completions", CHAT | dict(messages=[USER, dict(role="assistant", content="x",
            reasoning_content="t", provider_specific_fields={"a": None}, annotations=[{}],
            tool_calls=[CALL | {"extra": 1}]), dict(role="tool", tool_call_id="c", content="5",
            cache_control={"type": "ephemeral"})]),
            ["annotations", "cache_control", "extra", "provider_specific_fields",
             "reasoning_content"]),
        ("chat/completions", CHAT | dict(messages=[USER, dict(role="function", name="f",
            content="5"), USER]), []),
        ("responses", dict(input=[USER, dict(type="reasoning", id="r", summary=[]), USER],
            max_output_tokens=2, include=["reasoning.encrypted_content"]),
            ["include", "input.reasoning", "summary"]),
        ("messages", dict(messages=[USER, dict(role="assistant", content=[
            dict(type="thinking", thinking="x", signature="y"),
            dict(type="text", text="x", citations=[])]), USER], max_tokens=2),
            ["citations", "messages.thinking", "signature", "thinking"]),
    ],
)  # fmt: skip
def test_what_was_copied_from_other_answers_is_accepted(live, path, body, names):
    answer = live.post(f"/v1/{path}", body)
    assert answer.status_code == 200, answer.text
    assert said(answer) == names


def test_a_form_of_texts_has_no_effect_on_a_forced_call(live):
    """instructor sends both. A form of the whole answer contradicts a call, so it is refused."""
    form = {"name": "n", "schema": {"enum": ["red"]}}
    tool = {"name": "f", "parameters": {"enum": [{"a": 1}]}}
    chat = CHAT | dict(max_tokens=40, tools=[{"type": "function", "function": tool}])
    chat |= dict(tool_choice={"type": "function", "function": {"name": "f"}})
    answer = live.post(
        "/v1/chat/completions",
        chat | dict(response_format={"type": "json_schema", "json_schema": form}),
    )
    assert said(answer) == ["response_format"], answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    refusal = live.post("/v1/chat/completions", chat | dict(guided_regex="a"))
    assert refusal.status_code == 400
    assert "auto or none together with another form" in refusal.json()["error"]["message"]
    body = dict(input="x", max_output_tokens=40, tools=[{"type": "function"} | tool])
    body["text"] = {"format": {"type": "json_schema"} | form}
    body["tool_choice"] = {"type": "function", "name": "f"}
    answer = live.post("/v1/responses", body)
    assert said(answer) == ["text.format"]
    assert json.loads(answer.json()["output"][0]["arguments"]) == {"a": 1}


def test_numbers_may_be_strings(live):
    path, body = "/v1/completions", dict(prompt="def f(", max_tokens=4, temperature=0)
    written = body | dict(max_tokens="4", temperature="0.0", top_k=5.0, seed="-1", top_p="1e0")
    one, other = (live.post(path, each).json()["choices"] for each in (body, written))
    assert one == other
    for wrong in ("4.5", "", "four", "0x4", "1e999", " 4", "4" * 30, True, [4]):
        assert live.post(path, body | dict(max_tokens=wrong)).status_code == 400, wrong


@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", CHAT | dict(audio={"voice": "x", "format": "wav"})),
        ("chat/completions", CHAT | dict(modalities=["text", "audio"])),
        ("chat/completions", CHAT | dict(web_search_options={})),
        ("chat/completions", CHAT | dict(cache_salt="s")),
        ("chat/completions", CHAT | dict(tools=[{"type": "function", "function": {"name": "f",
            "defaults": 1}}])),
        ("responses", dict(input="x", background=True)),
        ("responses", dict(input="x", previous_response_id="resp_1")),
        ("responses", dict(input="x", tools=[{"type": "web_search"}])),
        ("responses", dict(input=[dict(type="reasoning", id="r", summary=[])])),
        ("messages", dict(messages=[USER], max_tokens=2, inference_geo="eu")),
        ("messages", dict(messages=[USER], max_tokens=2, output_config={"format": {}})),
        ("completions", dict(prompt="x", use_beam_search=True)),
        ("embeddings", dict(input="x", dimensions=8)),
    ],
)  # fmt: skip
def test_what_asks_for_another_answer_is_refused(running, path, body):
    answer = ask(running.service, "POST", f"/v1/{path}", json=body)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["self", "template", "messages", "conversations", "cls", "args"])
def test_names_of_a_templates_arguments_meet_none_of_ours(running, name):
    body = CHAT | dict(chat_template_kwargs={name: 1})
    answer = ask(running.service, "POST", "/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400), answer.text


def test_a_header_is_short_and_has_no_strange_names(running):
    extra = {f"x{at}": 1 for at in range(100)} | {"a\r\nb: c": 1, "é" * 80: 1, "y" * 70: 1}
    body = CHAT | dict(messages=[USER | extra])
    answer = ask(running.service, "POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 200 and said(answer) == sorted(f"x{at}" for at in range(20))


def test_the_table_is_that_of_the_models():
    assert effects.table() in README.read_text("utf-8")
