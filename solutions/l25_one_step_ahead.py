"""Exercises of lesson 25: two time lines, and a loop that is one step ahead of its device."""

from collections.abc import Sequence
from typing import Any, Protocol

from lessons.toolbox.exercises.exercise import exercise


@exercise("25.1", "Predict: two time lines", minutes=20, difficulty=2)
def two_time_lines(
    host_ms: Sequence[float], device_ms: Sequence[float]
) -> tuple[list[float], list[float]]:
    """When each step ends on the device: (one after the other, one step ahead), in milliseconds.

    host_ms[n]: what the host does until step n is launched; it tells the newest tokens that it
    knows, schedules, and launches. device_ms[n]: what the device needs for step n. Both lists have
    the same length. The host begins with step 0 at time 0.

        one after the other: the host begins with step n when step n - 1 has ended on the device.
        one step ahead: it begins with step n when step n - 2 has ended, whose tokens it tells
            first, and when it has launched step n - 1. (For the first two steps nothing has to
            end.)
    In both, the device begins with step n when it is launched and step n - 1 has ended.
    Errors: none to raise.

    Example: host_ms [2, 2, 2], device_ms [5, 5, 5]
        one after the other: 2 + 5 = 7, 9 + 5 = 14, 21
        one step ahead: launched at 2, 4 and 9, so the device ends at 7, 12 and 17
        -> ([7, 14, 21], [7, 12, 17])
    Guess first: what is the difference after 100 steps, and after 100 steps of a device of 1 ms?
    """
    # SOLUTION
    serial: list[float] = []
    ahead: list[float] = []
    now = launched = 0.0
    for n, (host, device) in enumerate(zip(host_ms, device_ms)):
        now += host + device
        serial.append(now)
        told = ahead[n - 2] if n >= 2 else 0.0
        launched = max(launched, told) + host
        is_free = ahead[n - 1] if n >= 1 else 0.0
        ahead.append(max(launched, is_free) + device)
    return serial, ahead
    # END


class Device(Protocol):
    """A model that runs one token of each row in a pass. `start` and `follow` return at once."""

    def start(self, tokens: list[int]) -> Any:
        """Launch the first pass: one row for each token."""

    def follow(self, rows: list[int]) -> Any:
        """Launch the next pass. rows: for each of its rows, which row of the pass that was launched
        last it goes on from. The device has that row's token, whether you know it or not.
        """

    def read(self, launched: Any) -> list[int]:
        """Wait for a pass, and return the token of each of its rows."""


@exercise(
    "25.2",
    "A loop that is one step ahead",
    minutes=40,
    difficulty=3,
    replaces="lessons.l25_one_step_ahead.generate:run_ahead",
    through="reference.ladder.yours.ahead:run_ahead",
)
def decode_ahead(device: Device, first: list[int], limits: list[int], stop: int) -> list[list[int]]:
    """Generate answers, and launch each pass before you read the one before it.

    first[r]: the last token of request r's prompt. limits[r]: the most tokens of its answer, 1 or
    more. stop: a token that ends an answer; it is the answer's last token. Returns the answers.

    All requests begin together, in the order of `first`. A request that has ended leaves the batch:
    by its limit in time, because you can count without knowing a token; by a stop token one pass
    late, because the next pass is launched by then. What that pass says of it is thrown away.

    Aim: always call `follow` for the next pass before you `read` the running one. No pass runs a
    request beyond its limit, and at most one pass runs it beyond its stop token. No pass is without
    rows, so without requests there is none.
    Errors: none to raise.

    Example: first [5, 6], limits [1, 9], stop 0; the device says 8 for request 0, and 7, 0, 4 for
    request 1
        start([5, 6]), follow([1]), read the first: 8 and 7; request 0 is not in the second pass
        follow([0]), read the second: 0 ends request 1; the third pass runs it once too often
        read the third: 4 is thrown away                                      -> [[8], [7, 0]]
    """
    # SOLUTION
    answers: list[list[int]] = [[] for _ in first]
    running = list(range(len(first)))  # the request of each row
    launched = device.start(first) if first else None
    while running:
        ahead = [
            request
            for request in running
            # One token of each is on its way.
            if len(answers[request]) + 1 < limits[request] and answers[request][-1:] != [stop]
        ]
        before, launched = launched, None
        if ahead:
            launched = device.follow([running.index(request) for request in ahead])
        for request, token in zip(running, device.read(before)):
            if answers[request][-1:] != [stop]:
                answers[request].append(token)
        running = ahead
    return answers
    # END
