"""What a server may do with its requests, by name: lessons 14 and 15's schedulers, alone or in two
pools.

    served = simulate(trace, new_deployment("llama-3-8b", "h100"), Policy("chunked"), replicas=4)
"""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l14_continuous_batching.loop import Scheduler
from lessons.l14_continuous_batching.naive import DynamicScheduler, StaticScheduler
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l15_chunked_prefill.lab.experiments import ReceivingScheduler
from lessons.l15_chunked_prefill.naive import PrefillFirstScheduler
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler
from lessons.l26_kv_transfer.blocks import Elsewhere
from reference.features.windows.blocks import GroupBlocks
from reference.features.windows.caching import CachingGroupBlocks
from reference.simulator.cluster import Cluster, Failure, Pool
from reference.simulator.costs import Deployment
from reference.simulator.replica import LazyPool, Replica
from reference.simulator.routers import ROUTERS, LeastLoaded
from reference.simulator.served import Served
from reference.simulator.tiers import VirtualTieredBlocks
from reference.simulator.traces import Trace

POLICIES = ("static", "dynamic", "continuous", "chunked", "disaggregated")
WAVE_PLACES, PLACES = 32, 256  # of a replica: in waves, and step by step
MOST_TOKENS = 2**31  # no limit
WHOLE_PROMPTS = 4096  # tokens of a step that runs prompts whole, but one prompt at least


@dataclass(frozen=True)
class Policy:
    """name: one of POLICIES. max_num_seqs: places of a replica; None: 32 in waves, else 256.
    max_num_batched_tokens: of a chunked step. max_wait_s: the window of "dynamic". prefill_share:
    of the replicas of "disaggregated", those that compute prompts; prefill_replicas: or how many.
    router: one of ROUTERS.
    """

    name: str = "chunked"
    router: str = "least-loaded"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 1024
    max_wait_s: float = 0.1
    prefill_share: float = 0.5
    prefill_replicas: int | None = None

    @property
    def least_replicas(self) -> int:
        return 1 + (self.prefill_replicas or 1) if self.name == "disaggregated" else 1

    def prefilling(self, replicas: int) -> int:
        """Of so many replicas of "disaggregated", how many compute prompts."""
        return self.prefill_replicas or min(
            replicas - 1, max(1, round(self.prefill_share * replicas))
        )


def new_cluster(
    policy: Policy,
    deployment: Deployment,
    replicas: int,
    trace: Trace,
    failures: Sequence[Failure] = (),
) -> Cluster:
    """A cluster that can serve the trace. Raises ValueError for a policy that does not exist, and
    for a request that no replica can hold.
    """
    if policy.name not in POLICIES or policy.router not in ROUTERS:
        accepted = f"{', '.join(POLICIES)}; routers {', '.join(ROUTERS)}"
        raise ValueError(f"policy: got {policy.name}, {policy.router}; accepted: {accepted}")
    if replicas < policy.least_replicas:
        raise ValueError(
            f"replicas: got {replicas}; accepted for {policy.name}: {policy.least_replicas} or more"
        )
    longest = longest_of(trace, deployment)
    # Without shared prefixes a prefix cache finds nothing. Lesson 14's schedulers never ask one.
    shares_prefixes = any(request.is_named for request in trace)
    caches = shares_prefixes and policy.name in ("chunked", "disaggregated")
    router = ROUTERS[policy.router]()

    def new(count: int, make, caches: bool) -> list[Replica]:
        return [new_replica(make, deployment, caches) for _ in range(count)]

    if policy.name != "disaggregated":
        make = partial(new_scheduler, policy, deployment, longest)
        return Cluster([Pool(new(replicas, make, caches), router)], failures)
    prefilling = policy.prefilling(replicas)
    places = policy.max_num_seqs or PLACES
    budget = max(WHOLE_PROMPTS, longest, places)
    prompts = partial(step_by_step, PrefillFirstScheduler, places, budget)
    answers = partial(step_by_step, ReceivingScheduler, places, budget)
    # The second pool gets K and V from the first, so it has nothing to look for.
    first = Pool(new(prefilling, prompts, caches), router, tokens_each=1)
    second = Pool(new(replicas - prefilling, answers, False), LeastLoaded())
    return Cluster([first, second], failures)


