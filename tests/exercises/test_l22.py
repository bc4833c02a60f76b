"""Checks of lesson 22's exercises. Each exists because it rejects a named wrong answer
(wrong/l22.py).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import cache
from itertools import pairwise
from statistics import quantiles
from unittest.mock import patch

from solutions.l22_serving import Shot, Wish
from tests.exercises.checking import assert_entries, assert_equal, call, check, note

# ---------------------------------------------------------------- 22.1 the report


def shot(due, sent, tokens, end=None, asked=8, whole=True):
    """A Shot; end: of the last token, if it is not said."""
    return Shot(due, sent, tuple(tokens), tokens[-1] if end is None else end, asked, whole)


def drawn_shots(seed, late=0.0, count=40, broken=0.0, refused=0.0):
    """Random requests; late: how much later than they are due they are sent, at most."""
    draws, now, shots = random.Random(seed), 5.0, []
    for index in range(count):
        now += draws.expovariate(4.0)
        sent = now + late * index / count
        if draws.random() < refused:
            gives_up = sent + draws.choice((0.01, 9.0))  # told at once, or never
            # a refusal may be an answer that came to its end, too
            shots.append(Shot(now, sent, (), gives_up, 16, draws.random() < 0.5))
            continue
        tokens = [sent + draws.expovariate(1.0)]
        for _ in range(draws.randint(1, 10)):
            tokens.append(tokens[-1] + draws.uniform(0.02, 0.3))
        whole = draws.random() >= broken
        shots.append(Shot(now, sent, tuple(tokens), tokens[-1] + 0.01, 16, whole))
    return shots


def reported(shots, ttft_slo_s, e2el_slo_s):
    """Number by number; the percentile by the standard library, who is there by an area."""
    begin, end = min(s.due_s for s in shots), max(s.end_s for s in shots)
    ttfts = sorted(s.token_s[0] - s.due_s for s in shots if s.token_s)
    tail = quantiles(ttfts, n=100, method="inclusive")[98] if len(ttfts) > 1 else ttfts[0]
    good = 0
    for s in shots:
        if s.is_whole and s.token_s:
            good += s.token_s[0] - s.due_s <= ttft_slo_s and s.end_s - s.due_s <= e2el_slo_s
    edges = sorted({x for s in shots for x in (s.due_s, s.end_s)})
    area = 0.0
    for a, b in pairwise(edges):
        area += (b - a) * sum(s.due_s <= a and b <= s.end_s for s in shots)
    seconds = end - begin
    tokens = sum(len(s.token_s) for s in shots)
    return (seconds, tokens / seconds, tail, good / seconds, area / seconds)


EXAMPLE = [shot(0, 0, (1.0, 2.0, 3.0), asked=4), shot(1, 2, (4.0, 5.0), asked=4)]
REPORT_CASES = {  # name: (shots by seed, limits, why)
    "example": (lambda seed: EXAMPLE, (2.0, 5.0), "the docstring's"),
    "punctual": (lambda seed: drawn_shots(seed), (1.0, 2.0), "everything is sent in time"),
    "late_client": (
        lambda seed: drawn_shots(seed, late=4.0),
        (2.0, 4.0),
        "the client sends later and later",
    ),
    "broken": (
        lambda seed: drawn_shots(seed, broken=0.4),
        (3.0, 6.0),
        "answers that break off have tokens, and are no good",
    ),
    "refused": (
        lambda seed: drawn_shots(seed, refused=0.4),
        (2.0, 4.0),
        "who is refused has no first token",
    ),
    "tail": (
        lambda seed: [*drawn_shots(seed), *drawn_shots(seed + 1, late=20.0, count=3)],
        (1.0, 2.0),
        "the last requests are the slowest",
    ),
    "on_the_limit": (
        lambda seed: [shot(0, 0, (1.0, 2.0)), shot(0, 0, (0.5, 2.0)), shot(1, 1, (1.5, 4.0))],
        (1.0, 2.0),
        "on the limit is within it",
    ),
    "unordered": (
        lambda seed: drawn_shots(seed, broken=0.1)[::-1],
        (2.0, 4.0),
        "the request that was due first is the last one of the list",
    ),
    "first_is_late": (
        lambda seed: [shot(2.0, 3.0, (3.5, 5.0), end=6.5), shot(4.0, 4.0, (4.5, 6.0))],
        (2.0, 4.0),
        "the client is late with the first request already",
    ),
    "end_after_the_last_token": (
        lambda seed: [shot(0, 0, (1.0, 2.0), end=6.0), shot(1, 1, (2.0, 3.0), end=4.5)],
        (2.0, 4.0),
        "an answer ends some time after its last token",
    ),
    "short": (
        lambda seed: [shot(2.0, 2.0, (2.25, 2.5)), shot(2.125, 2.125, (2.5,))],
        (0.25, 1.0),
        "all of it takes half a second",
    ),
    "one": (lambda seed: [shot(3.0, 3.0, (4.0,))], (2.0, 2.0), "a single request, which came at 3"),
}
REPORT_LABELS = ("duration_s", "tokens_per_s", "p99_ttft_s", "goodput_per_s", "in_system")


@check("22.1", {case: why for case, (*_, why) in REPORT_CASES.items()}, seconds=5)
def test_report(impl, case, seed):
    make, (ttft, e2el), _ = REPORT_CASES[case]
    shots = make(seed)
    got = call(impl, dict(shots=shots, ttft_slo_s=ttft, e2el_slo_s=e2el))
    assert isinstance(got, tuple) and len(got) == 5, f"your result is {got!r}, expected a Report"
    want = tuple(map(float, reported(shots, ttft, e2el)))
    assert_entries(got, want, REPORT_LABELS, rtol=1e-9)


# ---------------------------------------------------------------- 22.2 turns


def taking_turns(wishes, weights):
    """Event by event: the arrivals and the ends, in the order of time."""
    v, largest, busy_until, running = 0.0, 0.0, 0.0, None
    last, tags, order, left = {}, {}, [], list(range(len(wishes)))

    def choose(now):
        nonlocal v, running, busy_until
        running = min(tags, key=lambda i: (tags[i][0], i))
        v = tags.pop(running)[0]
        order.append(running)
        busy_until = now + wishes[running].tokens

    while left or tags or running is not None:
        at = wishes[left[0]].arrival if left else float("inf")
        if running is not None and busy_until < at:
            running = None
            if tags:
                choose(busy_until)
            continue
        if not left:  # no request comes any more
            running = None
            if tags:
                choose(busy_until)
            continue
        # all that come at this moment come before the engine chooses
        if running is not None and busy_until == at:
            running = None
        elif running is None and not tags:
            v = max(v, largest)
        while left and wishes[left[0]].arrival == at:
            index = left.pop(0)
            _, user, tokens = wishes[index]
            start = max(v, last.get(user, 0.0))
            last[user] = start + tokens / weights.get(user, 1.0)
            tags[index] = (start, last[user])
            largest = max(largest, last[user])
        if running is None:
            choose(at)
    return order


def compare_order(impl, wishes, weights, want) -> None:
    """As compare, with a message that says whose requests changed places."""
    got = call(impl, dict(wishes=wishes, weights=weights))
    is_order = isinstance(got, list) and sorted(map(str, got)) == sorted(map(str, want))
    if is_order and got != want:
        note(got)
        place = next(at for at, (mine, right) in enumerate(zip(got, want)) if mine != right)
        mine, right = (f"{int(order[place])}, {wishes[int(order[place])]}" for order in (got, want))
        raise AssertionError(
            f"your result[{place}] is {mine}, expected {right}, with weights {weights}"
        )
    assert_equal(got, want)


def drawn_wishes(seed, gap, count=24, users="abc", sizes=(1, 20)):
    """Random requests; gap: between two of them on average."""
    draws, now, wishes = random.Random(seed), 0, []
    for _ in range(count):
        now += draws.choice((0, 0, gap, 2 * gap))
        wishes.append(Wish(float(now), draws.choice(users), draws.randint(*sizes)))
    return wishes


def at_once(*pairs, at=0.0):
    return [Wish(at, user, tokens) for user, tokens in pairs]


TURN_CASES = {  # name: (requests by seed, weights, why)
    "example": (
        lambda seed: [*at_once(("ann", 10), ("ann", 10)), Wish(1.0, "bob", 5)],
        {},
        "the docstring's",
    ),
    "many_against_one": (
        lambda seed: [*at_once(*[("ann", 8)] * 6), Wish(20.0, "bob", 8), Wish(21.0, "bob", 8)],
        {},
        "one user sends six at once",
    ),
    "long_against_short": (
        lambda seed: at_once(*[("ann", 30)] * 3, *[("bob", 5)] * 9),
        {},
        "turns are counted in tokens, not in requests",
    ),
    "small_after_large": (
        lambda seed: at_once(("ann", 20), ("bob", 5), ("cem", 9), ("bob", 5), ("ann", 1)),
        {},
        "the smallest start is next, not the smallest finish or size",
    ),
    "newcomer": (
        lambda seed: [*at_once(*[("ann", 10)] * 8), *at_once(*[("bob", 10)] * 5, at=45.0)],
        {},
        "who comes late has no claim on what others got before",
    ),
    "past": (
        lambda seed: [*at_once(*[("ann", 10)] * 5), *at_once(("bob", 9), ("ann", 4), at=70.0)],
        {},
        "a user does not pay for what it got while no other user wanted it",
    ),
    "idle": (
        lambda seed: [*at_once(("ann", 40), ("bob", 5)), *at_once(("ann", 9), ("bob", 9), at=99.0)],
        {},
        "after a pause no user is ahead, although ann got more before it",
    ),
    "idle_with_weights": (
        lambda seed: [*at_once(("ann", 10)), *at_once(("ann", 4), ("bob", 4), at=12.0)],
        {"ann": 0.5},
        "after a pause no user is ahead, although ann's line is longer than the clock's time",
    ),
    "one_after_the_other": (
        lambda seed: [
            *at_once(("ann", 9), ("ann", 9), ("bob", 5)),
            *at_once(("bob", 5), ("bob", 5), at=9.0),
        ],
        {},
        "a line goes on where the user's request before it ends, also while nothing of it waits",
    ),
    "weights": (
        lambda seed: at_once(*[("ann", 12)] * 6, *[("bob", 12)] * 6),
        {"ann": 3.0},
        "ann's tokens count a third",
    ),
    "between_two_units": (
        lambda seed: [
            *at_once(("ann", 10), ("ann", 4)),
            Wish(10.5, "bob", 4),
            Wish(10.75, "cy", 1),
        ],
        {},
        "who comes half a unit after a choice was not waiting then",
    ),
    "begins_at_a_half": (
        lambda seed: [Wish(0.5, "ann", 2), Wish(1.0, "ann", 3), Wish(2.25, "bob", 3)],
        {},
        "who begins at half a unit ends at half a unit",
    ),
    "less_than_a_token": (
        lambda seed: at_once(*[("bob", 2)] * 4, *[("ann", 1)] * 8),
        {"ann": 8.0, "bob": 4.0},
        "a request may count less than one token at weight 1",
    ),
    "equals": (
        lambda seed: at_once(("zoe", 5), ("bob", 5), ("ann", 5), ("ann", 5), ("zoe", 5)),
        {},
        "among equals the one that came first",
    ),
    "nobody": (lambda seed: [], {}, "no request, no order"),
    "boundary": (
        lambda seed: [
            *at_once(("ann", 10)),
            *at_once(("ann", 4), ("bob", 30), ("bob", 2), at=10.0),
        ],
        {},
        "who comes at the end of another one is waiting then",
    ),
}


@check("22.2", {case: why for case, (*_, why) in TURN_CASES.items()}, seconds=5)
def test_turns(impl, case, seed):
    make, weights, _ = TURN_CASES[case]
    wishes = make(seed)
    compare_order(impl, wishes, weights, taking_turns(wishes, weights))


@cache
def turn_histories(seed, gap):
    """Random requests, some with weights, and the right orders."""
    draws, found = random.Random(seed), []
    for index in range(20):
        wishes = drawn_wishes(draws.randrange(10**6), gap)
        weights = {"a": 2.0, "b": 0.5} if index % 2 else {}
        found.append((wishes, weights, taking_turns(wishes, weights)))
    return found


@check("22.2", {"busy": "always a request waits", "quiet": "now and then none"}, seconds=5)
def test_turn_histories(impl, case, seed):
    for wishes, weights, want in turn_histories(seed, 4 if case == "busy" else 25):
        compare_order(impl, wishes, weights, want)


# ---------------------------------------------------------------- 22.3 the loop

TICKS = 200  # rounds of the event loop after which nothing will come any more
pause = asyncio.sleep  # a learner's loop must not sleep, and these checks do


class WordEngine:
    """Answers of numbered words, one a step. lengths: {request: words}."""

    def __init__(self, lengths, fails_at=None):
        self.lengths = lengths
        self.fails_at = fails_at
        self.running: dict[str, list[str]] = {}  # the words of each answer so far
        self.steps = 0
        self.slips = []  # what no engine should be asked

    def add(self, request_id):
        if request_id in self.running:
            raise ValueError(f"request_id: got {request_id!r}; accepted: one not in use")
        if request_id not in self.lengths:
            raise ValueError(f"request {request_id!r} is too long")
        self.running[request_id] = []

    def abort(self, request_id):
        if request_id not in self.running:
            self.slips.append(f"abort of {request_id!r}, which had ended")
        self.running.pop(request_id, None)

    async def step(self):
        if not self.running:
            self.slips.append("a step without a request")
        self.steps += 1
        in_step = dict(self.running)
        for _ in range(8):  # readers have time to read, and to leave
            await pause(0)
        if self.steps == self.fails_at:
            raise RuntimeError(f"step {self.steps} failed")
        outputs = []
        for request_id, words in in_step.items():
            if self.running.get(request_id, words) is not words:
                continue  # a namesake of one who left, and too late for this step
            words.append(f"word {len(words) + 1}")
            finished = len(words) == self.lengths[request_id]
            if finished:
                self.running.pop(request_id, None)
            outputs.append((request_id, len(words), finished))
        return outputs


class Stage:
    """A learner's loop, its engine, and the task of its run."""

    def __init__(self, impl, lengths, fails_at=None):
        self.engine = WordEngine(lengths, fails_at)
        self.loop = impl(self.engine)
        self.tasks = []
        self.run = self.start(self.loop.run())

    def start(self, awaitable: Awaitable) -> asyncio.Future:
        """A task of this stage: `end` looks at how it ended."""
        self.tasks.append(asyncio.ensure_future(awaitable))
        return self.tasks[-1]

    async def end(self):
        """Cancel what still runs. A task that failed and is not looked at writes to stderr when its
        memory is collected, perhaps in the middle of another test.
        """
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks, timeout=0.05)
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.exception()

    async def within(self, awaitable: Awaitable, what: str):
        """Its result, if it comes within some rounds of the event loop."""
        task = self.start(awaitable)
        for tick in range(TICKS):
            # a short sleep at the end, for a loop that needs a clock
            await pause(0 if tick < TICKS - 3 else 0.002)
            if self.run.done() and (error := self.run.exception()):
                assert str(error) != f"step {self.engine.fails_at} failed", (
                    "run() raises what the step raised; it is to return, and the readers get it"
                )
                raise error
            if task.done():
                return task.result()
        raise AssertionError(f"{what}: nothing comes any more")

    async def until(self, holds: Callable[[], object], what: str):
        """Wait some rounds of the event loop for it, and raise what a task raises meanwhile."""
        for _ in range(TICKS):
            if holds():
                return
            for task in self.tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    raise error
            await pause(0)
        raise AssertionError(f"{what}: nothing comes any more")

    async def read(self, request_id) -> list[int | str]:
        """All answers of a request as a quick reader sees them, and what the exception said, if the
        engine's ended them; the name of any other.
        """
        seen = []
        try:
            async for answer in self.loop.stream(request_id):
                assert not isinstance(answer, BaseException), (
                    f"your stream yields an exception, {answer!r}, as if it were an answer"
                )
                seen.append(answer)
        except (ValueError, RuntimeError) as error:
            # by name, because the learner's file has a Closed of its own
            kind = type(error).__name__
            seen.append(str(error) if kind == "RuntimeError" else kind)
        return seen

    def no_slips(self):
        assert not self.engine.slips, f"the engine was asked for {self.engine.slips[0]}"


