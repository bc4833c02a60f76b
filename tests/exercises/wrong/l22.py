"""Wrong answers to lesson 22's exercises: slips of published load clients, schedulers and servers,
and the hint for each.
"""

import asyncio
import heapq
from functools import partial
from statistics import quantiles

import numpy as np

from solutions.l22_serving import Closed
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 22.1 the report


def slipped_report(
    shots,
    ttft_slo_s,
    e2el_slo_s,
    *,
    counts_from="due",
    duration="clock",
    tokens="came",
    ttfts="all",
    tail="p99",
    good="both",
    there="stays",
    ends="end",
):
    """load_report with one slip, spelled by a switch."""
    came_s = {"due": lambda s: s.due_s, "sending": lambda s: s.sent_s}[counts_from]
    begin, end = min(s.due_s for s in shots), max(s.end_s for s in shots)
    end_s = (lambda s: s.token_s[-1]) if ends == "last token" else (lambda s: s.end_s)
    seconds = {
        "clock": end - begin,
        "sum": sum(s.end_s - s.due_s for s in shots),
        "from zero": end,
        "from the first sending": end - min(s.sent_s for s in shots),
        "to the last arrival": max(s.due_s for s in shots) - begin or 1.0,
        "to the last token": max(s.token_s[-1] for s in shots if s.token_s) - begin,
        "from the first to the last of the list": shots[-1].end_s - shots[0].due_s,
    }[duration]
    total = {
        "came": sum(len(s.token_s) for s in shots),
        "asked": sum(s.max_tokens for s in shots),
        "whole": sum(len(s.token_s) for s in shots if s.is_whole),
        "gaps": sum(max(0, len(s.token_s) - 1) for s in shots),
    }[tokens]
    seen = [s for s in shots if s.token_s]
    if ttfts == "whole":
        seen = [s for s in seen if s.is_whole]
    elif ttfts == "while others came":
        seen = [s for s in seen if s.token_s[0] <= max(x.sent_s for x in shots)] or seen
    found = [s.token_s[0] - came_s(s) for s in seen]
    if ttfts == "refused count 0":
        found += [0.0 for s in shots if not s.token_s]
    if ttfts == "refused count their end":
        found += [s.end_s - came_s(s) for s in shots if not s.token_s]
    p99 = {
        "p99": lambda: np.percentile(found, 99),
        "mean": lambda: np.mean(found),
        "max": lambda: max(found),
        "nearest": lambda: sorted(found)[int(0.99 * (len(found) - 1))],
        "share": lambda: np.percentile(found, 0.99),
        "mean of halves": lambda: np.mean(
            [np.percentile(half, 99) for half in np.array_split(found, 2) if len(half)]
        ),
        "unsorted": lambda: found[int(0.99 * (len(found) - 1))],
        "a value that came": lambda: np.percentile(found, 99, method="higher"),
        "exclusive": lambda: quantiles(found, n=100)[98] if len(found) > 1 else found[0],
    }[tail]()
    in_time = [
        s
        for s in shots
        if (s.is_whole or good == "also broken")
        and s.token_s
        and (
            good == "without ttft"
            or s.token_s[0] - came_s(s) < ttft_slo_s
            or (good != "below" and s.token_s[0] - came_s(s) == ttft_slo_s)
        )
        and (
            good == "without e2el"
            or end_s(s) - (s.sent_s if good == "end from the sending" else came_s(s)) <= e2el_slo_s
        )
    ]
    if good == "refused":
        in_time += [s for s in shots if not s.token_s and s.end_s - s.due_s <= e2el_slo_s]
    number_good = len(in_time)
    if good == "tokens":
        number_good = sum(len(s.token_s) for s in in_time)
    goodput = number_good / (len(shots) if good == "share" else seconds)
    if there == "stays":
        number = sum(s.end_s - came_s(s) for s in shots) / seconds
    elif there == "until the first token":
        number = sum(s.token_s[0] - came_s(s) for s in seen) / seconds
    elif there == "from the sending":
        number = sum(s.end_s - s.sent_s for s in shots) / seconds
    elif there == "answered":
        number = sum(s.end_s - came_s(s) for s in seen) / seconds
    elif there == "mean":
        number = sum(s.end_s - came_s(s) for s in shots) / len(shots)
    else:  # "most"
        number = max(sum(x.due_s <= s.due_s < x.end_s for x in shots) for s in shots)
    return float(seconds), float(total / seconds), float(p99), float(goodput), float(number)


