"""Proves the schedulers on random histories: arrivals, aborts, forks, priorities, small pools. The
model is a hash over a memory of tokens (lab/virtual.py), so every mistake with a block shows.
"""

from functools import partial

import pytest

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.l15_chunked_prefill.lab.histories import Asked, ChunkedRules, Rules, Trial, order_of
from lessons.l15_chunked_prefill.lab.testing import FOUND_BY, SLIPS, new_scheduler, new_swapping
from lessons.l15_chunked_prefill.lab.virtual import new_request
from lessons.l15_chunked_prefill.naive import PrefillFirstScheduler
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ASKED = st.builds(
    Asked,
    arrives=st.integers(0, 15),
    prompt_len=st.integers(1, 30),
    limit=st.integers(1, 16),
    answers=st.sampled_from([1, 1, 1, 2, 3]),
    priority=st.sampled_from([0, 0, 1, 2]),
    begins_as_others=st.booleans(),
    aborts=st.none() | st.integers(0, 40),
    after_pass=st.booleans(),
)
HISTORY = st.lists(ASKED, min_size=1, max_size=10)
# (num_blocks, block_size): from a pool for one request to one for all
POOLS = st.sampled_from([(8, 4), (12, 4), (14, 3), (45, 1), (60, 4), (3, 16)])
# (max_num_seqs, max_num_batched_tokens)
STEPS = st.sampled_from([(1, 1), (3, 3), (3, 7), (4, 16), (8, 64)])
CACHES = st.sampled_from([None, HashBlocks, RadixTree])
KINDS = {
    "chunked": (ChunkedScheduler, ChunkedRules),
    "whole prompts": (partial(ChunkedScheduler, enable_chunked_prefill=False), Rules),
}


def new_blocks(pool, cache):
    num_blocks, block_size = pool
    if cache is None:
        return BlockManager(num_blocks, block_size)
    return CachingBlockManager(num_blocks, block_size, cache(block_size))


def run_trial(kind, rules, requests, pool, step, cache, by_priority) -> Trial:
    order = order_of(requests) if by_priority else order_of([Asked(0, 1, 1)] * len(requests))
    scheduler = new_scheduler(kind, new_blocks(pool, cache), *step, order)
    trial = Trial(scheduler, requests)
    trial.rules = rules(scheduler)
    trial.run()
    return trial


def histories(count: int, **more):
    return settings(
        deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow], **more
    )


def examples(request) -> int:
    return 10_000 if request.config.getoption("--all") else 300


@pytest.mark.parametrize("name", KINDS)
def test_random_histories(name, request):
    @histories(examples(request))
    @given(HISTORY, POOLS, STEPS, CACHES, st.booleans())
    def check(requests, pool, step, cache, by_priority):
        run_trial(*KINDS[name], requests, pool, step, cache, by_priority)

    check()


def test_random_histories_with_swapping(request):
    @histories(examples(request))
    @given(HISTORY, POOLS, STEPS, CACHES)
    def check(requests, pool, step, cache):
        scheduler, model = new_swapping(
            new_blocks(pool, cache), max_num_seqs=step[0], max_num_batched_tokens=step[1]
        )
        trial = Trial(scheduler, requests, model)
        trial.rules = ChunkedRules(scheduler)
        trial.run()
        assert not scheduler.swap.away and not scheduler.swap.runner.held, "left on the host"

    check()


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(slip):
    @histories(300, database=None, phases=[Phase.generate])  # no shrinking, to save time
    @given(HISTORY, POOLS, STEPS, CACHES, st.booleans())
    def check(requests, pool, step, cache, by_priority):
        run_trial(slip, ChunkedRules, requests, pool, step, cache, by_priority)

    with pytest.raises(FOUND_BY):
        check()
