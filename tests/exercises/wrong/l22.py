"""Wrong answers to lesson 22's exercises: slips of published load clients, schedulers and servers,
and the hint for each.
"""

import asyncio
import heapq

import numpy as np

from solutions.l22_serving import Closed
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 22.1 the report

answers.slips(
    "22.1",
    """
    counted_from_the_sending: A client that comes late with sending hides the wait: count from
        due_s.
    - ttft_s = [
    + shots = [shot._replace(due_s=shot.sent_s) for shot in shots]
    + ttft_s = [

    latencies_summed_as_time: Requests run side by side, so the sum of their latencies is no
        duration.
    - duration_s = max(shot.end_s for shot in shots) - first_s
    + duration_s = sum(shot.end_s - shot.due_s for shot in shots)

    the_clock_starts_at_0: The load begins when the first request is due, whatever the clock says
        then.
    - first_s = min(shot.due_s for shot in shots)
    + first_s = 0.0

    ends_with_the_last_arrival: The server still works when the last request has come: go on to the
        last end.
    - max(shot.end_s for shot in shots) - first_s
    + (max(shot.due_s for shot in shots) - first_s) or 1.0

    begins_with_the_first_sending: The duration begins when the first request is due, also if the
        client sends it late.
    - first_s = min(shot.due_s for shot in shots)
    + first_s = min(shot.sent_s for shot in shots)

    ends_with_the_last_token: The duration goes on to the last end_s: the last token may come
        earlier.
    - max(shot.end_s for shot in shots)
    + max(shot.token_s[-1] for shot in shots if shot.token_s)

    order_of_the_list: The last request of the list need not end last: take the largest end_s.
    - max(shot.end_s for shot in shots) - first_s
    + shots[-1].end_s - shots[0].due_s

    first_of_the_list: The first request of the list need not be due first: take the smallest due_s.
    - min(shot.due_s for shot in shots)
    + shots[0].due_s

    requested_tokens: max_tokens is what was asked for. Count the tokens that came.
    - sum(len(shot.token_s) for shot in shots)
    + sum(shot.max_tokens for shot in shots)

    tokens_of_whole_answers: Tokens of an answer that broke off came as well.
    - len(shot.token_s) for shot in shots)
    + len(shot.token_s) for shot in shots if shot.is_whole)

    first_tokens_left_out: n tokens have n - 1 gaps. Count the tokens.
    - len(shot.token_s) for
    + max(0, len(shot.token_s) - 1) for

    tail_lost: First tokens that come when the last request has been sent are the slowest ones.
    - for shot in shots if shot.token_s]
    + for shot in shots if shot.token_s]
    + last_s = max(shot.sent_s for shot in shots)
    + before = [shot for shot in shots if shot.token_s and shot.token_s[0] <= last_s]
    + ttft_s = [shot.token_s[0] - shot.due_s for shot in before] or ttft_s

    ttfts_of_whole_answers: An answer that broke off had a first token, too.
    - for shot in shots if shot.token_s]
    + for shot in shots if shot.token_s and shot.is_whole]

    refused_at_once: A refused request got no first token. It has no TTFT, and certainly not 0.
    - [shot.token_s[0] - shot.due_s for shot in shots if shot.token_s]
    + [shot.token_s[0] - shot.due_s if shot.token_s else 0.0 for shot in shots]

    refused_by_their_end: A refused request got no first token, so it has no TTFT.
    - [shot.token_s[0] - shot.due_s for shot in shots if shot.token_s]
    + [(shot.token_s or [shot.end_s])[0] - shot.due_s for shot in shots]

    mean_for_tail: You report a mean, which hides the tail.
    - np.percentile(ttft_s, 99)
    + np.mean(ttft_s)

    maximum_for_tail: You report the maximum, not the 99th percentile.
    - np.percentile(ttft_s, 99)
    + max(ttft_s)

    rounded_down: Between two values the percentile is on the straight line; you take the lower one.
    - np.percentile(ttft_s, 99)
    + np.percentile(ttft_s, 99, method="lower")

    a_value_that_came: Between two values the percentile is on the straight line; you take the upper
        one.
    - np.percentile(ttft_s, 99)
    + np.percentile(ttft_s, 99, method="higher")

    exclusive_quantile: statistics.quantiles goes beyond the largest value by default:
        method="inclusive".
    - return Report(
    + from statistics import quantiles
    +
    + return Report(
    - float(np.percentile(ttft_s, 99))
    + quantiles(ttft_s, n=100)[98] if len(ttft_s) > 1 else ttft_s[0]

    percent_as_share: np.percentile takes percents: 99, not 0.99.
    - np.percentile(ttft_s, 99)
    + np.percentile(ttft_s, 0.99)

    mean_of_percentiles: A mean of percentiles is no percentile. Take it of all values together.
    - np.percentile(ttft_s, 99)
    + np.mean([np.percentile(half, 99) for half in np.array_split(ttft_s, 2) if len(half)])

    unsorted: A percentile is of the sorted values, not of those in the order of arrival.
    - np.percentile(ttft_s, 99)
    + ttft_s[int(0.99 * (len(ttft_s) - 1))]

    broken_answers_are_good: An answer that broke off met no objective.
    - shot.is_whole
    - and bool(shot.token_s)
    + bool(shot.token_s)

    goodput_by_the_end_alone: Goodput is of requests that met both limits, that of the first token
        as well.
    - and shot.token_s[0] - shot.due_s <= ttft_slo_s

    goodput_by_the_first_token_alone: Goodput is of requests that met both limits, that of the end
        as well.
    - and shot.end_s - shot.due_s <= e2el_slo_s

    refused_at_once_is_good: A refused request ends early, and its answer never came: it met no
        objective.
    - shot.is_whole
    - and bool(shot.token_s)
    - and shot.token_s[0] - shot.due_s <= ttft_slo_s
    + (not shot.token_s or shot.is_whole and shot.token_s[0] - shot.due_s <= ttft_slo_s)

    goodput_in_tokens: Goodput is requests a second; you count their tokens.
    - shot.is_whole
    - and bool(shot.token_s)
    + len(shot.token_s)
    + for shot in shots
    + if shot.is_whole
    + and shot.token_s
    - <= e2el_slo_s
    - for shot in shots
    + <= e2el_slo_s

    end_counted_from_the_sending: The end-to-end latency counts from due_s as well, like every other
        latency.
    - and shot.end_s - shot.due_s
    + and shot.end_s - shot.sent_s

    end_is_the_last_token: A request ends at end_s, when the client knows that nothing more comes.
    - and shot.end_s - shot.due_s
    + and shot.token_s[-1] - shot.due_s

    goodput_as_a_share: Goodput is requests a second, not a share.
    - good / duration_s
    + good / len(shots)

    below_the_limit: Exactly on the limit is within it: <=.
    - <= ttft_slo_s
    + < ttft_slo_s

    in_system_until_the_first_token: A request is in the system until its end, not until its first
        token.
    - stays_s = sum(shot.end_s - shot.due_s for shot in shots)
    + stays_s = sum(ttft_s)

    in_system_of_those_with_tokens: A refused request was there as well, until its end.
    - stays_s = sum(shot.end_s - shot.due_s for shot in shots)
    + stays_s = sum(shot.end_s - shot.due_s for shot in shots if shot.token_s)

    in_system_from_the_sending: A request is there from when it was due, also while the client keeps
        it back.
    - stays_s = sum(shot.end_s - shot.due_s for shot in shots)
    + stays_s = sum(shot.end_s - shot.sent_s for shot in shots)

    little_without_the_rate: L = λ · W: you have W, the mean stay. It wants the rate of arrivals
        beside it.
    - stays_s / duration_s
    + stays_s / len(shots)

    most_at_once: in_system is how many are there on average, not at the busiest moment.
    - stays_s / duration_s
    + float(max(sum(x.due_s <= shot.due_s < x.end_s for x in shots) for shot in shots))

    refused_meet_the_limit: Who got no first token did not get it within ttft_slo_s.
    - and bool(shot.token_s)
    - and shot.token_s[0] - shot.due_s <= ttft_slo_s
    + and (not shot.token_s or shot.token_s[0] - shot.due_s <= ttft_slo_s)

    goodput_is_a_count: Goodput is requests a second: divide by the duration.
    - good / duration_s
    + float(good)

    the_worst_ttft: The 99th percentile lies below the largest value.
    - float(np.percentile(ttft_s, 99))
    + max(ttft_s)

    at_least_a_second: A load may last less than a second: divide by how long it was.
    - return Report(
    + duration_s = max(1.0, duration_s)
    + return Report(
    """,
)


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