for name, slip, hint in [
    (
        "counted_from_the_sending",
        dict(counts_from="sending"),
        "A client that comes late with sending hides the wait: count from due_s.",
    ),
    (
        "latencies_summed_as_time",
        dict(duration="sum"),
        "Requests run side by side, so the sum of their latencies is no duration.",
    ),
    (
        "the_clock_starts_at_0",
        dict(duration="from zero"),
        "The load begins when the first request is due, whatever the clock says then.",
    ),
    (
        "ends_with_the_last_arrival",
        dict(duration="to the last arrival"),
        "The server still works when the last request has come: go on to the last end.",
    ),
    (
        "begins_with_the_first_sending",
        dict(duration="from the first sending"),
        "The duration begins when the first request is due, also if the client sends it late.",
    ),
    (
        "ends_with_the_last_token",
        dict(duration="to the last token"),
        "The duration goes on to the last end_s: the last token may come earlier.",
    ),
    (
        "order_of_the_list",
        dict(duration="from the first to the last of the list"),
        "The last request of the list need not end last: take the largest end_s.",
    ),
    (
        "requested_tokens",
        dict(tokens="asked"),
        "max_tokens is what was asked for. Count the tokens that came.",
    ),
    (
        "tokens_of_whole_answers",
        dict(tokens="whole"),
        "Tokens of an answer that broke off came as well.",
    ),
    (
        "first_tokens_left_out",
        dict(tokens="gaps"),
        "n tokens have n - 1 gaps. Count the tokens.",
    ),
    (
        "tail_lost",
        dict(ttfts="while others came"),
        "First tokens that come when the last request has been sent are the slowest ones.",
    ),
    (
        "ttfts_of_whole_answers",
        dict(ttfts="whole"),
        "An answer that broke off had a first token, too.",
    ),
    (
        "refused_at_once",
        dict(ttfts="refused count 0"),
        "A refused request got no first token. It has no TTFT, and certainly not 0.",
    ),
    (
        "refused_by_their_end",
        dict(ttfts="refused count their end"),
        "A refused request got no first token, so it has no TTFT.",
    ),
    ("mean_for_tail", dict(tail="mean"), "You report a mean, which hides the tail."),
    ("maximum_for_tail", dict(tail="max"), "You report the maximum, not the 99th percentile."),
    (
        "rounded_down",
        dict(tail="nearest"),
        "Between two values the percentile is on the straight line; you take the lower one.",
    ),
    (
        "a_value_that_came",
        dict(tail="a value that came"),
        "Between two values the percentile is on the straight line; you take the upper one.",
    ),
    (
        "exclusive_quantile",
        dict(tail="exclusive"),
        'statistics.quantiles goes beyond the largest value by default: method="inclusive".',
    ),
    (
        "percent_as_share",
        dict(tail="share"),
        "np.percentile takes percents: 99, not 0.99.",
    ),
    (
        "mean_of_percentiles",
        dict(tail="mean of halves"),
        "A mean of percentiles is no percentile. Take it of all values together.",
    ),
    (
        "unsorted",
        dict(tail="unsorted"),
        "A percentile is of the sorted values, not of those in the order of arrival.",
    ),
    (
        "broken_answers_are_good",
        dict(good="also broken"),
        "An answer that broke off met no objective.",
    ),
    (
        "goodput_by_the_end_alone",
        dict(good="without ttft"),
        "Goodput is of requests that met both limits, that of the first token as well.",
    ),
    (
        "goodput_by_the_first_token_alone",
        dict(good="without e2el"),
        "Goodput is of requests that met both limits, that of the end as well.",
    ),
    (
        "refused_at_once_is_good",
        dict(good="refused"),
        "A refused request ends early, and its answer never came: it met no objective.",
    ),
    (
        "goodput_in_tokens",
        dict(good="tokens"),
        "Goodput is requests a second; you count their tokens.",
    ),
    (
        "end_counted_from_the_sending",
        dict(good="end from the sending"),
        "The end-to-end latency counts from due_s as well, like every other latency.",
    ),
    (
        "end_is_the_last_token",
        dict(ends="last token"),
        "A request ends at end_s, when the client knows that nothing more comes.",
    ),
    ("goodput_as_a_share", dict(good="share"), "Goodput is requests a second, not a share."),
    ("below_the_limit", dict(good="below"), "Exactly on the limit is within it: <=."),
    (
        "in_system_until_the_first_token",
        dict(there="until the first token"),
        "A request is in the system until its end, not until its first token.",
    ),
    (
        "in_system_of_those_with_tokens",
        dict(there="answered"),
        "Who was refused was there as well, until its end.",
    ),
    (
        "in_system_from_the_sending",
        dict(there="from the sending"),
        "A request is there from when it was due, also while the client keeps it back.",
    ),
    (
        "little_without_the_rate",
        dict(there="mean"),
        "L = λ · W: you have W, the mean stay. It wants the rate of arrivals beside it.",
    ),
    (
        "most_at_once",
        dict(there="most"),
        "in_system is how many are there on average, not at the busiest moment.",
    ),
]:
    answers.wrong("22.1", hint, name)(partial(slipped_report, **slip))


