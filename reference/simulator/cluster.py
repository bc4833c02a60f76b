"""Replicas behind a router, on one virtual clock. Read `Cluster.run`: the next event of all, what
it changes, and the steps that begin then.

A cluster has one pool of replicas, or two: the first computes prompts and the first token, then K
and V travel to the second, which generates the rest (lesson 15, prefill/decode disaggregation).
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lessons.l02_naive_attention.sampling import GREEDY
from lessons.l14_continuous_batching.naive import StaticScheduler
from lessons.l14_continuous_batching.sequence import Sequence
from reference.simulator.links import Port, Prompts, send
from reference.simulator.replica import NEVER, Replica
from reference.simulator.routers import Router
from reference.simulator.served import Served, summed_up
from reference.simulator.traces import Trace, TracedRequest, next_tokens


class Failure(NamedTuple):
    """Replica number `replica` dies, and does not come back. Prefill replicas count first."""

    at_s: float
    replica: int


@dataclass
class Job:
    """A request on its way. token_s: when its tokens came, in pieces."""

    row: int
    request: TracedRequest
    token_s: list[np.ndarray] = field(default_factory=list)
    generated: int = 0
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        return self.request.output_tokens - self.generated

    def sequence(self, limit: int) -> Sequence:
        """What a scheduler gets: the prompt and all that was generated, and `limit` tokens to
        go.
        """
        prompt = self.request.tokens(self.row)
        tokens = prompt + next_tokens(prompt[-1], self.generated)
        return Sequence(self.row, tokens, limit, GREEDY, frozenset())

    def collect(self, pieces: list[np.ndarray]) -> None:
        """Tokens that a replica has generated for it."""
        self.token_s += pieces
        self.generated += sum(map(len, pieces))


class Pool:
    """Replicas that do the same. tokens_each: how many tokens of an answer come from here; None:
    all that are left.
    """

    def __init__(self, replicas: list[Replica], router: Router, tokens_each: int | None = None):
        self.replicas = replicas
        self.router = router
        self.tokens_each = tokens_each
        self.loads = np.zeros(len(replicas))
        self.ports = [Port() for _ in replicas]

    def choose(self, job: Job) -> int:
        """The replica that gets a request, which counts it from now on."""
        index = self.router.choose(job.request, self.loads)
        self.loads[index] += 1
        return index

    def limit(self, job: Job) -> int:
        """How many tokens a request gets from this pool."""
        return min(job.remaining, self.tokens_each or job.remaining)


class Place(NamedTuple):
    """A replica by its pool and its index there."""

    pool: int
    index: int


class Journey(NamedTuple):
    """K and V on their way from one replica to another. seconds: what they need of a link."""

    there_s: float
    row: int
    source: Place
    target: Place
    seconds: float


class Cluster:
    """One or two pools, and all that is under way. A cluster serves one trace."""

    def __init__(self, pools: list[Pool], failures: list[Failure] | tuple = ()):
        self.pools = pools
        self.places = [Place(p, i) for p, pool in enumerate(pools) for i in range(len(pool.loads))]
        self.failures = sorted(checked_failures(pools, failures))
        self.jobs: dict[int, Job] = {}
        self.events: list[tuple[float, Place]] = []  # when a replica does something by itself
        self.travelling: list[Journey] = []  # a heap
        self.touched: dict[Place, None] = {}  # replicas to look at before time goes on

    def replica(self, place: Place) -> Replica:
        """The replica of that place."""
        return self.pools[place.pool].replicas[place.index]

    def run(self, trace: Trace, on_done: Callable[[int], None] = lambda row: None) -> Served:
        """Serve a trace. on_done(row): a request has its last token.

        Raises ValueError for a request that no replica can hold.
        """
        coming = 0
        while (now_s := self.next_event_s(trace, coming)) < NEVER:
            self.complete_steps(now_s, on_done)
            while self.failures and self.failures[0].at_s <= now_s:
                self.fail(self.failures.pop(0), on_done)
            while coming < len(trace) and trace[coming].arrival_s <= now_s:
                self.jobs[coming] = Job(coming, trace[coming])
                self.send(self.jobs[coming], now_s)
                coming += 1
            while self.travelling and self.travelling[0].there_s <= now_s:
                journey = heapq.heappop(self.travelling)
                self.hand_to(journey.target, self.jobs[journey.row], now_s)
            if coming == len(trace):
                self.close()
            self.begin_steps(now_s)
        unserved = [row for row, job in self.jobs.items() if job.remaining]
        if unserved:
            raise RuntimeError(f"nothing runs, and {len(unserved)} requests were not served")
        found = sum((self.replica(place).found for place in self.places), Counter())
        return summed_up(self.jobs.values(), len(self.places), dict(found))

    def next_event_s(self, trace: Trace, coming: int) -> float:
        """When the next thing happens; infinity: never."""
        times = [trace[coming].arrival_s if coming < len(trace) else NEVER]
        if self.events:
            times.append(self.events[0][0])
        if self.travelling:
            times.append(self.travelling[0].there_s)
        busy = coming < len(trace) or len(times) > 1
        if busy and self.failures:  # no failure is waited for when all is served
            times.append(self.failures[0].at_s)
        return min(times)

    # ------------------------------------------------------------ what happens

    def complete_steps(self, now_s: float, on_done: Callable[[int], None]) -> None:
        """Steps that end now. Who has all its tokens leaves; who needs another pool travels."""
        while self.events and self.events[0][0] <= now_s:
            at_s, place = heapq.heappop(self.events)
            replica = self.replica(place)
            if replica.next_event_s != at_s:
                continue  # because an arrival or a failure has changed its plan since
            self.touched[place] = None
            if replica.planned is None:
                continue
            began_s = replica.planned.began_s
            leaving = []
            for sequence in replica.complete():
                job = self.take_from(place, sequence)
                if job.remaining:
                    leaving.append((job, sequence))
                else:
                    on_done(job.row)
            if leaving:
                self.depart(place, leaving, began_s, now_s)

    def depart(
        self, source: Place, leaving: list[tuple[Job, Sequence]], began_s: float, now_s: float
    ) -> None:
        """Prompts of one step travel to the second pool, each to a replica chosen now."""
        deployment, pool = self.replica(source).deployment, self.pools[1]
        targets = [pool.choose(job) for job, _ in leaving]
        # the newest token has no K and V yet
        seconds = [deployment.transfer_s(len(sequence.tokens) - 1) for _, sequence in leaving]
        prompts = Prompts(began_s, now_s, seconds, [pool.ports[target] for target in targets])
        port = self.pools[source.pool].ports[source.index]
        there_s = send(port, prompts, deployment.sent_in)
        for (job, _), target, at_s, own_s in zip(leaving, targets, there_s, seconds):
            journey = Journey(at_s, job.row, source, Place(1, target), own_s)
            heapq.heappush(self.travelling, journey)

    def take_from(self, place: Place, sequence: Sequence) -> Job:
        """A request leaves a replica, with the tokens that it got there."""
        job = self.jobs[sequence.row]
        job.collect(self.replica(place).token_s.pop(sequence.row))
        job.preemptions += sequence.preemptions
        self.pools[place.pool].loads[place.index] -= 1
        return job

    def send(self, job: Job, now_s: float) -> None:
        """Hand a request to a replica of the first pool."""
        self.hand_to(Place(0, self.pools[0].choose(job)), job, now_s)

    def hand_to(self, place: Place, job: Job, now_s: float) -> None:
        """A replica that was chosen for a request gets it."""
        sequence = job.sequence(self.pools[place.pool].limit(job))
        self.replica(place).receive(sequence, now_s)
        self.touched[place] = None

    def fail(self, failure: Failure, on_done: Callable[[int], None]) -> None:
        """A replica dies. Its requests go to the first pool again, with what they have generated,
        of which K and V are lost. So do those whose K and V it was sending or receiving.
        """
        place = self.places[failure.replica]
        orphans = self.replica(place).die(failure.at_s)
        jobs = [self.take_from(place, sequence) for sequence in orphans]
        jobs += self.lost_with(place, failure.at_s)
        self.pools[place.pool].loads[place.index] = np.inf
        for job in jobs:
            if job.remaining:
                self.send(job, failure.at_s)
            else:  # it had all its tokens, and waited for the end of its wave
                on_done(job.row)

    def lost_with(self, place: Place, now_s: float) -> list[Job]:
        """The requests whose K and V were on their way from or to a replica that dies."""
        lost = sorted(j for j in self.travelling if place in (j.source, j.target))
        self.travelling = [journey for journey in self.travelling if journey not in lost]
        heapq.heapify(self.travelling)
        for there_s, _, source, target, seconds in lost:
            self.pools[1].loads[target.index] -= 1
            left_s = min(seconds, there_s - now_s)
            self.pools[source.pool].ports[source.index].stop_sending(left_s, now_s)
            self.pools[1].ports[target.index].stop_receiving(left_s, now_s)
        return [self.jobs[journey.row] for journey in lost]

    def close(self) -> None:
        """No more requests will come, so no wave waits until it is full."""
        for place in self.places:
            scheduler = self.replica(place).scheduler
            if not isinstance(scheduler, StaticScheduler):
                return
            if not scheduler.is_closed:
                scheduler.close()
                self.touched[place] = None

    def begin_steps(self, now_s: float) -> None:
        """Every replica that was touched goes on, or waits for its next event."""
        for place in self.touched:
            replica = self.replica(place)
            if replica.planned is None:
                replica.begin(now_s)
            if replica.next_event_s < NEVER:
                heapq.heappush(self.events, (replica.next_event_s, place))
        self.touched.clear()


def checked_failures(pools: list[Pool], failures) -> list[Failure]:
    """The failures. Raises ValueError for a replica that is not there, or if a pool loses them
    all.
    """
    count = sum(len(pool.replicas) for pool in pools)
    for failure in failures:
        if not 0 <= failure.replica < count or not 0 <= failure.at_s < NEVER:
            raise ValueError(
                f"failures: replica {failure.replica} at {failure.at_s} s; accepted: replicas 0 to "
                f"{count - 1}, at 0 s or later"
            )
    if len({failure.replica for failure in failures}) < len(failures):
        raise ValueError("failures: one replica twice; accepted: each replica once")
    first = 0
    for pool in pools:
        last = first + len(pool.replicas)
        if all(any(f.replica == index for f in failures) for index in range(first, last)):
            raise ValueError(
                f"failures: all of the replicas {first} to {last - 1} die; accepted: one is left"
            )
        first = last
    return list(failures)
