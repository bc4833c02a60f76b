"""Timing is tested on sleeps, on a simulated GPU whose clock is ours, and on samples with known
quantiles.
"""

import contextlib
import math
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
    summarise,
)


def test_measure_on_the_cpu_finds_the_time_of_a_sleep():
    t = measure(lambda: time.sleep(0.01), device="cpu", budget_s=0.1)
    assert 0.01 <= t.best_s <= t.p20_s <= t.median_s <= t.p80_s < 0.05
    assert 3 <= t.runs <= 12


def test_warm_up_is_not_in_the_samples():
    durations = iter([0.2, 0.1] + [0.001] * 500)
    t = measure(lambda: time.sleep(next(durations)), device="cpu", budget_s=0.4)
    assert t.p80_s < 0.05


def test_a_slow_function_still_gets_three_runs():
    assert measure(lambda: time.sleep(0.03), device="cpu", budget_s=0.01).runs == 3


def test_the_floor_is_flagged_only_when_beaten():
    (flag,) = summarise([0.5] * 5, floor_s=1.0).flags
    assert flag == "beats the floor of 1 s: cache-resident data or a wrong floor"
    assert summarise([0.5] * 5, floor_s=0.4).flags == []
    fast = measure(lambda: None, device="cpu", floor_s=1.0, budget_s=0.01)
    assert any(flag.startswith("beats the floor of 1 s") for flag in fast.flags)


def test_quantiles_and_noise():
    t = summarise([6.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert (t.median_s, t.p20_s, t.p80_s, t.best_s, t.runs) == (3.5, 2.0, 5.0, 1.0, 6)
    assert t.flags == ["noisy: the 20-80 % band spans 86% of the median"]
    assert summarise([2.0]).p20_s == summarise([2.0]).p80_s == 2.0


def test_candidates_take_turns():
    order = []
    functions = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timings = interleave(functions, device="cpu", budget_s=0.001)
    assert timings["a"].runs == timings["b"].runs
    assert order[-2 * timings["a"].runs :][:4] == ["a", "b", "b", "a"]
    with pytest.raises(ValueError, match="fns is empty"):
        interleave({}, device="cpu")


# ---------------------------------------------------------------- a simulated GPU


class FakeGpu:
    """A GPU with its own clock: work is queued and done later. It stands in for torch.cuda, and for
    the clock of the host.
    """

    def __init__(self):
        self.queued_until = self.host = 0.0  # seconds
        self.flushed_bytes, self.cached = 0, False

    def launch(self, seconds, cached_seconds=None, python_s=0.0):
        self.host += python_s
        if self.cached and cached_seconds:
            seconds = cached_seconds
        self.queued_until = max(self.queued_until, self.host) + seconds
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

    def flush(self, numel, device):
        def read():
            self.launch(6e-5)
            self.flushed_bytes, self.cached = 4 * numel, False

        return SimpleNamespace(sum=read)


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    cuda = SimpleNamespace(
        Event=gpu.event,
        synchronize=gpu.synchronize,
        current_stream=lambda device: gpu,
        is_available=lambda: True,
        device=lambda device: contextlib.nullcontext(),
        _sleep=lambda cycles: gpu.launch(cycles / 2e9),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "zeros", gpu.flush)
    monkeypatch.setattr(timing, "MAX_RUNS", 20)
    monkeypatch.setattr(timing, "perf_counter", lambda: gpu.host)
    return gpu


def test_cuda_events_time_the_queued_work_with_a_cold_cache(gpu):
    """CUDA is the default where it is; milliseconds become seconds, and nothing is cached."""
    t = measure(lambda: gpu.launch(1e-3, cached_seconds=1e-5), budget_s=0.01)
    assert t.median_s == pytest.approx(1e-3)
    assert gpu.flushed_bytes >= 2 * 126 * 2**20


def test_a_short_launch_is_not_in_the_time_and_a_long_chain_of_launches_is(gpu):
    t = measure(lambda: gpu.launch(2e-5, python_s=150e-6))
    assert t.median_s == pytest.approx(2e-5), "Python's time is inside the GPU's"
    assert t.flags == ["launch not counted: Python needs 150 µs for it"]
    quick = measure(lambda: gpu.launch(2e-5, python_s=10e-6))
    assert quick.median_s == pytest.approx(2e-5) and quick.flags == []

    def step():
        for _ in range(100):
            gpu.launch(1e-6, python_s=5e-6)

    chain = measure(step)
    assert chain.median_s == pytest.approx(100 * 5e-6 + 1e-6), "a part of the launches is missing"
    assert chain.flags == []


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
        gpu.launch(1.0)
        gpu.synchronize()
        assert math.isnan(watch.seconds), "the block has not ended"
    assert watch.seconds == 1.0


def test_an_error_in_the_block_is_not_hidden(gpu):
    with pytest.raises(KeyError), Stopwatch("cuda"):
        gpu.launch(1.0)
        raise KeyError("mine")


def test_cuda_tensors_timed_as_cpu_work_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    with pytest.raises(UnsynchronisedTiming, match="pass device='cuda'"):
        measure(lambda: {"out": [torch.ones(1)]}, device="cpu")


def test_stopwatch_on_a_cpu():
    with Stopwatch("cpu") as watch:
        time.sleep(0.02)
    assert 0.02 <= watch.seconds < 0.2


@pytest.mark.gpu
def test_a_real_gpu_is_waited_for_and_its_launches_are_hidden():
    x = torch.randn(2**20, device="cuda")  # 4 MB: within every L2

    def slow_to_launch():
        time.sleep(100e-6)
        return x.sum()

    plain, slow = (measure(f, device="cuda").median_s for f in (x.sum, slow_to_launch))
    assert 0 < slow < plain + 30e-6
    big = torch.randn(8192, 8192, device="cuda")
    with pytest.raises(UnsynchronisedTiming), Stopwatch("cuda"):
        big @ big
