"""Prompts and answers apart in the simulator: when K and V are there, by hand, against a loop over
layers, and by what is conserved.
"""

import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from lessons.l26_kv_transfer.costs import token_of
from reference.simulator import cluster as cluster_module
from reference.simulator.cluster import Cluster, Failure
from reference.simulator.costs import new_deployment
from reference.simulator.links import Port, Prompts, send
from reference.simulator.policies import Policy, new_cluster, simulate
from reference.simulator.traces import TracedRequest

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.cluster_cases import TRACES, deployment, examples, how_many, trace_of

# ---------------------------------------------------------------- a link


def sent(pieces: int, *seconds: float, source: Port | None = None, to: list[Port] | None = None):
    """Prompts of a step from 10 s to 14 s."""
    to = to or [Port() for _ in seconds]
    return send(source or Port(), Prompts(10.0, 14.0, seconds, to), pieces)


def test_a_link_by_hand():
    """Four layers are computed after 11, 12, 13 and 14 s. Two seconds of sending are half a second
    a layer, so only the last half is left at the end. Eight are two a layer: they fill the link
    from the first layer on.
    """
    assert sent(1, 2.0) == [16.0] and sent(1, 8.0) == [22.0]
    assert sent(4, 2.0) == [14.5] and sent(4, 8.0) == [19.0]
    # two prompts share each layer's turn
    assert sent(4, 1.0, 1.0) == [14.25, 14.5]
    assert sent(1, 1.0, 1.0) == [15.0, 16.0]
    busy = Port()
    busy.out_free_s = 20.0
    assert sent(4, 2.0, source=busy) == [22.0] and busy.out_free_s == 22.0


def test_a_receivers_link_is_shared_by_senders():
    receiver = Port()
    assert [sent(1, 2.0, to=[receiver]) for _ in range(3)] == [[16.0], [18.0], [20.0]]
    receiver = Port()
    first, second = (sent(4, 8.0, to=[receiver]) for _ in range(2))
    assert (first, second) == ([19.0], [27.0]), "16 s of receiving from 11 s on"


def by_layers(free_s: float, began_s: float, ended_s: float, seconds, pieces: int) -> list[float]:
    """A layer at a time, a prompt at a time."""
    now_s, there_s = free_s, []
    for layer in range(1, pieces + 1):
        now_s = max(now_s, began_s + (ended_s - began_s) * layer / pieces)
        there_s = [now_s + before / pieces for before in accumulate(seconds)]
        now_s = there_s[-1]
    return there_s


def test_a_link_against_a_loop_over_layers(seed):
    for _ in range(300):
        source = Port()
        source.out_free_s = free_s = random.choice((0.0, 10 * random.random()))
        began_s = 5 * random.random()
        ended_s = began_s + random.choice((0.1, 1.0, 5.0)) * random.random()
        seconds = [random.expovariate(random.choice((0.3, 3.0))) for _ in range(1 + seed % 3)]
        pieces = random.choice((1, 2, 32))
        want = by_layers(free_s, began_s, ended_s, seconds, pieces)
        step = Prompts(began_s, ended_s, seconds, [Port() for _ in seconds])
        found = send(source, step, pieces)
        assert found == pytest.approx(want, rel=1e-12)
        assert source.out_free_s == pytest.approx(want[-1], rel=1e-12)


# ---------------------------------------------------------------- two pools


SLOW = {"link_bytes_per_s": 1e9}  # one second a token


def test_apart_by_hand():
    """A prompt of 8 tokens in a step of 1 + 8 / 4 + 8 / 64 s, 8 s on the link, then steps of one
    token.
    """
    trace, policy = [TracedRequest(0.0, 8, 3)], Policy("disaggregated")
    prompt_s, token_s = 3.125, [1.25 + 9 / 64, 1.25 + 10 / 64]
    at_end = simulate(trace, replace(deployment(20), **SLOW), policy, 2)
    assert list(at_end.token_s) == [prompt_s, *(prompt_s + 8 + at for at in accumulate(token_s))]
    layers = replace(deployment(20), **SLOW, sent_in=4)
    # the link is the bound: it begins after the first of four layers, and sends for 8 s
    there_s = prompt_s / 4 + 8
    found = simulate(trace, layers, policy, 2)
    assert list(found.token_s) == [prompt_s, *(there_s + at for at in accumulate(token_s))]
    # two seconds of sending: the last layer is the bound, and leaves in half a second
    fast = replace(layers, link_bytes_per_s=4e9)
    there_s = prompt_s + 0.5
    found = simulate(trace, fast, policy, 2)
    assert list(found.token_s) == [prompt_s, *(there_s + at for at in accumulate(token_s))]


def test_one_link_is_shared_by_all_prompts():
    """Eight prompts at once to one receiver: the last comes after all of their bytes."""
    trace = [TracedRequest(0.0, 8, 2)] * 8
    for pieces in (1, 4):
        deployed = replace(deployment(60), **SLOW, sent_in=pieces)
        served = simulate(trace, deployed, Policy("disaggregated"), 2)
        assert served.makespan_s >= 8 * 8


