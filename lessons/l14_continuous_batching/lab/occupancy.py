"""What a schedule wastes, counted: idle places, padding, and steps that a better one would not
need.

Every number is counted on a log of `serve`, so that the schedulers themselves are measured and no
formula about them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l14_continuous_batching.clock import Arrival, CostExecutor, Log, VirtualClock, serve
from lessons.l14_continuous_batching.lab.workload import all_at_once
from lessons.l14_continuous_batching.loop import Scheduler
from lessons.l14_continuous_batching.naive import DynamicScheduler, StaticScheduler
from lessons.l14_continuous_batching.optimized import ContinuousScheduler
from lessons.l14_continuous_batching.sequence import Step

BLOCK_SIZE = 16
ENOUGH_BLOCKS = 2**20  # so that places are the limit, and not memory


@dataclass(frozen=True)
class Occupancy:
    """Places and tokens of a run. busy: (place, step) pairs in which a request got a token."""

    places: int
    steps: int
    busy: int
    wanted_tokens: int
    computed_tokens: int

    @property
    def busy_share(self) -> float:
        return self.busy / (self.places * self.steps)

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_share

    @property
    def padding_share(self) -> float:
        """Of all tokens that were computed, those that no request wanted."""
        return 1 - self.wanted_tokens / self.computed_tokens


def occupancy(log: Log, places: int) -> Occupancy:
    """Count a run on so many places."""
    return Occupancy(
        places,
        steps=len(log.passes),
        busy=sum(len(one.rows) for one in log.passes),
        wanted_tokens=sum(one.wanted_tokens for one in log.passes),
        computed_tokens=sum(one.computed_tokens for one in log.passes),
    )


def new_scheduler(name: str, places: int, clock: VirtualClock, max_wait_s: float) -> Scheduler:
    """ "static", "dynamic" or "continuous". max_wait_s: the window of the dynamic one, seconds."""
    if name == "static":
        return StaticScheduler(places)
    if name == "dynamic":
        return DynamicScheduler(places, max_wait_s, clock)
    return ContinuousScheduler(BlockManager(ENOUGH_BLOCKS, BLOCK_SIZE), places)


def simulate(
    name: str, trace: Sequence[Arrival], places: int, cost, max_wait_s: float = 0.0
) -> Log:
    """Serve a trace by one of the three, each step taking cost(step) seconds."""
    clock = VirtualClock()
    scheduler = new_scheduler(name, places, clock, max_wait_s)
    return serve(scheduler, trace, CostExecutor(clock, cost), clock)


def one_second(step: Step) -> float:
    """A cost under which seconds are steps."""
    return 1.0


def offline(name: str, output_lens: Sequence[int], places: int) -> Log:
    """Answers of these lengths, all there from the beginning, a second a step."""
    return simulate(name, all_at_once(output_lens), places, one_second)


def gain(output_lens: Sequence[int], places: int) -> float:
    """Steps of static waves over steps of continuous batching, for the same answers."""
    static, continuous = (offline(name, output_lens, places) for name in ("static", "continuous"))
    return len(static.passes) / len(continuous.passes)


# ---------------------------------------------------------------- as a Gantt chart


def place_rows(log: Log, places: int) -> list[list[int | None]]:
    """Which request is on which place in which step: [places][steps], None where none is.

    A request keeps the place that it took: the first that was free when it came.
    """
    table = [[None] * len(log.passes) for _ in range(places)]
    place_of: dict[int, int] = {}
    for step, one in enumerate(log.passes):
        here = set(one.rows)
        place_of = {row: place for row, place in place_of.items() if row in here}
        free = iter(sorted(set(range(places)) - set(place_of.values())))
        for row in one.rows:
            if row not in place_of:
                place_of[row] = next(free)
            table[place_of[row]][step] = row
    return table


def gantt_rows(
    log: Log, places: int, label: str, steps: int
) -> dict[str, list[tuple[int, int, str, str]]]:
    """The first `steps` steps as toolbox.draw.plotting.gantt takes them: a lane a place."""
    lanes = {}
    for place, table in enumerate(place_rows(log, places)):
        lane = lanes[f"{label} {place + 1}"] = []
        for step, row in enumerate(table[:steps]):
            kind = "idle" if row is None else "a token"
            text = "" if row is None else f"{row + 1}"
            if lane and lane[-1][2:] == (kind, text):
                lane[-1] = (lane[-1][0], step + 1, kind, text)
            else:
                lane.append((step, step + 1, kind, text))
    return lanes
