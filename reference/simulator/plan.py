"""How many GPUs a trace needs, and what happens at other rates and other numbers of GPUs.

needed = gpus_needed(trace, new_deployment("llama-3-8b", "h100"), Policy("chunked"), Slo(0.5, 0.05))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reference.simulator.costs import Deployment
from reference.simulator.policies import Policy, simulate
from reference.simulator.served import Served, Slo
from reference.simulator.traces import Trace, at_rate

PREFILL_SHARES = (0.25, 0.5, 0.75)
APART_S = 3600.0  # between requests that shall not meet

OnDone = Callable[[int], None]


def ignored(row: int) -> None:
    """The end of a request interests no one here."""


def serve_well(
    trace: Trace,
    deployment: Deployment,
    policy: Policy,
    replicas: int,
    slo: Slo,
    on_done: OnDone = ignored,
) -> Served:
    """Serve a trace; of "disaggregated", with the split of the replicas that keeps the objective
    for the most requests, unless the policy names one.
    """
    if policy.name != "disaggregated" or policy.prefill_replicas:
        return simulate(trace, deployment, policy, replicas, on_done=on_done)
    splits = {max(1, min(replicas - 1, round(share * replicas))) for share in PREFILL_SHARES}
    runs = [
        simulate(
            trace,
            deployment,
            replace(policy, prefill_share=count / replicas),
            replicas,
            on_done=on_done,
        )
        for count in sorted(splits)
    ]
    return max(runs, key=lambda served: served.attained(slo))


@dataclass(frozen=True)
class Needed:
    """The fewest replicas that were found, and how they serve. is_enough: whether they keep the
    objective; if not, the most that were tried.
    """

    replicas: int
    gpus: int
    served: Served
    is_enough: bool


def gpus_needed(
    trace: Trace,
    deployment: Deployment,
    policy: Policy,
    slo: Slo,
    attain: float = 0.99,
    most_replicas: int = 64,
    on_done: OnDone = ignored,
) -> Needed:
    """The fewest replicas with which the share `attain` of the requests keeps the objective.

    Twice as many until it is enough, then halving between. For waves more replicas are not always
    better, because each wave takes longer to fill; then it is a number that is enough.
    """

    def tried(count: int) -> Needed:
        served = serve_well(trace, deployment, policy, count, slo, on_done)
        is_enough = served.attained(slo) >= attain
        return Needed(count, count * deployment.gpus, served, is_enough)

    too_few, found = policy.least_replicas - 1, tried(policy.least_replicas)
    if not found.is_enough and policy.name in ("continuous", "chunked"):
        # No request is served better than alone, so then no number of replicas is enough.
        alone = [r._replace(arrival_s=at * APART_S) for at, r in enumerate(trace)]
        if simulate(alone, deployment, policy).attained(slo) < attain:
            return found
    while not found.is_enough and found.replicas < most_replicas:
        too_few, found = found.replicas, tried(min(2 * found.replicas, most_replicas))
    while found.is_enough and found.replicas - too_few > 1:
        middle = tried((found.replicas + too_few) // 2)
        if middle.is_enough:
            found = middle
        else:
            too_few = middle.replicas
    return found


def over_rates(
    trace: Trace,
    deployment: Deployment,
    policies: Sequence[Policy],
    replicas: int,
    rates: Sequence[float],
    slo: Slo,
    on_done: OnDone = ignored,
) -> dict[str, list[Served]]:
    """{policy: how the trace is served at each rate (requests/s)} on so many replicas."""
    traces = [at_rate(trace, rate) for rate in rates]
    return {
        policy.name: [serve_well(t, deployment, policy, replicas, slo, on_done) for t in traces]
        for policy in policies
    }


def over_replicas(
    trace: Trace,
    deployment: Deployment,
    policies: Sequence[Policy],
    counts: Sequence[int],
    slo: Slo,
    on_done: OnDone = ignored,
) -> dict[str, list[float | None]]:
    """{policy: requests/s that keep the objective on each number of replicas}; None: too few."""
    return {
        policy.name: [
            serve_well(trace, deployment, policy, count, slo, on_done).goodput(slo)
            if count >= policy.least_replicas
            else None
            for count in counts
        ]
        for policy in policies
    }
