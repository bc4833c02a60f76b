"""The policy kv: a prompt goes where it costs least, by what each replica holds of it and has to
do.

    cost = kv_weight * (blocks that wait there + the prompt's blocks - what is cached) + active

It is lesson 26's `scores`, exercise 26.5, which names its sources. What is cached counts by its
tier. A prompt of which no replica is known to hold a block goes by lesson 22's prefix: so prompts
that begin alike meet before the first event has come, and a router without events is that of
lesson 22. Of replicas that cost the same, the first in the prefix's ranking gets it, so that new
chats after one system prompt are spread.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from lessons.toolbox.exercises.drop_ins import PartFailed, naming_exercises
from reference.router import block_index
from reference.router.args import RouterArgs
from reference.router.blocks import Blocks
from reference.router.policies import PrefixHash, Prompt, request_of
from reference.server.errors import ApiError

CHARS = 4  # of a token, about: for the size of a prompt whose tokens are not known
# what decides the tokens of a prompt, by the path of the request
FIELDS = {
    "/v1/completions": ("prompt", "add_special_tokens"),
    "/v1/chat/completions": ("messages", "tools", "add_generation_prompt", "continue_final_message",
                             "add_special_tokens", "documents", "chat_template",
                             "chat_template_kwargs"),
}  # fmt: skip
KEYS = (b"authorization", b"x-api-key")  # a client's, which the replica wants to see


@dataclass
class Work:
    """What a replica has of this router's requests, in blocks. waiting: to be computed before the
    first token; active: of answers that have begun.
    """

    waiting: float = 0.0
    active: float = 0.0


class CacheAware:
    """As said above. homes: ranks the replicas for a prefix, and has their names."""

    def __init__(self, homes: PrefixHash, blocks: Blocks, args: RouterArgs):
        self.homes, self.blocks, self.weight = homes, blocks, args.kv_weight
        self.work: dict[str, Work] = {}

    def choose(self, request: Prompt, loads: np.ndarray) -> int:
        """As in Router. Raises ApiError if a learner's scores fail."""
        if request.prefix is None or request.tokens is None:
            return self.homes.choose(request, loads)
        alive = [at for at in self.homes.ranked(request.prefix) if loads[at] < np.inf]
        names = [self.homes.names[at] for at in alive]
        cached = [self.blocks.cached(name, request) for name in names]
        if not any(cached):
            return self.homes.choose(request, loads)
        work = [self.work.get(name, Work()) for name in names]
        count = blocks_in(len(request.tokens), self.blocks.block_size)
        waiting, active = [one.waiting for one in work], [one.active for one in work]
        try:
            with naming_exercises():
                _, cheapest, _, _ = block_index.scores(count, cached, waiting, active, self.weight)
                return alive[cheapest]
        except PartFailed as failed:
            raise ApiError(500, str(failed)) from failed

    def begin(self, name: str, request: Prompt, body: bytes) -> "Share":
        """A replica gets a request. body: its bytes, which tell the size if the tokens do not."""
        size = self.blocks.block_size
        known = request.tokens is not None
        count = blocks_in(len(request.tokens) if known else len(body) // CHARS, size)
        share = Share(self.work.setdefault(name, Work()), count)
        share.wait(max(0.0, count - self.blocks.cached(name, request)))
        return share


class Share:
    """One request's part of a replica's work. A request whose answer is no stream waits until its
    end, because its first token is not seen here.
    """

    def __init__(self, work: Work, blocks: int):
        self.work, self.blocks = work, blocks
        self.waiting = self.active = 0.0

    def wait(self, blocks: float) -> None:
        """So many have to be computed."""
        self.waiting = blocks
        self.work.waiting += blocks

    def answers(self) -> None:
        """Its first token has come."""
        self.end()
        self.active = float(self.blocks)
        self.work.active += self.active

    def end(self) -> None:
        """It is done."""
        self.work.waiting -= self.waiting
        self.work.active -= self.active
        self.waiting = self.active = 0.0


def blocks_in(tokens: int, block_size: int) -> int:
    """Blocks of a prompt, 1 or more. block_size: 0 if no replica has told."""
    return max(1, -(-tokens // block_size)) if block_size else 1


# ---------------------------------------------------------------- the tokens of a prompt


def question_of(path: str, body: bytes) -> tuple[list[int] | None, dict[str, Any] | None]:
    """(the prompt's ids, if the request has them; else what /tokenize is asked). Both None: it is
    no prompt that could be known, as one with pictures, of several prompts, or cut by the server.
    """
    fields = FIELDS.get(path)
    request = request_of(body) if fields else {}
    if not request or request.get("truncate_prompt_tokens") is not None:
        return None, None
    prompt, messages = request.get("prompt"), request.get("messages")
    if path == "/v1/completions" and isinstance(prompt, list):
        is_ids = bool(prompt) and all(type(one) is int and 0 <= one < 2**31 for one in prompt)
        return (prompt, None) if is_ids else (None, None)
    is_text = isinstance(prompt, str) if path == "/v1/completions" else bool(messages)
    if not is_text or "image_url" in json.dumps(messages):
        return None, None
    asked = {name: request[name] for name in ("model", *fields) if request.get(name) is not None}
    return None, asked


class Reader:
    """Tokens by asking a replica (POST /tokenize, as vLLM's servers have it, too).

    The router does not read text itself: then it would need the tokenizer's files, the chat
    template and the rules of the server for messages and tools, all of the same version as the
    replica's, and would import what takes seconds. A question takes a millisecond or two, where a
    hit saves the computing of a whole prompt. One that is late costs --tokenize-timeout and the
    prompt goes by its prefix.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, timeout_s: float):
        self.transport, self.timeout_s = transport, timeout_s

    async def tokens(
        self, urls: Sequence[str], path: str, body: bytes, headers
    ) -> list[int] | None:
        """The ids of a request's prompt; None: they are not known. urls: of whom to ask, one after
        the other if one is gone, all within the time of one.
        """
        ids, asked = question_of(path, body)
        if asked is None:
            return ids
        try:
            return await asyncio.wait_for(self.first(urls, asked, headers), self.timeout_s)
        except (asyncio.TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def first(self, urls: Sequence[str], asked: dict[str, Any], headers) -> list[int] | None:
        """What the first says that lives."""
        for url in urls:
            with suppress(httpx.TransportError):
                return await self.ask(url, asked, headers)
        return None

    async def ask(self, url: str, asked: dict[str, Any], headers) -> list[int] | None:
        """The ids; None: the replica refused, and will refuse the request itself."""
        sent = [(name, value) for name, value in headers if name.lower() in KEYS]
        request = httpx.Request(
            "POST",
            f"{url}/tokenize",
            headers=[*sent, (b"content-type", b"application/json")],
            content=json.dumps(asked).encode(),
            extensions={"timeout": httpx.Timeout(self.timeout_s).as_dict()},
        )
        response = await self.transport.handle_async_request(request)
        try:
            await response.aread()
        finally:
            await response.aclose()
        if response.status_code != 200:
            return None
        tokens = response.json()["tokens"]
        return tokens if all(type(one) is int for one in tokens) else None