answers.slips(
    "22.2",
    """
    whole_units: A request may begin between two units of time, and it then ends between two.
    - now += wishes[index].tokens
    + now = int(now) + wishes[index].tokens

    someone_is_taken_for_granted: There may be no request at all: then the order is empty.
    - v = now = largest_finish = 0.0
    + v = largest_finish = 0.0
    + now = wishes[0].arrival

    first_come_first_served: That is the order of arrival: one user's hundred requests come before
        all others.
    - waiting.sort()
    + waiting.sort(key=lambda request: request[1])

    shortest_first: Shortest first is not fair: a user who asks for long answers is never served.
    - waiting.sort()
    + waiting.sort(key=lambda request: wishes[request[1]].tokens)

    smallest_finish: Next is the smallest start. By the finish, short requests pass long ones.
    - waiting.sort()
    + waiting.sort(key=lambda request: request[2])

    largest_start: The smallest start is next, not the largest.
    - waiting.sort()
    + waiting.sort(key=lambda request: -request[0])

    turns_by_requests: A request counts its tokens, not 1: a user with long requests gets more of
        the engine.
    - start + tokens / weights
    + start + 1 / weights

    weights_upside_down: A user with weight 2 is to get more: the tokens are divided by the weight.
    - tokens / weights.get(user, 1.0)
    + tokens * weights.get(user, 1.0)

    without_weights: You do not use the weights.
    - tokens / weights.get(user, 1.0)
    + tokens

    claims_saved_up: A newcomer's start is at least v. From 0, it has a claim on all that others got
        before.
    - max(v, finish_of_user.get(user, 0.0))
    + finish_of_user.get(user, 0.0)

    own_past_forgotten: The start is at least the finish of the same user's request before it.
    - max(v, finish_of_user.get(user, 0.0))
    + v

    smaller_of_both: max(v, finish), not min: neither the past of others nor one's own is claimed.
    - max(v, finish_of_user.get(user, 0.0))
    + min(v, finish_of_user.get(user, 0.0))

    seconds_for_virtual_time: v is the start of the request that began last, not the time of the
        clock.
    - max(v, finish_of_user.get(user, 0.0))
    + max(now, finish_of_user.get(user, 0.0))

    v_stands_still: v moves on when a request begins: it becomes its start.
    - v, index, finish = waiting
    + _, index, finish = waiting

    v_becomes_the_finish: When a request begins, v becomes its start, not its finish.
    - v, index, finish = waiting.pop(0)
    + _, index, finish = waiting.pop(0)
    + v = finish

    idle_forgotten: When none waits, v becomes the largest finish: so no user pays for its time
        alone.
    - v, now = max(v, largest_finish), wishes[coming].arrival
    + now = wishes[coming].arrival

    idle_begins_anew_at_0: v never falls. If it goes back to 0, users that were served before pay
        for it.
    - v, now = max(v, largest_finish), wishes[coming].arrival
    + v, now = 0.0, wishes[coming].arrival

    idle_takes_the_last_finish: When none waits, v becomes the largest finish of all; the last one
        served may have less.
    - largest_finish = max(largest_finish, finish)
    + largest_finish = finish

    idle_takes_the_clock: v is in tokens over weights, the clock is not: v becomes the largest
        finish.
    - v, now = max(v, largest_finish), wishes[coming].arrival
    + v = now = wishes[coming].arrival

    line_of_those_served: A request's line follows its user's request before it, also if that one
        still waits.
    - finish_of_user[user] = start + tokens / weights.get(user, 1.0)
    - waiting.append((start, coming, finish_of_user[user]))
    + waiting.append((start, coming, start + tokens / weights.get(user, 1.0)))
    - largest_finish = max(largest_finish, finish)
    + largest_finish = max(largest_finish, finish)
    + finish_of_user[wishes[index].user] = finish

    line_of_those_who_wait: You forget a user's finish as soon as nothing of theirs waits: they got
        those tokens.
    - largest_finish = max(largest_finish, finish)
    + largest_finish = max(largest_finish, finish)
    + still_wait = {wishes[other].user for _, other, _ in waiting}
    + finish_of_user = {user: f for user, f in finish_of_user.items() if user in still_wait}

    clock_by_weights: The clock moves on by the tokens: a weight makes no tokens faster.
    - now += wishes[index].tokens
    + now += wishes[index].tokens / weights.get(wishes[index].user, 1.0)

    last_of_equals: Among equals the one that came first is next.
    - waiting.sort()
    + waiting.sort(key=lambda request: (request[0], -request[1]))

    by_name: Among equals the one that came first is next, not by name.
    - waiting.sort()
    + waiting.sort(key=lambda request: (request[0], wishes[request[1]].user, request[1]))

    at_the_end_is_too_late: A request that comes when another one ends is waiting when the engine
        chooses.
    - coming < len(wishes) and wishes[coming].arrival <= now:
    + (
    +     coming < len(wishes)
    +     and wishes[coming].arrival <= now
    +     and (not waiting or wishes[coming].arrival < now)
    + ):

    idle_at_every_end: One that comes when another ends is waiting by then: the engine is not idle.
    - if not waiting and wishes[coming].arrival > now:
    -     v, now = max(v, largest_finish), wishes[coming].arrival
    + if not waiting:
    +     v, now = max(v, largest_finish), max(now, wishes[coming].arrival)

    whole_numbers_of_v: Virtual time is no whole number: tokens / weight, not tokens // weight.
    - tokens / weights.get(user, 1.0)
    + tokens // weights.get(user, 1.0)

    the_shorter_of_equals: Among equal starts the one that came first is next, not the shorter one.
    - waiting.sort()
    + waiting.sort(key=lambda entry: (entry[0], entry[2]))

    at_least_one_token: tokens / weight may be below 1, and it counts as it is.
    - tokens / weights.get(user, 1.0)
    + max(1.0, tokens / weights.get(user, 1.0))

    whole_units_of_time: Requests may come between two units of time: compare arrivals as they are.
    - while coming < len(wishes) and wishes[coming].arrival <= now:
    + while coming < len(wishes) and int(wishes[coming].arrival) <= now:
    """,
)


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


