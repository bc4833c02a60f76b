"""The load test of a server that is started here: it says what a server of known delays does, and a
server that stands still hides nothing from it.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from lessons.l22_serving.load import Served
from lessons.toolbox.draw.figure import overlapping_texts, texts_outside
from reference.bench import bench_figures, bench_serving, bench_sweep, slides, speed_serving
from reference.bench.bench_load import BenchRequest, LoadRun, Stream
from reference.bench.bench_omission import MEANT, SENT, counted_twice
from reference.bench.deck import Deck
from reference.bench.own_server import OwnServer, own_server
from tests.virtual_time import run_virtual


class Stalling:
    """Answers after 50 ms with two tokens, 50 ms apart, unless it is stopped: then when it goes
    on.
    """

    def __init__(self):
        self.goes = asyncio.Event()
        self.goes.set()

    def stop(self):
        self.goes.clear()

    def go_on(self):
        self.goes.set()

    async def send(self, request: BenchRequest, stream: Stream) -> None:
        for _ in range(2):
            await asyncio.sleep(0.05)
            await self.goes.wait()
            stream.came()


class Fake:
    """What bench_sweep does not start here: a server and the requests for it."""

    def __init__(self, monkeypatch):
        self.server = None
        monkeypatch.setattr(bench_serving, "backend_of", lambda client: self)
        monkeypatch.setattr(bench_serving, "wait_until_ready", self.ready)
        monkeypatch.setattr(bench_serving, "requests_of", self.requests)

    async def __aenter__(self):
        return self.server

    async def __aexit__(self, *error):
        pass

    async def ready(self, client, backend):
        pass

    def requests(self, client, seed):
        return [BenchRequest("x", 1, 2)] * client.num_prompts


def arguments(*more):
    return bench_sweep.parse_args(["--goodput", "ttft:300", "--seconds", "20", *more])


def measured(monkeypatch, args):
    """The record of a whole load test, on a clock that jumps."""
    fake = Fake(monkeypatch)

    async def run():
        fake.server = Stalling()
        client = bench_sweep.client_args(args)
        points, more = await bench_sweep.measure(args, fake.server, client)
        return dict(vars(client)), points, more

    setting, points, more = run_virtual(run())
    at = bench_figures.knee_of(points)
    return dict(setting=setting, fingerprint={"device": "a device"}, knee=at, points=points, **more)


def test_the_sweep_finds_what_the_server_does(monkeypatch, tmp_path):
    """64 places of 0.1 s each are 640 requests a second, and a stall of 1.5 s in 20 is 7.5 %."""
    record = measured(monkeypatch, arguments("--shares", "0.04", "0.02", "0.01"))
    assert record["capacity_per_s"] == pytest.approx(640)
    assert [point["request_rate"] for point in record["points"]] == pytest.approx([6.4, 12.8, 25.6])
    assert [point["completed"] for point in record["points"]] == [128, 256, 512]
    assert all(point["slo_attainment"] == 1 for point in record["points"])
    stall = record["stall"]
    # Little: 25.6 a second, each for 0.1 s, twice
    assert stall["max_concurrency"] == 6 and stall["requests"] == 512
    sent, meant = (stall["counted"][name] for name in (SENT, MEANT))
    assert sent["share_late"] <= 6 / 512 and sent["p99_ttft_ms"] > 1000
    assert 0.06 < meant["share_late"] < 0.2 and meant["distribution_ttft_ms"][50] < 60
    figures = bench_figures.figures_of(record)
    assert set(figures) == {"latencies", "knee", "cost", "omission"}
    for name, (figure, alt) in figures.items():
        assert alt and not texts_outside(figure) and not overlapping_texts(figure), name
    (tmp_path / "serving_load.json").write_text(json.dumps(record, default=str))
    monkeypatch.setattr(bench_figures, "figures_of", lambda data: figures)
    with Deck(tmp_path) as deck:
        assert slides.draw_record(tmp_path / "serving_load.json", deck) == 4


def test_both_ways_of_counting_are_of_the_same_requests():
    """A request that waited 2 s in the client, then 0.1 s for its token; and one that failed."""
    history = [
        Served(0.0, 1.0, (0.1, 0.2)),
        Served(1.0, 4.0, (3.1,)),
        Served(2.0, 3.0, why_not="gone"),
    ]
    found = counted_twice(LoadRun(history, [0.0, 2.0, 0.5], False), 0.5)
    assert found["requests"] == 3 and found["failed"] == 1
    ends = {name: one["distribution_ttft_ms"][100] for name, one in found["counted"].items()}
    assert ends == pytest.approx({SENT: 100, MEANT: 2100})
    assert found["counted"][MEANT]["share_late"] == 0.5
    with pytest.raises(ValueError, match="answered requests: got 0"):
        counted_twice(LoadRun(history[2:], [0.5], False), 0.5)


def test_a_stopped_server_goes_on_and_ends():
    """A process with a child, in a group of its own, as a server with its engine in another
    process.
    """
    program = "import time\nwhile True: print('x', flush=True); time.sleep(0.01)"
    process = subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE
    )
    server = OwnServer(process, "1")
    try:
        assert process.stdout.readline()
        server.stop()
        deadline = time.monotonic() + 60
        while state(process.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(process.pid) == "T"
        server.go_on()
        while state(process.pid) == "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(process.pid) != "T"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def state(pid: int) -> str:
    """Of a process: T if it is stopped."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_server_is_ended_even_if_it_stands(monkeypatch):
    """Whatever happens in the block, nothing is left behind."""
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start(program, **how))
    with pytest.raises(KeyError), own_server("models/tiny") as server:
        server.stop()
        raise KeyError
    assert server.process.returncode == -signal.SIGTERM


def test_servers_of_the_other_measurement_are_ended_alike(monkeypatch):
    """speed_serving starts two, one with its engine in a thread, and both end although they
    stand.
    """
    commands, program = [], [sys.executable, "-c", "import time; time.sleep(60)"]
    start = subprocess.Popen

    def note(command, **how):
        commands.append((command, start(program, **how)))
        return commands[-1][1]

    monkeypatch.setattr(subprocess, "Popen", note)
    args = speed_serving.parse_args(["--streams", "7"])
    with ExitStack() as stack:
        urls = speed_serving.enter_servers(args, stack)
        for _, process in commands:
            os.killpg(process.pid, signal.SIGSTOP)
    assert list(urls) == [speed_serving.SERVER, speed_serving.THREAD]
    for (command, process), url, thread in zip(commands, urls.values(), (0, 1)):
        assert f"127.0.0.1:{command[command.index('--port') + 1]}" in url
        assert command[command.index("--max-num-seqs") + 1] == "7"
        assert command.count("--disable-frontend-multiprocessing") == thread
        assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "given, said",
    [
        (["--seconds", "0"], "--seconds: got 0.0"),
        (["--shares", "0.5", "-1"], "--shares: got -1.0"),
        (["--goodput", "ttft:x"], "--goodput: got 'ttft:x'"),
        (["--output-len", "0"], "--random-output-len: got 0"),
        (["--price-per-hour", "-3"], "--price-per-hour: got -3.0"),
    ],
)
def test_mistakes_are_one_line(given, said, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_sweep, "own_server", None)  # no server is started before
    assert bench_sweep.main([*given, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
