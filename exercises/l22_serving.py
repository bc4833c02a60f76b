# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=22
# Generated from solutions/l22_serving.py, checksum 79f03909481f. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 22: what a load client reports, users who take turns, a serving loop."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lessons.toolbox.exercises.exercise import exercise


class Shot(NamedTuple):
    """What a client saw of one request. All times are seconds on one clock.

    due_s: when the request was meant to be sent. sent_s: when the client came to send it. token_s:
    when each token came; empty for a request that was refused. end_s: when the client knew the
    outcome. max_tokens: what it asked for. is_whole: whether the answer came to its end.
    """

    due_s: float
    sent_s: float
    token_s: tuple[float, ...]
    end_s: float
    max_tokens: int
    is_whole: bool = True


class Report(NamedTuple):
    """What a load client prints."""

    duration_s: float
    tokens_per_s: float
    p99_ttft_s: float
    goodput_per_s: float
    in_system: float


@exercise("22.1", "What a load client must report", minutes=30, difficulty=1)
def load_report(shots: Sequence[Shot], ttft_slo_s: float, e2el_slo_s: float) -> Report:
    """The report of a load test. shots: one or more, in any order; at least one got a token.

    Every latency of a request counts from when it was due, because that is when its user began to
    wait. The duration is the time of the clock from the first due request to the last end.

        tokens_per_s: tokens that came, also those of answers that broke off later
        p99_ttft_s: the 99th percentile of the time to first token, over all requests that got one.
            Take it as NumPy does: on the straight line between two values.
        goodput_per_s: requests a second whose answer was whole, whose first token came within
            ttft_slo_s and whose end came within e2el_slo_s. Exactly on the limit is within it.
        in_system: how many requests were there on average, from their due time to their end. By
            Little's law you need no event queue for it.
    Errors: none to raise.

    Example: limits of 2 s and 5 s, and two requests that both ask for 4 tokens
        due 0, sent 0, tokens at 1, 2 and 3, end at 3
        due 1, sent 2, tokens at 4 and 5, end at 5: its TTFT is 3 s, so it misses the limit
        duration 5, tokens 5 / 5, TTFTs 1 and 3, in system (3 + 4) / 5
        -> Report(5.0, 1.0, 2.98, 0.2, 1.4)
    Guess first, and try it at the end: which of the five change if the second request is sent at 3?
    """
    raise NotImplementedError("Exercise 22.1: What a load client must report")


class Wish(NamedTuple):
    """A request: when it comes, whose it is, and its tokens, of which each takes 1 unit of time."""

    arrival: float
    user: str
    tokens: int


@exercise(
    "22.2",
    "Users take turns by tokens",
    minutes=35,
    difficulty=2,
    replaces="lessons.l22_serving.fair:FairQueue",
    through="reference.ladder.yours.turns:fair_queue",
)
def serving_order(wishes: Sequence[Wish], weights: dict[str, float]) -> list[int]:
    """In which order an engine with one place begins the requests: their indices.

    wishes: none or more, in the order of arrival. The engine serves one request at a time, to its
    end, and a token takes 1 unit of time. When it is free, it looks at those that have arrived by
    now. If there is none, it waits for the next arrival. weights: a user with weight 2 gets twice
    as many tokens; a user who is not named has 1.

    This is start-time fair queuing. The engine keeps a *virtual time* v, in tokens at weight 1:
        when a request arrives, start = max(v, finish of its user's request before it, or 0)
                                finish = start + tokens / weight
        when a request begins, v becomes its start
        when the engine is free and none waits, v becomes the largest finish of all that it served
        next is the waiting request with the smallest start; among equals the one that came first
    A request that arrives at the moment at which another ends is waiting when the engine chooses.
    Errors: none to raise.

    Example: at 0 ann sends two requests of 10 tokens (numbers 0 and 1), at 1 bob sends one of 5 (2)
        ann's start at 0 and 10. 0 begins, so v = 0. Bob's starts at 0, so before ann's second.
        -> [0, 2, 1]
    With bob's arrival at 10 it is the same order: at the end of 0, v is still 0.
    """
    raise NotImplementedError("Exercise 22.2: Users take turns by tokens")


class Closed(RuntimeError):
    """The server takes no new request."""


@exercise("22.3", "Find the bugs: a loop and its readers", minutes=50, difficulty=4)
class ServingLoop:
    """An engine and the readers of its answers, in one event loop.

    engine.add(request_id) queues a request, and raises ValueError for one that it does not take.
    engine.abort(request_id) ends a request that has not ended. `await engine.step()` runs one step
    and returns (request_id, answer, finished) for each request that was there when it began, also
    for one that was aborted meanwhile; answer: the whole answer so far. The engine wants no step
    while it has no request. A step may raise: then the engine is dead.

    What must hold:
        - The engine waits for no reader. A slow reader skips answers, and gets the newest one.
        - A request whose reader leaves (the stream is closed, or its task is cancelled) is aborted
          and forgotten. A request that has finished is not aborted: its request_id may be in use
          again.
        - A request that the engine does not take leaves no trace.
        - While the loop drains, and after the engine has died, `stream` raises Closed.
        - When a step raises, every reader whose answer had not ended gets that exception.
        - drain() returns when every answer has been computed, and `run` then returns. It waits for
          no reader, and works for every caller, also while no request is there.
    Use no threads and no sleeping, not even asyncio.sleep(0): events and queues are enough.

    Example: an engine gives one word a step. A reader sees "the", "the cat", "the cat sat" if it
        reads at once, and "the", "the cat sat" if it was busy in between.

    The code below is right for one quick reader who stays, and has six bugs. Delete the `raise`
    in front of each method's code, then find them.
    """

    def __init__(self, engine):
        self.engine = engine
        self.inboxes: dict[str, asyncio.Queue] = {}  # of the requests that have not ended
        self.has_work = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.is_draining = False
        self.failure: Exception | None = None

    async def run(self) -> None:
        """Serve until a drain has ended or the engine has died; returns in both cases. A task."""

        raise NotImplementedError("Exercise 22.3: Find the bugs: a loop and its readers")
        while self.inboxes or not self.is_draining:
            if not self.inboxes:
                self.has_work.clear()
                await self.has_work.wait()
                continue
            for request_id, answer, finished in await self.engine.step():
                await self.inboxes[request_id].put((answer, finished))
                if finished:
                    del self.inboxes[request_id]
        self.has_ended.set()

    async def stream(self, request_id: str):
        """Serve one request: an async generator of its answers so far."""
        raise NotImplementedError("Exercise 22.3: Find the bugs: a loop and its readers")
        inbox = self.inboxes[request_id] = asyncio.Queue(2)
        self.engine.add(request_id)
        self.has_work.set()
        finished = False
        while not finished:
            answer, finished = await inbox.get()
            yield answer

    async def drain(self) -> None:
        """Take no new request, and wait until every answer has been computed."""
        raise NotImplementedError("Exercise 22.3: Find the bugs: a loop and its readers")
        self.is_draining = True
        await self.has_ended.wait()
