"""Timing is tested on sleeps, on a simulated GPU whose clock is ours, and on samples with known
quantiles.
"""

import contextlib
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from lessons.toolbox.measure import timing
from lessons.toolbox.measure.timing import (
    Stopwatch,
    UnsynchronisedTiming,
    interleave,
    measure,
    speedup,
    summarise,
)


def test_measure_on_the_cpu_finds_the_time_of_a_sleep():
    t = measure(lambda: time.sleep(0.01), device="cpu", budget_s=0.1)
    assert 0.01 <= t.p20_s <= t.median_s <= t.p80_s < 0.05
    assert 3 <= t.runs <= 12 and t.median_s == statistics.median(t.samples_s)


def test_warm_up_is_not_in_the_samples():
    durations = iter([0.2, 0.1] + [0.001] * 500)
    t = measure(lambda: time.sleep(next(durations)), device="cpu", budget_s=0.4)
    assert max(t.samples_s) < 0.05


def test_a_slow_function_still_gets_three_runs_and_a_flag():
    t = measure(lambda: time.sleep(0.03), device="cpu", budget_s=0.01)
    assert t.runs == 3 and "only 3 runs" in t.flags


def test_the_floor_is_flagged_only_when_beaten():
    fast = measure(lambda: None, device="cpu", floor_s=1.0, budget_s=0.01)
    assert any(
        f.startswith("beats the floor of 1 s: cache-resident data or a wrong floor")
        for f in fast.flags
    )
    assert not any(
        "floor" in f
        for f in measure(lambda: None, device="cpu", floor_s=1e-12, budget_s=0.01).flags
    )


