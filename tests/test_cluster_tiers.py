"""The simulator's tiers: by hand, by what is conserved, and against a run that asks before each
step.
"""

from dataclasses import replace

import numpy as np
import pytest

from lessons.l26_kv_transfer.blocks import Elsewhere
from reference.simulator import replica as replica_module
from reference.simulator import tiers as tiers_module
from reference.simulator.costs import Tiers, new_deployment
from reference.simulator.policies import Policy, new_cluster
from reference.simulator.tiers import DISK, HOST, NOWHERE, POOL, Link, VirtualTiers
from reference.simulator.traces import TracedRequest

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.cluster_cases import BLOCKS, SIZE, TRACES, deployment, examples, how_many, trace_of

BLOCK = SIZE * 1e9  # bytes; a token of cluster_cases has 1e9
TOY = Tiers(100 * BLOCK, 0.0, BLOCK / 0.5, BLOCK / 1.0)  # half a second a block, a disk one more
POLICY = Policy(max_num_seqs=3, max_num_batched_tokens=24)


def chat(at_s: float, tokens: int, output: int = 1, name: str = "a") -> TracedRequest:
    return TracedRequest(at_s, tokens, output, name, tokens)


def run(trace, tiers: Tiers, num_blocks: int, policy: Policy = POLICY):
    """(what was served, the replica that did)."""
    deployed = replace(deployment(num_blocks), tiers=tiers)
    cluster = new_cluster(policy, deployed, 1, trace)
    (replica,) = cluster.pools[0].replicas
    replica.history = []
    return cluster.run(trace), replica


# ---------------------------------------------------------------- by hand


def come_back() -> list[TracedRequest]:
    """A chat of 16 tokens, another request that takes three of its four blocks from a pool of
    twelve, and the chat again with 20 tokens.
    """
    return [chat(0.0, 16), TracedRequest(20.0, 44, 1), chat(40.0, 20)]


def test_a_chat_comes_back_by_hand():
    """One block is in the pool, three are loaded in 1.5 s, and a step of 4 tokens over a context of
    20 takes 1 + 4 / 4 + 20 / 64 seconds. From the disk the blocks come one a second, and the last
    one is half a second later here.
    """
    step_s, whole_s = 2 + 20 / 64, 1 + 16 / 4 + 20 / 64
    assert run(come_back(), Tiers(), 12)[0].ttft_s[2] == whole_s
    served, _ = run(come_back(), TOY, 12)
    assert served.ttft_s[2] == 1.5 + step_s
    assert served.found == {POOL: 4, HOST: 12, NOWHERE: 16 + 44 + 4}
    served, _ = run(come_back(), TOY._replace(host_bytes=0, disk_bytes=100 * BLOCK), 12)
    assert served.ttft_s[2] == 3.5 + step_s > whole_s, "a disk so slow loses"
    assert served.found == {POOL: 4, DISK: 12, NOWHERE: 64}


def test_host_memory_gives_its_oldest_block_to_the_disk():
    """Room for eleven blocks: the other request's push out all four of the chat. Then three are
    loaded from the disk, come up, and push out three of the other's.
    """
    served, replica = run(
        come_back(), TOY._replace(host_bytes=11 * BLOCK, disk_bytes=BLOCK * 9), 12
    )
    assert served.found == {POOL: 4, DISK: 12, NOWHERE: 64}
    tiers = replica.tiers
    # the chat's last block was computed: it is in host memory, too
    assert len(tiers.host.keys) == 11 and len(tiers.disk.keys) == 4 + 4
    assert tiers.links["to disk"].busy_s == 8 and tiers.links["from disk"].busy_s == 3
    lost, _ = run(come_back(), TOY._replace(host_bytes=11 * BLOCK), 12)
    assert lost.found == {POOL: 4, NOWHERE: 76}, "without a disk they are gone"


def test_a_load_takes_its_time_beside_steps():
    """Another answer decodes meanwhile, and none of its gaps holds the 1.5 s of the load."""
    alone = [*come_back()[:2], TracedRequest(30.0, 4, 12)]
    served, _ = run([*alone, come_back()[2]], TOY, 14)
    assert served.found[HOST] == 12
    gaps = served.gaps_s[served.first[2] :][:11]
    assert gaps.max() <= 1 + (4 + 1) * 0.25 + 40 / 64
    # and the load ends in the middle of a step, after which the chat's own step begins
    assert served.ttft_s[3] > 1.5 + 2 + 20 / 64


def test_a_replica_of_two_gpus_has_two_of_each():
    one, two = (
        VirtualTiers(new_deployment("llama-3-8b", "h100", gpus, tiers=Tiers(64e9, 1e12)), None)
        for gpus in (1, 2)
    )
    assert two.host_room == pytest.approx(2 * one.host_room, abs=1) and one.host_room == 30517
    assert one.host_s == 16 * 131072 / 64e9 == 2 * two.host_s
    assert one.disk_s == 16 * 131072 / 14e9


# ---------------------------------------------------------------- what is conserved


SIZES = st.sampled_from([0, 1, 3, 8, 100])
RATES = st.sampled_from([0.25, 1.0, 64.0])