def played(scene: Callable):
    """Make a check of an async function of (impl): in an event loop of its own."""

    async def to_the_end(impl):
        stages, sleeps, mine = [], [], asyncio.get_running_loop()

        async def noted(seconds, *result):
            if asyncio.get_running_loop() is mine:  # and not that of a server in another thread
                sleeps.append(seconds)
            return await pause(seconds, *result)

        def stage(*arguments, **named):
            stages.append(Stage(impl, *arguments, **named))
            return stages[-1]

        try:
            with patch.object(asyncio, "sleep", noted):
                await scene(stage)
        finally:
            for one in stages:
                await one.end()
        assert not sleeps, "your loop sleeps: wait for an event, or it wakes up for nothing"

    return lambda impl: asyncio.run(to_the_end(impl))


async def quick(stage):
    one = stage({"a": 3, "b": 5})
    both = await one.within(asyncio.gather(one.read("a"), one.read("b")), "two quick readers")
    assert_equal(both, [[1, 2, 3], [1, 2, 3, 4, 5]], label="the answers so far")
    later = await one.within(one.read("a"), "a reader who comes when the loop was idle")
    assert_equal(later, [1, 2, 3], label="the answers so far")
    one.no_slips()


async def slow(stage):
    one = stage({"slow": 9, "quick": 12})
    stream = one.loop.stream("slow")
    first = await one.within(stream.__anext__(), "the first answer")
    whole = await one.within(one.read("quick"), "a quick reader beside one who has stopped reading")
    assert_equal((first, whole[-1]), (1, 12), label="the first and the last answer")
    rest = await one.within(rest_of(stream), "the slow reader's answer")
    assert_equal(rest, [9], label="what a reader gets who reads again")
    one.no_slips()


