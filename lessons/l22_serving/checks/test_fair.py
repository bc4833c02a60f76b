"""Proves the order of users: the bound on their shares, that no user starves, saves up or is
punished, and that what was not used is given back.
"""

import random

import pytest

from lessons.l15_chunked_prefill.lab.virtual import VirtualModel
from lessons.l15_chunked_prefill.preemption import by_arrival
from lessons.l22_serving.engine import new_engine
from lessons.l22_serving.fair import IDLE_USERS_KEPT, FairQueue, by_fair_share
from lessons.l22_serving.lab import testing
from lessons.l22_serving.lab.simulation import Call, of_user, simulate
from lessons.l22_serving.load import percentile


def first_of(waiting: list) -> object:
    """Who is next: the smallest start, among equals the first who came."""
    return min(waiting, key=lambda ticket: (ticket.start, ticket.number))


class Line:
    """A queue and one place: requests begin one after the other, each when the last has left."""

    def __init__(self, kind=FairQueue, weights=None):
        self.fair = kind(weights)
        self.waiting, self.count = [], 0

    def arrive(self, user, cost):
        ticket = self.fair.arrive(user, cost)
        ticket.number = self.count
        self.count += 1
        self.waiting.append(ticket)
        return ticket

    def serve(self, share_used=1.0):
        """Begin and end the next request. Returns (user, tokens that it took)."""
        ticket = first_of(self.waiting)
        self.waiting.remove(ticket)
        self.fair.begin(ticket)
        used = max(1, round(ticket.cost * share_used))
        self.fair.leave(ticket, used)
        return ticket.user, used


@pytest.mark.parametrize("weights", [{}, {"b": 3.0}])
def test_who_always_wants_more_gets_a_share(seed, weights):
    check_bound(FairQueue, weights)


def check_bound(kind, weights=None, rounds=300):
    """Users who always want more get the same, but for a largest request or two of each: from every
    moment on, at every later one.
    """
    weights = weights or {}
    line, most = Line(kind, weights), {"a": 10, "b": 100, "c": random.randint(1, 500)}
    used_share = {user: random.uniform(0.05, 1.0) for user in most}
    got, history = dict.fromkeys(most, 0.0), [dict.fromkeys(most, 0.0)]
    for _ in range(rounds):
        for user, largest in most.items():
            while sum(ticket.user == user for ticket in line.waiting) < 4:
                line.arrive(user, random.randint(1, largest))
        user, used = line.serve(used_share[first_of(line.waiting).user])
        got[user] += used / weights.get(user, 1)
        history.append(dict(got))
    lag = {user: largest / weights.get(user, 1) for user, largest in most.items()}
    for x, y in ("ab", "bc", "ac"):
        ahead = [after[x] - after[y] for after in history]
        assert max(ahead) - min(ahead) <= lag[x] + lag[y], (x, y)
    return got


def check_latecomer(kind):
    """A user who comes late is next but one, at most, and no more than next: he has no claim to
    what was served before.
    """
    line = Line(kind)
    for _ in range(50):
        line.arrive("early", 10)
    for _ in range(20):
        line.serve()
    for _ in range(10):
        line.arrive("late", 10)
    order = [line.serve()[0] for _ in range(20)]
    assert order.count("late") == 10 and "late" in order[:2]
    assert all(order[i : i + 4].count("late") in (1, 2, 3) for i in range(16)), order


def check_no_punishment(kind):
    """Who had the engine for himself pays nothing for it when another one comes."""
    line = Line(kind)
    for _ in range(50):
        line.arrive("alone", 10)
        line.serve()
    for _ in range(6):
        line.arrive("alone", 10)
        line.arrive("new", 10)
    order = [line.serve()[0] for _ in range(12)]
    assert all(order[i : i + 4].count("alone") == 2 for i in range(0, 12, 4)), order


def check_tokens_not_requests(kind):
    """One user's requests are ten times as long, so she gets a tenth as many."""
    line = Line(kind)
    for _ in range(60):
        line.arrive("long", 100)
        line.arrive("short", 10)
    order = [line.serve()[0] for _ in range(44)]
    assert 3 <= order.count("long") <= 5


def check_gives_back(kind):
    """One user's answers end after a tenth of what they may take, so he gets ten times as many."""
    line, order = Line(kind), []
    for _ in range(60):
        line.arrive("frugal", 100)
        line.arrive("spender", 100)
    for _ in range(44):
        is_frugal = first_of(line.waiting).user == "frugal"
        order.append(line.serve(0.1 if is_frugal else 1.0)[0])
    assert 3 <= order.count("spender") <= 5


def check_memory(kind):
    """A stranger a request, and only those who are here are remembered."""
    line = Line(kind)
    for stranger in range(20 * IDLE_USERS_KEPT):
        line.arrive(f"user {stranger}", random.randint(1, 100))
        line.serve()
    assert len(line.fair.lines) <= 4 * IDLE_USERS_KEPT


def check_strangers(kind):
    """A user with many requests has his turn, although new users keep coming, each of them once."""
    line = Line(kind)
    for _ in range(40):
        line.arrive("greedy", 50)
    for stranger in range(3):
        line.arrive(f"user {stranger}", 50)
    for stranger in range(3, 400):
        while line.serve()[0] == "greedy":
            pass
        line.arrive(f"user {stranger}", 50)
    assert sum(ticket.user == "greedy" for ticket in line.waiting) < 10


CHECKS = (
    check_bound,
    check_latecomer,
    check_no_punishment,
    check_tokens_not_requests,
    check_gives_back,
    check_strangers,
    check_memory,
)


@pytest.mark.parametrize("check", CHECKS)
def test_the_order_of_users(check, seed):
    check(FairQueue)


