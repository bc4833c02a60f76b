"""The numbers of the text that come from a virtual clock: what the loop gains, where it loses."""

from typing import NamedTuple

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import VirtualClock
from lessons.l15_chunked_prefill.lab.virtual import answer, new_request
from lessons.l25_one_step_ahead.lab.timeline import (
    BLOCKS,
    HOST_MS,
    BusyDevice,
    BusyScheduler,
    Host,
    recorded,
)
from lessons.l25_one_step_ahead.naive import Serial
from lessons.l25_one_step_ahead.optimized import OneStepAhead
from lessons.l25_one_step_ahead.stream import VirtualStream

LATENCIES_MS = (1, 2, 5, 10, 20)
ARRIVALS = 20


class Ways(NamedTuple):
    """The same number of both loops."""

    serial: float
    ahead: float


def step_ms(device_ms: float, prepare_ms: float = 0.0) -> Ways:
    """Milliseconds of a step. prepare_ms: what the host prepares for the sampler, such as masks."""
    host_ms = HOST_MS | {"sample": prepare_ms}
    return Ways(*(recorded(loop, device_ms, host_ms).step_ms for loop in (Serial, OneStepAhead)))


class CountedBlocks(BlockManager):
    """Counts the blocks that were ever taken."""

    taken = 0

    def take(self, count: int) -> list[int]:
        self.taken += max(0, count)
        return super().take(count)


class Run:
    """Requests that arrive at times of a virtual clock. device_ms: of a step."""

    def __init__(self, loop: type, device_ms: float = 5.0, block_size: int = 16):
        self.clock = VirtualClock()

        def pause(seconds: float) -> None:
            self.clock.now_s += seconds

        host = Host(dict(HOST_MS), self.clock, pause)
        self.blocks = CountedBlocks(BLOCKS, block_size)
        self.device = BusyDevice(host, self.blocks, VirtualStream(self.clock), device_ms)
        self.told_s: dict[int, list[float]] = {}
        self.loop = loop(BusyScheduler(host, self.blocks), self.device, self.on_token)

    def on_token(self, row: int, token: int) -> None:
        """Note when a token is known to the host."""
        self.told_s.setdefault(row, []).append(self.clock.now_s)

    def serve(self, coming: list) -> None:
        """coming: (second, request), in the order of arrival."""
        while coming or not self.loop.is_idle:
            while coming and (coming[0][0] <= self.clock.now_s or self.loop.is_idle):
                self.loop.scheduler.add(coming.pop(0)[1])
            self.loop.step()


def first_token_ms(loop: type, device_ms: float = 5.0) -> float:
    """Mean time to the first token of a request that comes while four others decode; it comes at
    any moment of a step.
    """
    total = 0.0
    step_s = getattr(step_ms(device_ms), "serial" if loop is Serial else "ahead") / 1e3
    for phase in range(ARRIVALS):
        run, arrives_s = Run(loop, device_ms), step_s * (5 + phase / ARRIVALS)
        decoding = [(0.0, new_request(row, [row] * 4, 12)) for row in range(4)]
        run.serve([*decoding, (arrives_s, new_request(9, [1, 2, 3], 1))])
        total += run.told_s[9][0] - arrives_s
    return 1e3 * total / ARRIVALS


def first_tokens_ms(device_ms: float = 5.0) -> Ways:
    """`first_token_ms` of both loops."""
    return Ways(*(first_token_ms(loop, device_ms) for loop in (Serial, OneStepAhead)))


def late_end(tokens: int, loop: type = OneStepAhead, block_size: int = 16) -> tuple[int, int]:
    """(tokens that the device computed, blocks that were ever taken) for one answer that a stop
    token ends after `tokens` tokens.
    """
    request = new_request(0, [5, 6, 7, 8], 2 * tokens)
    wanted = answer(0, request.prompt, tokens)
    # a prompt whose last token appears nowhere before
    row = 0
    while wanted[-1] in wanted[:-1]:
        row += 1
        wanted = answer(row, request.prompt, tokens)
    request.row, request.stop_token_ids = row, frozenset(wanted[-1:])
    run = Run(loop, block_size=block_size)
    run.serve([(0.0, request)])
    assert request.output == wanted
    return run.device.computed_tokens, run.blocks.taken