@answers.alternative("22.1")
def by_arrays(shots, ttft_slo_s, e2el_slo_s):
    """All at once, L by λ and W."""
    due, end = np.array([[s.due_s, s.end_s] for s in shots]).T
    seconds = end.max() - due.min()
    first = np.array([s.token_s[0] if s.token_s else np.inf for s in shots])
    whole = np.array([s.is_whole for s in shots])
    good = whole & (first - due <= ttft_slo_s) & (end - due <= e2el_slo_s)
    rate, stay = len(shots) / seconds, (end - due).mean()
    ttft = (first - due)[np.isfinite(first)]
    tokens = sum(len(s.token_s) for s in shots)
    return tuple(
        map(
            float,
            (seconds, tokens / seconds, np.percentile(ttft, 99), good.sum() / seconds, rate * stay),
        )
    )


@answers.alternative("22.1")
def by_hand(shots, ttft_slo_s, e2el_slo_s):
    """The percentile without NumPy."""
    begin = end = None
    tokens = good = stays = 0
    ttfts = []
    for due, _, token_s, end_s, _, whole in shots:
        begin = due if begin is None else min(begin, due)
        end = end_s if end is None else max(end, end_s)
        tokens += len(token_s)
        stays += end_s - due
        if token_s:
            ttfts.append(token_s[0] - due)
            good += whole and ttfts[-1] <= ttft_slo_s and end_s - due <= e2el_slo_s
    ttfts.sort()
    place = 0.99 * (len(ttfts) - 1)
    low = int(place)
    above = ttfts[min(low + 1, len(ttfts) - 1)]
    p99 = ttfts[low] + (place - low) * (above - ttfts[low])
    seconds = end - begin
    return tuple(map(float, (seconds, tokens / seconds, p99, good / seconds, stays / seconds)))


# ---------------------------------------------------------------- 22.2 turns


