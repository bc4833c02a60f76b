"""The client of bench_serving: it sends requests when they are meant to be sent, reads their
streams, and notes when each part came.

Read `run_load`. A request's time counts from its intended arrival. If the client is late, because
max_concurrency held it back or its own event loop was busy, that is part of what a user waits for.
"""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from lessons.l22_serving.load import Served, gamma_arrivals
from lessons.toolbox.model.arguments import refuse
from reference.engine.async_engine import AsyncLLMEngine
from reference.engine.sampling_params import SamplingParams

DONE = "[DONE]"
LONGEST_REASON = 120  # characters of a server's error that are kept


@dataclass(frozen=True)
class BenchRequest:
    """What is sent. prompt_tokens: 0 where they are not counted yet; then the server says."""

    prompt: str | list[int]
    prompt_tokens: int
    max_tokens: int


class Failed(Exception):
    """The request has no whole answer; the text says why."""


@dataclass
class Stream:
    """What came of an answer. token_s: times of the event loop, in seconds."""

    token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int | None = None

    def came(self) -> None:
        """A part of the answer is here."""
        self.token_s.append(asyncio.get_running_loop().time())


class Backend(Protocol):
    """Sends a request and fills a Stream while its answer comes."""

    async def send(self, request: BenchRequest, stream: Stream) -> None:
        """Raises Failed."""


# ---------------------------------------------------------------- over HTTP


class OpenAI:
    """POST /v1/completions, and read the stream of server-sent events."""

    path = "/v1/completions"

    def __init__(self, client: httpx.AsyncClient, model: str, **body):
        self.client = client
        self.body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self.body |= body

    def payload(self, request: BenchRequest) -> dict:
        """The body of a request."""
        return self.body | {"prompt": request.prompt, "max_tokens": request.max_tokens}

    def part(self, choice: dict) -> str | None:
        """The text that an event adds to the answer."""
        return choice.get("text")

    async def send(self, request: BenchRequest, stream: Stream) -> None:
        """As Backend says it."""
        post = self.client.stream("POST", self.path, json=self.payload(request))
        try:
            async with post as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    raise Failed(f"HTTP {response.status_code}: {' '.join(said.split())}")
                await self.read(response, stream)
        except (httpx.HTTPError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise Failed(f"{type(error).__name__}: {error}") from None

    async def read(self, response: httpx.Response, stream: Stream) -> None:
        """Events until [DONE]. A stream that ends without it was cut off."""
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == DONE:
                return
            self.take(json.loads(data), stream)
        raise Failed(f"the stream ended before {DONE}")

    def take(self, event: dict, stream: Stream) -> None:
        """One event: a part of the answer, the counts at its end, or an error."""
        if "error" in event:
            raise Failed(f"error: {event['error']}")
        if any(self.part(choice) for choice in event.get("choices", ())):
            stream.came()
        if usage := event.get("usage"):
            stream.prompt_tokens = usage.get("prompt_tokens", 0)
            stream.generated_tokens = usage.get("completion_tokens")


class OpenAIChat(OpenAI):
    """POST /v1/chat/completions: the prompt as a user's message."""

    path = "/v1/chat/completions"

    def payload(self, request: BenchRequest) -> dict:
        message = {"role": "user", "content": request.prompt}
        return self.body | {"messages": [message], "max_completion_tokens": request.max_tokens}

    def part(self, choice: dict) -> str | None:
        return choice.get("delta", {}).get("content")


# ---------------------------------------------------------------- in this process


class InProcess:
    """The same requests to an engine here, without a server: what is left of the difference is
    HTTP's.
    """

    def __init__(self, engine: AsyncLLMEngine, ignore_eos: bool = False, temperature: float = 0.0):
        self.engine = engine
        self.wishes = dict(ignore_eos=ignore_eos, temperature=temperature)
        self.count = 0

    async def send(self, request: BenchRequest, stream: Stream) -> None:
        """As Backend says it."""
        self.count += 1
        params = SamplingParams(max_tokens=request.max_tokens, **self.wishes)
        try:
            outputs = await self.engine.add_request(f"bench {self.count}", request.prompt, params)
            with contextlib.closing(outputs):
                async for output in outputs:
                    stream.came()
                    stream.prompt_tokens = len(output.prompt_token_ids)
                    stream.generated_tokens = len(output.outputs[0].token_ids)
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from None


# ---------------------------------------------------------------- the load


def new_client(base_url: str, api_key: str | None = None, **how) -> httpx.AsyncClient:
    """A client without limits of its own: it must not be what makes requests wait. how: of httpx.

    Raises ValueError for an address that is none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    url = httpx.URL(base_url)
    if url.scheme not in ("http", "https") or not url.host:
        refuse("--base-url", base_url, "http://HOST:PORT")
    return httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=None, trust_env=False, **how
    )


def arrivals_of(
    request_rate: float | None, burstiness: float, count: int, seed: int
) -> list[float] | None:
    """When requests are meant to be sent, in seconds; None: as soon as there is a place."""
    if request_rate is None:
        return None
    return gamma_arrivals(request_rate, count, seed, burstiness)


@dataclass
class LoadRun:
    """What came of all requests, in their order. late_s: how much later than it was meant to be
    each was sent, in seconds. closed_loop: whether each place sent its next request only when it
    had an answer, so that a server that stalls is asked less often, and looks better than it is.
    """

    history: list[Served]
    late_s: list[float]
    closed_loop: bool


async def run_load(
    requests: Sequence[BenchRequest],
    arrivals_s: Sequence[float] | None,
    backend: Backend,
    max_concurrency: int | None = None,
    timeout_s: float = 600.0,
) -> LoadRun:
    """Send each request at its time, at most max_concurrency at once, and wait for all of them.

    arrivals_s: seconds after the beginning; None: as soon as there is a place, which with
    max_concurrency is a closed loop. timeout_s: for one request, from when it is sent.
    """
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency or len(requests))
    closed_loop = arrivals_s is None and max_concurrency is not None
    begin_s = loop.time()

    async def one(index: int, request: BenchRequest) -> tuple[Served, float]:
        meant_s = 0.0 if arrivals_s is None else arrivals_s[index]
        await asyncio.sleep(begin_s + meant_s - loop.time())
        async with places:
            sent_s = loop.time() - begin_s
            if closed_loop:
                meant_s = sent_s  # because it was not meant to be sent sooner
            stream, why_not = Stream(), ""
            try:
                await asyncio.wait_for(backend.send(request, stream), timeout_s)
            except Failed as failure:
                why_not = str(failure)[:LONGEST_REASON]
            except (TimeoutError, asyncio.TimeoutError):
                why_not = f"no whole answer within {timeout_s:g} s"
            if not why_not and not stream.token_s:
                why_not = "an answer without tokens"
            end_s = loop.time() - begin_s
        served = Served(
            meant_s,
            end_s,
            tuple(at - begin_s for at in stream.token_s),
            stream.prompt_tokens or request.prompt_tokens,
            why_not=why_not,
            generated_tokens=stream.generated_tokens,
        )
        return served, sent_s - meant_s

    found = await asyncio.gather(*(one(*numbered) for numbered in enumerate(requests)))
    history, late_s = zip(*found)
    return LoadRun(list(history), list(late_s), closed_loop)
