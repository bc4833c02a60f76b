"""The simulator makes the decisions of the real schedulers, step for step, at the same times."""

import numpy as np
import pytest

from lessons.l12_paged_kv.blocks import BlockManager, BlockPool, OutOfBlocks
from lessons.l14_continuous_batching.clock import Arrival, CostExecutor, VirtualClock, serve
from lessons.l14_continuous_batching.naive import DynamicScheduler, StaticScheduler
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l15_chunked_prefill.lab.costs import StepCost as RooflineStep
from lessons.l15_chunked_prefill.lab.experiments import apart, mixed_trace
from lessons.l15_chunked_prefill.lab.virtual import new_request, run
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from reference.simulator import replica as replica_module
from reference.simulator.costs import Deployment, RooflineCost, new_deployment
from reference.simulator.policies import Policy, new_cluster, new_replica, simulate
from reference.simulator.replica import LazyPool, Replica
from reference.simulator.served import Slo
from reference.simulator.traces import TracedRequest, next_tokens

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.cluster_cases import BLOCKS, SIZE, TRACES, deployment, examples, how_many, trace_of

# ---------------------------------------------------------------- the lesson's own loop


def lesson_scheduler(name: str, blocks, clock, fit: int):
    """The scheduler of a policy, made by hand: 3 places, or as many rows as fit the memory; steps
    of 7 tokens where prompts are cut.
    """
    return {
        "static": lambda: StaticScheduler(min(3, fit)),
        "dynamic": lambda: DynamicScheduler(min(3, fit), 2.5, clock),
        "continuous": lambda: ContinuousScheduler(blocks, 3, 4096),
        "chunked": lambda: ChunkedScheduler(blocks, 3, 7),
    }[name]()


def by_the_lesson(name: str, trace, num_blocks: int):
    """(passes as (end, {row: tokens}), token times by row) of lesson 14's loop, a step at a
    time.
    """
    deployed, clock, steps = deployment(num_blocks), VirtualClock(), []
    caches = name == "chunked" and any(request.prefix for request in trace)
    replica = replica_like(deployed, caches)
    longest = max(request.prompt_tokens + request.output_tokens for request in trace)
    fit = num_blocks // deployed.blocks_for(longest)
    scheduler = lesson_scheduler(name, replica.blocks, clock, fit)
    execute = CostExecutor(clock, deployed)

    def watched(step):
        chunks = [(chunk.sequence.row, chunk.count) for chunk in step.chunks]
        tokens = execute(step)
        steps.append((clock.now_s, chunks))
        # the tokens that the simulator gives them, because a prefix cache sees them
        sampled = [chunk.sequence for chunk in step.chunks if chunk.is_sampled]
        return [next_tokens(s.tokens[-1], 1)[0] for s in sampled][: len(tokens)]

    arrivals = [
        Arrival(request.arrival_s, request.tokens(row), request.output_tokens)
        for row, request in enumerate(trace)
    ]
    return steps, serve(scheduler, arrivals, watched, clock).token_s


def replica_like(deployed: Deployment, caches: bool) -> Replica:
    """A replica whose blocks a scheduler made by hand may use."""
    return new_replica(lambda blocks, clock: ContinuousScheduler(blocks), deployed, caches)


def by_the_simulator(name: str, trace, num_blocks: int):
    policy = Policy(name, max_num_seqs=3, max_num_batched_tokens=7, max_wait_s=2.5)
    cluster = new_cluster(policy, deployment(num_blocks), 1, trace)
    (replica,) = cluster.pools[0].replicas
    replica.history = []
    served = cluster.run(trace)
    times = np.split(served.token_s, served.first[1:])
    return replica.history, {row: list(own) for row, own in enumerate(times)}


def check_against_the_lesson(name: str, lines, num_blocks: int) -> None:
    trace = trace_of(lines)
    want_steps, want_s = by_the_lesson(name, trace, num_blocks)
    steps, token_s = by_the_simulator(name, trace, num_blocks)
    assert steps == want_steps and token_s == want_s


@pytest.mark.parametrize("name", ["static", "dynamic", "continuous", "chunked"])
@pytest.mark.sample(2)
def test_a_replica_makes_the_steps_of_the_lesson(name, request):
    """The same chunks in the same order at the same times: with preemption, prefixes and arrivals
    in the middle of steps.
    """

    @examples(how_many(request))
    @given(TRACES, BLOCKS)
    def check(lines, num_blocks):
        check_against_the_lesson(name, lines, num_blocks)

    check()


class SkipsTooFar(Replica):
    """Forgets that blocks may run out while it skips."""

    def has_blocks(self, step, count):
        return True


class ForgetsArrivals(Replica):
    """Goes on with what it planned, whatever arrives."""

    def receive(self, sequence, at_s):
        planned = self.planned
        super().receive(sequence, at_s)
        self.planned = planned