def slipped_order(
    wishes,
    weights,
    *,
    by="start",
    length="tokens",
    weight="divides",
    begins=lambda v, last: max(v, last),
    v_at_begin="start",
    idle="largest",
    tie="first",
    late="waits",
    line="goes on",
    seconds="tokens",
):
    """serving_order with one slip, spelled by a switch."""
    v = now = largest = served = 0.0
    last, waiting, order, coming = {}, [], [], 0
    while len(order) < len(wishes):
        if not waiting and wishes[coming].arrival > now:
            if idle == "largest":
                v = max(v, largest)
            elif idle == "zero":
                v = 0.0
            elif idle == "zero for all":
                v, last = 0.0, {}
            elif idle == "last":
                v = max(v, served)
            elif idle == "clock":
                v = wishes[coming].arrival
            now = wishes[coming].arrival
        while coming < len(wishes) and (
            wishes[coming].arrival <= now
            if late == "waits" or not waiting
            else wishes[coming].arrival < now
        ):
            _, user, tokens = wishes[coming]
            start = begins(now if v_at_begin == "clock" else v, last.get(user, 0.0))
            factor = {
                "divides": 1 / weights.get(user, 1.0),
                "multiplies": weights.get(user, 1.0),
                "ignored": 1.0,
            }[weight]
            finish = start + (tokens if length == "tokens" else 1) * factor
            if line != "of those served":
                last[user] = finish
            waiting.append((start, coming, finish, user, tokens))
            coming += 1
        key = {
            "start": lambda w: (w[0],),
            "finish": lambda w: (w[2],),
            "arrival": lambda w: (),
            "size": lambda w: (w[4],),
            "largest start": lambda w: (-w[0],),
        }[by]
        ties = {
            "first": lambda w: (w[1],),
            "last": lambda w: (-w[1],),
            "name": lambda w: (w[3], w[1]),
        }[tie]
        chosen = min(waiting, key=lambda w: (*key(w), *ties(w)))
        waiting.remove(chosen)
        start, index, finish, user, tokens = chosen
        largest, served = max(largest, finish), finish
        if line == "of those served":
            last[user] = finish
        elif line == "of those who wait" and all(w[3] != user for w in waiting):
            del last[user]
        v = {"start": start, "finish": finish, "never": v, "clock": v}[v_at_begin]
        order.append(index)
        now += tokens / (weights.get(user, 1.0) if seconds == "weighted" else 1.0)
    return order


for name, slip, hint in [
    (
        "first_come_first_served",
        dict(by="arrival"),
        "That is the order of arrival: one user's hundred requests come before all others.",
    ),
    (
        "shortest_first",
        dict(by="size"),
        "Shortest first is not fair: a user who asks for long answers is never served.",
    ),
    (
        "smallest_finish",
        dict(by="finish"),
        "Next is the smallest start. By the finish, short requests pass long ones.",
    ),
    ("largest_start", dict(by="largest start"), "The smallest start is next, not the largest."),
    (
        "turns_by_requests",
        dict(length="requests"),
        "A request counts its tokens, not 1: a user with long requests gets more of the engine.",
    ),
    (
        "weights_upside_down",
        dict(weight="multiplies"),
        "A user with weight 2 is to get more: the tokens are divided by the weight.",
    ),
    ("without_weights", dict(weight="ignored"), "You do not use the weights."),
    (
        "claims_saved_up",
        dict(begins=lambda v, last: last),
        "A newcomer's start is at least v. From 0, it has a claim on all that others got before.",
    ),
    (
        "own_past_forgotten",
        dict(begins=lambda v, last: v),
        "The start is at least the finish of the same user's request before it.",
    ),
    (
        "smaller_of_both",
        dict(begins=min),
        "max(v, finish), not min: neither the past of others nor one's own is claimed.",
    ),
    (
        "seconds_for_virtual_time",
        dict(v_at_begin="clock"),
        "v is the start of the request that began last, not the time of the clock.",
    ),
    (
        "v_stands_still",
        dict(v_at_begin="never"),
        "v moves on when a request begins: it becomes its start.",
    ),
    (
        "v_becomes_the_finish",
        dict(v_at_begin="finish"),
        "When a request begins, v becomes its start, not its finish.",
    ),
    (
        "idle_forgotten",
        dict(idle="nothing"),
        "When none waits, v becomes the largest finish: so no user pays for its time alone.",
    ),
    (
        "idle_begins_anew_at_0",
        dict(idle="zero"),
        "v never falls. If it goes back to 0, who was served before pays for it.",
    ),
    (
        "idle_takes_the_last_finish",
        dict(idle="last"),
        "When none waits, v becomes the largest finish of all; the last one served may have less.",
    ),
    (
        "idle_takes_the_clock",
        dict(idle="clock"),
        "v is in tokens over weights, the clock is not: v becomes the largest finish.",
    ),
    (
        "line_of_those_served",
        dict(line="of those served"),
        "A request's line follows its user's request before it, also if that one still waits.",
    ),
    (
        "line_of_those_who_wait",
        dict(line="of those who wait"),
        "You forget a user's finish as soon as nothing of theirs waits: they got those tokens.",
    ),
    (
        "clock_by_weights",
        dict(seconds="weighted"),
        "The clock moves on by the tokens: a weight makes no tokens faster.",
    ),
    ("last_of_equals", dict(tie="last"), "Among equals the one that came first is next."),
    ("by_name", dict(tie="name"), "Among equals the one that came first is next, not by name."),
    (
        "at_the_end_is_too_late",
        dict(late="not yet"),
        "A request that comes when another one ends is waiting when the engine chooses.",
    ),
]:
    answers.wrong("22.2", hint, name)(partial(slipped_order, **slip))


