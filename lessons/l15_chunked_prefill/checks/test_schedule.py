"""Proves the schedulers on random histories: arrivals, aborts, forks, priorities, small pools. The
model is a hash over a memory of tokens (lab/virtual.py), so every mistake with a block shows.
"""

from functools import partial
from pathlib import Path

import pytest

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l13_prefix_caching.cache import CachingBlockManager
from lessons.l13_prefix_caching.naive import HashBlocks
from lessons.l13_prefix_caching.optimized import RadixTree
from lessons.l15_chunked_prefill.lab.histories import (
    Asked,
    ChunkedRules,
    PrefillFirstRules,
    Rules,
    Trial,
    order_of,
)
from lessons.l15_chunked_prefill.lab.testing import (
    COPY_SLIPS,
    FOUND_BY,
    SLIPS,
    SWAP_SLIPS,
    SwapsPromises,
    new_scheduler,
    new_swapping,
)
from lessons.l15_chunked_prefill.lab.virtual import VirtualModel, new_request, run
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
HISTORIES = 150  # of a test; with --all 10,000
HISTORY = st.lists(ASKED, min_size=1, max_size=10)
# (num_blocks, block_size): from a pool for one request to one for all
POOLS = st.sampled_from([(8, 4), (12, 4), (14, 3), (45, 1), (60, 4), (3, 16)])
# (max_num_seqs, max_num_batched_tokens)
STEPS = st.sampled_from([(1, 1), (3, 3), (3, 7), (4, 16), (8, 64)])
CACHES = st.sampled_from([None, HashBlocks, RadixTree])
HOSTS = st.sampled_from([None, None, 0, 2, 6])  # blocks
KINDS = {
    "chunked": (ChunkedScheduler, ChunkedRules),
    "prompts first": (PrefillFirstScheduler, PrefillFirstRules),
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
    return 10_000 if request.config.getoption("--all") else HISTORIES


def test_the_page_says_how_many_histories():
    text = (Path(__file__).parents[1] / "MORE.md").read_text(encoding="utf-8")
    assert len(KINDS) == 3
    assert f"of {HISTORIES} random histories for each of three schedulers" in text


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(2, of="histories of lesson 15")
def test_random_histories(name, request):
    @histories(examples(request))
    @given(HISTORY, POOLS, STEPS, CACHES, st.booleans())
    def check(requests, pool, step, cache, by_priority):
        run_trial(*KINDS[name], requests, pool, step, cache, by_priority)

    check()


def run_swapping_trial(slip, requests, pool, step, cache, host_blocks=None) -> None:
    scheduler, model = new_swapping(
        new_blocks(pool, cache),
        slip,
        host_blocks=host_blocks,
        max_num_seqs=step[0],
        max_num_batched_tokens=step[1],
    )
    trial = Trial(scheduler, requests, model)
    trial.rules = ChunkedRules(scheduler)
    trial.run()
    assert not scheduler.host.swap.away and not scheduler.host.swap.runner.held, "left on the host"


@pytest.mark.sample(2, of="histories of lesson 15")
def test_random_histories_with_swapping(request):
    @histories(examples(request))
    @given(HISTORY, POOLS, STEPS, CACHES, HOSTS)
    def check(requests, pool, step, cache, host_blocks):
        run_swapping_trial(ChunkedScheduler, requests, pool, step, cache, host_blocks)

    check()


def is_planted(check_history) -> None:
    """Random histories find what is wrong with a scheduler."""
    # No shrinking, to save time.
    how = histories(300, database=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises(FOUND_BY):
        how(check_history)()


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.sample(3)
def test_a_planted_slip_is_found(slip):
    @given(HISTORY, POOLS, STEPS, CACHES, st.booleans())
    def check(requests, pool, step, cache, by_priority):
        run_trial(slip, ChunkedRules, requests, pool, step, cache, by_priority)

    is_planted(check)


@pytest.mark.parametrize("slip", SWAP_SLIPS)
def test_a_planted_slip_of_swapping_is_found(slip):
    @given(HISTORY, POOLS, STEPS)
    def check(requests, pool, step):
        run_swapping_trial(slip, requests, pool, step, None)

    is_planted(check)


# The second request forks while the first, which goes before it, is in the middle of its prompt. In
# the next step its three answers want two copies; then the first lacks blocks, and takes one of
# those that were to be copied into.
LATE = [Asked(arrives=1, prompt_len=19, limit=3), Asked(0, prompt_len=14, limit=6, answers=3)]
LATE_POOL, LATE_STEP = (12, 3), (4, 12)


def test_a_copy_for_who_is_preempted_in_the_same_step():
    run_trial(ChunkedScheduler, ChunkedRules, LATE, LATE_POOL, LATE_STEP, None, False)
    run_swapping_trial(ChunkedScheduler, LATE, LATE_POOL, LATE_STEP, None)


@pytest.mark.parametrize("slip", COPY_SLIPS)
def test_a_planted_slip_with_copies_is_found(slip):
    with pytest.raises(FOUND_BY):
        if slip is SwapsPromises:
            run_swapping_trial(slip, LATE, LATE_POOL, LATE_STEP, None)
        else:
            run_trial(slip, ChunkedRules, LATE, LATE_POOL, LATE_STEP, None, False)


# ---------------------------------------------------------------- single cases


class Served:
    """A scheduler and its model; next(count) -> the next steps, {row: tokens} of each."""

    def __init__(self, scheduler, requests=()):
        self.scheduler = scheduler
        self.model = VirtualModel(scheduler.blocks)
        for request in requests:
            scheduler.add(request)

    def next(self, count: int) -> list[dict[int, int]]:
        seen = []
        for _ in range(count):
            run(self.scheduler, self.model, lambda step: seen.append(tokens_of(step)))
        return seen


def tokens_of(step) -> dict[int, int]:
    return {sequence.row: count for sequence, count in step.chunks}


def test_a_long_prompt_runs_in_what_the_decodes_leave():
    scheduler = ChunkedScheduler(BlockManager(100, 4), 4, max_num_batched_tokens=10)
    asked = enumerate([(2, 9), (3, 9), (30, 2)])
    requests = [new_request(row, list(range(prompt)), limit) for row, (prompt, limit) in asked]
    first, second, third, fourth, fifth = Served(scheduler, requests).next(5)
    assert first == {0: 2, 1: 3, 2: 5}
    assert second == third == fourth == {0: 1, 1: 1, 2: 8}
    assert fifth == {0: 1, 1: 1, 2: 1}, "30 tokens: 5 + 8 + 8 + 8 + 1"


def test_prompts_first_stop_the_decodes():
    scheduler = PrefillFirstScheduler(BlockManager(100, 4), 4, max_num_batched_tokens=30)
    served = Served(scheduler, [new_request(0, [1, 2], 9)])
    assert served.next(2) == [{0: 2}, {0: 1}]
    scheduler.add(new_request(1, list(range(28)), 2))
    assert served.next(2) == [{1: 28}, {0: 1, 1: 1}]


def test_the_last_gives_its_blocks_to_the_first_and_comes_back():
    """Four blocks of 2: each request needs 3 in the end."""
    scheduler = ChunkedScheduler(BlockManager(4, 2), 2, max_num_batched_tokens=8)
    first, last = new_request(0, [1, 2, 3], 4), new_request(1, [4, 5, 6], 4)
    assert Served(scheduler, [first, last]).next(5) == [
        {0: 3, 1: 3},
        {0: 1, 1: 1},
        {0: 1},  # its fifth token needs a third block; the last has given back two
        {0: 1},
        {1: 5},  # three of its prompt, and two that it had generated
    ]
    assert (first.preemptions, last.preemptions) == (0, 1) and len(last.output) == 3


def test_swapped_tokens_are_not_computed_again():
    blocks = BlockManager(4, 2)
    scheduler, model = new_swapping(blocks, max_num_seqs=2, max_num_batched_tokens=8)
    last = new_request(1, [4, 5, 6], 4)
    for sequence in (new_request(0, [1, 2, 3], 4), last):
        scheduler.add(sequence)
    while not scheduler.is_idle:
        run(scheduler, model)
    assert model.computed_tokens == 2 * 6 and last.preemptions == 1
    assert scheduler.host.swap.swapped_bytes == 2 * (2 * 2) * 2 * 8  # out and in, K and V, int64


@pytest.mark.parametrize("host_blocks, swapped", [(1, False), (2, True)])
def test_who_finds_no_room_on_the_host_computes_again(host_blocks, swapped):
    """As above: the last has 4 tokens in 2 blocks when it is sent away."""
    scheduler, model = new_swapping(
        BlockManager(4, 2), host_blocks=host_blocks, max_num_seqs=2, max_num_batched_tokens=8
    )
    for row in range(2):
        scheduler.add(new_request(row, [1, 2, 3], 4))
    while not scheduler.is_idle:
        run(scheduler, model)
    assert model.computed_tokens == 2 * 6 + (0 if swapped else 4)
    assert bool(scheduler.host.swap.swapped_bytes) is swapped


def test_a_search_in_the_cache_is_not_repeated_until_blocks_come_free():
    blocks = CachingBlockManager(8, 2, HashBlocks(2))
    scheduler = ChunkedScheduler(blocks, 4, max_num_batched_tokens=16)
    requests = [new_request(0, list(range(10)), 4), new_request(1, list(range(50, 60)), 4)]
    served = Served(scheduler, requests)
    searched, match = [], blocks.cache.match
    blocks.cache.match = lambda tokens: searched.append(len(tokens)) or match(tokens)
    served.next(4)
    assert searched == [10, 10], "one search for each, although the second waited for three steps"
    assert served.next(1) == [{1: 10}]


@pytest.mark.parametrize(
    "kind, asked, said",
    [
        (ChunkedScheduler, (5, 4), "8 tokens need 4 blocks; accepted: at most 3"),
        (PrefillFirstScheduler, (4, 2), "4 tokens and their answer; accepted without chunked"),
        (partial(ChunkedScheduler, enable_chunked_prefill=False), (4, 2), "at most 4 (max_num"),
    ],
)
def test_what_can_never_run_is_refused_at_once(kind, asked, said):
    scheduler = kind(BlockManager(3, 2), max_num_seqs=2, max_num_batched_tokens=4)
    with pytest.raises(ValueError) as error:
        scheduler.add(new_request(0, [1] * asked[0], asked[1]))
    assert said in str(error.value) and scheduler.is_idle


def test_arguments_and_forks_are_checked():
    with pytest.raises(ValueError, match="max_num_batched_tokens: got 3; accepted: 4 or more"):
        ChunkedScheduler(BlockManager(3, 2), max_num_seqs=4, max_num_batched_tokens=3)
    scheduler = ChunkedScheduler(BlockManager(3, 2))
    parent = new_request(0, [1, 2], 3)
    Served(scheduler, [parent]).next(1)
    with pytest.raises(ValueError, match="request 0: 1 place left"):
        scheduler.fork(parent, new_request(1, [1, 2], 3))
