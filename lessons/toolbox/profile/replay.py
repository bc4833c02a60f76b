"""An SM on which programs' warps go their way once more, with a clock: the heart of
`time_model.py`.

CONSTANTS are of Hopper, and fitted on the points of `points.py`, each to two digits, the same for
every kernel. All other numbers are the chip's.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from lessons.toolbox.gpu.counters import SECTOR, WARP, matrix_flops, wgmma_rate
from lessons.toolbox.gpu.decode import WITHOUT_RESULT, names, reads
from lessons.toolbox.gpu.ptx import Instruction, Kernel

SCHEDULERS = 4
FREE = ("mov", "cvta", "ret", "prefetch", "prefetchu", "griddepcontrol", "fence")  # or renamed away


@dataclass(frozen=True)
class Constants:
    """Of Hopper, in clocks unless the name says otherwise."""

    launch: float = 3000  # of a launch, outside of the SMs
    start: float = 800  # of a program: its first instructions and parameters
    alu: float = 2  # the assembler orders instructions so that most of it is filled
    functions: float = 30
    shuffle: float = 25
    shared: float = 30
    matrix: float = 20
    barrier: float = 5
    l1: float = 40
    l2: float = 350
    memory: float = 700
    fetch: float = 12  # of 128 bytes of code that run for the first time
    sm_bytes: float = 64  # a clock, from L2
    l2_bytes_per_s: float = 6.5e12  # of all SMs together
    memory_share: float = 0.92  # of the data sheet's bandwidth that a copy reaches
    mma_share: float = 0.8  # of the matrix units' rate that mma (not wgmma) reaches


CONSTANTS = Constants()


@dataclass(frozen=True)
class Cost:
    """What one execution of an instruction by a warp needs. busy: clocks of its unit."""

    unit: str
    busy: float
    latency: float
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    sectors: float = 0  # of global memory
    first: float = 0  # of them, those that come from memory and not from a cache
    kind: str = ""  # "free", "barrier", "copy", "commit", "wait", "product"; engines.py has more
    left: int = 0  # groups that a wait leaves open
    number: int = 0  # of a barrier
    warps: int = 0  # that come to it; 0: all of the program
    passes: float = 0  # of shared memory, for a product's operands


class Unpredicted(ValueError):
    """A kernel that the model does not know how to time."""


def costs(kernel: Kernel, launch, capability: int, c: Constants) -> list[Cost]:
    """One for each instruction. Raises Unpredicted."""
    found = []
    for place, instruction in enumerate(kernel.instructions):
        many = max(launch.executed[place], 1)
        per = {name: float(x[place]) / many for name, x in launch.counts.columns.items()}
        found.append(cost_of(instruction, per, capability, c))
    return found


def cost_of(instruction: Instruction, per: dict[str, float], capability: int, c: Constants) -> Cost:
    """per: {column: of one execution}."""
    from lessons.toolbox.profile.counted import RATES, pipe

    op = instruction.op
    fills = op not in WITHOUT_RESULT and instruction.operands
    writes = tuple(names(instruction.operands[0])) if fills else ()
    needs = tuple(reads(instruction))

    def cost(unit="", busy=1.0, latency=c.alu, **more) -> Cost:
        return Cost(unit, busy, latency, needs, writes, **more)

    if op.startswith("tcgen05"):
        raise Unpredicted(f"{instruction.text[:60]!r}: the model knows no tensor memory")
    if op == "mbarrier":
        kind = "flag wait" if instruction.has("try_wait", "test_wait") else "flag"
        return cost("shared", latency=c.shared, kind=kind)
    if instruction.has("bulk"):
        first = per["first_sectors"] / max(per["sectors"], 1)
        return cost("load/store", latency=c.memory if first else c.l2, kind="engine", first=first)
    if op in FREE or (op == "ld" and instruction.has("param")):
        return cost(kind="free", busy=0, latency=0)
    if op in ("bar", "barrier"):
        if instruction.has("warp"):
            return cost(kind="free", latency=0)
        number, *threads = [int(o) for o in instruction.operands if str(o).isdigit()] or [0]
        return cost(kind="barrier", latency=c.barrier, number=number, warps=sum(threads) // WARP)
    if op == "wgmma":
        return product(instruction, cost, per, c)
    if op == "cp":
        return copy(instruction, per, cost, c)
    if op == "mma":
        rate = 1024 * c.mma_share  # FLOPs a clock of one scheduler's matrix unit: 4096 of an SM
        return cost("matrix", matrix_flops(instruction) / rate, c.matrix)
    if per["requests"]:
        latency = c.memory if per["first_sectors"] else c.l2
        if op == "ld" and per["own_sectors"] > 0.9 * per["sectors"]:
            latency = c.l1
        return cost("load/store", per["sectors"] / 4, latency if op != "st" else 0,
                    sectors=per["sectors"], first=per["first_sectors"])  # fmt: skip
    if per["passes"]:
        return cost("shared", per["passes"], c.shared if op not in ("st", "stmatrix") else 0)
    if op == "shfl":
        return cost("shared", 1, c.shuffle)
    if name := pipe(instruction):
        busy = WARP * SCHEDULERS / RATES[capability][name]
        return cost(name, busy, c.functions if name == "functions" else c.alu)
    return cost()


def product(instruction: Instruction, cost, per: dict, c: Constants) -> Cost:
    what = instruction.modifiers[0]
    if what == "wait_group":
        return replace(cost(kind="wait", left=int(instruction.operands[0], 0)), unit="products")
    if what == "commit_group":
        return replace(cost(kind="commit"), unit="products")
    if what == "fence":
        return cost(kind="free", busy=0, latency=0)
    busy = matrix_flops(instruction) / wgmma_rate(instruction)
    return cost("matrix", busy, c.matrix, kind="product", passes=per["passes"])


def copy(instruction: Instruction, per: dict, cost, c: Constants) -> Cost:
    if instruction.has("commit_group"):
        return replace(cost(kind="commit"), unit="copies")
    if instruction.has("wait_group", "wait_all"):
        left = int(instruction.operands[0], 0) if instruction.has("wait_group") else 0
        return replace(cost(kind="wait", left=left), unit="copies")
    latency, held = (
        c.memory if per["first_sectors"] else c.l2,
        max(per["sectors"] / 4, per["passes"]),
    )
    return cost("load/store", held, latency if per["sectors"] else c.shared,
                sectors=per["sectors"], first=per["first_sectors"], kind="copy")  # fmt: skip


# ---------------------------------------------------------------- the replay


@dataclass
class Warp:
    """One warp on its way. groups: unit -> [when each closed group is done]."""

    number: int
    program: int
    path: np.ndarray
    at: int = 0
    time: float = 0.0
    flags: dict[int, list] = field(default_factory=dict)  # place in path -> see Counts.flag

    def __post_init__(self):
        self.ready: dict[str, float] = {}
        self.open = defaultdict(float)
        self.groups: dict[str, list[float]] = defaultdict(list)


class SM:
    """One SM with some programs on it. rates: bytes a clock from L2 and from memory."""

    def __init__(self, costs: list[Cost], c: Constants, l2_rate: float, memory_rate: float):
        self.costs, self.c = costs, c
        self.l2_rate, self.memory_rate = l2_rate, memory_rate
        self.free = defaultdict(float)  # (unit, scheduler) -> when it is free
        self.fetched: dict[int, float] = {}  # line of code -> when it is here
        self.busy = defaultdict(float)
        self.end = 0.0

    def run(self, programs: list[list[np.ndarray]]) -> float:
        """Clocks until all warps have ended. programs: of each, the path of every warp."""
        warps = [
            Warp(k, number, path, time=self.c.start)
            for number, paths in enumerate(programs)
            for k, path in enumerate(paths)
        ]
        self.alive = [len(paths) for paths in programs]
        return self.go(warps)

    def go(self, warps: list[Warp]) -> float:
        """Clocks until these have ended."""
        self.at_barrier: dict[tuple[int, int], list[Warp]] = defaultdict(list)
        self.queue: list[tuple[float, int, Warp]] = []
        for tie, warp in enumerate(warps):
            warp.number = tie
            self.push(warp)
        while self.queue:
            when, _, warp = heapq.heappop(self.queue)
            cost = self.costs[warp.path[warp.at]]
            start = max(when, *(self.free[key] for key in self.units(cost, warp)))
            if self.queue and start > self.queue[0][0]:
                heapq.heappush(self.queue, (start, warp.number, warp))
                continue
            self.issue(cost, warp, start)
        return self.end

    def units(self, cost: Cost, warp: Warp) -> list[tuple]:
        scheduler = warp.number % SCHEDULERS
        whole = cost.unit in ("shared", "load/store")  # one for all schedulers
        return [("issue", scheduler), (cost.unit, 0 if whole else scheduler)]

    def push(self, warp: Warp) -> None:
        """Queue a warp for the moment at which its next instruction may be issued."""
        while warp.at < len(warp.path):
            place = int(warp.path[warp.at])
            cost = self.costs[place]
            when = max((warp.ready.get(name, 0.0) for name in cost.reads), default=0.0)
            if cost.kind == "free":
                for name in cost.writes:
                    warp.ready[name] = when
                warp.at += 1
                continue
            when = max(when, warp.time, self.code(place, warp.time))
            if cost.kind == "wait":
                done = warp.groups[cost.unit]
                late = done[: len(done) - cost.left] if cost.left else done
                when = max(when, max(late, default=0.0))
            when = self.held(cost, warp, when)
            if when is not None:
                heapq.heappush(self.queue, (when, warp.number, warp))
            return
        self.end = max(self.end, warp.time)
        self.alive[warp.program] -= 1
        for program, number in list(self.at_barrier):
            if program == warp.program:
                self.release(program, number)

    def held(self, cost: Cost, warp: Warp, when: float) -> float | None:
        """When a warp may issue; None: not before something wakes it."""
        return when

    def code(self, place: int, now: float) -> float:
        """When an instruction's code is here: 8 instructions are a line."""
        line = place // 8
        if line not in self.fetched:
            before = self.fetched.get(line - 1, now)
            self.fetched[line] = max(now, before) + self.c.fetch
        return self.fetched[line]

    def issue(self, cost: Cost, warp: Warp, start: float) -> None:
        """Run one instruction and queue the warp for its next."""
        issue, unit = self.units(cost, warp)
        self.free[issue] = start + 1
        self.busy["instructions issued"] += 1 / SCHEDULERS
        if cost.unit and cost.kind != "wait":
            self.free[unit] = start + cost.busy
        done = start + cost.busy - 1 + cost.latency
        if cost.sectors:
            done = self.transfer(cost, start)
        for name in cost.writes:
            warp.ready[name] = done
        if cost.kind in ("copy", "product"):
            which = "copies" if cost.kind == "copy" else "products"
            warp.open[which] = max(warp.open[which], done)
        elif cost.kind == "commit":
            warp.groups[cost.unit].append(warp.open.pop(cost.unit, 0.0))
        warp.time, warp.at = start + 1, warp.at + 1
        self.end = max(self.end, done)
        if cost.kind == "barrier":
            self.at_barrier[warp.program, cost.number].append(warp)
            self.release(warp.program, cost.number, cost.warps)
        else:
            self.push(warp)

    def transfer(self, cost: Cost, start: float) -> float:
        """When the sectors of a request are there, or stored."""
        for unit, sectors, rate in (
            ("L2 cache", cost.sectors, self.l2_rate),
            ("memory", cost.first, self.memory_rate),
        ):
            needed = sectors * SECTOR / rate
            self.busy[unit] += needed
            self.free[unit] = max(self.free[unit], start) + needed
        return max(self.free["L2 cache"], self.free["memory"], start) + cost.latency

    def release(self, program: int, number: int, needed: int = 0) -> None:
        """Let the warps go on if all have come to the barrier: of the program, or `needed`."""
        waiting = self.at_barrier[program, number]
        if waiting and len(waiting) >= min(needed or self.alive[program], self.alive[program]):
            now = max(warp.time for warp in waiting) + self.c.barrier
            self.at_barrier[program, number] = []
            for warp in waiting:
                warp.time = now
                self.push(warp)
