"""reference.bench.ahead_speed in small: a device that takes time, and loops that wait for it."""

import json
import time

import pytest
import torch

from reference.bench import ahead_speed
from reference.bench.ahead_speed import SleepingDevice, put_on
from reference.engine.llm import LLM
from reference.engine.sampling_params import SamplingParams
from tests.test_llm import MODEL


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_passes_run_one_after_the_other():
    device, start = SleepingDevice(0.01), time.perf_counter()
    ends = [device.launch() for _ in range(3)]
    assert time.perf_counter() - start < 0.01  # a launch does not wait
    for count, end in enumerate(ends, 1):
        assert 0.01 * count <= end - start < 0.01 * (count + 1)
        device.wait(end)
        assert time.perf_counter() >= end
    time.sleep(0.002)
    assert device.launch() - time.perf_counter() > 0.009  # not from when the last one ended


@pytest.mark.parametrize("is_ahead", ahead_speed.LOOPS.values(), ids=ahead_speed.LOOPS)
def test_a_token_is_told_when_its_pass_has_ended(is_ahead):
    """Never before, and each place gets its own."""
    llm = LLM(MODEL, dtype="float32", device="cpu", max_num_seqs=2, async_scheduling=is_ahead)
    device = SleepingDevice(0.02)
    put_on(llm.engine, device)
    params = SamplingParams(temperature=1, max_tokens=5, ignore_eos=True)
    llm.engine.add_request("a", [5, 6, 7], params)
    start, told = time.perf_counter(), []
    while llm.engine.has_unfinished_requests:
        for output in llm.engine.step():
            told.append(time.perf_counter() - start)
            tokens = output.outputs[0].token_ids
            assert tokens == [100 + 7 * place for place in range(len(tokens))]
    assert len(told) == 5
    assert all(0.02 * count <= seconds for count, seconds in enumerate(told, 1))


@pytest.mark.sample(1, of="speed")
def test_ahead_hides_what_turns_pay(tmp_path, capsys):
    arguments = ["--out", str(tmp_path), "--device-ms", "10", "--steps", "15"]
    assert ahead_speed.main(arguments) == 0
    record = json.loads((tmp_path / "ahead_speed.json").read_text())
    (entry,) = record["entries"]
    turns, ahead = (entry[name]["step_s"]["median"] for name in ahead_speed.LOOPS)
    assert 0.0099 < ahead < turns
    share = entry["in turns"]["overhead"]["median"]
    assert share == pytest.approx(1 - 0.01 / turns, abs=0.02) and share > 0
    assert "in turns" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--device-ms", "0"]])
def test_arguments_out_of_range_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        ahead_speed.main(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err