def test_layer_by_layer_is_never_later(request):
    @examples(how_many(request) // 4)
    @given(TRACES)
    def check(lines):
        trace = trace_of([(1000, *line[1:]) for line in lines])
        ends = [
            simulate(trace, replace(deployment(60), **SLOW, sent_in=pieces), policy, 2).token_s
            for pieces in (1, 4)
        ]
        assert (ends[1] <= ends[0] + 1e-9).all()

    policy = Policy("disaggregated", max_num_seqs=3)
    check()


def check_laws(lines, failures, pieces: int) -> None:
    """Nothing is lost and nothing comes twice, whoever dies in the middle of a transfer; each
    journey's bytes crossed both ends of a link, no faster than it is.
    """
    trace = trace_of(lines)
    deployed = replace(deployment(60), **SLOW, sent_in=pieces)
    policy = Policy("disaggregated", max_num_seqs=3, prefill_replicas=2)
    cluster = new_cluster(policy, deployed, 5, trace, failures)
    done = []
    served = cluster.run(trace, done.append)
    assert sorted(done) == list(range(len(trace)))
    assert (served.counts == [request.output_tokens for request in trace]).all()
    assert (served.gaps_s >= 0).all() and not cluster.travelling
    ports = [[pool.ports[i] for i in range(len(pool.ports))] for pool in cluster.pools]
    out_s, in_s = (sum(getattr(port, name) for pool in ports for port in pool)
                   for name in ("sent_s", "received_s"))  # fmt: skip
    assert out_s == pytest.approx(in_s)
    travelled = sum(r.prompt_tokens for r in trace if r.output_tokens > 1)
    assert out_s >= 0
    if not failures:
        assert out_s == pytest.approx(travelled), "a second a token"
        for own in ports[0]:
            assert own.sent_s <= served.makespan_s, "a link was faster than it is"
        for row, request in enumerate(trace):
            if request.output_tokens > 1:
                began_s = served.arrival_s[row]
                second_s = served.token_s[served.first[row] + 1]
                assert second_s - began_s > request.prompt_tokens
    for pool in cluster.pools:
        alive = [replica.is_alive for replica in pool.replicas]
        assert list(pool.loads) == [0 if lives else np.inf for lives in alive]


FAILURES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3)), max_size=3)


def possible(failures) -> list[Failure]:
    """One of two that compute prompts, and at most two of three others."""
    chosen = {index: Failure(float(at_s), index) for at_s, index in failures}
    return list(chosen.values())


def test_laws_of_links(request):
    @examples(how_many(request))
    @given(TRACES, FAILURES, st.sampled_from([1, 4]))
    def check(lines, failures, pieces):
        check_laws(lines, possible(failures), pieces)

    check()


def test_who_dies_in_mid_transfer_costs_a_second_prompt():
    """The sender or the receiver dies at 5 s, when 2 of 8 s were sent. The prompt is computed again
    and sent again, over links that are free since then.
    """
    trace = [TracedRequest(0.0, 8, 3)]
    deployed = replace(deployment(20), **SLOW)
    policy = Policy("disaggregated", prefill_replicas=2)
    for dead in (0, 2):
        served = simulate(trace, deployed, policy, 4, [Failure(5.0, dead)])
        # 9 tokens now: the prompt and the first token, whose step gives the second
        second_s = 5 + 1 + 9 / 4 + 9 / 64
        assert served.token_s[1] == second_s
        assert served.token_s[2] == second_s + 9 + 1.25 + 10 / 64


def test_the_arithmetic_is_lesson_26s():
    one = new_deployment("llama-3-8b", "h100", link_bytes_per_s=12.5e9)
    token = token_of("llama-3-8b")
    assert one.token == token and one.transfer_s(1000) == 1000 * token.move_s(12.5e9)
    large = new_deployment("llama-3-70b", "h100", link_bytes_per_s=12.5e9, by_layer=True)
    assert large.gpus == 2 and large.sent_in == 80
    assert large.transfer_s(1) == token_of("llama-3-70b").kv_bytes / 25e9


# ---------------------------------------------------------------- wrong versions must fail


def no_queue(source, prompts, pieces):
    """Every prompt has a link of its own."""
    there_s = []
    for seconds, port in zip(prompts.seconds, prompts.to):
        there_s += send(Port(), prompts._replace(seconds=[seconds], to=[Port()]), pieces)
        source.sent_s += seconds
        port.received_s += seconds
    return there_s


def before_it_is_computed(source, prompts, pieces):
    """All layers leave when the first is computed."""
    early_s = prompts.began_s + (prompts.ended_s - prompts.began_s) / pieces
    return send(source, prompts._replace(ended_s=early_s), 1)


def forgets_travellers(self, failure, on_done, fail=Cluster.fail):
    """Who was on the way to a replica that dies is lost."""
    place = self.places[failure.replica]
    self.travelling = [one for one in self.travelling if place not in (one.source, one.target)]
    fail(self, failure, on_done)


def arrives_at_the_dead(self, failure, on_done, fail=Cluster.fail):
    """Journeys go on whoever dies."""
    travelling, self.travelling = self.travelling, []
    fail(self, failure, on_done)
    self.travelling = travelling


BUGS = {
    "no queue": (cluster_module, "send", no_queue),
    "layers leave too early": (cluster_module, "send", before_it_is_computed),
    "travellers are lost": (Cluster, "fail", forgets_travellers),
    "the dead receive": (Cluster, "fail", arrives_at_the_dead),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    monkeypatch.setattr(*BUGS[bug])

    @examples(300, database=None, derandomize=True, phases=[Phase.generate])
    @given(TRACES, FAILURES, st.sampled_from([1, 4]))
    def check(lines, failures, pieces):
        check_laws(lines, possible(failures), pieces)

    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        test_one_link_is_shared_by_all_prompts()
        test_apart_by_hand()
        check()