@answers.wrong("22.2", "Number requests when they arrive: v has moved on since the first one came.")
def numbered_at_the_beginning(wishes, weights):
    last, starts = {}, []
    for index, (_, user, tokens) in enumerate(wishes):
        starts.append((last.get(user, 0.0), index))
        last[user] = starts[-1][0] + tokens / weights.get(user, 1.0)
    return [index for _, index in sorted(starts)]


@answers.wrong(
    "22.2", "You serve the user who has got least so far: a newcomer claims what others got before."
)
def least_served_so_far(wishes, weights):
    got, order, left, now = {}, [], list(range(len(wishes))), 0.0
    while left:
        here = [i for i in left if wishes[i].arrival <= now]
        if not here:
            now = wishes[left[0]].arrival
            continue
        index = min(here, key=lambda i: (got.get(wishes[i].user, 0.0), i))
        _, user, tokens = wishes[index]
        got[user] = got.get(user, 0.0) + tokens / weights.get(user, 1.0)
        left.remove(index)
        order.append(index)
        now += tokens
    return order


@answers.wrong("22.2", "You take the users in a circle, a request each: count tokens.")
def round_robin(wishes, weights):
    order, left, now, turn = [], list(range(len(wishes))), 0.0, {}
    while left:
        here = [i for i in left if wishes[i].arrival <= now]
        if not here:
            now = wishes[left[0]].arrival
            continue
        index = min(here, key=lambda i: (turn.get(wishes[i].user, -1), i))
        turn[wishes[index].user] = len(order)
        left.remove(index)
        order.append(index)
        now += wishes[index].tokens
    return order


@answers.alternative("22.2")
def numbered_in_advance(wishes, weights):
    """Arrivals are numbered just before the choice; a dictionary for each user."""
    users = {}
    order, v, now, most, at = [], 0.0, 0.0, 0.0, 0
    pending = {}
    while at < len(wishes) or pending:
        if not pending and wishes[at].arrival > now:
            now, v = wishes[at].arrival, max(v, most)
        while at < len(wishes) and wishes[at].arrival <= now:
            wish = wishes[at]
            line = users.setdefault(wish.user, dict(end=0.0, weight=weights.get(wish.user, 1)))
            begin = line["end"] if line["end"] > v else v
            line["end"] = begin + wish.tokens / line["weight"]
            pending[at] = begin, line["end"]
            at += 1
        best = min(pending, key=lambda i: (pending[i][0], i))
        v, end = pending.pop(best)
        most = max(most, end)
        order.append(best)
        now += wishes[best].tokens
    return order


@answers.alternative("22.2")
def by_a_clock_that_ticks(wishes, weights):
    """One arrival or one end at a time."""
    heap, order, ends, v, now, seen, most = [], [], {}, 0.0, 0.0, 0, 0.0

    def arrive():
        nonlocal seen
        wish = wishes[seen]
        start = max(v, ends.get(wish.user, 0.0))
        ends[wish.user] = start + wish.tokens / weights.get(wish.user, 1.0)
        heapq.heappush(heap, (start, seen, ends[wish.user]))
        seen += 1

    while len(order) < len(wishes):
        while seen < len(wishes) and wishes[seen].arrival <= now:
            arrive()
        if not heap:
            v, now = max(v, most), wishes[seen].arrival
            continue
        v, index, end = heapq.heappop(heap)
        most = max(most, end)
        order.append(index)
        now += wishes[index].tokens
    return order


# ---------------------------------------------------------------- 22.3 the loop


