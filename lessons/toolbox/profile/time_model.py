"""How long a kernel takes, predicted: the way of its warps, replayed on a model of an SM.

The machine has noted which instructions each warp of a program went through (`Counts.path`). They
are issued again here, in order, on the clock of an SM that holds as many programs as fit:

    a warp issues its next instruction when the registers that it reads are there,
    its scheduler (of four) is free, and so is the unit that runs it;
    a result comes after the unit's latency; shared memory gives one pass a clock;
    memory gives each SM its share of the bandwidth, and answers after a latency, so that few bytes
    in flight leave it idle (Little's law);
    a barrier holds a warp until the others have come, a wait until copies or products are there.

A launch is as long as its busiest SM: programs that do not fit run in further waves. Before it and
after it comes the launch itself.

The replay is in `replay.py`, with the constants, and for kernels that use the copy engine (TMA) in
`engines.py`. The clock is the data sheet's. No chip but Hopper is predicted, because no other was
held against measurements.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from lessons.toolbox.gpu.counters import SECTOR
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.profile.engines import SMWithEngine, with_flags
from lessons.toolbox.profile.replay import CONSTANTS, SM, Constants, Cost, Unpredicted, costs

RECORD = Path(__file__).resolve().parents[3] / "results" / "h200" / "time_model.json"
HOPPER = ("h100", "h200")  # they run the same code


@dataclass(frozen=True)
class Prediction:
    """Of one launch. busy: {unit: the share of the busiest SM's time that it works}."""

    seconds: float
    clocks: float  # of the busiest SM
    busy: dict[str, float]

    @property
    def limit(self) -> str:
        """The busiest unit, or what else the warps wait for."""
        name = max(self.busy, key=self.busy.get)
        return name if self.busy[name] > 0.6 else "latency"


def predict(profile, c: Constants = CONSTANTS) -> Prediction:
    """How long a launch of a profiled kernel takes on the profile's chip. Raises Unpredicted."""
    chip, launch = profile.chip, profile.first
    programs = math.prod(launch.grid)
    on_one = math.ceil(programs / chip.sm_count)  # of the SM that has most
    together = min(on_one, profile.occupancy()[0])
    active = min(programs, chip.sm_count)
    clock = chip.clock_hz
    memory_rate = min(c.sm_bytes, c.memory_share * chip.memory_bytes_per_s / active / clock)
    l2_rate = min(c.sm_bytes, c.l2_bytes_per_s / active / clock)
    found = costs(profile.kernel, launch, profile.capability, c)
    found = [replace(x, first=x.first * share(x, launch, chip)) for x in found]
    has_engine = any(cost.kind in ("flag", "engine") for cost in found)
    sm = (SMWithEngine if has_engine else SM)(found, c, l2_rate, memory_rate)
    chosen, typical = chosen_of(launch, together)
    once = sm.run((with_flags if has_engine else paths_of)(launch, chosen))
    busy = {name: min(1.0, time / once) for name, time in sm.busy.items()}
    clocks = once * max(1.0, on_one / together * typical) if on_one > together else once
    return Prediction((clocks + c.launch) / clock, clocks, busy)


def share(cost: Cost, launch, chip) -> float:
    """Of the sectors that were touched for the first time, those that memory really moves: what
    fits into half of the L2 is stored later, and a sample of programs knows no others that have
    touched them.
    """
    if not cost.first:
        return 0.0
    kind = "loaded" if cost.latency else "stored"
    scale = math.prod(launch.grid) / launch.ran
    touched = [(x > 0).sum() for (which, _), x in launch.counts.touched.items() if which == kind]
    sizes = [len(x) for (which, _), x in launch.counts.touched.items() if which == kind]
    guessed = scale * sum(touched)
    real = sum(min(size, scale * many) for size, many in zip(sizes, touched))
    if kind == "stored":
        real = max(0.0, real - chip.l2_bytes / 2 / SECTOR)
    return real / guessed


def chosen_of(launch, together: int) -> tuple[list[int], float]:
    """So many programs, the longest among them, and how long all are on average, as a share of
    these. Turns of a loop that asks an mbarrier again and again add nothing to a length, because
    how many there are depends on when the machine lets a warp go on.
    """
    count = len(launch.counts.programs)
    every = np.ones(count * launch.warps, dtype=bool)
    asks = [x.op in ("mbarrier", "bra") for x in launch.kernel.instructions]
    path = [step for step in launch.counts.path if not asks[step[0]]]
    lengths = sum((every if m is None else m).astype(np.int64) for _, m in path)
    lengths = lengths.reshape(count, launch.warps).sum(1)
    order = np.argsort(-lengths, kind="stable")
    chosen = [int(order[round(k)]) for k in np.linspace(0, count - 1, together)]
    return chosen, float(lengths.mean() / lengths[chosen].mean())


def paths_of(launch, chosen: list[int]) -> list[list[np.ndarray]]:
    """The paths of the warps of the chosen programs: [program][warp] -> places."""
    path, warps = launch.counts.path, launch.warps
    every = np.ones(len(launch.counts.programs) * warps, dtype=bool)
    places = np.array([place for place, _ in path])
    found = []
    for program in chosen:
        mine = slice(program * warps, (program + 1) * warps)
        went = np.stack([(every if mask is None else mask)[mine] for _, mask in path])
        found.append([places[went[:, warp]] for warp in range(warps)])
    return found


# ---------------------------------------------------------------- in words


@cache
def errors() -> dict[str, dict]:
    """{what limits: {"points", "median", "worst"}} of the record, "all" among them."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["errors"]


def predictions(profile) -> dict[str, Prediction]:
    """{chip's name: prediction} for the chips that run this code. Raises Unpredicted."""
    if profile.capability != 90:
        raise Unpredicted("the model was held against a Hopper GPU alone")
    if "NVVM Compiler" in profile.kernel.text:  # NVRTC names itself so
        raise Unpredicted("NVIDIA's assembler reorders what NVRTC writes, and the model does not")
    chips = map(lookup, HOPPER)
    return {chip.name: predict(replace(profile, chip=chip)) for chip in chips}


def text(profile) -> list[str]:
    """What `make profile` prints: the time on each chip that runs the code, and how wrong it may
    be.
    """
    try:
        found = predictions(profile)
    except Unpredicted as reason:
        return [f"  No time is predicted: {reason}"]
    lines = [
        f"  Predicted on {name}: {1e6 * each.seconds:.3g} µs, limit: {each.limit}"
        for name, each in found.items()
    ]
    known = errors().get(found["H200"].limit, errors()["all"])
    lines.append(
        f"  The model's error for such kernels on an H200: median {known['median']:.0%}, worst "
        f"{known['worst']:.0%} of {known['points']} points"
    )
    return lines


def as_json(profile) -> dict[str, dict]:
    """{chip's name: {"predicted_s", "limit"}}; empty where nothing is predicted."""
    try:
        found = predictions(profile)
    except Unpredicted:
        return {}
    return {
        name: {"predicted_s": each.seconds, "limit": each.limit} for name, each in found.items()
    }