@answers.alternative("22.2")
def a_queue_for_each_user(wishes, weights):
    """A request gets its start when it is the first of its user: v has not passed it by then."""
    v = now = largest = 0.0
    finish, queues, coming, order = {}, {}, 0, []
    while len(order) < len(wishes):
        if not any(queues.values()) and wishes[coming].arrival > now:
            v, now = max(v, largest), wishes[coming].arrival
        while coming < len(wishes) and wishes[coming].arrival <= now:
            queues.setdefault(wishes[coming].user, []).append(coming)
            coming += 1
        heads = {queue[0]: user for user, queue in queues.items() if queue}
        v, index = min((max(v, finish.get(user, 0.0)), head) for head, user in heads.items())
        user = heads[index]
        queues[user].pop(0)
        finish[user] = v + wishes[index].tokens / weights.get(user, 1.0)
        largest = max(largest, finish[user])
        order.append(index)
        now += wishes[index].tokens
    return order


# ---------------------------------------------------------------- 22.3 the loop

answers.slips(
    "22.3",
    """
    waits_for_readers: The loop waits for room in an inbox: one reader who stops stops all.
    - put(inbox, (answer, finished))
    + await inbox.put((answer, finished))
    - asyncio.Queue(1)
    + asyncio.Queue(2)

    keeps_every_answer: An inbox without a limit keeps every answer of a slow reader. The newest
        says it all.
    - asyncio.Queue(1)
    + asyncio.Queue()

    keeps_the_oldest: When an inbox is full, the newest answer is to replace the old one, not to get
        lost.
    - if inbox.full():
    -     inbox.get_nowait()  # it was not read, and the newer one says all that it said
    - inbox.put_nowait(message)
    + if not inbox.full():
    +     inbox.put_nowait(message)

    only_the_last_one_replaces: Each newer answer replaces the one that was not read, not the last
        alone.
    - if inbox.full():
    -     inbox.get_nowait()  # it was not read, and the newer one says all that it said
    - inbox.put_nowait(message)
    + ends = isinstance(message, Exception) or message[1]
    + if inbox.full() and ends:
    +     inbox.get_nowait()
    + if not inbox.full():
    +     inbox.put_nowait(message)

    not_aborted: A reader has left and is still computed: abort the request when the stream is
        closed.
    - if self.inboxes.get(request_id) is inbox:
    -     del self.inboxes[request_id]
    -     self.engine.abort(request_id)
    + pass

    only_cancelled_ones: A stream that is closed gets GeneratorExit, not CancelledError: use
        finally.
    - finally:
    -     if self.inboxes.get(request_id) is inbox:
    -         del self.inboxes[request_id]
    -         self.engine.abort(request_id)
    + except asyncio.CancelledError:
    +     if self.inboxes.get(request_id) is inbox:
    +         del self.inboxes[request_id]
    +         self.engine.abort(request_id)
    +     raise

    only_closed_ones: A task that is cancelled gets CancelledError, not GeneratorExit: use finally.
    - finally:
    -     if self.inboxes.get(request_id) is inbox:
    -         del self.inboxes[request_id]
    -         self.engine.abort(request_id)
    + except GeneratorExit:
    +     if self.inboxes.get(request_id) is inbox:
    +         del self.inboxes[request_id]
    +         self.engine.abort(request_id)
    +     raise

    forgotten_but_not_aborted: The reader is forgotten, but the engine still computes for it: abort
        the request.
    - self.engine.abort(request_id)

    aborted_but_still_listed: A reader that left is still listed, so the loop steps an engine that
        has nothing to do.
    - del self.inboxes[request_id]
    - self.engine.abort(request_id)
    + self.engine.abort(request_id)

    finished_ones_aborted: A request that has ended must not be aborted: its id may be another
        reader's by then.
    - if self.inboxes.get(request_id) is inbox:
    -     del self.inboxes[request_id]
    -     self.engine.abort(request_id)
    + if self.inboxes.get(request_id) is inbox:
    +     del self.inboxes[request_id]
    + self.engine.abort(request_id)

    aborts_a_namesake: The request_id may be another reader's by now: is the inbox under it still
        this reader's?
    - if self.inboxes.get(request_id) is inbox:
    + if request_id in self.inboxes:

    who_left_is_looked_up: A reader may leave while a step runs. Its answer comes back, and has no
        inbox any more.
    - inbox = self.inboxes.get(request_id)
    - if inbox is None:
    -     continue
    + inbox = self.inboxes[request_id]

    cancellation_ends_here: Raise CancelledError again: without it the cancelled task sees an answer
        that has ended.
    - finally:
    -     if self.inboxes.get
    + except asyncio.CancelledError:
    +     pass
    + finally:
    +     if self.inboxes.get

    listed_before_it_is_taken: The inbox is made before the engine has taken the request: a refusal
        leaves it there.
    - self.engine.add(request_id)
    - inbox = self.inboxes[request_id] = asyncio.Queue(1)
    + inbox = self.inboxes[request_id] = asyncio.Queue(1)
    + self.engine.add(request_id)

    newcomers_in_a_drain: While it drains, stream must raise Closed, or a drain need never end.
    - if self.is_draining or self.failure is not None:
    + if self.failure is not None:

    newcomers_of_a_dead_engine: After the engine has died, no answer comes: raise Closed.
    - if self.is_draining or self.failure is not None:
    + if self.is_draining:

    death_is_not_told: When a step raises, all readers wait for ever: give them the exception.
    - for inbox in self.inboxes.values():
    -     put(inbox, error)

    death_is_told_to_one: When a step raises, every reader is to get the exception.
    - for inbox in self.inboxes.values():
    + for inbox in [*self.inboxes.values()][:1]:

    death_is_told_if_there_is_room: A slow reader's inbox is full, and it waits for ever: the
        exception replaces the answer.
    - put(inbox, error)
    + if not inbox.full():
    +     inbox.put_nowait(error)

    death_waits_for_room: When a step raises, run waits for room in an inbox: a slow reader stops
        the others.
    - for inbox in self.inboxes.values():
    -     put(inbox, error)
    + for inbox in [*self.inboxes.values()]:
    +     await inbox.put(error)

    death_finds_no_room: A slow reader's inbox is full, and put_nowait raises: make room first.
    - put(inbox, error)
    + inbox.put_nowait(error)

    death_by_another_exception: Readers are to get the exception of the step itself, which says what
        happened.
    - put(inbox, error)
    + put(inbox, RuntimeError("the engine has died"))

    death_ends_the_run: run() returns when the engine has died: the readers get the exception.
    - self.inboxes.clear()
    + self.inboxes.clear()
    + raise

    death_looks_like_an_end: A stream that just ends looks like a whole answer: raise the exception
        in it.
    - put(inbox, error)
    + put(inbox, None)
    - if isinstance(message, Exception):
    -     raise message
    + if message is None:
    +     return

    drain_sleeps: A drain must wake the loop: it may be waiting for work that will never come.
    - self.is_draining = True
    - self.has_work.set()
    + self.is_draining = True

    drain_returns_at_once: drain() returns before the answers have been computed.
    - await self.has_ended.wait()

    drain_aborts: Requests that are there get their whole answers: a drain aborts no request.
    - self.is_draining = True
    + self.is_draining = True
    + for request_id in [*self.inboxes]:
    +     self.engine.abort(request_id)
    +     inbox = self.inboxes.pop(request_id)
    +     if inbox.empty():
    +         inbox.put_nowait(Closed("this server ends"))

    drain_of_a_dead_engine: When the engine has died, a drain is over: has_ended must be set in any
        case.
    - finally:
    -     self.has_ended.set()
    + else:
    +     self.has_ended.set()

    drain_is_used_up: A drain that has ended stays ended: another caller must not wait for it for
        ever.
    - await self.has_ended.wait()
    + await self.has_ended.wait()
    + self.has_ended.clear()

    drain_waits_for_readers: A drain waits for answers to be computed, not for a reader who has
        stopped reading.
    - self.is_draining = False
    + self.is_draining = False
    + self.num_readers = 0
    - while self.inboxes or not self.is_draining:
    + while self.inboxes or self.num_readers or not self.is_draining:
    - inbox = self.inboxes[request_id] = asyncio.Queue(1)
    + inbox = self.inboxes[request_id] = asyncio.Queue(1)
    + self.num_readers += 1
    - finally:
    -     if self.inboxes.get
    + finally:
    +     self.num_readers -= 1
    +     self.has_work.set()
    +     if self.inboxes.get

    polls: The loop turns round and round while no request is there: let it wait for has_work.
    - self.has_work.clear()
    - await self.has_work.wait()
    + await asyncio.sleep(0)

    ends_when_idle: The loop ends when no request is there: the next reader waits for ever.
    - self.has_work.clear()
    + if self.has_work.is_set():
    +     break

    yields_the_exception: `raise` the exception in the reader's stream: yielded, it is one more
        answer.
    - raise message
    + yield message
    + return

    another_class_when_closed: A newcomer gets Closed.
    - raise Closed("this server takes no new request")
    + raise ValueError("this server takes no new request")

    closed_for_those_who_wait: Closed is for newcomers. Who waits gets the exception of the step.
    - put(inbox, error)
    + put(inbox, Closed("the engine died"))

    closed_once: Every newcomer gets Closed when the engine has died, not only the first one.
    - if self.is_draining or self.failure is not None:
    + failure, self.failure = self.failure, None
    + if self.is_draining or failure is not None:

    stays_with_an_answer_unread: A reader who leaves is aborted, whatever is left in the inbox.
    - if self.inboxes.get(request_id) is inbox:
    + if self.inboxes.get(request_id) is inbox and inbox.empty():

    aborted_after_the_first_answer: A reader may leave before the first answer, too: wait for it
        within the `try`.
    - try:
    -     finished = False
    -     while not finished:
    -         message = await inbox.get()
    + message = await inbox.get()
    + try:
    +     finished, first = False, True
    +     while not finished:
    +         message = message if first else await inbox.get()
    +         first = False

    a_drain_hides_the_failure: The engine may die during a drain, too: readers get the exception.
    - self.failure = error
    + if self.is_draining:
    +     return
    + self.failure = error

    the_failure_hides_an_answer: An answer that had ended before the engine died is its reader's,
        read or not.
    - message = await inbox.get()
    + message = await inbox.get()
    + if self.failure is not None:
    +     raise self.failure

    the_rest_of_the_step_is_lost: One request has no reader any more. Those after it in the step
        have.
    - if inbox is None:
    -     continue
    + if inbox is None:
    +     break
    """,
)


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
