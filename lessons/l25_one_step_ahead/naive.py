"""One thing after the other: the host waits for the device, then the device waits for the host.

Read `step`. While it schedules, launches and tells, the device has nothing to do, and while the
device runs, the host has nothing to do. So a step takes the time of both together.
"""

from lessons.l02_naive_attention.request import OnToken
from lessons.l14_continuous_batching.loop import Scheduler
from lessons.l14_continuous_batching.sequence import Sequence
from lessons.l25_one_step_ahead.device import Device


class Serial:
    """The loop of lesson 14, with its device in three parts."""

    def __init__(self, scheduler: Scheduler, device: Device, on_token: OnToken | None = None):
        self.scheduler, self.device = scheduler, device
        self.on_token = on_token or (lambda row, token: None)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    def abort(self, sequence: Sequence) -> None:
        """Forget a request between two steps, or while tokens are told."""
        self.scheduler.abort(sequence)

    def step(self) -> None:
        """Schedule, run, sample, wait, tell."""
        step = self.scheduler.schedule()
        if not step.chunks:
            return
        passed = self.device.launch(step)
        sequences = self.scheduler.finish(step)
        self.device.sample(passed, sequences)
        tokens = self.device.read(passed)
        for sequence, token in zip(sequences, tokens):
            sequence.append(token)
            self.on_token(sequence.row, token)
        self.scheduler.leave()


def run_until_idle(loop) -> None:
    """Serve all requests of a loop."""
    while not loop.is_idle:
        loop.step()
