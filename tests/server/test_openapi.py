"""The server's own OpenAPI document: what it describes is there, and nothing that a stranger makes
of it is answered by a 5xx.
"""

import importlib.util

import httpx
import pytest

PATHS = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models",
    "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/generate",
    "/generate_stream", "/info", "/health", "/ready", "/metrics", "/version", "/",
}  # fmt: skip


def document(live) -> dict:
    return httpx.get(f"{live.url}/openapi.json", timeout=60).json()


def test_every_endpoint_is_described(running):
    found = document(running)
    assert set(found["paths"]) >= PATHS
    fields = found["components"]["schemas"]["ChatCompletionRequest"]
    assert fields["additionalProperties"] is False and "tool_choice" in fields["properties"]


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None,
    reason="NOT RUN: schemathesis is not installed",
)
@pytest.mark.sample(2, of="clients of the server")
@pytest.mark.parametrize("path", sorted(PATHS))
def test_schemathesis_finds_no_server_error(live, request, path):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_dict(document(live))
    (operation,) = schema[path].values()
    good, bad = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    client = live.client()

    @given(case=good | bad)
    @settings(
        max_examples=100 if request.config.getoption("--all") else 5,
        deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def no_server_error(case):
        sent = case.as_transport_kwargs(base_url=live.url)
        body = dict(json=sent["json"]) if "json" in sent else dict(content=sent.get("data"))
        response = client.request(sent["method"], sent["url"], headers=sent["headers"], **body)
        assert response.status_code < 500, (sent, response.text)

    no_server_error()


@pytest.mark.parametrize(
    "method, path, status, said",
    [
        ("POST", "/v1/completion", 404, "Not Found; did you mean /v1/completions?"),
        (
            "POST",
            "/sleep",
            404,
            "of vLLM that this server does not have, because no client changes how the server runs",
        ),
        ("POST", "/v1/chat/completion", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/model", 404, "did you mean /v1/models?"),
        ("GET", "/qqqqqqqqqqq", 404, "accepted: a path of /openapi.json"),
        ("GET", "/v1/completions", 405, "Method Not Allowed; accepted: POST"),
        ("DELETE", "/v1/models", 405, "accepted: GET"),
    ],
)
def test_a_path_that_is_wrong_is_told_the_right_one(running, method, path, status, said):
    answer = httpx.request(method, running.url + path, json={}, timeout=60)
    assert answer.status_code == status and answer.json()["error"]["message"].endswith(said)


def test_a_browser_is_told_what_this_is(running):
    answer = httpx.get(running.url, timeout=60)
    assert answer.status_code == 200 and answer.json()["models"][0] == "tiny"
    for path in answer.json()["paths"]:
        assert path in document(running)["paths"]
