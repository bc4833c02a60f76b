"""Our server and vLLM's, sent the same: `make peers`, then
`pytest tests/test_vllm_server_peer.py --all`. LADDER_SEED=… sends the same requests again.
"""

import json
import math
import random

import httpx
import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from reference.bench.peers.differential import CLOSE, Judge
from reference.bench.peers.processes import PYTHON, vllm_server
from reference.bench.peers.wishes import BAD, Draw
from reference.server.app import new_service
from tests.seeds import seed_of
from tests.server.live import Live, events, server_args
from tests.server.paths import MODEL

COUNT = 300  # requests of each kind
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
# Offline alone. "temprature", which vLLM's server takes and forgets, is unknown here.
NOT_SENT = ("flat_logprobs", "detokenize", "temprature")


@pytest.fixture(scope="module")
def theirs(request):
    if not PYTHON.exists():
        pytest.skip("NOT RUN: needs vLLM, which make peers installs")
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: vLLM takes long to start, make test-all")
    how = ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--seed", "0"]
    how += ["--max-model-len", "512", "--chat-template", TEMPLATE]
    with vllm_server(MODEL, *how) as url:
        yield url


@pytest.fixture(scope="module")
def ours():
    live = Live(new_service(server_args(chat_template=TEMPLATE)))
    yield live.url
    live.stop()
    live.service.engine.shutdown()


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(Decoder.from_pretrained(MODEL, dtype=torch.float64))


def bodies(kind: str, seed: int, count: int):
    """Random requests of a route, one in three as a stream."""
    draw, other = Draw(seed, 4096), random.Random(seed)
    refused = [json.dumps(bad) for bad in BAD]
    for _ in range(count):
        asked = draw.request()
        body = {k: v for k, v in asked["params"].items() if k not in NOT_SENT}
        is_bad = any(json.dumps({k: v}) in refused for k, v in body.items())
        body |= {"model": "tiny", "return_token_ids": True}
        if other.random() < 1 / 3 and not is_bad and "prompt_logprobs" not in body:
            body |= {"stream": True, "stream_options": {"include_usage": other.random() < 0.5}}
        if kind == "completions":
            yield body | {"prompt": asked["prompt"]}
            continue
        if (count_of_tops := body.pop("logprobs", None)) is not None:
            body |= {"logprobs": True, "top_logprobs": count_of_tops}
        words = asked["prompt"] if isinstance(asked["prompt"], str) else "def f(x):"
        talk = [{"role": "user", "content": words}]
        if other.random() < 0.4:
            talk = [{"role": "system", "content": "Write code."}, *talk]
        yield body | {"messages": talk}


def answer_of(url: str, path: str, body: dict) -> dict:
    """{"status", and for 200 "choices" and "usage"} of one request; a stream is put together."""
    response = httpx.post(url + path, json=body, timeout=120)
    if response.status_code != 200 or not body.get("stream"):
        found = response.json()
        if "error" in found:  # a stream may have begun
            return {"status": 400, "error": found["error"]["message"]}
        return {"status": response.status_code, **found}
    return {"status": 200, **put_together(events(response.text), body)}


