"""Requests that are well formed and ask for the impossible: each gets an answer of 4xx for less
than a second's work, and the server lives on. test_limits.py has those that are not well formed.
"""

import json
import socket

import httpx
import pytest

from tests.server.test_limits import for_little_work, head, status_of

BIG = 10**9
ONE = dict(prompt="x", max_tokens=1)
USER = dict(role="user", content="x")


def nested(depth: int) -> dict:
    """A schema within a schema within a schema."""
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


COMPLETIONS = {
    "answers": dict(n=BIG),
    "the best of many": dict(best_of=BIG),
    "tokens": dict(max_tokens=10**18),
    "least tokens": dict(min_tokens=BIG),
    "no tokens": dict(max_tokens=-1),
    "stop strings": dict(stop=[f"a{at}" for at in range(10_000)]),
    "an empty stop string": dict(stop=[""]),
    "a long stop string": dict(stop="a" * 900_000),
    "stop tokens": dict(stop_token_ids=list(range(100_000))),
    "a stop token that is none": dict(stop_token_ids=[10**30]),
    "biases": dict(logit_bias={str(at): 1 for at in range(60_000)}),
    "a bias beyond floats": dict(logit_bias={"1": 10**400}),
    "a bias of no token": dict(logit_bias={"9" * 4000: 1}),
    "prompts": dict(prompt=["a"] * 50_000),
    "a token that is none": dict(prompt=[10**30]),
    "a token below zero": dict(prompt=[-1]),
    "lists in lists": dict(prompt=[[[1]]]),
    "a long prompt": dict(prompt="a b" * 330_000),
    "a prompt of spaces": dict(prompt=" " * 1_000_000),
    "a prompt of pictures": dict(prompt="🙂" * 150_000),
    "top-k": dict(top_k=10**30),
    "log-probabilities": dict(logprobs=BIG),
    "a seed": dict(seed=10**30),
    "a model's path": dict(model="/etc/passwd"),
    "a model's address": dict(model="file:///etc/passwd"),
    "a model's zero byte": dict(model="tiny\0"),
    "a model's second line": dict(model="tiny\nX: y"),
    "a model's length": dict(model="x" * 900_000),
    "a regex in a regex": dict(guided_regex="((((a{1,50}){1,50}){1,50}){1,50})"),
    "a regex that looks ahead": dict(guided_regex="(?=a)b"),
    "a regex that doubles": dict(guided_regex="(a?){5000}a{5000}"),
    "a long regex": dict(guided_regex="[^a]" * 20_000),
    "alternatives": dict(guided_regex="|".join(f"a{at}" for at in range(50_000))),
    "choices": dict(guided_choice=[f"c{at}" for at in range(80_000)]),
    "a long choice": dict(guided_choice=["c" * 500_000]),
    "a schema of itself": dict(guided_json={"$ref": "#"}),
    "a deep schema": dict(guided_json=nested(300)),
    "a schema's file": dict(guided_json={"$ref": "file:///etc/passwd"}),
    "a schema's address": dict(guided_json={"$ref": "http://127.0.0.1:1/"}),
    "a schema's list": dict(guided_json={"type": "array", "items": {}, "minItems": BIG}),
    "a schema's text": dict(guided_json={"type": "string", "minLength": BIG}),
    "a schema's values": dict(guided_json={"enum": [f"v{at}" for at in range(50_000)]}),
    "a schema's pattern": dict(guided_json={"type": "string", "pattern": "(a+)+(?=b)"}),
    "a rule of itself": dict(guided_grammar="root ::= root"),
    "unknown fields": {"__proto__": {"a": 1}},
    "a long user": dict(user="u" * 900_000),
}
TEMPLATES = {
    "a template": dict(chat_template="{{ ''.__class__.__mro__ }}"),
    "a template that loops": dict(chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    "another role": dict(messages=[dict(role="{{ 7 * 7 }}", content="x")]),
    "messages": dict(messages=[USER] * 19_000),
    "a picture's file": dict(
        messages=[
            USER | dict(content=[dict(type="image_url", image_url=dict(url="file:///etc/passwd"))])
        ]
    ),
    "a tool's name": dict(
        tools=[dict(type="function", function=dict(name="x\n\0", parameters={}))]
    ),
}
OTHERS = {
    "embeddings": ("/v1/embeddings", dict(input=["x"] * 20_000)),
    "dimensions": ("/v1/embeddings", dict(input="x", dimensions=BIG)),
    "no token's text": ("/detokenize", dict(tokens=[10**30])),
    "a long response": ("/v1/responses", dict(input="x", max_output_tokens=10**30)),
    "a conversation": ("/v1/responses", dict(input=[USER] * 19_000)),
    "a long message": ("/v1/messages", dict(messages=[USER], max_tokens=10**30)),
    "stop sequences": ("/generate", dict(inputs="x", parameters=dict(stop=["a"] * 10_000))),
}
CASES = {name: ("/v1/completions", ONE | body) for name, body in COMPLETIONS.items()}
CASES |= {
    name: ("/v1/chat/completions", dict(messages=[USER]) | body) for name, body in TEMPLATES.items()
}
CASES |= OTHERS
NUMBERS = ("temperature", "top_p", "top_k", "n", "presence_penalty", "repetition_penalty", "seed")
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + 400 * "0")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(8)
def test_what_cannot_be_is_refused_at_once(live, name):
    path, body = CASES[name]
    data = json.dumps(body).encode()
    status = for_little_work(lambda: status_of(live, head(path, len(data)) + data), most_s=1.5)
    assert 400 <= status < 500, status
    assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.sample(2)