async def slow_and_not_at_the_end(stage):
    one = stage({"slow": 90, "quick": 6})
    stream = one.loop.stream("slow")
    await one.within(stream.__anext__(), "the first answer")
    await one.within(one.read("quick"), "a quick reader beside one who has stopped reading")
    newest = len(one.engine.running["slow"])
    for _ in range(4):  # what the engine gave can be where it belongs by then
        await pause(0)
    got = await one.within(stream.__anext__(), "the slow reader's answer")
    note(got)
    assert isinstance(got, int) and got >= newest, (
        f"a reader who reads again gets answer {got}, and the newest was {newest}: "
        "what it did not read is out of date"
    )
    await one.within(stream.aclose(), "closing a stream")
    one.no_slips()


async def rest_of(stream):
    return [answer async for answer in stream]


async def closes(stage):
    one = stage({"a": 50, "b": 4})
    stream = one.loop.stream("a")
    await one.within(stream.__anext__(), "the first answer")
    await one.within(stream.aclose(), "closing a stream")
    assert_equal(sorted(one.engine.running), [], label="what the engine runs when the reader left")
    assert_equal(await one.within(one.read("b"), "the next reader"), [1, 2, 3, 4])
    await one.within(one.loop.drain(), "a drain after a reader left")
    one.no_slips()


