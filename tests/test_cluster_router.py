"""The router and the two pools: whichever process dies, no request is lost or served twice."""

from dataclasses import dataclass

import numpy as np
import pytest

from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from reference.simulator import policies
from reference.simulator.cluster import Failure
from reference.simulator.policies import POLICIES, Policy, new_cluster, simulate
from reference.simulator.replica import Replica
from reference.simulator.routers import ROUTERS, LeastLoaded, PrefixAware, RoundRobin
from reference.simulator.traces import TracedRequest

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster_cases import TRACES, deployment, examples, how_many, trace_of

# ---------------------------------------------------------------- the router


@dataclass(frozen=True)
class Run:
    """What a watched cluster did: who got which request when, and the times of the tokens."""

    sent: list
    served: object


def watched_run(trace, policy, replicas, failures=(), num_blocks=60) -> Run:
    cluster = new_cluster(policy, deployment(num_blocks), replicas, trace, failures)
    sent = []
    for place in cluster.places:
        replica = cluster.replica(place)
        receive = replica.receive

        def receiving(sequence, at_s, place=place, replica=replica, receive=receive):
            assert replica.is_alive, "a request for a dead replica"
            assert sequence.row not in replica.here, "a request is here twice"
            sent.append((sequence.row, cluster.places.index(place), at_s, len(sequence.prompt)))
            receive(sequence, at_s)

        replica.receive = receiving
    done = []
    served = cluster.run(trace, done.append)
    assert sorted(done) == list(range(len(trace))), "lost, or done twice"
    for place in cluster.places:
        replica = cluster.replica(place)
        assert not replica.here and not replica.token_s
        load = cluster.pools[place.pool].loads[place.index]
        assert load == (0 if replica.is_alive else np.inf)
    return Run(sent, served)


FAILURES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=4)


def possible(failures, name: str) -> list[Failure]:
    """Failures that leave a replica in each pool: of 5 in one, or of 2 and 3."""
    chosen = {index: Failure(float(at_s), index) for at_s, index in failures}
    if name == "disaggregated":
        chosen.pop(0, None)
        chosen.pop(4, None)
    return list(chosen.values())[:4]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.sample(5)
def test_no_request_is_lost_and_none_is_served_twice(name, router, request):
    """Whichever process dies, every request gets its tokens, in order, and after it arrived."""

    @examples(how_many(request) // 4)
    @given(TRACES, FAILURES)
    def check(lines, failures):
        trace, failures = trace_of(lines), possible(failures, name)
        policy = Policy(name, router, max_num_seqs=3, max_num_batched_tokens=7)
        run = watched_run(trace, policy, 5, failures)
        served = run.served
        assert (served.counts == [request.output_tokens for request in trace]).all()
        assert (served.ttft_s > 0).all() and (served.gaps_s >= 0).all()
        died = {failure.replica: failure.at_s for failure in failures}
        assert all(
            at_s < died.get(index, np.inf) or at_s == died[index] for _, index, at_s, _ in run.sent
        )

    check()


class LosesOrphans(Replica):
    """Its requests die with it."""

    def die(self, at_s):
        super().die(at_s)
        return []


class HandsOverTwice(Replica):
    """One of its requests goes to two others."""

    def die(self, at_s):
        orphans = super().die(at_s)
        return orphans if not orphans else [*orphans, orphans[0]]


@pytest.mark.parametrize("slip", [LosesOrphans, HandsOverTwice])
def test_a_lost_or_doubled_request_is_found(slip, monkeypatch):
    monkeypatch.setattr("reference.simulator.policies.Replica", slip)
    trace = [TracedRequest(0.0, 8, 50)] * 6
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        watched_run(trace, Policy(), 3, [Failure(12.0, 1)])


def test_requests_of_a_dead_replica_go_elsewhere_with_their_tokens():
    trace = [TracedRequest(0.0, 8, 50)] * 4
    run = watched_run(trace, Policy(router="round-robin"), 2, [Failure(20.0, 1)])
    again = [(row, index, prompt) for row, index, at_s, prompt in run.sent if at_s == 20.0]
    assert [(row, index) for row, index, _ in again] == [(1, 0), (3, 0)]
    assert all(prompt > 8 for *_, prompt in again), "what was generated is part of the prompt"
    untouched = run.served.token_s[:50]
    assert (untouched[untouched < 20] == np.unique(untouched[untouched < 20])).all()


def test_what_routers_choose():
    line = TracedRequest(0.0, 8, 8)
    chat = line._replace(prefix="chat")
    around, least, aware = RoundRobin(), LeastLoaded(), PrefixAware(slack=2)
    loads = np.array([3.0, np.inf, 1.0])
    assert [around.choose(line, loads) for _ in range(4)] == [0, 2, 0, 2]
    assert least.choose(line, loads) == 2
    assert aware.choose(chat, loads) == 2
    loads[:] = 0, 0, 2
    assert aware.choose(chat, loads) == 2, "its cache is worth a wait of two"
    loads[2] = 3
    assert aware.choose(chat, loads) == 0
    loads[0] = np.inf
    assert aware.choose(chat, loads) == 1, "its replica is dead"


def test_a_prefix_aware_router_computes_less():
    """Eight prefixes, each longer than what is new: on its replica a prompt begins after it."""
    lines = [(6.0, 24, 4, f"{row % 8}", 20) for row in range(64)]
    trace = trace_of(lines)
    loads = {}
    for router in ("round-robin", "prefix-aware"):
        policy = Policy(router=router, max_num_seqs=3, max_num_batched_tokens=8)
        loads[router] = simulate(trace, deployment(60), policy, replicas=3)
    assert loads["prefix-aware"].ttft_s.mean() < 0.8 * loads["round-robin"].ttft_s.mean()


def recomputed() -> int:
    """Prompt tokens that the second pool computes although no request was preempted."""
    trace = [TracedRequest(0.0, 28, 12)] * 4
    policy = Policy("disaggregated", max_num_seqs=4)
    cluster = new_cluster(policy, deployment(20), 2, trace)
    (replica,) = cluster.pools[1].replicas
    replica.history = []
    cluster.run(trace)
    return sum(count - 1 for _, chunks in replica.history for _, count in chunks)


def test_who_waits_for_blocks_keeps_what_was_computed(monkeypatch):
    """Blocks for two of four: the others wait, and their K and V with them."""
    assert recomputed() == 0

    class Forgets(policies.ReceivingScheduler):
        take_blocks = ChunkedScheduler.take_blocks

    monkeypatch.setattr(policies, "ReceivingScheduler", Forgets)
    assert recomputed() > 0