def test_quantiles_and_noise():
    t = summarise([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (t.median_s, t.p20_s, t.p80_s, t.runs) == (3.5, 2.0, 5.0, 6)
    assert t.flags == ("noisy: the 20-80 % band spans 86% of the median",)
    assert summarise([1.0] * 5).flags == ()
    assert summarise([2.0]).p80_s == 2.0


def test_inputs_are_taken_in_turn():
    seen = []
    measure(lambda x: seen.append(x), device="cpu", inputs=[(1,), (2,), (3,)], budget_s=0.001)
    assert seen[-6:] in ([1, 2, 3] * 2, [2, 3, 1] * 2, [3, 1, 2] * 2)
    with pytest.raises(ValueError, match="inputs is empty"):
        measure(lambda: None, device="cpu", inputs=[])
    with pytest.raises(ValueError, match="fns is empty"):
        interleave({}, device="cpu")


def test_interleave_alternates_and_shares_drift():
    order, drift = [], iter(range(10**6))

    def work(name, seconds):
        order.append(name)
        time.sleep(seconds * (1 + 0.05 * next(drift)))  # a machine that slows down all the time

    timings = interleave(
        {"slow": lambda: work("slow", 2e-3), "fast": lambda: work("fast", 1e-3)},
        device="cpu",
        budget_s=0.08,
    )
    assert timings["slow"].runs == timings["fast"].runs
    rounds = order[-2 * timings["slow"].runs :]
    assert rounds[:4] == ["slow", "fast", "fast", "slow"]
    ratio = speedup(timings["slow"], timings["fast"])
    assert 1.4 < ratio.median < 2.6 and ratio.p20 <= ratio.median <= ratio.p80


def test_speedup_is_taken_pair_by_pair():
    slow, fast = summarise([2.0, 20.0, 8.0, 2.0, 6.0]), summarise([1.0, 10.0, 4.0, 1.0, 3.0])
    assert speedup(slow, fast) == timing.Ratio(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="slow has 5 runs, fast has 1"):
        speedup(slow, summarise([1.0]))


# ---------------------------------------------------------------- a simulated GPU


class FakeGpu:
    """A GPU with its own clock: work is queued and done later. It stands in for torch.cuda."""

    def __init__(self):
        self.queued_until = self.host = 0.0  # seconds
        self.flushed_bytes, self.cached = 0, False

    def launch(self, seconds, cached_seconds=None):
        self.queued_until = max(self.queued_until, self.host) + (
            cached_seconds if self.cached and cached_seconds else seconds
        )
        self.cached = True

    def synchronize(self, device=None):
        self.host = max(self.host, self.queued_until)

    def query(self):
        return self.host >= self.queued_until

    def event(self, enable_timing):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", max(self.queued_until, self.host))
        event.elapsed_time = lambda end: self.milliseconds(event, end)
        return event

    def milliseconds(self, start, end):
        assert self.host >= end.at, "CUDA refuses to read an event that has not happened"
        return (end.at - start.at) * 1e3

    def flush(self, numel, dtype, device):
        assert dtype == torch.float32

        def read():
            self.flushed_bytes, self.cached = 4 * numel, False
            self.queued_until += 6e-5

        return SimpleNamespace(sum=read)


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    cuda = SimpleNamespace(
        Event=gpu.event,
        synchronize=gpu.synchronize,
        current_stream=lambda device: gpu,
        is_available=lambda: True,
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=200 * 2**20),
        device=lambda device: contextlib.nullcontext(),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "zeros", gpu.flush)
    return gpu


def test_cuda_events_time_the_queued_work_with_a_cold_cache(gpu):
    t = measure(lambda: gpu.launch(1e-3, cached_seconds=1e-5), device="cuda", budget_s=0.01)
    assert t.median_s == pytest.approx(1e-3), (
        "milliseconds were not converted, or the cache was warm"
    )
    assert gpu.flushed_bytes >= 2 * 200 * 2**20


def test_cuda_is_the_default_where_it_is(gpu):
    assert measure(lambda: gpu.launch(2e-3)).median_s == pytest.approx(2e-3)


def test_an_unsynchronised_stopwatch_is_refused(gpu):
    refused = pytest.raises(
        UnsynchronisedTiming, match="the GPU is still working on this block: call synchronize"
    )
    with refused as caught, Stopwatch("cuda"):
        gpu.launch(1.0)
    assert "\n" not in str(caught.value)


def test_a_synchronised_stopwatch_is_accepted_and_earlier_work_is_waited_for(gpu):
    gpu.launch(5.0)  # not the block's
    with Stopwatch("cuda") as watch:
        assert gpu.host == 5.0
        gpu.launch(1.0)
        gpu.synchronize()
    assert watch.seconds >= 0


def test_an_error_in_the_block_is_not_hidden(gpu):
    with pytest.raises(KeyError), Stopwatch("cuda"):
        gpu.launch(1.0)
        raise KeyError("mine")


def test_cuda_tensors_timed_as_cpu_work_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    with pytest.raises(UnsynchronisedTiming, match="pass device='cuda'"):
        measure(lambda: {"out": [torch.ones(1)]}, device="cpu")


# ---------------------------------------------------------------- the rest


def test_stopwatch_on_a_cpu():
    watch = Stopwatch("cpu")
    with pytest.raises(RuntimeError, match="no time yet"):
        _ = watch.seconds
    with watch:
        time.sleep(0.02)
    assert 0.02 <= watch.seconds < 0.2


def test_cache_sizes_and_rotation(monkeypatch):
    assert timing._parse_size("480K\n") == 480 * 1024 and timing._parse_size("4M") == 4 * 2**20
    assert timing.cache_bytes("cpu") >= 2**18
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1000)
    inputs = timing.rotating_inputs(lambda: (torch.zeros(100), torch.zeros(25)), "cpu")
    assert len(inputs) == 10  # 10 x 500 bytes are 5 times the cache
    assert len({x.data_ptr() for x, _ in inputs}) == 10
    assert len(timing.rotating_inputs(lambda: (torch.zeros(100),), "cpu", limit_bytes=800)) == 2
    with pytest.raises(ValueError, match="no tensor data"):
        timing.rotating_inputs(lambda: (1,), "cpu")


@pytest.mark.gpu
def test_a_real_gpu_is_waited_for_and_its_cache_is_cold():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = torch.randn(2**20, device="cuda")  # 4 MB: within every L2
    cold = measure(lambda: x.sum(), device="cuda")
    assert cold.median_s > 0
    big = torch.randn(8192, 8192, device="cuda")
    with pytest.raises(UnsynchronisedTiming), Stopwatch("cuda"):
        big @ big
