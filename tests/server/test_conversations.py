"""Conversations of several turns by clients that people use: `make clients`, then
`pytest tests/server/test_conversations.py --all`. Each client is a script of clients/ in the Python
that LADDER_CLIENTS names, or in the one that `make clients` made.
"""

import json
import math
import os
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from reference.engine.sampling_params import SamplingParams
from reference.ladder.judging import logits_after
from reference.server.app import new_service
from tests.server.live import Live, server_args
from tests.server.paths import MODEL, REPOSITORY

PYTHON = Path(os.environ.get("LADDER_CLIENTS") or REPOSITORY / ".venv-clients/bin/python")
SCRIPTS = Path(__file__).with_name("clients")
# How many turns a client tells as [whole, streams], calls, and answers of a form.
TOLD = {
    "litellm": dict(turns=2, streamed=2, called=1, shaped=1),
    "langchain": dict(turns=2, streamed=2, responses=2, called=1, shaped=2),
    "agents": dict(turns=2, streamed=2, called=2, shaped=6),
    "pydantic_ai": dict(turns=2, streamed=2, responses=2, shaped=8),
    "llm": dict(turns=2, streamed=2, shaped=1),
    "instructor": dict(modes=9, shaped=26, anything=3),
}
USER = ("class Dog:", "def bark(self):")
COUNTED = re.compile(r'^\S*http_requests_total\{handler="(.*)",status="(\d+)"\} (\S+)$', re.M)


@pytest.fixture(scope="module")
def server(request):
    if not PYTHON.exists():
        pytest.skip("NOT RUN: needs the clients, which make clients installs")
    if not request.config.getoption("--all"):
        pytest.skip("NOT RUN: the clients take long to import, make test-all")
    args = server_args()
    live = Live(new_service(replace(args, engine=replace(args.engine, max_model_len=2048))))
    yield live
    live.stop()
    live.service.engine.shutdown()


def statuses(live: Live) -> Counter:
    """How often (path, status) has been answered."""
    text = live.client().get("/metrics").text
    return Counter({(path, code): int(float(n)) for path, code, n in COUNTED.findall(text)})


def told_by(live: Live, name: str, *more: str) -> dict:
    """What a client's script prints. No request of it may have been refused."""
    before = statuses(live)
    done = subprocess.run(
        [PYTHON, SCRIPTS / f"with_{name}.py", live.url, *more],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sent = statuses(live) - before
    asked = [path for path, code in sent if path != "/metrics"]
    assert asked and {code for _, code in sent} == {"200"}, sent
    return json.loads(done.stdout.splitlines()[-1])


def answer_of(live: Live, talk: list[dict]) -> str:
    """The engine's own next 8 tokens."""
    ids = live.post("/tokenize", dict(messages=talk)).json()["tokens"]
    (found,) = live.tokens_of(ids, SamplingParams(temperature=0, max_tokens=8))
    return live.service.tokens.decode(found, skip_special=True)


@pytest.fixture(scope="module")
def turns(server) -> list[str]:
    """What the engine says in the conversation."""
    talk, found = [], []
    for text in USER:
        talk.append({"role": "user", "content": text})
        found.append(answer_of(server, talk))
        talk.append({"role": "assistant", "content": found[-1]})
    assert found[1] != answer_of(server, talk[2:3]), "the first turn changes the second"
    return found


def is_colour(value: dict) -> bool:
    """It has the form that every client asks for."""
    return (
        value.keys() == {"name", "dark"}
        and value["name"] in ("red", "green")
        and isinstance(value["dark"], bool)
    )


@pytest.mark.parametrize("name", TOLD)
def test_a_conversation(server, turns, name):
    told = told_by(server, name)
    after = told.pop("after", "a text after the result of a call")
    assert after.strip() and {kind: len(told[kind]) for kind in told} == TOLD[name]
    texts = [told[kind] for kind in ("turns", "streamed") if kind in told]
    assert all(text == turns for text in texts + told.get("responses", []))
    assert all(map(is_colour, told.get("called", []) + told["shaped"])), told
    assert told.get("anything", []) == [{}] * TOLD[name].get("anything", 0)


def log_likelihood(decoder: Decoder, begin: list[int], end: list[int]) -> tuple[float, bool]:
    """Of end after begin, and whether end is the greedy answer."""
    total, is_greedy = 0.0, True
    for at, token in enumerate(end):
        logprobs = logits_after(decoder, begin + end[:at]).log_softmax(-1)
        total += logprobs[token].item()
        is_greedy &= logprobs.argmax().item() == token
    return total, is_greedy


@torch.inference_mode()
def test_log_likelihoods_of_lm_eval(server):
    """Against float64. Two of the three lines have the right end as their likeliest."""
    told = told_by(server, "lm_eval", MODEL)
    decoder = Decoder.from_pretrained(MODEL, dtype=torch.float64)

    def encode(text: str) -> list[int]:
        body = dict(prompt=text, add_special_tokens=False)
        return server.post("/tokenize", body).json()["tokens"]

    assert len(told["said"]) == 7 and told["acc"] == pytest.approx(2 / 3)
    for begin, end, value, greedy in told["said"]:
        first = encode(begin)
        want, is_greedy = log_likelihood(decoder, first, encode(begin + end)[len(first) :])
        assert math.isclose(value, want, abs_tol=1e-3) and greedy == is_greedy, (begin, end)
