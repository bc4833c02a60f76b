"""Proves the continuous scheduler on random histories: who runs, who waits, and who owns which
block after every step. No model takes part.
"""

import pytest

from lessons.l12_paged_kv.blocks import BlockManager, OutOfBlocks
from lessons.l14_continuous_batching.lab.testing import (
    SLIPS,
    check_history,
    new_request,
    new_scheduler,
    run,
)
from lessons.l14_continuous_batching.optimized import ContinuousScheduler

pytest.importorskip("hypothesis", reason="NOT RUN: needs hypothesis")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# (arrives at step, prompt tokens, limit, tokens until a stop token); all fit the pool alone
REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 24), st.integers(1, 20), st.integers(1, 25)),
    min_size=1,
    max_size=12,
)


def histories(count: int):
    return settings(deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])


def test_random_histories(request):
    count = 10_000 if request.config.getoption("--all") else 300

    @histories(count)
    @given(REQUESTS)
    def check(requests):
        check_history(ContinuousScheduler, requests)

    check()


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(slip):
    # as many as it takes, because a slip may be rare; no shrinking, to save time
    @settings(histories(3000), database=None, phases=[Phase.generate])
    @given(REQUESTS)
    def check(requests):
        check_history(slip, requests)

    with pytest.raises((AssertionError, OutOfBlocks, KeyError)):
        check()


def test_a_place_and_its_blocks_are_free_in_the_very_next_step():
    """Two places, the blocks of two requests: the third starts one step after the first has
    finished.
    """
    scheduler = new_scheduler(num_blocks=4, block_size=4, max_num_seqs=2)
    steps = []
    run(
        scheduler,
        [(0, 3, 2, 9), (0, 3, 5, 9), (0, 3, 2, 9)],
        lambda step: steps.append([chunk.sequence.row for chunk in step.chunks]),
    )
    assert steps == [[0, 1], [0, 1], [1, 2], [1, 2], [1]]


def test_a_request_that_can_never_fit_is_refused_at_once():
    scheduler = ContinuousScheduler(BlockManager(4, 4))
    scheduler.add(new_request(0, 9, 8))  # 16 tokens in the cache: the last one is never stored
    with pytest.raises(ValueError, match="needs 5 blocks for 17 tokens; accepted: at most 4"):
        scheduler.add(new_request(1, 10, 8))


def test_a_prompt_above_the_budget_runs_alone():
    scheduler = new_scheduler(max_num_batched_tokens=8)
    sizes = []
    run(
        scheduler,
        [(0, 2, 1, 9), (0, 20, 2, 9), (0, 2, 3, 9)],
        lambda step: sizes.append([chunk.count for chunk in step.chunks]),
    )
    assert sizes == [[2], [20], [1, 2], [1], [1]]
