"""Random requests to every route: none is answered by a 5xx, none leaves a traceback in the log,
none is stuck, and each refusal is one line in the form of its API.
"""

import asyncio
import logging

import httpx
import pytest

from reference.server.app import new_app
from tests.seeds import seed_of
from tests.server.fuzz import GOOD, Sent, request_of

MOST_S = 60.0  # that a request may take, beside fifteen others
AT_ONCE = 16
LOGS = ("uvicorn.error", "asyncio", "reference")


class Heard(logging.Handler):
    """What the server's loggers say of exceptions."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


@pytest.fixture
def heard():
    handler = Heard()
    for name in LOGS:
        logging.getLogger(name).addHandler(handler)
    yield handler.lines
    for name in LOGS:
        logging.getLogger(name).removeHandler(handler)


def complaint(path: str, answer: httpx.Response) -> str | None:
    """What is wrong with an answer."""
    if answer.status_code >= 500 or "server made a mistake" in answer.text:
        return f"{answer.status_code} {answer.text[:300]}"
    if answer.status_code < 400:
        return None
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    if not message or "\n" in message or "Traceback" in message:
        return f"{answer.status_code} {message!r}"
    return None


async def sent(client: httpx.AsyncClient, one: Sent) -> tuple[int, str | None]:
    """The status of a request, and what is wrong with its answer."""
    try:
        headers = {"content-type": "application/json"}
        post = client.post(one.path, content=one.data, headers=headers)
        answer = await asyncio.wait_for(post, MOST_S)
    except (asyncio.TimeoutError, httpx.HTTPError) as error:
        return 0, f"{type(error).__name__}: {error}"
    try:
        return answer.status_code, complaint(one.path, answer)
    except (ValueError, KeyError, TypeError):
        return answer.status_code, f"no error of this API: {answer.text[:300]!r}"


async def all_sent(url: str, requests: list[Sent]) -> list[tuple[Sent, int, str | None]]:
    """All of them, some at a time."""
    found, left = [], iter(requests)

    async def worker(client: httpx.AsyncClient) -> None:
        for one in left:
            found.append((one, *await sent(client, one)))

    # a connection that the server closes for its idleness is no failure
    limits = httpx.Limits(keepalive_expiry=1)
    async with httpx.AsyncClient(base_url=url, timeout=MOST_S, limits=limits) as client:
        await asyncio.gather(*(worker(client) for _ in range(AT_ONCE)))
        health = await client.get("/health")
    assert health.status_code == 200
    return found


def test_random_requests_are_served_or_refused(live, heard, request):
    seed = seed_of("fuzz")
    count = 20_000 if request.config.getoption("--all") else 200
    found = asyncio.run(all_sent(live.url, [request_of(seed, at) for at in range(count)]))
    wrong = [
        f"request_of({seed}, {one.at}) {one.path} {one.data[:500]!r}: {why}"
        for one, _, why in found
        if why
    ]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:10]])
    assert not heard, heard[:3]
    served = {one.path for one, status, _ in found if status == 200}
    assert served == set(GOOD), "of each route some are served, or the fuzz tries too little"
    assert 0.2 < sum(status == 200 for _, status, _ in found) / count < 0.9


def test_every_route_with_a_body_is_tried(running):
    routes = new_app(running.service).openapi()["paths"]
    with_body = {path for path, by in routes.items() if "requestBody" in by.get("post", {})}
    assert with_body == set(GOOD)