class SlippedLoop:
    """ServingLoop with one slip, spelled by a switch."""

    def __init__(
        self,
        engine,
        full="newest",
        left="aborted",
        closed="both",
        refused="first",
        newcomers="closed",
        dead="closed",
        told="all",
        drain="wakes",
        idle="sleeps",
        waits_for="answers",
        strangers="skipped",
        cancels="goes on",
        dies="returns",
    ):
        self.engine = engine
        self.full, self.left, self.closed, self.refused = full, left, closed, refused
        self.newcomers, self.dead, self.told = newcomers, dead, told
        self.drain_kind, self.idle, self.waits_for = drain, idle, waits_for
        self.strangers, self.cancels, self.dies = strangers, cancels, dies
        self.inboxes, self.readers, self.served = {}, 0, False
        self.work, self.ended = asyncio.Event(), asyncio.Event()
        self.is_draining, self.failure = False, None

    async def put(self, inbox, message):
        if self.full == "wait":
            await inbox.put(message)
        elif self.full == "oldest":
            if not inbox.full():
                inbox.put_nowait(message)
        else:
            if inbox.full():
                inbox.get_nowait()
            inbox.put_nowait(message)

    async def run(self):
        try:
            while self.busy() or not self.is_draining:
                if not self.inboxes:
                    if self.idle == "ends" and self.served:
                        return
                    if self.idle == "polls":
                        await asyncio.sleep(0)
                        continue
                    self.work.clear()
                    await self.work.wait()
                    continue
                self.served = True
                for name, answer, finished in await self.engine.step():
                    if name in self.inboxes or self.strangers == "looked up":
                        inbox = self.inboxes[name]
                        if finished:
                            del self.inboxes[name]
                        await self.put(inbox, (answer, finished))
        except RuntimeError as error:
            self.failure = error
            inboxes = list(self.inboxes.values())
            for inbox in inboxes[: {"first": 1, "none": 0}.get(self.told)]:
                if self.told == "if there is room" and inbox.full():
                    continue
                if self.told == "waits for room":
                    await inbox.put(error)
                elif self.told == "no matter what is there":
                    inbox.put_nowait(error)
                elif self.told == "by another exception":
                    await self.put(inbox, RuntimeError("the engine has died"))
                else:
                    await self.put(inbox, None if self.told == "ends" else error)
            self.inboxes.clear()
            if self.dies == "raises":
                self.ended.set()
                raise
        if self.drain_kind != "not after a death" or self.failure is None:
            self.ended.set()

    def busy(self):
        return self.inboxes or (self.waits_for == "readers" and self.readers)

    def check_open(self):
        if (self.is_draining and self.newcomers == "closed") or (
            self.failure is not None and self.dead == "closed"
        ):
            raise Closed("closed")

    async def stream(self, name):
        self.check_open()
        size = {"all": 0, "wait": 2}.get(self.full, 1)
        if self.refused == "after":
            inbox = self.inboxes[name] = asyncio.Queue(size)
            self.engine.add(name)
        else:
            self.engine.add(name)
            inbox = self.inboxes[name] = asyncio.Queue(size)
        self.readers += 1
        self.work.set()
        finished = False
        try:
            while not finished:
                message = await inbox.get()
                if message is None:
                    return
                if isinstance(message, Exception):
                    raise message
                answer, finished = message
                yield answer
        except asyncio.CancelledError:
            if self.closed == "cancelled":
                self.leave(name, inbox)
            if self.cancels == "ends here":
                return
            raise
        except GeneratorExit:
            if self.closed == "exit":
                self.leave(name, inbox)
            raise
        finally:
            self.readers -= 1
            self.work.set()
            if self.closed == "both":
                self.leave(name, inbox)

    def leave(self, name, inbox):
        if self.left == "always aborted":
            self.engine.abort(name)
        if self.inboxes.get(name) is not inbox and (
            self.left != "the name alone" or name not in self.inboxes
        ):
            return
        if self.left != "still listed":
            del self.inboxes[name]
        if self.left != "forgotten":
            self.engine.abort(name)

    async def drain(self):
        self.is_draining = True
        if self.drain_kind == "at once":
            return
        if self.drain_kind == "aborts":
            for name in list(self.inboxes):
                self.engine.abort(name)
                await self.put(self.inboxes.pop(name), None)
        if self.drain_kind != "sleeps":
            self.work.set()
        await self.ended.wait()
        if self.drain_kind == "is used up":
            self.ended.clear()