async def closes_with_an_answer_unread(stage):
    one = stage({"a": 50, "b": 4})
    stream = one.loop.stream("a")
    await one.within(stream.__anext__(), "the first answer")
    await one.within(one.read("b"), "another reader")  # meanwhile the first one's inbox fills
    await one.within(stream.aclose(), "closing a stream")
    assert_equal(sorted(one.engine.running), [], label="what the engine runs when the reader left")
    await one.within(one.loop.drain(), "a drain after a reader left")
    one.no_slips()


async def cancelled_at_once(stage):
    """Before the first answer."""
    one = stage({"a": 50, "b": 4})
    task = one.start(one.read("a"))
    await one.until(lambda: one.engine.running, "the first request")
    task.cancel()
    await one.within(asyncio.gather(task, return_exceptions=True), "a reader who is cancelled")
    assert_equal(sorted(one.engine.running), [], label="what the engine runs when the reader left")
    assert_equal(await one.within(one.read("b"), "the next reader"), [1, 2, 3, 4])
    one.no_slips()


async def cancelled(stage):
    one = stage({"a": 50, "b": 30})
    task = one.start(one.read("a"))
    other = one.start(one.read("b"))
    for _ in range(12):
        await pause(0)
    task.cancel()
    await one.within(asyncio.gather(task, return_exceptions=True), "a reader who is cancelled")
    assert_equal(sorted(one.engine.running), ["b"], label="what the engine runs")
    assert_equal(task.cancelled(), True, label="whether the cancelled task ended as cancelled")
    whole = await one.within(whole_of(one, other), "the reader beside one who left")
    assert_equal(whole[-1], 30, label="the other reader's last answer")
    one.no_slips()


