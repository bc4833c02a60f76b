"""Whom to turn away at the door. A queue that grows without end makes all requests late; a server
that refuses some at once, and says when to come again, answers the others in time.

Read `AdmissionControl.admit`. How long the queue takes is predicted from how fast the engine has
worked lately: the tokens that wait, over tokens a second. That is Little's law, read for W.

Source: Welsh and Culler 2003, Adaptive Overload Control for Busy Internet Servers, section 3
(admission by what it does to the response time, not by a fixed rate).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lessons.toolbox.model.arguments import check_positive, is_number, is_whole, refuse

HALF_LIFE_S = 10.0  # busy seconds after which an observation counts half
RETRY_S = (1, 60)  # the least and the most that a client is told to wait


class Overloaded(Exception):
    """The request is not taken. retry_after_s: whole seconds, for HTTP's Retry-After."""

    def __init__(self, why: str, retry_after_s: int):
        super().__init__(f"{why}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Waiting(NamedTuple):
    """A request that waits: whose it is, the tokens of its prompt, and of its answer at most."""

    user: str
    prompt_tokens: int
    max_tokens: int


class Queue(NamedTuple):
    """Who waits, and how many of them find a place in the next step: those do not count as a
    queue.
    """

    waiting: list[Waiting]
    free_places: int


@dataclass(frozen=True)
class Limits:
    """None: no limit. 0 requests: only while there is a free place. max_waiting_per_user: requests
    of one user; max_wait_s: the predicted wait.

    Raises ValueError, in one line.
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_waiting_per_user: int | None = None
    max_wait_s: float | None = None

    def __post_init__(self):
        for name in ("max_waiting_requests", "max_waiting_tokens", "max_waiting_per_user"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 0):
                refuse(name, value, "None, or a whole number, 0 or more and below 2**31")
        wait = self.max_wait_s
        if wait is not None and not (is_number(wait, 0) and wait > 0):
            refuse("max_wait_s", wait, "None, or a positive, finite number of seconds")


class ServiceRate:
    """How fast the engine works lately, in tokens a busy second, and how long its answers are.

    Idle seconds do not count, because an engine without work has not become slow. Averages forget:
    after half_life_s busy seconds, an observation counts half.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S):
        check_positive(half_life_s=half_life_s)
        self.half_life_s = half_life_s
        self.tokens = self.seconds = self.steps = 0.0
        self.answers = self.answer_tokens = 0.0

    def ran(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens, of prompts and of answers, in so many seconds."""
        kept = 0.5 ** (seconds / self.half_life_s)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds
        self.steps = self.steps * kept + 1
        self.answers *= kept
        self.answer_tokens *= kept

    def answered(self, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self.answers += 1
        self.answer_tokens += tokens

    def expected_answer(self, max_tokens: int) -> float:
        """Tokens of an answer: most end long before their limit."""
        if self.answers > 0.5:
            return min(max_tokens, self.answer_tokens / self.answers)
        return max_tokens

    def expected(self, waiting: Waiting) -> float:
        """Tokens that a request will take."""
        return waiting.prompt_tokens + self.expected_answer(waiting.max_tokens)

    def seconds_for(self, tokens: float) -> float:
        """Of the whole engine, for so many tokens of any user. 0 while nothing has run yet: no
        request is turned away by a guess.
        """
        return tokens * self.seconds / self.tokens if self.tokens else 0.0

    def service_s(self, prompt_tokens: int, max_tokens: int) -> float:
        """Seconds from when a request begins to its whole answer: its prompt, then a step a
        token.
        """
        step_s = self.seconds / self.steps if self.steps else 0.0
        return self.seconds_for(prompt_tokens) + self.expected_answer(max_tokens) * step_s


class AdmissionControl:
    """Says no at the door. queue(): asked at each request, so that there is no second count of
    those who wait, which could drift from the first.
    """

    def __init__(self, limits: Limits, rate: ServiceRate, queue: Callable[[], Queue]):
        self.limits = limits
        self.rate = rate
        self.queue = queue

    def admit(
        self, user: str, prompt_tokens: int, max_tokens: int, timeout_s: float | None = None
    ) -> None:
        """Return if the request may come in. timeout_s: seconds after which its answer is of no
        use.

        Raises Overloaded.
        """
        if self.limits == Limits() and timeout_s is None:
            return  # without looking at a queue that may be long
        limits, (waiting, free_places) = self.limits, self.queue()
        ahead = len(waiting) - free_places  # of it, for whom there is no place
        if ahead < 0:
            return
        mine = sum(one.user == user for one in waiting)
        tokens = sum(one.prompt_tokens + one.max_tokens for one in waiting)
        wait_s = self.wait_s(waiting)
        if exceeds(ahead + 1, limits.max_waiting_requests):
            why = waits(ahead, "requests", "max_waiting_requests", limits)
        elif exceeds(mine + 1, limits.max_waiting_per_user):
            why = waits(mine, "of your requests", "max_waiting_per_user", limits)
        elif waiting and exceeds(tokens + prompt_tokens + max_tokens, limits.max_waiting_tokens):
            # `waiting`: the first in the queue may be of any size, or a long request never came in
            why = waits(tokens, "tokens", "max_waiting_tokens", limits)
        elif exceeds(wait_s, limits.max_wait_s):
            why = f"the wait is {wait_s:.1f} s, the limit is {limits.max_wait_s:g} s (max_wait_s)"
        elif exceeds(wait_s + self.rate.service_s(prompt_tokens, max_tokens), timeout_s):
            why = f"the wait is {wait_s:.1f} s, too long for the request's own timeout"
        else:
            return
        raise Overloaded(why, self.retry_after_s(wait_s))

    def wait_s(self, waiting: Iterable[Waiting]) -> float:
        """Seconds until the engine will have run what waits now."""
        return self.rate.seconds_for(sum(map(self.rate.expected, waiting)))

    @staticmethod
    def retry_after_s(wait_s: float) -> int:
        """When what waits now has gone. Sooner, all who were refused would come for one place."""
        least, most = RETRY_S
        return min(most, max(least, math.ceil(wait_s)))


def exceeds(value: float, limit: float | None) -> bool:
    """Whether there is a limit, and the value is above it."""
    return limit is not None and value > limit


def waits(count: int, what: str, name: str, limits: Limits) -> str:
    """Why no other request may wait. count: of those who wait; name: of the limit that they have
    reached.
    """
    return f"no place is free, {count} {what} wait, the limit is {getattr(limits, name)} ({name})"