for name, slip, hint in [
    (
        "waits_for_readers",
        dict(full="wait"),
        "The loop waits for room in an inbox: one reader who stops stops all.",
    ),
    (
        "keeps_every_answer",
        dict(full="all"),
        "An inbox without a limit keeps every answer of a slow reader. The newest says it all.",
    ),
    (
        "keeps_the_oldest",
        dict(full="oldest"),
        "When an inbox is full, the newest answer is to replace the old one, not to get lost.",
    ),
    (
        "not_aborted",
        dict(closed="none"),
        "A reader has left and is still computed: abort the request when the stream is closed.",
    ),
    (
        "only_cancelled_ones",
        dict(closed="cancelled"),
        "A stream that is closed gets GeneratorExit, not CancelledError: use finally.",
    ),
    (
        "only_closed_ones",
        dict(closed="exit"),
        "A task that is cancelled gets CancelledError, not GeneratorExit: use finally.",
    ),
    (
        "forgotten_but_not_aborted",
        dict(left="forgotten"),
        "The reader is forgotten, but the engine still computes for it: abort the request.",
    ),
    (
        "aborted_but_still_listed",
        dict(left="still listed"),
        "Who left is still listed, so the loop steps an engine that has nothing to do.",
    ),
    (
        "finished_ones_aborted",
        dict(left="always aborted"),
        "A request that has ended must not be aborted: its id may be another reader's by then.",
    ),
    (
        "aborts_a_namesake",
        dict(left="the name alone"),
        "The request_id may be another reader's by now: is the inbox under it still this reader's?",
    ),
    (
        "who_left_is_looked_up",
        dict(strangers="looked up"),
        "A reader may leave while a step runs. Its answer comes back, and has no inbox any more.",
    ),
    (
        "cancellation_ends_here",
        dict(cancels="ends here"),
        "Raise CancelledError again: without it the cancelled task sees an answer that has ended.",
    ),
    (
        "listed_before_it_is_taken",
        dict(refused="after"),
        "The inbox is made before the engine has taken the request: a refusal leaves it there.",
    ),
    (
        "newcomers_in_a_drain",
        dict(newcomers="served"),
        "While it drains, stream must raise Closed, or a drain need never end.",
    ),
    (
        "newcomers_of_a_dead_engine",
        dict(dead="served"),
        "After the engine has died, no answer comes: raise Closed.",
    ),
    (
        "death_is_not_told",
        dict(told="none"),
        "When a step raises, all readers wait for ever: give them the exception.",
    ),
    (
        "death_is_told_to_one",
        dict(told="first"),
        "When a step raises, every reader is to get the exception.",
    ),
    (
        "death_is_told_if_there_is_room",
        dict(told="if there is room"),
        "A slow reader's inbox is full, and it waits for ever: the exception replaces the answer.",
    ),
    (
        "death_waits_for_room",
        dict(told="waits for room"),
        "When a step raises, run waits for room in an inbox: a slow reader stops the others.",
    ),
    (
        "death_finds_no_room",
        dict(told="no matter what is there"),
        "A slow reader's inbox is full, and put_nowait raises: make room first.",
    ),
    (
        "death_by_another_exception",
        dict(told="by another exception"),
        "Readers are to get the exception of the step itself, which says what happened.",
    ),
    (
        "death_ends_the_run",
        dict(dies="raises"),
        "run() returns when the engine has died: the readers get the exception.",
    ),
    (
        "death_looks_like_an_end",
        dict(told="ends"),
        "A stream that just ends looks like a whole answer: raise the exception in it.",
    ),
    (
        "drain_sleeps",
        dict(drain="sleeps"),
        "A drain must wake the loop: it may be waiting for work that will never come.",
    ),
    (
        "drain_returns_at_once",
        dict(drain="at once"),
        "drain() returns before the answers have been computed.",
    ),
    (
        "drain_aborts",
        dict(drain="aborts"),
        "Those who are there get their whole answers: a drain aborts no request.",
    ),
    (
        "drain_of_a_dead_engine",
        dict(drain="not after a death"),
        "When the engine has died, a drain is over: has_ended must be set in any case.",
    ),
    (
        "drain_is_used_up",
        dict(drain="is used up"),
        "A drain that has ended stays ended: another caller must not wait for it for ever.",
    ),
    (
        "drain_waits_for_readers",
        dict(waits_for="readers"),
        "A drain waits for answers to be computed, not for a reader who has stopped reading.",
    ),
    (
        "polls",
        dict(idle="polls"),
        "The loop turns round and round while no request is there: let it wait for has_work.",
    ),
    (
        "ends_when_idle",
        dict(idle="ends"),
        "The loop ends when no request is there: the next reader waits for ever.",
    ),
]:
    answers.wrong("22.3", hint, name)(partial(SlippedLoop, **slip))


