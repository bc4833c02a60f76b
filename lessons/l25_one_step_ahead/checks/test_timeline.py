"""Time on the virtual clock: what a step takes, what is late, and that the host waits in one
place.
"""

from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lessons.l11_cuda_graphs.lab.testing import new_model, new_prompts
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l25_one_step_ahead.generate import generate
from lessons.l25_one_step_ahead.lab import pictures
from lessons.l25_one_step_ahead.lab.experiments import late_end, step_ms
from lessons.l25_one_step_ahead.lab.sleeping import served
from lessons.l25_one_step_ahead.lab.timeline import HOST_MS, recorded
from lessons.l25_one_step_ahead.model_device import ModelDevice
from lessons.l25_one_step_ahead.naive import Serial
from lessons.l25_one_step_ahead.optimized import OneStepAhead
from lessons.l25_one_step_ahead.stream import VirtualStream
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside


@pytest.mark.parametrize("device_ms", [0.5, 1, 2, 5, 20])
def test_a_step_takes_the_longer_of_the_two(device_ms):
    host_ms = sum(HOST_MS.values())
    serial, ahead = step_ms(device_ms)
    assert serial == pytest.approx(host_ms + device_ms)
    assert ahead == pytest.approx(max(host_ms, device_ms))


class ReadsAtOnce(OneStepAhead):
    """Waits for each pass as soon as it is sampled: a synchronisation in the loop."""

    def sample(self, step, ahead):
        super().sample(step, ahead)
        self.device.stream.wait(self.device.sampled[ahead])


def test_a_wait_in_the_loop_gives_the_gain_away():
    """Its tokens are right, so only time can tell."""
    waits, ahead, serial = (recorded(loop, 5) for loop in (ReadsAtOnce, OneStepAhead, Serial))
    assert waits.outputs == ahead.outputs == serial.outputs
    # Telling alone is still hidden.
    assert waits.step_ms == pytest.approx(serial.step_ms - HOST_MS["tell"])
    assert ahead.step_ms < waits.step_ms


def test_the_device_runs_one_thing_at_a_time_and_is_never_idle():
    spans = [span for span in recorded(OneStepAhead, 5).spans if span.lane == "device"]
    assert len(spans) > 20
    for before, after in pairwise(spans):
        assert after.start_s == pytest.approx(before.end_s)


def test_a_stream_does_its_work_in_order_and_late():
    clock, done = VirtualClock(), []
    stream = VirtualStream(clock)
    first = stream.launch("a", 2.0, lambda: done.append("a"))
    second = stream.launch("b", 3.0, lambda: done.append("b"))
    assert (second.start_s, second.end_s, clock.now_s, done) == (2.0, 5.0, 0.0, [])
    stream.wait(second)
    assert (clock.now_s, done) == (5.0, ["a", "b"])
    stream.wait(first)
    assert clock.now_s == 5.0


@pytest.mark.parametrize("tokens", [4, 13, 14, 15, 29, 30])
def test_an_end_by_a_stop_token_costs_a_row_and_one_time_in_sixteen_a_block(tokens):
    """A prompt of 4 tokens. The late token is number 4 + tokens."""
    (rows, blocks), (late_rows, late_blocks) = (
        late_end(tokens, loop) for loop in (Serial, OneStepAhead)
    )
    assert late_rows == rows + 1
    assert late_blocks == blocks + ((4 + tokens) % 16 == 1)


def test_a_thread_that_sleeps_serves_the_same_tokens():
    assert served(Serial, 0.1, 5) == served(OneStepAhead, 0.1, 5)


class Reads(TorchFunctionMode):
    """Counts what asks a tensor for its values."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


class CountedDevice(ModelDevice):
    """Notes how often a tensor is read in each of the three parts."""

    def __init__(self, runner):
        super().__init__(runner)
        self.reads: dict[str, list[int]] = {"sample": [], "read": []}

    def counted(self, name, *arguments):
        with Reads() as reads:
            result = getattr(ModelDevice, name)(self, *arguments)
        self.reads[name].append(reads.count)
        return result

    def sample(self, passed, sequences):
        return self.counted("sample", passed, sequences)

    def read(self, passed):
        return self.counted("read", passed)


def test_the_host_reads_one_tensor_a_step(seed, monkeypatch):
    """In `read`. A launch on a CPU plans its attention from lists; of a GPU's launch
    test_equivalence.py has a test that PyTorch itself decides.
    """
    from lessons.l25_one_step_ahead import generate as rung

    devices = []

    class Noted(CountedDevice):
        def __init__(self, runner):
            super().__init__(runner)
            devices.append(self)

    monkeypatch.setattr(rung, "ModelDevice", Noted)
    generate(new_model(torch.float32), new_prompts(3, 1, 7), [5, 9, 2])
    (device,) = devices
    assert set(device.reads["read"]) == {1} and set(device.reads["sample"]) == {0}


def test_the_picture_fits():
    figure = pictures.draw_timeline()
    assert not texts_outside(figure) and not overlapping_texts(figure)
    assert "7 ms in turns, 5 ms one step ahead" in figure.get_suptitle()