async def cancelled_in_the_last_step_of_another(stage):
    one = stage({"a": 50, "b": 4})
    task = one.start(one.read("a"))
    other = one.start(one.read("b"))
    await one.until(lambda: len(one.engine.running.get("b", ())) == 3, "the third word")
    for _ in range(4):  # a step takes eight rounds
        await pause(0)
    task.cancel()
    await one.within(asyncio.gather(task, return_exceptions=True), "a reader who is cancelled")
    whole = await one.within(whole_of(one, other), "the reader whose answer ends in that step")
    assert_equal(whole[-1], 4, label="the other reader's last answer")
    one.no_slips()


async def whole_of(one, task):
    while not task.done():
        await pause(0)
    return task.result()


async def closes_late(stage):
    """The answer has ended, and its reader leaves without having read the end."""
    one = stage({"a": 3, "b": 8})
    stream = one.loop.stream("a")
    await one.within(stream.__anext__(), "the first answer")
    await one.within(one.read("b"), "another reader")
    await one.within(stream.aclose(), "closing a stream")
    one.no_slips()


async def closes_beside_a_namesake(stage):
    """As above, and another reader uses the request_id by then."""
    one = stage({"a": 3, "b": 8})
    stream = one.loop.stream("a")
    await one.within(stream.__anext__(), "the first answer")
    await one.within(one.read("b"), "another reader")
    one.engine.lengths["a"] = 6
    namesake = one.start(one.read("a"))
    for _ in range(12):
        await pause(0)
    await one.within(stream.aclose(), "closing a stream")
    whole = await one.within(whole_of(one, namesake), "a new reader with the same request_id")
    assert_equal(whole, [1, 2, 3, 4, 5, 6], label="what the new reader gets")
    one.no_slips()