def put_together(chunks: list[dict], body: dict) -> dict:
    """A stream as a whole answer."""
    choices, usage = {}, None
    for chunk in chunks:
        if "error" in chunk:
            return {"status": 400, "error": chunk["error"]["message"]}
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            one = choices.setdefault(
                part["index"],
                {"index": part["index"], "text": "", "token_ids": [], "finish_reason": None,
                 "stop_reason": None, "logprobs": []},
            )  # fmt: skip
            delta = part["text"] if "text" in part else part["delta"].get("content")
            one["text"] += delta or ""
            one["token_ids"] += part.get("token_ids") or []
            one["finish_reason"] = part["finish_reason"] or one["finish_reason"]
            one["stop_reason"] = part.get("stop_reason") or one["stop_reason"]
            if part.get("logprobs"):
                one["logprobs"].append(part["logprobs"])
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def differences(body: dict, mine: dict, other: dict, judge: Judge, prompt: list[int]) -> list[str]:
    """What differs between two answers, a line each. prompt: its tokens, for ties."""
    if mine["status"] != other["status"]:
        return [f"status: {mine['status']} {mine.get('error')} | {other.get('error')}"]
    if mine["status"] != 200:
        return []
    wrong = []
    if len(mine["choices"]) != len(other["choices"]):
        return [f"choices: {len(mine['choices'])} | {len(other['choices'])}"]
    met_tie = False
    for one, two in zip(mine["choices"], other["choices"]):
        a, b = one["token_ids"], two["token_ids"]
        parted = next((at for at, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)
        if parted is not None:
            params = {k: v for k, v in body.items() if k in PARAMS}
            pair = [a[parted], b[parted]]
            if judge.is_tie({"params": params}, prompt, a[:parted], pair):
                met_tie = True
                continue
        for name in ("index", "token_ids", "finish_reason", "stop_reason"):
            if one[name] != two[name]:
                wrong.append(f"{name}: {one[name]} | {two[name]}")
        first, second = text_of(one), text_of(two)
        if not isinstance(one["stop_reason"], str):  # see DIFFERENCES
            first = first[: len(second)] + first[len(second) :].rstrip("\ufffd")
        if first != second:
            wrong.append(f"text: {first!r} | {second!r}")
        if "structured_outputs" not in body:  # see DIFFERENCES
            wrong += unequal("logprobs", one.get("logprobs"), two.get("logprobs"))
    if not met_tie and mine["usage"] and other["usage"]:
        counts = [
            [found["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
            for found in (mine, other)
        ]
        if counts[0] != counts[1]:
            wrong.append(f"usage: {counts}")
    wrong += unequal("prompt_logprobs", prompt_logprobs(mine), prompt_logprobs(other))
    return wrong


PARAMS = ("temperature", "top_k", "top_p", "min_p", "n", "presence_penalty", "frequency_penalty",
          "repetition_penalty", "logit_bias", "seed")  # fmt: skip


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"] or ""


def prompt_logprobs(answer: dict):
    """Of /v1/completions in the choices, of chat beside them."""
    return [
        answer.get("prompt_logprobs"),
        *(one.get("prompt_logprobs") for one in answer["choices"]),
    ]


def unequal(at: str, mine, other) -> list[str]:
    """What differs between two values of JSON. Numbers may be off by rounding. A name whose value
    is null may be left out; dicts by token compare by their sorted numbers, because of equal ones
    each may name another.
    """
    if isinstance(mine, dict) and isinstance(other, dict):
        wrong = []
        if "token" not in mine and (at.endswith("top_logprobs") or "prompt_logprobs" in at):
            values = [sorted(map(number_of, each.values())) for each in (mine, other)]
            return [] if len(values[0]) == len(values[1]) and all(
                abs(a - b) < CLOSE for a, b in zip(*values)
            ) else [f"{at}: {mine} | {other}"]  # fmt: skip
        for name in mine.keys() | other.keys():
            wrong += unequal(f"{at}.{name}", mine.get(name), other.get(name))
        return wrong
    if isinstance(mine, list) and isinstance(other, list):
        if at.endswith(("bytes", "content.top_logprobs")):
            return []  # of part of a character vLLM says none; the chosen token comes first there
        if len(mine) != len(other):
            return [f"{at}: {len(mine)} | {len(other)}"]
        return [line for a, b in zip(mine, other) for line in unequal(at, a, b)]
    if isinstance(mine, float) and isinstance(other, float):
        return [] if math.isclose(mine, other, abs_tol=CLOSE) else [f"{at}: {mine} | {other}"]
    return [] if mine == other else [f"{at}: {mine} | {other}"]


def number_of(value) -> float:
    return value["logprob"] if isinstance(value, dict) else value


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_both_servers_answer_the_same(theirs, ours, judge, kind):
    seed, wrong = seed_of(f"servers {kind}"), []
    path = f"/v1/{kind}"
    for body in bodies(kind, seed, COUNT):
        mine, other = answer_of(ours, path, body), answer_of(theirs, path, body)
        asked = {k: body[k] for k in ("prompt", "messages") if isinstance(body.get(k), (str, list))}
        prompt = asked.get("prompt")
        if not isinstance(prompt, list):
            told = {"model": "tiny", **asked}
            prompt = httpx.post(f"{ours}/tokenize", json=told).json()["tokens"]
        for line in differences(body, mine, other, judge, prompt):
            wrong.append(f"{json.dumps(body)[:500]}\n    {line[:300]}")
    assert not wrong, f"seed {seed}\n" + "\n".join(wrong)


def test_the_small_routes_are_the_same(theirs, ours):
    for text in ("def f(x):", "", "été 漢字", "<|endoftext|>x"):
        found = [
            httpx.post(f"{url}/tokenize", json={"model": "tiny", "prompt": text}).json()
            for url in (ours, theirs)
        ]
        assert found[0] == found[1]
        body = {"model": "tiny", "tokens": found[0]["tokens"]}
        found = [httpx.post(f"{url}/detokenize", json=body).json() for url in (ours, theirs)]
        assert found[0] == found[1]
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"),
                         ("GET", "/version"), ("GET", "/metrics")):  # fmt: skip
        found = [httpx.request(method, url + path) for url in (ours, theirs)]
        assert found[0].status_code == found[1].status_code == 200, path


def test_a_difference_is_seen():
    one = {"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "length",
           "stop_reason": None, "logprobs": {"token_logprobs": [-1.0]}}  # fmt: skip
    answer = {
        "status": 200,
        "choices": [one],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }

    class NoTie:
        def is_tie(self, *_):
            return False

    def found(**changes):
        other = json.loads(json.dumps(answer))
        other["choices"][0] |= changes
        return differences({}, answer, other, NoTie(), [])

    assert not found()
    assert not found(logprobs={"token_logprobs": [-1.0001]})
    for change in (dict(text="ac"), dict(token_ids=[1, 3]), dict(finish_reason="stop"),
                   dict(index=1), dict(stop_reason=3), dict(logprobs={"token_logprobs": [-1.1]}),
                   dict(logprobs=None), dict(prompt_logprobs=[None])):  # fmt: skip
        assert found(**change), change
    assert differences({}, answer, {"status": 400, "error": "x"}, NoTie(), [])
