"""Checks of lesson 25's exercises. Each exists because it rejects a named wrong answer
(wrong/l25.py).
"""

import random
from zlib import crc32

from tests.exercises.checking import assert_equal, call, check, note

# ---------------------------------------------------------------- 25.1 two time lines


def by_events(host_ms, device_ms):
    """Both lists, from the intervals in which host and device are busy."""
    both = []
    for lead in (0, 1):
        host_free = device_free = 0.0
        ends = []
        for n in range(len(host_ms)):
            # the newest step whose end the host has to see before it begins
            seen = n - 1 - lead
            begins = max([host_free, ends[seen]] if seen >= 0 else [host_free])
            host_free = begins + host_ms[n]
            device_free = max(host_free, device_free) + device_ms[n]
            ends.append(device_free)
        both.append(ends)
    return tuple(both)


LINES = "one after the other, the end of step", "one step ahead, the end of step"
LINE_CASES = {  # name: (host, device, why)
    "example": ([2.0] * 3, [5.0] * 3, "the docstring's"),
    "short_device": ([2.0] * 6, [1.0] * 6, "a host that needs longer than the device"),
    "one_step": ([3.0], [4.0], "nothing to overlap with"),
    "two_steps": ([3.0, 1.0], [4.0, 2.0], "the host has to wait for neither"),
    "slow_host_late": ([1.0, 1, 1, 1, 20, 1], [5.0] * 6, "a long prompt is scheduled in step 4"),
    "slow_device_early": ([2.0] * 6, [30.0, 1, 1, 1, 1, 1], "a long prompt runs in step 0"),
    "no_step": ([], [], "two empty lists"),
}


def compare_lines(impl, host_ms, device_ms):
    """As compare, with the names of the two lists."""
    got = call(impl, dict(host_ms=host_ms, device_ms=device_ms))
    assert isinstance(got, (list, tuple)) and len(got) == 2, (
        f"your result is a {type(got).__name__}, expected two lists: (one after the other, one "
        "step ahead)"
    )
    note(got)
    for label, mine, right in zip(LINES, got, by_events(host_ms, device_ms)):
        assert_equal(mine, right, atol=1e-5, label=label)


@check("25.1", {case: why for case, (*_, why) in LINE_CASES.items()}, seconds=5)
def test_time_lines(impl, case, seed):
    host_ms, device_ms, _ = LINE_CASES[case]
    compare_lines(impl, list(host_ms), list(device_ms))


@check("25.1", seconds=5)
def test_random_time_lines(impl, seed):
    """Quarters of a millisecond, so that sums are exact."""
    draws = random.Random(seed)
    for _ in range(30):
        count = draws.randint(1, 12)
        host_ms, device_ms = ([draws.randint(1, 40) / 4 for _ in range(count)] for _ in range(2))
        compare_lines(impl, host_ms, device_ms)


# ---------------------------------------------------------------- 25.2 the loop


def said(history: tuple[int, ...]) -> int:
    """The token after these: of 12."""
    return crc32(bytes(history)) % 12


def alone(first: int, limit: int, stop: int) -> list[int]:
    """The answer of a request that nothing else is with."""
    tokens = [first]
    while len(tokens) <= limit and (tokens[-1] != stop or len(tokens) == 1):
        tokens.append(said(tuple(tokens)))
    return tokens[1:]


class CountingDevice:
    """Runs passes, and complains in words when it is used otherwise than as the exercise says."""

    def __init__(self, first, limits):
        self.first, self.limits = list(first), list(limits)
        self.passes: list[list[tuple[int, ...]]] = []  # the tokens so far of each row
        self.told: list[int] = []  # passes that were read
        self.rows = 0

    def start(self, tokens):
        assert not self.passes, "your function calls `start` a second time"
        assert tokens, "your function launches a pass without rows"
        assert list(tokens) == self.first, (
            f"your first pass has the rows {list(tokens)}: all requests begin together, in the "
            f"order of first, {self.first}"
        )
        return self.launch([(token,) for token in tokens])

    def follow(self, rows):
        assert self.passes, "your function calls `follow` before `start`"
        before = self.passes[-1]
        assert rows, "your function launches a pass without rows"
        outside = [row for row in rows if row not in range(len(before))]
        assert not outside, f"row {outside[0]} is not in a pass of {len(before)} rows"
        assert len(self.passes) - 1 not in self.told, (
            f"your function reads pass {len(self.passes) - 1} before it launches the next one, so "
            f"the device has nothing to do meanwhile"
        )
        return self.launch([(*before[row], said(before[row])) for row in rows])

    def launch(self, histories):
        self.passes.append(histories)
        self.rows += len(histories)
        assert len(self.passes) <= max(self.limits), (
            f"your function launches {len(self.passes)} passes, and no answer may have more than "
            f"{max(self.limits)} tokens"
        )
        return len(self.passes) - 1

    def read(self, launched):
        assert isinstance(launched, int), f"your function reads {launched!r}, which is no pass"
        self.told.append(launched)
        return [said(history) for history in self.passes[launched]]


def stopping_first(limit: int, stop: int, length: int) -> int:
    """A first token whose answer ends by the stop token after `length` tokens."""
    return next(f for f in range(13, 256) if len(alone(f, limit, stop)) == length < limit)


LOOP_CASES = {  # name: (first, limits, stop, why)
    "limits": ([20, 21, 22], [3, 5, 1], 255, "answers that end by their limits alone"),
    "one_token": ([30], [1], 255, "nothing follows the first pass"),
    "stop": ([stopping_first(9, 4, 3)], [9], 4, "the pass after the stop token is thrown away"),
    "stop_in_the_middle": (
        [20, stopping_first(9, 4, 2), 21, 22],
        [7, 9, 2, 6],
        4,
        "who goes on moves up in the batch",
    ),
    "stop_at_the_limit": (
        [stopping_first(9, 4, 3), 20],
        [3, 6],
        4,
        "the last token that is allowed is the stop token",
    ),
    "first_is_the_stop": ([4, 20], [4, 4], 4, "a prompt may end with the stop token"),
    "no_request": ([], [], 4, "no pass, because none is without rows"),
}


def compare_loop(impl, first, limits, stop):
    device = CountingDevice(first, limits)
    want = [alone(token, limit, stop) for token, limit in zip(first, limits)]
    got = call(impl, dict(device=device, first=first, limits=limits, stop=stop))
    assert_equal(got, want)
    late = sum(len(answer) < limit for answer, limit in zip(want, limits))
    most = sum(map(len, want)) + late
    assert device.rows <= most, (
        f"your passes have {device.rows} rows in all, and {most} are enough: one for each token, "
        f"and one more for each answer that the stop token ends early"
    )


@check("25.2", {case: why for case, (*_, why) in LOOP_CASES.items()}, seconds=5)
def test_loop(impl, case, seed):
    first, limits, stop, _ = LOOP_CASES[case]
    compare_loop(impl, list(first), list(limits), stop)


@check("25.2", seconds=5)
def test_random_loops(impl, seed):
    draws = random.Random(seed)
    for _ in range(30):
        count = draws.randint(1, 6)
        first = [draws.randint(0, 255) for _ in range(count)]
        compare_loop(impl, first, [draws.randint(1, 9) for _ in range(count)], draws.randint(0, 11))
