"""The machine: it runs a kernel's instructions, one after another, for all threads at once.

Threads that stand at the same instruction form a *front*: (place, mask). A branch that only some of
them take splits a front in two. The front at the lowest place goes on, because compilers lay code
out so that the paths of a branch meet further down: there the fronts become one again. A front that
waits (for a barrier, for a copy) is set aside until what it waits for has happened.

`launch` runs a whole grid: programs in batches that fit into memory, in an order drawn from a seed.
In some launches all warps go on together. In others they take turns: a drawn half of them goes as
far as it can, then the other half. `LADDER_ORDER=7` gives every launch that seed; faults name it.

Source: Collange, Stack-less SIMT reconvergence at low cost (2011): the front at the lowest place.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from lessons.toolbox.gpu.barriers import Barriers
from lessons.toolbox.gpu.counters import Counts, counts_for, sampled
from lessons.toolbox.gpu.decode import Step, compiled_steps, declared
from lessons.toolbox.gpu.faults import UnknownInstruction
from lessons.toolbox.gpu.global_memory import Buffer, GlobalMemory
from lessons.toolbox.gpu.instructions.wgmma import note_written
from lessons.toolbox.gpu.ptx import Kernel
from lessons.toolbox.gpu.threads import WARP, Threads, garbage

TURNS = 1 / 4  # of the launches: warps take turns, which makes one up to twice as slow
BYTES_OF_REGISTERS = 400 * 2**20  # of the programs that run together
# Shared memory that one program may have, in bytes. Source: CUDA C++ Programming Guide 13, table of
# technical specifications.
KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHARED_LIMIT = {chip: 1024 * kib for chip, kib in KIB.items()}
MOST_STEPS = 50_000_000  # of a launch: a kernel that does not end


@dataclass
class Launch:
    """What ran. executed: {place of an instruction: warps that executed it}."""

    kernel: Kernel
    programs: int
    steps: int = 0  # instructions, each for all threads of a front
    executed: Counter = field(default_factory=Counter)
    grid: tuple[int, int, int] = (1, 1, 1)
    warps: int = 0  # of a program
    shared_bytes: int = 0  # of a program
    counts: Counts | None = None  # within `counting`
    ran: int = 0  # programs that ran: all but within `counting(n)`


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    buffers: list[Buffer],
    parameters: dict[str, bytes],
    shared_bytes: int = 0,
    seed: int = 0,
    maps: dict | None = None,
    runner: "type[Run] | None" = None,
) -> Launch:
    """Run every program of the grid. parameters: {name: its bytes}; shared_bytes: all of a
    program's, with those that the launch gives; maps: {parameter: TensorMap}; runner: in which
    order fronts go on, None for Run. Raises Fault, UnknownInstruction.
    """
    steps = compiled_steps(kernel)
    generator = np.random.default_rng(seed)
    smallest = [
        instruction.type
        for instruction in kernel.instructions
        if instruction.op in ("ld", "st", "atom", "red") and instruction.has("global")
    ]
    cell = min([4, *(int(type_[1:]) // 8 for type_ in smallest)])
    memory = GlobalMemory(buffers, cell)
    count = grid[0] * grid[1] * grid[2]
    order, drawn = sampled(generator.permutation(count)), generator.random()
    shared_bytes = max(shared_bytes, kernel.shared_bytes)
    warps = -(-block[0] * block[1] * block[2] // WARP)
    done = Launch(kernel, count, grid=grid, warps=warps, shared_bytes=shared_bytes)
    done.counts, done.ran = counts_for(kernel), len(order)
    # Another runner has an order of its own, and what is counted is the way of all warps together.
    takes_turns = runner is None and done.counts is None and drawn < TURNS
    together = programs_together(kernel, block, shared_bytes)
    for first in range(0, len(order), together):
        programs = np.sort(order[first : first + together])
        threads = Threads(
            kernel, programs, grid, block, memory, shared_bytes, parameters, generator
        )
        threads.maps, threads.counts = maps or {}, done.counts
        if done.counts and not first:
            done.counts.programs = programs
        # The compiler does not care what it never writes. With turns, the others may not have yet.
        for name in kernel.read if takes_turns else kernel.undefined:
            threads.write(name, garbage(kernel.width(name)), None)
        threads.seed, threads.takes_turns = seed, takes_turns
        (runner or Run)(threads, steps, done).go()
    return done


def programs_together(kernel: Kernel, block: tuple, shared_bytes: int) -> int:
    """How many programs run in lockstep: as many as fit into memory."""
    warps = -(-block[0] * block[1] * block[2] // WARP)
    registers = {o for i in kernel.instructions for o in i.operands if isinstance(o, str)}
    each = warps * WARP * 5 * len(registers) + shared_bytes * (3 + 2 * warps)
    return max(1, BYTES_OF_REGISTERS // max(each, 1))


class Run:
    """One batch of programs on their way through the code."""

    def __init__(self, threads: Threads, steps: list[Step], done: Launch):
        self.threads, self.steps, self.done = threads, steps, done
        self.turn = (
            drawn_warps(threads) if threads.takes_turns else None
        )  # whose it is, [count] bool
        self.fronts: dict[int, np.ndarray] = {}
        self.resting: dict[int, np.ndarray] = {}  # whose turn it is not
        Run.take(self, {0: threads.alive.copy()})
        self.stalled: dict[int, np.ndarray] = {}  # at an mbarrier whose phase is not complete
        self.seen_changes = -1  # of mbarriers, when they stalled
        self.last_step = done.steps + MOST_STEPS
        self.barriers = Barriers(threads)

    def go(self) -> None:
        """Run until no thread is left. Raises Fault."""
        threads = self.threads
        with np.errstate(all="ignore"):
            while self.unfinished():
                if threads.events and threads.random.random() < 0.3:
                    self.end_a_copy()
                while not self.fronts:
                    self.next_turn() if self.resting else self.wake()
                place = min(self.fronts)
                self.advance(place, self.fronts.pop(place))
            while threads.events:  # copies that no thread waited for
                self.end_a_copy()
            if threads.tensor is not None:
                threads.tensor.check_freed(threads)

    def unfinished(self) -> bool:
        return bool(self.fronts or self.resting or self.stalled or self.barriers.any_waiting())

    def end_a_copy(self) -> None:
        """One copy of the engine ends, in no particular order."""
        events = self.threads.events
        events.pop(int(self.threads.random.integers(len(events))))()

    def stall(self, place: int, mask: np.ndarray) -> None:
        """Threads that wait at an mbarrier: they come back here when one has changed."""
        if mask.any():
            self.stalled[place] = self.stalled[place] | mask if place in self.stalled else mask

    def wake(self) -> None:
        """No thread can go on: look which may by now. Raises Fault if none ever will."""
        changes = self.threads.mbarriers.changes
        if self.stalled and changes != self.seen_changes:
            self.seen_changes = changes
            fronts, self.stalled = self.stalled, {}
            self.take(fronts)
        elif self.threads.events:
            self.end_a_copy()
            self.seen_changes = -1
            self.wake()
        else:
            self.take(self.barriers.woken(self.stalled))

    def next_turn(self) -> None:
        """None of the warps whose turn it is can go on: the others."""
        self.turn = ~self.turn
        fronts, self.resting = self.resting, {}
        self.take(fronts)

    def take(self, fronts: dict[int, np.ndarray]) -> None:
        """Add fronts; those at one place become one."""
        for place, mask in fronts.items():
            parts = [(self.fronts, mask)]
            if self.turn is not None:
                parts = [(self.fronts, mask & self.turn), (self.resting, mask & ~self.turn)]
            for added, part in parts:
                if part.any():
                    added[place] = added[place] | part if place in added else part

    def advance(self, place: int, mask: np.ndarray | None) -> None:
        """Run a front until it splits, waits, ends or reaches another one."""
        threads, steps, executed = self.threads, self.steps, self.done.executed
        mask = self.whole(mask)
        warps = self.warps_in(mask)
        while place < len(steps):
            step = steps[place]
            threads.pc = place
            self.done.steps += 1
            executed[place] += warps
            if self.done.steps > self.last_step:
                threads.fail("the kernel does not end", threads.active(mask))
            taking, leaving = self.split(step, mask)
            if threads.counts:
                threads.counts.executed(threads, mask, taking)
            if step.control is not None:
                self.take(step.control(self, taking, leaving))
                return
            if taking is not NO_THREAD:
                self.check_in_flight(step, taking)
                try:
                    step.run(threads, taking)
                except KeyError as unknown:
                    name = str(unknown)[1:-1]
                    if name not in step.reads:
                        raise
                    if not declared(threads.kernel, frozenset([name])):
                        raise UnknownInstruction(
                            f"{threads.kernel.name}, {threads.line_of(place)}: the machine does "
                            f"not know the variable {name!r} (of __device__ or __constant__?)"
                        ) from None
                    threads.fail(
                        f"register {unknown} is read before it is written", threads.active(taking)
                    )
                if threads.counts:
                    threads.counts.done(threads)
                if threads.unfenced:
                    note_written(threads, place, step.writes, self.masked(taking))
            place += 1
            if place in self.fronts:
                self.take({place: self.masked(mask)})
                return
        self.end(mask)

    def whole(self, mask: np.ndarray | None) -> np.ndarray | None:
        """None where a mask holds all threads that have not ended."""
        if mask is None or (mask == self.threads.alive).all():
            return None
        return mask

    def masked(self, mask: np.ndarray | None) -> np.ndarray:
        return self.threads.alive.copy() if mask is None else mask

    def warps_in(self, mask: np.ndarray | None) -> int:
        if mask is None:
            mask = self.threads.alive
        return int(mask.reshape(-1, WARP).any(1).sum())

    def split(self, step: Step, mask: np.ndarray | None):
        """(the threads for which the predicate holds, the others); NO_THREAD for no thread."""
        if step.predicate is None:
            return mask, NO_THREAD
        holds = self.threads.registers.get(step.predicate)
        if holds is None:
            self.threads.fail(
                f"register {step.predicate!r} is read before it is written",
                self.threads.active(mask),
            )
        if step.negated:
            holds = ~holds
        if len(holds) == 1:
            return (mask, NO_THREAD) if holds[0] else (NO_THREAD, mask)
        inside = holds if mask is None and self.threads.alive.all() else holds & self.masked(mask)
        if not inside.any():
            return NO_THREAD, mask
        outside = ~holds & self.masked(mask)
        if not outside.any():
            return mask, NO_THREAD
        return inside, outside

    def check_in_flight(self, step: Step, mask: np.ndarray | None) -> None:
        """Raises Fault if the step reads a register that other hardware is still filling."""
        threads, early, who = self.threads, None, ""
        if threads.products is not None and threads.products.flying:
            early = step.reads & threads.products.names(self.masked(mask))
            who = "a matrix product (wgmma)"
        elif threads.tensor is not None and threads.tensor.loads:
            early = threads.tensor.read_early(threads, step, self.masked(mask))
            who = "a load from tensor memory (tcgen05.ld)"
        if early:
            threads.fail(
                f"register {sorted(early)[0]} is read while {who} fills it", threads.active(mask)
            )

    def end(self, mask: np.ndarray | None) -> None:
        """The threads are done. Raises Fault if a store of theirs still reads shared memory."""
        ending = self.masked(mask)
        for lanes, _ in self.threads.stores:
            if ending[lanes].any():
                self.threads.fail(
                    "the program ends before the copy engine has read what it stores", lanes
                )
        self.threads.alive = self.threads.alive & ~ending


def drawn_warps(threads: Threads) -> np.ndarray:
    """[count] bool: half of the warps, drawn; whole warpgroups where they multiply together
    (wgmma).
    """
    together = 4 if threads.unfenced else 1
    groups = -(-threads.warps // together)
    drawn = threads.random.random((threads.num_programs, groups)) < 0.5
    return np.repeat(drawn, together, axis=1)[:, : threads.warps].repeat(WARP)


NO_THREAD = np.zeros(0, dtype=bool)  # an empty mask, known by its identity
