"""Proves the virtual clock on traces small enough for paper: who waits for whom, and for how
long.
"""

import math

import pytest

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l11_cuda_graphs.lab.testing import new_model, new_prompts
from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import Arrival, Timed, VirtualClock, serve
from lessons.l14_continuous_batching.lab.occupancy import occupancy, offline, one_second, simulate
from lessons.l14_continuous_batching.lab.workload import FIGURE, NEXT_IN_FIGURE, all_at_once
from lessons.l14_continuous_batching.loop import ModelExecutor, StepRunner, run_until_idle
from lessons.l14_continuous_batching.naive import DynamicScheduler, PaddedRunner, StaticScheduler
from lessons.l14_continuous_batching.optimized import ContinuousScheduler


def arrivals(*pairs: tuple[float, int]) -> list[Arrival]:
    """(arrival in seconds, answer in tokens), with prompts of one token."""
    return [Arrival(arrival_s, [1], output_len) for arrival_s, output_len in pairs]


# At a second a step, on two places.
TRACE = arrivals((0, 2), (0, 5), (1, 2), (7, 1))


def test_a_wave_leaves_together_and_the_next_comes_after_it():
    log = simulate("static", TRACE, 2, one_second)
    assert [one.rows for one in log.passes] == [[0, 1], [0, 1], [1], [1], [1], [2, 3], [2]]
    # The second wave is full when request 3 arrives, at 7. Request 0 waits for request 1.
    assert log.left_s == {0: 5, 1: 5, 2: 9, 3: 9}
    assert log.token_s[0] == [1, 2] and log.ttfts_s() == [1, 1, 7, 1]


def test_a_window_opens_a_wave_that_is_not_full():
    log = simulate("dynamic", TRACE, 2, one_second, max_wait_s=0.5)
    assert [one.rows for one in log.passes] == [[0, 1], [0, 1], [1], [1], [1], [2], [2], [3]]
    # Request 2's window has ended long before the first wave does, at 5.
    assert log.left_s == {0: 5, 1: 5, 2: 7, 3: 8}


def test_a_window_is_waited_for():
    log = simulate("dynamic", arrivals((1, 1), (9, 1)), 2, one_second, max_wait_s=0.5)
    assert log.passes[0].start_s == 1.5
    assert log.left_s == {0: 2.5, 1: 10}  # no request comes after request 1, so it need not wait


def test_a_place_is_filled_after_every_step():
    log = simulate("continuous", TRACE, 2, one_second)
    assert [one.rows for one in log.passes] == [[0, 1], [0, 1], [1, 2], [1, 2], [1], [3]]
    assert log.left_s == {0: 2, 1: 5, 2: 4, 3: 8}
    assert log.latencies_s() == [2, 5, 3, 1]
    assert log.tokens_per_s == 10 / 8


def test_the_well_known_figure():
    """26 of 32 places are busy, so no schedule gains more than 1.23 there."""
    static = occupancy(offline("static", FIGURE, 4), 4)
    assert (static.busy, static.places * static.steps) == (26, 32)
    assert 1 / static.busy_share == pytest.approx(1.23, abs=0.005)
    full = occupancy(offline("continuous", [*FIGURE, *NEXT_IN_FIGURE], 4), 4)
    assert (full.busy, full.steps, full.idle_share) == (32, 8, 0)


def test_padding_is_counted():
    """Prompts of 1 and 5, answers of 2 and 4: a rectangle of 2 x 5, then three of 2 x 1."""
    trace = [Arrival(0, [1], 2), Arrival(0, [1] * 5, 4)]
    static = occupancy(simulate("static", trace, 2, one_second), 2)
    assert (static.wanted_tokens, static.computed_tokens) == (1 + 5 + 1 + 3, 2 * 5 + 3 * 2)
    ragged = occupancy(simulate("continuous", trace, 2, one_second), 2)
    assert ragged.padding_share == 0 and static.padding_share == 1 - 10 / 16


class WaitsForEver(ContinuousScheduler):
    def schedule(self):
        return super().schedule()._replace(chunks=[])


def test_a_loop_that_would_never_end_says_so():
    scheduler = WaitsForEver(BlockManager(4, 4))
    scheduler.running = [object()]
    with pytest.raises(RuntimeError, match="empty step"):
        run_until_idle(scheduler, lambda step: [])


@pytest.mark.parametrize("way", ["static", "dynamic", "continuous"])
def test_the_real_model_moves_the_clock(way, seed):
    """The same tokens as one at a time, whenever requests arrive; each step took some time."""
    model, prompts, limits = new_model(), new_prompts(3, 6, 2, 5), [4, 7, 2, 3]
    expected = one_at_a_time.generate(model, prompts, limits)
    times = [0.0, 0.0, 0.001, 50.0]
    trace = [Arrival(*request) for request in zip(times, prompts, limits)]
    clock, said = VirtualClock(), [[] for _ in prompts]
    blocks = BlockManager(16, 4)
    scheduler, runner = {
        "static": (StaticScheduler(2), PaddedRunner(model, 2, 20)),
        "dynamic": (DynamicScheduler(2, 0.01, clock), PaddedRunner(model, 2, 20)),
        "continuous": (ContinuousScheduler(blocks, 2), StepRunner(model, blocks, 20)),
    }[way]
    executor = ModelExecutor(runner)

    def execute(step):
        tokens = executor(step)
        for chunk, token in zip(step.chunks, tokens):
            said[chunk.sequence.row].append(token)
        return tokens

    log = serve(scheduler, trace, Timed(clock, execute), clock)
    assert said == expected
    assert all(one.end_s > one.start_s for one in log.passes)
    assert clock() >= 50 and math.isfinite(log.makespan_s)


def test_an_offline_job_is_a_trace_without_gaps():
    trace = all_at_once([3, 1], prompt_len=2)
    assert trace == [Arrival(0.0, [1, 1], 3), Arrival(0.0, [1, 1], 1)]
