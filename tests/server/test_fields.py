"""No field of an API is ignored in silence: each is a field of ours, accepted without effect and
named in a header, or refused by name.
"""

import importlib.util

import pytest

from reference.server.protocol.chat import ChatCompletionRequest
from reference.server.protocol.completions import CompletionRequest
from reference.server.protocol.messages import CountTokensRequest, MessagesRequest
from reference.server.protocol.responses import ResponsesRequest
from reference.server.protocol.tokens import EmbeddingRequest
from tests.server.live import ask

MESSAGES = [{"role": "user", "content": "x"}]
# Of vLLM's requests, beside OpenAI's (vllm/entrypoints/openai/protocol.py).
VLLM = [
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "add_special_tokens",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
    "priority",
    "request_id",
    "logits_processors",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "cache_salt",
    "kv_transfer_params",
    "vllm_xargs",
    "logprob_token_ids",
]
VLLM_CHAT = [
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "echo",
    "include_reasoning",
    "best_of",
]


def api_fields(module: str, name: str) -> list[str]:
    """The fields of a request, as a client's package lists them."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"NOT RUN: {package} is not installed")
    types = getattr(importlib.import_module(module), name).__annotations__
    return [*types, *(["stream"] if name.endswith("Base") else [])]


OPENAI, ANTHROPIC = "openai.types.", "anthropic.types."


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "ours, module, name, more",
    [
        (ChatCompletionRequest, OPENAI + "chat.completion_create_params",
            "CompletionCreateParamsBase", VLLM + VLLM_CHAT),
        (CompletionRequest, OPENAI + "completion_create_params",
            "CompletionCreateParamsBase", [*VLLM, "prompt_embeds"]),
        (EmbeddingRequest, OPENAI + "embedding_create_params",
            "EmbeddingCreateParams", ["truncate_prompt_tokens", "priority"]),
        (ResponsesRequest, OPENAI + "responses.response_create_params",
            "ResponseCreateParamsBase", []),
        (MessagesRequest, ANTHROPIC + "message_create_params",
            "MessageCreateParamsBase", ["temperature", "top_p", "top_k"]),
        (CountTokensRequest, ANTHROPIC + "message_count_tokens_params",
            "MessageCountTokensParams", []),
    ],
)  # fmt: skip
def test_every_field_is_honoured_or_refused(ours, module, name, more):
    known = {field.alias or name for name, field in ours.model_fields.items()}
    refused, hints = set(ours.refused), set(ours.hints)
    assert not known & refused and not (known | refused) & hints, "one of the three"
    assert set(api_fields(module, name)) | set(more) <= known | refused | hints


@pytest.mark.parametrize(
    "path, wishes, said",
    [
        ("completions", dict(suffix="x"), "suffix: got 'x'; accepted: '', because"),
        ("completions", dict(promt="x"), "promt: unknown field; did you mean prompt?"),
        ("completions", dict(n=0), "n: got 0; accepted: 1 or more"),
        ("completions", dict(n=129), "n: got 129; accepted: at most 128"),
        ("completions", dict(temperature=True), "temperature: got True; accepted: a number"),
        ("completions", dict(temperature=-1), "temperature: got -1"),
        ("completions", dict(temperature=0, n=2), "n: got 2; accepted: 1 with temperature 0"),
        ("completions", dict(max_tokens=0), "max_tokens: got 0; accepted: 1 or more without echo"),
        ("completions", dict(prompt=[]), "prompt: got []; accepted: one prompt at least"),
        ("completions", dict(prompt=[[]]), "prompt: got 'no tokens'"),
        ("completions", dict(prompt=[99999]), "prompt[0]: got 99999; accepted: token ids"),
        ("completions", dict(prompt="a " * 600), "tokens; accepted: at most 511 tokens"),
        ("completions", dict(prompt="a" * 10**5), "100000 characters; accepted: at most 511"),
        ("completions", dict(logprobs=21), "logprobs: got 21; accepted: 0 to 20 (--max-logprobs)"),
        ("completions", dict(logit_bias={"x": 1}), "logit_bias: got 'x'; accepted: token ids"),
        ("completions", dict(logit_bias={"1": 101}), "logit_bias: got {1: 101.0}"),
        ("completions", dict(best_of=2, stream=True), "best_of: got 2; accepted: n (1) with"),
        ("completions", dict(stream_options={}), "stream_options: got"),
        ("completions", dict(seed=-2), "seed: got -2"),
        ("completions", dict(structured_outputs={}), "structured_outputs: got {}; accepted: one"),
        ("completions", dict(use_beam_search=True), "use_beam_search: got True; accepted: False"),
        ("completions", dict(response_format={"type": "xml"}), "response_format.type: got 'xml'"),
        ("chat/completions", dict(messages=[]), "messages: got []"),
        ("chat/completions", dict(messages=[{"role": "me"}]), "messages[0].role: got 'me'"),
        ("chat/completions", dict(messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:x"}}]}]),
            "messages[0].content[0].type: got 'image_url'; accepted: 'text'"),
        ("chat/completions", dict(top_logprobs=2), "top_logprobs: got 2; accepted: none without"),
        ("chat/completions", dict(max_tokens=2, max_completion_tokens=3), "max_tokens: got 2"),
        ("chat/completions", dict(tool_choice="required"), "tool_choice: got 'required'"),
        ("chat/completions", dict(tool_choice={"type": "function", "function": {"name": "f"}}),
            "tool_choice: got 'f'; accepted: one of tools: there are none"),
        ("chat/completions", dict(modalities=["audio"]),
            "modalities: got ['audio']; accepted: ['text']"),
        ("chat/completions", dict(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
        ("responses", dict(input="x", background=True), "background: got True; accepted: False"),
        ("responses", dict(input=[{"type": "function_call"}]), "input[0].name: got None"),
        ("embeddings", dict(input="x", model="sql"), "because adapters do not embed"),
        ("embeddings", dict(input=[]), "input: got []"),
        ("messages", dict(messages=MESSAGES), "max_tokens: missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_one_line(running, path, wishes, said):
    first = {"completions": dict(prompt="x"), "chat/completions": dict(messages=MESSAGES)}
    answer = ask(running.service, "POST", f"/v1/{path}", json=first.get(path, {}) | wishes)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert said in error["message"] and "\n" not in error["message"]


def test_nulls_are_no_fields(running):
    body = dict(prompt="x", max_tokens=1, suffix=None, stop=None, logit_bias=None, user=None)
    assert ask(running.service, "POST", "/v1/completions", json=body).status_code == 200


def test_priorities_need_their_policy(running):
    body = dict(prompt="x", max_tokens=1, priority=3)
    assert ask(running.service, "POST", "/v1/completions", json=body).status_code == 200
    engine = running.service.args.engine
    from dataclasses import replace

    fcfs = dict(engine=replace(engine, scheduling_policy="fcfs"))
    answer = ask(running.service, "POST", "/v1/completions", fcfs, json=body)
    assert answer.status_code == 400 and "priority: got 3; accepted: 0" in answer.text


def test_each_api_has_its_own_form_of_an_error(running):
    def body(path: str, **own):
        return ask(running.service, "POST", path, own, json=dict(model="no")).json()

    assert set(body("/v1/completions")["error"]) == {"message", "type", "param", "code"}
    found = body("/v1/messages")
    assert found["type"] == "error" and found["error"]["type"] == "invalid_request_error"
    assert body("/v1/messages", api_key=["k"])["error"]["type"] == "authentication_error"
    for path in ("/generate", "/generate_stream", "/"):
        assert body(path)["error_type"] == "validation"