def longest_of(trace: Trace, deployment: Deployment) -> int:
    """Tokens of the longest request. Raises ValueError if it does not fit a replica's cache."""
    longest = max(request.prompt_tokens + request.output_tokens for request in trace)
    # The most that fits, by halving: with groups of layers blocks do not grow in proportion.
    held = bisect_right(range(1, longest + 1), deployment.num_blocks, key=deployment.blocks_for)
    if longest > held:
        if deployment.groups is None:
            held = deployment.num_blocks * deployment.block_size
        raise ValueError(
            f"--trace: a request of {longest} tokens; accepted: at most {held}, what the cache of "
            f"a replica holds ({deployment.name})"
        )
    return longest


def step_by_step(kind, places: int, budget: int, blocks, clock) -> Scheduler:
    """A scheduler over blocks that decides each step anew."""
    return kind(blocks, max_num_seqs=places, max_num_batched_tokens=budget)


def new_scheduler(
    policy: Policy, deployment: Deployment, longest: int, blocks: BlockManager, clock: VirtualClock
) -> Scheduler:
    """The scheduler of a replica that does everything."""
    if policy.name in ("static", "dynamic"):
        # A wave reserves the longest request's memory for each row.
        fit = deployment.num_blocks // deployment.blocks_for(longest)
        places = min(policy.max_num_seqs or WAVE_PLACES, fit)
        if policy.name == "static":
            return StaticScheduler(places)
        return DynamicScheduler(places, policy.max_wait_s, clock)
    places = policy.max_num_seqs or PLACES
    if policy.name == "continuous":
        return ContinuousScheduler(blocks, places, WHOLE_PROMPTS)
    budget = max(policy.max_num_batched_tokens, places)
    return step_by_step(ChunkedScheduler, places, budget, blocks, clock)


def new_replica(
    make: Callable[[BlockManager, VirtualClock], Scheduler],
    deployment: Deployment,
    caches: bool,
) -> Replica:
    """A replica with its own clock and its own blocks. caches: whether it keeps a prefix cache, and
    below it the tiers of the deployment.
    """
    clock, size = VirtualClock(), deployment.block_size
    tiered = caches and deployment.tiers.host_bytes + deployment.tiers.disk_bytes > 0
    if tiered:
        blocks = VirtualTieredBlocks(deployment, clock)
    elif deployment.groups is not None:
        blocks = window_blocks(deployment, caches)
    elif caches:
        blocks = CachingBlockManager(deployment.num_blocks, size, HashBlocks(size))
    else:
        blocks = BlockManager(1, size)
        blocks.pool = LazyPool(deployment.num_blocks)
    scheduler = make(blocks, clock)
    if tiered:
        scheduler.host = Elsewhere(blocks)
    if isinstance(blocks, GroupBlocks) and isinstance(scheduler, PreemptiveScheduler):
        blocks.most_tokens = scheduler.max_num_batched_tokens
    uses_blocks = not isinstance(scheduler, StaticScheduler)
    return Replica(scheduler, blocks if uses_blocks else None, deployment, clock)


def window_blocks(deployment: Deployment, caches: bool) -> GroupBlocks:
    """Blocks of groups of layers. Until a scheduler says how many tokens a step has, for one that
    takes the blocks of a whole answer at once.
    """
    if caches:
        how = deployment.groups, MOST_TOKENS, deployment.num_blocks, deployment.block_size
        return CachingGroupBlocks(*how)
    blocks = GroupBlocks(deployment.groups, MOST_TOKENS, 1, deployment.block_size)
    blocks.pool = LazyPool(deployment.num_blocks)
    return blocks


@contextmanager
def without_collector() -> Iterator[None]:
    """Within it Python does not search its objects for cycles, because a large run has millions of
    objects and no cycles, and would be searched again and again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def simulate(
    trace: Trace,
    deployment: Deployment,
    policy: Policy | None = None,
    replicas: int = 1,
    failures: Sequence[Failure] = (),
    on_done: Callable[[int], None] = lambda row: None,
) -> Served:
    """Serve a trace on so many replicas. Raises ValueError for what can never be served."""
    cluster = new_cluster(policy or Policy(), deployment, replicas, trace, failures)
    with without_collector():
        return cluster.run(trace, on_done)