@pytest.mark.parametrize("slip", testing.FAIR_SLIPS)
def test_slips_are_found(slip, seed):
    found = 0
    for check in CHECKS:
        try:
            check(slip)
        except AssertionError:
            found += 1
    assert found, f"no check noticed: {slip.__doc__}"


def test_what_was_not_used_is_given_back_to_who_waits():
    line = Line()
    first, second = line.arrive("a", 1000), line.arrive("a", 1000)
    line.arrive("b", 10), line.arrive("b", 10)
    assert (first.start, second.start) == (0, 1000)
    assert line.serve(0.01) == ("a", 10)
    assert second.start == 10
    assert [line.serve()[0] for _ in range(3)] == ["b", "a", "b"]


def test_a_cancelled_request_costs_nothing():
    fair = FairQueue()
    tickets = [fair.arrive("a", 100) for _ in range(3)]
    fair.leave(tickets[1], used=0)
    assert [ticket.start for ticket in (tickets[0], tickets[2])] == [0, 100]
    fair.begin(tickets[2])
    fair.leave(tickets[0], used=7)
    assert tickets[2].start == 100, "the number of one that runs has changed"


def test_a_line_goes_on_where_its_last_request_ended():
    """Not where the user's first one began, before it was away for long."""
    fair = FairQueue()
    for ticket in (fair.arrive("a", 10), fair.arrive("b", 1000)):
        fair.begin(ticket)
        fair.leave(ticket, ticket.cost)
    fair.arrive("b", 10)
    second = fair.arrive("a", 10)
    fair.begin(second)
    began = second.start
    fair.leave(second, 10)
    assert fair.arrive("a", 10).start == began + 10
    assert fair.now == began + 5, "two are here, so each has got half of what was done"


def test_a_newcomer_among_many_is_next():
    line = Line()
    for _ in range(20):
        for user in "abc":
            line.arrive(user, 10)
    for _ in range(30):
        line.serve()
    line.arrive("new", 10)
    assert "new" in [line.serve()[0] for _ in range(4)]


def test_an_abort_brings_its_users_next_one_forward():
    engine = new_engine(VirtualModel, 20, by_fair_share, max_num_seqs=1)
    for name, tokens in (("a1", 40), ("a2", 40), ("b1", 10), ("b2", 10)):
        engine.add_request(name, [1, 2], tokens, name[0])
    engine.abort_request("a1")
    assert [s.request_id for s in engine.scheduler.waiting] == ["a2", "b1", "b2"]


def test_wrong_weights_are_refused():
    with pytest.raises(ValueError, match=r"weights\['a'\]: got 0; accepted: a positive"):
        FairQueue({"a": 0})


# ---------------------------------------------------------------- in an engine


@pytest.mark.parametrize("order", [by_fair_share, by_arrival])
def test_random_histories_end_and_leak_nothing(order, seed):
    """Users come and go, blocks are few, requests are preempted: each still gets the tokens that
    he gets alone.
    """
    engine = new_engine(VirtualModel, 10, order, max_num_seqs=4, max_num_batched_tokens=16)
    wanted, answers, step = {}, {}, 0
    while step < 60 or engine.has_unfinished_requests:
        if step < 60 and random.random() < 0.6:
            prompt = random.choices(range(90), k=random.randint(1, 30))
            limit, name = random.randint(1, 40), str(step)
            wanted[name] = limit if random.random() < 0.5 else random.randint(1, limit)
            engine.add_request(name, prompt, limit, random.choice("abc"), wanted[name])
        if random.random() < 0.15 and engine.sequences:
            gone = random.choice(list(engine.sequences))
            engine.abort_request(gone)
            del wanted[gone]
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = output.tokens
        step += 1
        assert step < 5000, "a user starves"
    assert {name: len(tokens) for name, tokens in answers.items()} == wanted
    blocks = engine.scheduler.blocks
    assert blocks.num_free == blocks.num_blocks and not blocks.tables and not engine.sequences
    assert not any(line.tickets for line in engine.fair.lines.values())


def test_a_newcomer_starts_where_the_engine_stands():
    """Four of the first user's requests run, each laid out with 16 tokens: they start at 0, 16, 32
    and 48, so the engine is at 48.
    """
    engine = new_engine(VirtualModel, 20, by_fair_share, max_num_seqs=4)
    for at in range(8):
        engine.add_request(f"early {at}", [1] * 8, 8, "early")
    engine.step()
    for at in range(2):
        engine.add_request(f"late {at}", [1] * 8, 8, "late")
    starts = {name: sequence.ticket.start for name, sequence in engine.sequences.items()}
    assert (starts["late 0"], starts["late 1"], starts["early 4"]) == (48, 64, 64)
    waiting = [sequence.request_id for sequence in engine.scheduler.waiting]
    assert waiting[:3] == ["late 0", "early 4", "late 1"]


def test_one_user_of_a_hundred_requests_does_not_stop_another():
    many = [Call(0.0, 256, 40, "greedy")] * 100
    one = [Call(0.2 * i, 256, 40, "modest") for i in range(1, 6)]
    calls = sorted(many + one, key=lambda call: call.arrival_s)
    worst = {}
    for order in (by_arrival, by_fair_share):
        history, _ = simulate(calls, order=order, max_num_seqs=8)
        assert not any(served.why_not for served in history)
        worst[order] = percentile([one.ttft_s for one in of_user(history, "modest")], 100)
        # nothing is made faster: the same work is only done in another order
        work = max(served.end_s for served in history)
        assert work == pytest.approx(worst.setdefault("work", work), rel=0.03)
    assert worst[by_fair_share] < worst[by_arrival] / 5