async def refused(stage):
    one = stage({"a": 6})
    got = await one.within(one.read("huge"), "a request that the engine does not take")
    assert_equal(got, ["ValueError"], label="what a refused reader gets")
    await one.within(one.loop.drain(), "a drain after a refused request")
    one.no_slips()


async def namesake(stage):
    one = stage({"a": 6})
    got = await one.within(
        asyncio.gather(one.read("a"), one.read("a")), "two readers with the same request_id"
    )
    assert_equal(got, [[1, 2, 3, 4, 5, 6], ["ValueError"]], label="what the two get")
    one.no_slips()


async def drains(stage):
    one = stage({"a": 5, "b": 5})
    reader = one.start(one.read("a"))
    for _ in range(12):
        await pause(0)
    drain = one.start(one.loop.drain())
    await one.within(pause(0), "a round of the event loop")
    assert_equal(drain.done(), False, label="whether drain() has returned before the answers")
    got = await one.within(one.read("b"), "a newcomer during a drain")
    assert_equal(got, ["Closed"], label="what a newcomer gets during a drain")
    await one.within(drain, "a drain")
    assert_equal(len(one.engine.running), 0, label="what runs when drain() has returned")
    assert_equal(await one.within(reader, "who was there before"), [1, 2, 3, 4, 5])
    await one.within(one.run, "run() after a drain")
    one.no_slips()