def check_laws(lines, num_blocks: int, host: int, disk: int, rate: float) -> None:
    trace = trace_of(lines)
    tiers = Tiers(host * BLOCK, disk * BLOCK, rate * BLOCK, rate * BLOCK)
    served, replica = run(trace, tiers, num_blocks, Policy(max_num_seqs=3))
    found, prompts = served.found, sum(request.prompt_tokens for request in trace)
    if not any(request.is_named for request in trace):
        return
    if not served.preemptions.any():
        assert sum(found.values()) == prompts, "each token was somewhere"
        ran = sum(count for _, chunks in replica.history for _, count in chunks)
        assert ran == found.get(NOWHERE, 0) + (served.counts - 1).sum(), "each was computed once"
    if replica.tiers is None:
        assert not {HOST, DISK} & found.keys()
        return
    virtual = replica.tiers
    assert len(virtual.host.keys) <= host and len(virtual.disk.keys) <= disk
    assert virtual.ready_s.keys() == virtual.host.keys.keys() | virtual.disk.keys.keys()
    assert not virtual.loads and not replica.blocks.copying
    assert replica.blocks.num_free == num_blocks, "no block is kept by a copy"
    here, far = virtual.links["from host"].busy_s * rate, virtual.links["from disk"].busy_s * rate
    assert far <= here, "what comes from the disk crosses both links"
    loaded = found.get(HOST, 0) + found.get(DISK, 0)
    assert loaded <= here * SIZE and found.get(DISK, 0) <= far * SIZE
    # one thing at a time on a link: it cannot be used for longer than the run takes
    assert virtual.links["from host"].busy_s <= served.makespan_s


def test_laws_of_tiers(request):
    @examples(how_many(request))
    @given(TRACES, BLOCKS, SIZES, SIZES, RATES)
    def check(lines, num_blocks, host, disk, rate):
        check_laws(lines, num_blocks, host, disk, rate)

    check()


def test_endless_tiers_that_take_no_time_are_a_pool_that_never_forgets(request):
    """Requests that do not meet: each finds what it would find in a pool for all of them."""
    free = Tiers(1e6 * BLOCK, 0.0, 1e30, 1e30)

    @examples(how_many(request) // 2)
    @given(TRACES)
    def check(lines):
        trace = trace_of([(1000, *line[1:]) for line in lines])
        small, _ = run(trace, free, 11)
        large, _ = run(trace, Tiers(), 2000)
        assert small.found.get(NOWHERE) == large.found.get(NOWHERE)
        assert np.allclose(small.token_s, large.token_s, rtol=0, atol=1e-9)

    check()


def check_single_steps(lines, num_blocks: int, host: int, disk: int, rate: float) -> None:
    trace = trace_of(lines)
    tiers = Tiers(host * BLOCK, disk * BLOCK, rate * BLOCK, rate * BLOCK)
    many, replica = run(trace, tiers, num_blocks, POLICY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module, "MOST_ALIKE", 1)
        single, one_by_one = run(trace, tiers, num_blocks, POLICY)
    assert replica.history == one_by_one.history
    assert (many.token_s == single.token_s).all() and many.found == single.found


def test_asking_before_each_step_gives_the_same(request):
    @examples(how_many(request))
    @given(TRACES, BLOCKS, SIZES, SIZES, RATES)
    def check(lines, num_blocks, host, disk, rate):
        check_single_steps(lines, num_blocks, host, disk, rate)

    check()


# ---------------------------------------------------------------- wrong versions must fail


def never_waits(self, seconds, from_s):
    """A link on which everything travels at once."""
    self.busy_s += seconds
    return from_s + seconds


def keeps_names(self):
    """What leaves the last tier can still be found."""
    while len(self.host.keys) > self.host_room:
        self.disk.add(self.host.evict())
    while len(self.disk.keys) > self.disk_room:
        self.disk.evict()


def grows(self):
    """Nothing ever leaves."""


def in_both_links_at_once(self, keys, blocks, start_load=VirtualTiers.start_load):
    """What comes from the disk is in the GPU as soon as it has left the disk."""
    host_s, self.host_s = self.host_s, 0.0
    job = start_load(self, keys, blocks)
    self.host_s = host_s
    return job


BUGS = {
    "nothing waits on a link": (Link, "send", never_waits),
    "what is gone is offered": (VirtualTiers, "push_out", keeps_names),
    "no quota": (VirtualTiers, "push_out", grows),
    "a load crosses one link": (VirtualTiers, "start_load", in_both_links_at_once),
    "a step reads before the load has ended": (Elsewhere, "has", lambda self, sequence: False),
    "steps go on past the end of a load": (
        replica_module.Planned,
        "until",
        lambda self, at_s: self,
    ),
    "a hit is no use": (VirtualTiers, "use", lambda self, key: None),
    "all that was loaded was in the pool": (
        tiers_module.VirtualTieredBlocks,
        "tier_of",
        lambda self, block: POOL,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    monkeypatch.setattr(*BUGS[bug])

    @examples(300, database=None, derandomize=True, phases=[Phase.generate])
    @given(TRACES, BLOCKS, SIZES, SIZES, RATES)
    def check(lines, num_blocks, host, disk, rate):
        check_laws(lines, num_blocks, host, disk, rate)
        check_single_steps(lines, num_blocks, host, disk, rate)

    with pytest.raises((AssertionError, KeyError, ValueError, RuntimeError)):
        test_a_chat_comes_back_by_hand()
        test_host_memory_gives_its_oldest_block_to_the_disk()
        test_a_load_takes_its_time_beside_steps()
        check()
