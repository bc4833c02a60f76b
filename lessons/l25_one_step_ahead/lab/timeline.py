"""A loop whose host needs time, too: what host and device did when, recorded on a clock.

run = recorded(OneStepAhead, device_ms=5)
run.step_ms        # the mean time of a step, in the middle of the run
run.spans          # who did what, from when to when
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l15_chunked_prefill.lab.virtual import new_request
from lessons.l15_chunked_prefill.optimized import ChunkedScheduler
from lessons.l25_one_step_ahead.lab.virtual import VirtualDevice
from lessons.l25_one_step_ahead.naive import run_until_idle
from lessons.l25_one_step_ahead.stream import VirtualStream

# What the host does in a step, in milliseconds: together 2. "sample" is what it prepares for the
# sampler (masks, penalties), which plain requests have no need of.
HOST_MS = {"schedule": 0.8, "launch": 0.7, "sample": 0.0, "tell": 0.5}
SAMPLE_SHARE = 0.1  # of the device's time of a step
REQUESTS, ANSWER, BLOCKS = 4, 24, 64


class Span(NamedTuple):
    """One of them was busy with something. lane: "host" or "device". number: of the step."""

    lane: str
    what: str
    number: int
    start_s: float
    end_s: float


@dataclass
class Host:
    """A host that needs cost_ms[what] milliseconds for what it does. pause: lets seconds pass."""

    cost_ms: dict[str, float]
    now: Callable[[], float]
    pause: Callable[[float], None]
    spans: list[Span] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def spend(self, what: str) -> None:
        """Be busy, and note it."""
        number = self.counts[what] = self.counts.get(what, 0) + 1
        start_s = self.now()
        self.pause(self.cost_ms[what] / 1e3)
        if self.cost_ms[what]:
            self.spans.append(Span("host", what, number, start_s, self.now()))


class BusyScheduler(ChunkedScheduler):
    """A scheduler whose host needs time to schedule."""

    def __init__(self, host: Host, blocks: BlockManager):
        super().__init__(blocks)
        self.busy = host

    def schedule(self):
        self.busy.spend("schedule")
        return super().schedule()


class BusyDevice(VirtualDevice):
    """A device whose host needs time to launch, to prepare sampling, and to tell what came out."""

    def __init__(self, host: Host, blocks: BlockManager, stream, device_ms: float):
        sample_ms = SAMPLE_SHARE * device_ms
        super().__init__(blocks, stream, (device_ms - sample_ms) / 1e3, sample_ms / 1e3)
        self.host = host

    def launch(self, step, before=None):
        self.host.spend("launch")
        return super().launch(step, before)

    def sample(self, passed, sequences):
        self.host.spend("sample")
        super().sample(passed, sequences)

    def read(self, passed):
        tokens = super().read(passed)
        self.host.spend("tell")
        return tokens


@dataclass
class Recorded:
    """A run that has ended. spans: in the order in which they ended, device's after the host's."""

    spans: list[Span]
    outputs: list[list[int]]

    @property
    def step_ms(self) -> float:
        """From the end of one step on the device to that of the next, in the middle of the run."""
        ends = [s.end_s for s in self.spans if (s.lane, s.what) == ("device", "sample")]
        middle = ends[len(ends) // 4 : -len(ends) // 4]
        return 1e3 * (middle[-1] - middle[0]) / (len(middle) - 1)


def recorded(
    loop: type, device_ms: float, host_ms: dict[str, float] = HOST_MS, answer: int = ANSWER
) -> Recorded:
    """A few requests served by a loop on a virtual clock. device_ms: a pass with its sampling."""
    clock = VirtualClock()

    def pause(seconds: float) -> None:
        clock.now_s += seconds

    host, stream = Host(dict(host_ms), clock, pause), VirtualStream(clock)
    outputs = serve(loop, host, stream, device_ms, answer)
    numbers: dict[str, int] = {}
    for work in stream.done:
        number = numbers[work.name] = numbers.get(work.name, 0) + 1
        host.spans.append(Span("device", work.name, number, work.start_s, work.end_s))
    return Recorded(host.spans, outputs)


def serve(
    loop: type, host: Host, stream, device_ms: float, answer: int, kind: type = BusyDevice
) -> list[list[int]]:
    """The tokens of REQUESTS requests of `answer` tokens each. kind: of the device."""
    blocks = BlockManager(BLOCKS, 16)
    scheduler = BusyScheduler(host, blocks)
    requests = [new_request(row, [row] * 4, answer) for row in range(REQUESTS)]
    for request in requests:
        scheduler.add(request)
    run_until_idle(loop(scheduler, kind(host, blocks, stream, device_ms)))
    return [request.output for request in requests]
