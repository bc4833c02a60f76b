"""The requests of vLLM's own proxies for prefill and decode apart, one after the other, to two of
our servers. Written from tests/v1/kv_connector/nixl_integration/toy_proxy_server.py (commit
030ea52e) and toy_push_proxy_server.py (d1655eec), read on 27 November 2026.

These proxies do not know where the consumer takes blocks, so the producer's kv_ip and kv_port have
to say it.
"""

import uuid
from dataclasses import replace

import httpx
import pytest

from reference.server.app import new_service
from tests.server.live import Live, events, server_args
from tests.transfer_cases import free_port

HEADERS = {"Authorization": "Bearer None"}  # as they write it where no key is set
TEXT = "".join(f"def f{n}(a, b):\n    return a * {n} + b\n\n" for n in range(14))
WISH = dict(model="tiny", temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair():
    """(producer, consumer), both on one host and with one kv_port."""
    port, found = free_port(), []
    for role in ("kv_producer", "kv_consumer"):
        args = server_args(lora_modules={})
        own = dict(kv_connector="TcpConnector", kv_role=role, kv_port=port, kv_buffer_size=4e7)
        engine = replace(args.engine, enable_lora=False, max_loras=1, kv_transfer_config=own)
        found.append(Live(new_service(replace(args, engine=engine))))
    yield found
    for live in found:
        live.stop()


def to_prefill(request: dict) -> dict:
    """What a proxy makes of a client's request for the producer."""
    found = dict(request)
    found["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    found["stream"] = False
    found["max_tokens"] = 1
    if "max_completion_tokens" in found:
        found["max_completion_tokens"] = 1
    for name in ("stream_options", "min_tokens", "min_completion_tokens"):
        found.pop(name, None)
    return found


def pulled(said: dict) -> dict:
    """What the consumer is told by toy_proxy_server.py: what the producer said."""
    return said


def pushed(said: dict) -> dict:
    """What it is told by toy_push_proxy_server.py."""
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
    found = {"do_remote_prefill": True, "do_remote_decode": False}
    return found | {name: said.get(name) for name in names}


def through_a_proxy(pair, path: str, request: dict, passed_on) -> str:
    """The body that a client gets: of the producer's answer only kv_transfer_params are used."""
    producer, consumer = pair
    headers = HEADERS | {"X-Request-Id": str(uuid.uuid4())}
    first = producer.post(path, to_prefill(request), headers=headers)
    first.raise_for_status()
    said = first.json().get("kv_transfer_params", {})
    if said:
        request = request | {"kv_transfer_params": passed_on(said)}
    second = consumer.post(path, request, headers=headers)
    second.raise_for_status()
    return second.text


def hits(live: Live) -> float:
    """Tokens that a server found in its inbox."""
    name = "vllm:external_prefix_cache_hits_total"
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def text_in(path: str, body: str) -> str:
    """Of an answer, streamed or not."""
    found = events(body) if body.startswith("data: ") else [httpx.Response(200, text=body).json()]
    choices = [each["choices"][0] for each in found if each["choices"]]
    if path == "/v1/completions":
        return "".join(choice["text"] for choice in choices)
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    return "".join(part.get("content") or "" for part in parts)


@pytest.mark.parametrize("passed_on", [pulled, pushed])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_proxy_of_vllm_gets_the_answers_of_one_server(pair, path, stream, passed_on):
    text = f"# {path} {stream} {passed_on.__name__}\n{TEXT}"
    if path == "/v1/completions":
        request = WISH | dict(prompt=text, max_tokens=12, min_tokens=2)
    else:
        message = {"role": "user", "content": text}
        request = WISH | dict(messages=[message], max_completion_tokens=12)
    if stream:
        request |= dict(stream=True, stream_options={"include_usage": True})
    before = hits(pair[1])
    got = through_a_proxy(pair, path, request, passed_on)
    assert hits(pair[1]) - before > 100, "blocks came from the producer"
    alone = pair[0].post(path, request)
    assert text_in(path, got) == text_in(path, alone.text) != ""


def test_a_prompt_without_a_whole_block_is_computed_where_it_is_decoded(pair):
    """The producer has nothing to say, so these proxies pass the request on as it came."""
    request = WISH | dict(prompt="def f", max_tokens=4)
    before = hits(pair[1])
    got = through_a_proxy(pair, "/v1/completions", request, pulled)
    alone = pair[0].post("/v1/completions", request)
    path = "/v1/completions"
    assert text_in(path, got) == text_in(path, alone.text) and hits(pair[1]) == before
