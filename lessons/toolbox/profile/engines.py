"""The replay of kernels whose warps work beside the copy engine (TMA): warps wait at mbarriers, and
the operands of a product compete with copies for shared memory.

    an mbarrier lets a warp go on when its arrivals and bytes have come, as the machine noted them;
    a copy takes its share of the bandwidth, and then passes of shared memory as it arrives;
    a product (wgmma) reads operands from shared memory, one pass a clock, while it runs.

Kernels without the copy engine are replayed by `replay.SM` alone, with which the constants were
fitted.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from lessons.toolbox.gpu.counters import BANKS, SECTOR, WORD
from lessons.toolbox.profile.replay import SM, Cost, Warp


@dataclass
class Flag:
    """An mbarrier of a program. time: of the last event of its phase; done: when the phase before
    was complete.
    """

    expected: int = 0
    left: int = 0
    bytes: int = 0
    phases: int = 0
    time: float = 0.0
    done: float = 0.0
    waiting: list[Warp] = field(default_factory=list)


class SMWithEngine(SM):
    """An SM that knows mbarriers and the copy engine."""

    def run(self, programs: list[list[tuple[np.ndarray, dict]]]) -> float:
        """Clocks until all warps have ended. programs: of each, (path, flags) of every warp."""
        self.flags: dict[tuple[int, int], Flag] = defaultdict(Flag)
        self.arriving: list[tuple[float, float]] = []  # when, passes
        self.alive = [len(warps) for warps in programs]
        return self.go(
            [
                Warp(k, number, path, time=self.c.start, flags=flags)
                for number, warps in enumerate(programs)
                for k, (path, flags) in enumerate(warps)
            ]
        )

    def held(self, cost: Cost, warp: Warp, when: float) -> float | None:
        if cost.kind != "flag wait":
            return when
        for _, address, _, parity in warp.flags[warp.at]:
            flag = self.flags[warp.program, address]
            if flag.phases & 1 == parity:
                flag.waiting.append(warp)
                return None
            when = max(when, flag.done)
        return when

    def issue(self, cost: Cost, warp: Warp, start: float) -> None:
        while self.arriving and self.arriving[0][0] <= start:
            when, passes = heapq.heappop(self.arriving)
            self.pass_shared(when, passes)
        acts = warp.flags.get(warp.at, ()) if cost.kind in ("flag", "engine") else ()
        if cost.kind == "product":
            # a matrix unit waits for its operands
            late = self.pass_shared(start, cost.passes) - start
            cost = replace(cost, busy=max(cost.busy, late))
        super().issue(replace(cost, first=0.0) if cost.kind == "engine" else cost, warp, start)
        for what, address, many, number in acts:
            self.act(cost, self.flags[warp.program, address], what, many, number, start)

    def pass_shared(self, when: float, passes: float) -> float:
        """When shared memory has done so many passes, asked for at a time."""
        self.busy["shared memory"] += passes
        self.free["shared", 0] = max(self.free["shared", 0], when) + passes
        return self.free["shared", 0]

    def act(self, cost: Cost, flag: Flag, what: str, many: int, number: int, start: float) -> None:
        """One warp's lanes, `many`, do something to an mbarrier."""
        if what == "init":
            flag.expected = flag.left = number
            return
        now = start
        if what == "copy":
            sectors = many * number / SECTOR
            bulk = replace(cost, sectors=sectors, first=sectors * cost.first)
            now = self.transfer(bulk, start)
            heapq.heappush(self.arriving, (now, many * number / (BANKS * WORD)))
            flag.bytes -= many * number
        else:
            flag.left -= many * number if what == "arrive" else many
            flag.bytes += many * number if what == "expect" else 0
        flag.time = max(flag.time, now)
        self.end = max(self.end, now)
        if flag.left == 0 and flag.bytes == 0:
            flag.phases, flag.left = flag.phases + 1, flag.expected
            flag.done, flag.time = flag.time, 0.0
            woken, flag.waiting = flag.waiting, []
            for warp in woken:
                self.push(warp)


def with_flags(launch, chosen: list[int]) -> list[list[tuple[np.ndarray, dict]]]:
    """The ways of the warps of the chosen programs: [program][warp] -> (places, {index in it: what
    is done to mbarriers there}). A wait that found its phase incomplete is left out, because the
    warp comes back to it.
    """
    path, warps = launch.counts.path, launch.warps
    code, flags = launch.kernel.instructions, launch.counts.flags
    waits = [i.op == "mbarrier" and i.has("try_wait", "test_wait") for i in code]
    found = []
    for program in chosen:
        mine = range(program * warps, (program + 1) * warps)
        places: list[list[int]] = [[] for _ in mine]
        notes: list[dict[int, list]] = [{} for _ in mine]
        for step, (place, mask) in enumerate(path):
            here = defaultdict(list)
            for what, address, who, many, number in flags.get(step, ()):
                for warp, count in zip(who, many):
                    here[int(warp)].append((what, address, int(count), number))
            for k, warp in enumerate(mine):
                if (mask is not None and not mask[warp]) or (waits[place] and warp not in here):
                    continue
                if warp in here:
                    notes[k][len(places[k])] = here[warp]
                places[k].append(place)
        found.append([(np.array(p), n) for p, n in zip(places, notes)])
    return found