async def drains_idle(stage):
    one = stage({"a": 2})
    await one.within(one.read("a"), "a reader")
    for _ in range(12):
        await pause(0)
    await one.within(one.loop.drain(), "a drain while no request is there")
    one.no_slips()


async def drains_and_dies(stage):
    one = stage({"a": 9}, fails_at=4)
    reader = one.start(one.read("a"))
    await one.until(lambda: one.engine.running, "the first request")
    await one.within(one.loop.drain(), "a drain during which the engine dies")
    got = await one.within(reader, "who was there before")
    assert_equal(got, [1, 2, 3, "step 4 failed"], label="what the reader got")
    await one.within(one.run, "run() after the engine has died")
    one.no_slips()


async def drains_twice(stage):
    one = stage({"a": 5})
    reader = one.start(one.read("a"))
    for _ in range(12):
        await pause(0)
    both = asyncio.gather(one.loop.drain(), one.loop.drain())
    await one.within(both, "two drains at once")
    assert_equal(await one.within(reader, "who was there before"), [1, 2, 3, 4, 5])
    await one.within(one.loop.drain(), "a drain after a drain")
    one.no_slips()


async def drains_and_a_reader_leaves(stage):
    one = stage({"a": 90})
    stream = one.loop.stream("a")
    await one.within(stream.__anext__(), "the first answer")
    drain = one.start(one.loop.drain())
    await one.within(pause(0), "a round of the event loop")
    await one.within(stream.aclose(), "closing a stream")
    await one.within(drain, "a drain during which the last reader leaves")
    await one.within(one.run, "run() after a drain")
    one.no_slips()


async def drains_beside_a_slow_reader(stage):
    one = stage({"a": 6})
    stream = one.loop.stream("a")
    await one.within(stream.__anext__(), "the first answer")
    await one.within(one.loop.drain(), "a drain beside a reader who has stopped reading")
    assert_equal(await one.within(rest_of(stream), "the rest of the answer"), [6])
    one.no_slips()


async def dies(stage):
    one = stage({"a": 2, "b": 9, "c": 9, "d": 3}, fails_at=4)
    got = await one.within(
        asyncio.gather(*(one.read(name) for name in "abc")), "readers of an engine that died"
    )
    told = [1, 2, 3, "step 4 failed"]
    assert_equal(got, [[1, 2], told, told], label="what the readers got")
    for _ in range(2):
        later = await one.within(one.read("d"), "who comes when the engine has died")
        assert_equal(later, ["Closed"], label="what a newcomer gets when the engine has died")
    await one.within(one.loop.drain(), "a drain when the engine has died")
    one.no_slips()