class KeepsContext(Replica):
    """Plans every step at the cost of the first."""

    def begin(self, now_s):
        super().begin(now_s)
        if self.planned is not None:
            ends_s = self.planned.ends_s
            first = ends_s[0] - now_s
            self.planned = self.planned._replace(
                ends_s=now_s + first * np.arange(1, len(ends_s) + 1)
            )


@pytest.mark.parametrize("slip", [SkipsTooFar, ForgetsArrivals, KeepsContext])
def test_a_wrong_replica_is_found(slip, monkeypatch):
    monkeypatch.setattr("reference.simulator.policies.Replica", slip)

    @examples(300, database=None, derandomize=True, phases=[Phase.generate])
    @given(TRACES, BLOCKS)
    def check(lines, num_blocks):
        check_against_the_lesson("chunked", lines, num_blocks)

    with pytest.raises((AssertionError, OutOfBlocks, RuntimeError)):
        check()


def test_most_steps_are_planned_at_once(monkeypatch):
    """The proof above would say nothing of skipping if there was none."""
    begins = []
    begin = Replica.begin
    monkeypatch.setattr(Replica, "begin", lambda self, now: begins.append(now) or begin(self, now))
    trace = [TracedRequest(0.0, 8, 100), TracedRequest(0.0, 8, 300)]
    served = simulate(trace, deployment(200), Policy("chunked"))
    assert len(served.token_s) == 400 and len(begins) <= 5
    monkeypatch.setattr(replica_module, "MOST_ALIKE", 1)
    again = simulate(trace, deployment(200), Policy("chunked"))
    assert (again.token_s == served.token_s).all() and len(begins) >= 300


def test_two_pools_are_the_lessons():
    """Lesson 15's `apart` on one replica each, over the same link."""
    arrivals = mixed_trace(rate_per_s=10.0, count=60)
    trace = [TracedRequest(a.arrival_s, len(a.prompt), a.output_len) for a in arrivals]
    deployed = new_deployment("llama-3-8b", "h100")
    served = simulate(trace, deployed, Policy("disaggregated"), replicas=2)
    want = apart(arrivals, deployed.link_bytes_per_s)
    # The lesson packs prompts into steps of 65,536 tokens, here 4,296: so a few come earlier.
    assert np.median(served.ttft_s) == pytest.approx(want.ttft_s, rel=0.25)
    second = served.gaps_s[served.first]
    assert np.median(second) == pytest.approx(want.second_token_s, rel=0.15)


# ---------------------------------------------------------------- costs


def test_the_costs_are_the_lessons():
    trace = trace_of([(0, 20, 9, None, 1)] * 3, with_prefixes=False)
    scheduler = ChunkedScheduler(BlockManager(99, SIZE), 4, 30)
    predicted = RooflineStep()
    deployed = Deployment("test", RooflineCost(predicted), 99, block_size=SIZE)
    for row, request in enumerate(trace):
        scheduler.add(new_request(row, [1] * request.prompt_tokens, request.output_tokens))

    def same(step):
        assert deployed(step) == pytest.approx(predicted(step), rel=1e-12)

    while not scheduler.is_idle:
        run(scheduler, lambda step: [0] * len(step.chunks), same)


def test_more_gpus_a_replica_split_the_work():
    one, two = new_deployment("llama-3-8b", "h100", 1), new_deployment("llama-3-8b", "h100", 2)
    assert two.num_blocks > 2 * one.num_blocks, "the weights are kept once"
    assert new_deployment("llama-3-70b", "h100").gpus == 2
    assert new_deployment("llama-3-8b", "t4").gpus == 2


# ---------------------------------------------------------------- blocks, objectives


@examples(300)
@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=30))
def test_a_lazy_pool_gives_the_blocks_of_a_pool(num_blocks, actions):
    pools = BlockPool(num_blocks), LazyPool(num_blocks)
    held = []
    for takes, count in actions:
        if not takes and held:
            blocks = held.pop(count % len(held))
            for pool in pools:
                pool.release(blocks)
        elif count <= pools[0].num_free:
            taken = [pool.take(count) for pool in pools]
            assert taken[0] == taken[1]
            held.append(taken[0])
        else:
            with pytest.raises(OutOfBlocks):
                pools[1].take(count)
        assert pools[0].num_free == pools[1].num_free


def test_an_objective_forgives_one_slow_gap_in_a_hundred():
    trace = [TracedRequest(0.0, 8, 201), TracedRequest(0.0, 8, 3)]
    served = simulate(trace, deployment(200), Policy(max_num_seqs=2), replicas=2)
    first, rest = served.token_s[:201], served.token_s[201:]
    gaps = np.sort(np.diff(first))
    assert served.attained(Slo(99, gaps[-1])) == 1.0
    assert list(served.keeps(Slo(99, gaps[-3]))) == [True, np.diff(rest).max() <= gaps[-3]]
    assert not served.keeps(Slo(99, gaps[-4]))[0], "three of 200 gaps are slow"
    assert not served.keeps(Slo(float(first[0]) * 0.9, 99))[0]
    assert len(served.itl_s) == 202 and served.tokens_per_s == 204 / served.makespan_s