@answers.wrong("22.3", "This is the code with its six bugs, as it was given.")
class AsGiven:
    def __init__(self, engine):
        self.engine, self.inboxes = engine, {}
        self.has_work, self.has_ended = asyncio.Event(), asyncio.Event()
        self.is_draining = False

    async def run(self):
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

    async def stream(self, request_id):
        inbox = self.inboxes[request_id] = asyncio.Queue(2)
        self.engine.add(request_id)
        self.has_work.set()
        finished = False
        while not finished:
            answer, finished = await inbox.get()
            yield answer

    async def drain(self):
        self.is_draining = True
        await self.has_ended.wait()


@answers.alternative("22.3")
class ByEvents:
    """A slot and an event for each reader."""

    def __init__(self, engine):
        self.engine, self.slots, self.state = engine, {}, "open"
        self.bell, self.over = asyncio.Event(), asyncio.Event()

    async def run(self):
        while self.slots or self.state == "open":
            if not self.slots:
                self.bell.clear()
                await self.bell.wait()
                continue
            try:
                outputs = await self.engine.step()
            except Exception as error:
                self.state = "dead"
                for slot in self.slots.values():
                    slot.update(error=error)
                    slot["event"].set()
                self.slots = {}
                break
            for name, answer, finished in outputs:
                slot = self.slots.pop(name, None)
                if slot is None:
                    continue
                slot.update(answer=answer, finished=finished)
                slot["event"].set()
                if not finished:
                    self.slots[name] = slot
        self.over.set()

    async def stream(self, name):
        if self.state != "open":
            raise Closed(self.state)
        self.engine.add(name)
        slot = self.slots[name] = dict(event=asyncio.Event(), finished=False, error=None)
        self.bell.set()
        try:
            while True:
                await slot["event"].wait()
                slot["event"].clear()
                if "answer" in slot:
                    finished = slot["finished"]
                    yield slot.pop("answer")
                    if finished:
                        return
                if slot["error"]:
                    raise slot["error"]
        finally:
            if self.slots.get(name) is slot:
                del self.slots[name]
                self.engine.abort(name)

    async def drain(self):
        if self.state == "open":
            self.state = "draining"
        self.bell.set()
        await self.over.wait()


@answers.alternative("22.3")
class ByFutures:
    """A future for the next answer of each reader, a list of those who are there."""

    def __init__(self, engine):
        self.engine, self.readers, self.unread = engine, {}, {}
        self.work, self.end = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.open = True

    def tell(self, reader, message):
        reader["news"] = message
        if not reader["waits"].done():
            reader["waits"].set_result(None)

    async def run(self):
        try:
            while self.readers or self.open:
                if self.readers:
                    for name, *message in await self.engine.step():
                        if name in self.readers:
                            reader = self.readers[name]
                            if message[1]:
                                self.readers.pop(name)
                            self.tell(reader, message)
                else:
                    self.work = asyncio.Event()
                    await self.work.wait()
        except Exception as error:
            self.open = False
            while self.readers:
                self.tell(self.readers.popitem()[1], error)
        self.end.set_result(None)

    async def stream(self, name):
        if not self.open:
            raise Closed
        self.engine.add(name)
        future = asyncio.get_running_loop().create_future
        reader = self.readers[name] = dict(waits=future(), news=None)
        self.work.set()
        try:
            while True:
                await reader["waits"]
                reader["waits"], news = future(), reader["news"]
                if isinstance(news, Exception):
                    raise news
                yield news[0]
                if news[1]:
                    break
        finally:
            if self.readers.get(name) is reader:
                self.readers.pop(name)
                self.engine.abort(name)

    async def drain(self):
        self.open = False
        self.work.set()
        await asyncio.shield(self.end)