def test_what_is_no_number_is_refused(live, field):
    """JSON knows no NaN, and 1e400 is infinite as a float."""
    for value in NO_NUMBERS:
        body = f'{{"prompt": "x", "max_tokens": 1, "{field}": {value}}}'.encode()
        assert 400 <= status_of(live, head(length=len(body)) + body) < 500, (field, value)


HEADERS = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "data, status",
    [
        (HEADERS + b"".join(b"A%d: b\r\n" % at for at in range(10_000)) + b"\r\n", (400, 431)),
        (HEADERS + b"A: \x00\r\n\r\n", (400,)),
        (b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", (400,)),
        (b"GET /v1/models/%00 HTTP/1.1\r\nHost: x\r\n\r\n", (404,)),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", (400,)),
        (POST + b"Content-Length: -2\r\n\r\n{}", (400,)),
        (
            POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 10**5 + b"\r\n{}\r\n0\r\n\r\n",
            (400,),
        ),
        (POST + b"Content-Length: 104857600\r\n\r\n" + b"x" * 10**8, (413, 0)),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5F5E100\r\n" + b"x" * 10**7, (413, 0)),
        (POST + b"Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n", (413,)),
    ],
    ids=lambda value: None if isinstance(value, tuple) else "",
)
def test_heads_and_bodies_that_are_too_much(live, data, status):
    assert for_little_work(lambda: status_of(live, data)) in status


def test_many_half_requests_delay_no_other(live):
    """Their connections are open, and cost nothing."""
    half = head(length=100) + b"{"
    wires = [socket.create_connection(live.socket.getsockname(), timeout=60) for _ in range(100)]
    try:
        for at, wire in enumerate(wires):
            wire.sendall(half if at % 2 else half[: at + 1])
        assert for_little_work(lambda: live.post("/v1/completions", ONE).status_code) == 200
    finally:
        for wire in wires:
            wire.close()


def test_what_stands_in_a_message_is_text_and_no_template(live):
    """Jinja would make 49 of it, and so would a template that is rendered twice."""
    body = dict(messages=[dict(role="user", content="{{ 7 * 7 }}{% raw %}")])
    ids = live.post("/tokenize", body).json()["tokens"]
    text = live.post("/detokenize", dict(tokens=ids)).json()["prompt"]
    assert "{{ 7 * 7 }}{% raw %}" in text and "49" not in text