async def dies_beside_a_slow_reader(stage):
    one = stage({"slow": 9, "quick": 9, "later": 3}, fails_at=4)
    stream = one.loop.stream("slow")
    await one.within(stream.__anext__(), "the first answer")
    got = await one.within(one.read("quick"), "a reader of an engine that died")
    # how many words it saw depends on the step in which it came
    assert_equal(got[-1:], ["step 4 failed"], label="what the quick reader got at the end")

    async def end_of(stream):
        """The unread answer may come before it."""
        try:
            await rest_of(stream)
        except RuntimeError as error:
            return str(error)
        return "a stream that just ended"

    got = await one.within(end_of(stream), "a slow reader of an engine that died")
    assert_equal(got, "step 4 failed", label="what the slow reader got")
    later = await one.within(one.read("later"), "who comes when the engine has died")
    assert_equal(later, ["Closed"], label="what a newcomer gets when the engine has died")
    await one.within(one.loop.drain(), "a drain when the engine has died")
    one.no_slips()


async def dies_with_an_answer_unread(stage):
    """Of a request that had ended: it was not the engine's any more."""
    one = stage({"short": 2, "long": 9}, fails_at=4)
    stream = one.loop.stream("short")
    await one.within(stream.__anext__(), "the first answer")
    got = await one.within(one.read("long"), "a reader of an engine that died")
    assert_equal(got[-1:], ["step 4 failed"], label="what the other reader got at the end")
    got = await one.within(told_by(stream), "an answer that had ended before the engine died")
    assert_equal(got, [2], label="what a reader gets whose answer had ended, but was unread")
    one.no_slips()


async def told_by(stream):
    """What a stream still gives, and what the engine's exception said."""
    seen = []
    try:
        async for answer in stream:
            seen.append(answer)
    except RuntimeError as error:
        seen.append(str(error))
    return seen


SCENES = {
    "quick": (quick, "quick readers see every answer"),
    "slow": (slow, "one reader stops reading for a while"),
    "slow_and_not_at_the_end": (
        slow_and_not_at_the_end,
        "a reader stops reading, and goes on before its answer ends",
    ),
    "closes": (closes, "a reader leaves after the first word"),
    "closes_with_an_answer_unread": (
        closes_with_an_answer_unread,
        "a reader leaves who has a newer answer to read",
    ),
    "cancelled_at_once": (cancelled_at_once, "a reader leaves before the first answer"),
    "cancelled": (cancelled, "a reader's task is cancelled"),
    "cancelled_in_the_last_step_of_another": (
        cancelled_in_the_last_step_of_another,
        "a reader leaves during the step in which another one's answer ends",
    ),
    "closes_late": (closes_late, "who has finished is not aborted"),
    "closes_beside_a_namesake": (
        closes_beside_a_namesake,
        "the request_id of one that has finished is another reader's by then",
    ),
    "refused": (refused, "the engine does not take a request"),
    "namesake": (namesake, "a request_id that is in use"),
    "drains": (drains, "those who are there are served, newcomers are not"),
    "drains_idle": (drains_idle, "no request is there"),
    "drains_and_dies": (drains_and_dies, "the fourth step raises, during a drain"),
    "drains_twice": (drains_twice, "two wait for the same drain"),
    "drains_and_a_reader_leaves": (
        drains_and_a_reader_leaves,
        "the last reader leaves during a drain",
    ),
    "drains_beside_a_slow_reader": (drains_beside_a_slow_reader, "a reader has stopped reading"),
    "dies": (dies, "the fourth step raises"),
    "dies_beside_a_slow_reader": (
        dies_beside_a_slow_reader,
        "the fourth step raises, and a reader has stopped reading",
    ),
    "dies_with_an_answer_unread": (
        dies_with_an_answer_unread,
        "the fourth step raises, and by then another answer has ended",
    ),
}


@check("22.3", {name: why for name, (_, why) in SCENES.items()}, seconds=5)
def test_loop(impl, case, seed):
    played(SCENES[case][0])(impl)
