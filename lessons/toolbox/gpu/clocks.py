"""Who knows of whose past: a clock for each warp, and what it says of an access to memory.

Warps run in any order. What one warp writes, another may read only after a barrier that both pass,
and so for a write after a read. The machine runs one order, so it looks at the order that barriers
*promise*, with vector clocks:

    clock[p, w, u]   how much of agent u's past agent w of program p knows of
    clock[p, w, w]   its own time; it steps on at every barrier

Agents are the warps and, from Hopper on, hardware beside them: the copy engine (TMA) and
Blackwell's tensor core. A barrier lets its warps know of each other's past. Each cell of memory
remembers who wrote it last and when, and when each agent read it last. A read is in order if the
reader's clock knows of the write, a write if it knows of the write and of all reads before.

Hardware beside the warps sees what a warp stored only after a `fence.proxy.async` that comes behind
the store and before the hardware is started. fenced[p, w, u] is how much of u's past is behind such
a fence, as far as w knows.

Source: Flanagan and Freund, FastTrack: efficient and precise dynamic race detection (PLDI 2009),
section 3; NVIDIA, PTX ISA 9.0, 8.9 (causality order, proxies).
"""

import numpy as np

# A cell's record of its last write: the writer's time, the instruction, the agent.
TIME, PLACE = 26, 6
IN_FLIGHT = 1 << 36  # a time that no clock reaches: it is still going on


def place_of(record):
    """The instruction in the record of a write, or of each of an array."""
    return (record >> PLACE) & ((1 << (TIME - PLACE)) - 1)


class Clocks:
    """Of all programs that run together. beside: the names of agents that are no warps."""

    def __init__(self, programs: int, warps: int, beside: tuple[str, ...]):
        self.warps, self.beside, self.agents = warps, beside, warps + len(beside)
        self.clock = np.zeros((programs, self.agents, self.agents), dtype=np.int64)
        self.own = np.arange(self.agents)
        self.clock[:, self.own, self.own] = 1
        self.fenced = np.zeros_like(self.clock)
        self.fenced[:, :, warps:] = IN_FLIGHT  # hardware sees what hardware wrote

    def agent(self, name: str) -> int:
        return self.warps + self.beside.index(name)

    def who(self, agent: int) -> str:
        return self.beside[agent - self.warps] if agent >= self.warps else f"warp {agent}"

    def time(self, cta: np.ndarray, agent) -> np.ndarray:
        """An agent's own time in some programs."""
        return self.clock[cta, agent, agent]

    def step(self, cta: np.ndarray, agent) -> None:
        """What they do from here on is not yet known to those who learn of them now."""
        pairs = np.unique(np.stack(np.broadcast_arrays(cta, agent)), axis=1)
        self.clock[pairs[0], pairs[1], pairs[1]] += 1

    def synchronize(self, warps: np.ndarray) -> None:
        """A barrier of the warps, [programs, warps] bool: they learn of each other's past."""
        taking = np.flatnonzero(warps.any(1))
        meets = np.zeros((len(taking), self.agents), dtype=bool)
        meets[:, : self.warps] = warps[taking]
        for table in (self.clock, self.fenced):
            held = table[taking]
            known = np.where(meets[:, :, None], held, 0).max(1)
            table[taking] = np.where(meets[:, :, None], known[:, None], held)
        clock = self.clock[taking]
        clock[:, self.own, self.own] += meets
        self.clock[taking] = clock

    def fence(self, cta: np.ndarray, agent: np.ndarray) -> None:
        """What these warps know of is visible to the hardware that they start from now on."""
        known = np.maximum(self.fenced[cta, agent], self.clock[cta, agent])
        self.fenced[cta, agent] = known
        self.step(cta, agent)

    def known(self, cta: np.ndarray, agent) -> np.ndarray:
        """[2, lanes, agents]: what they can tell others."""
        return np.stack([self.clock[cta, agent], self.fenced[cta, agent]])

    def told(self, cta: np.ndarray, agent) -> np.ndarray:
        """[2, lanes, agents]: the same, and what they do from here on is not a part of it."""
        known = self.known(cta, agent)
        self.step(cta, agent)
        return known

    def learn(self, cta: np.ndarray, agent, known: np.ndarray) -> None:
        """Each pair (cta, agent) once: they are told what others knew."""
        self.clock[cta, agent] = np.maximum(self.clock[cta, agent], known[0])
        self.fenced[cta, agent] = np.maximum(self.fenced[cta, agent], known[1])


class Cells:
    """Pieces of a memory that are watched as one. name: of the memory, for the faults; kind: what
    goes on beside a warp there.
    """

    def __init__(self, clocks: Clocks, count: int, name: str, kind: str = "copy"):
        self.clocks, self.name, self.kind = clocks, name, kind
        self.written = np.zeros(count, dtype=np.int64)  # time << TIME | place << PLACE | agent
        self.read = np.zeros((clocks.agents, count), dtype=np.int64)  # time << TIME | place

    def writer(self, cell: np.ndarray) -> np.ndarray:
        """The agent that wrote each cell last."""
        return self.written[cell] & ((1 << PLACE) - 1)

    def note_read(self, threads, cell, cta, agent, lanes) -> None:
        """Check and note that each lane's agent reads its cell."""
        self.after_write(threads, cell, cta, agent, lanes, "reads")
        self.read[agent, cell] = (self.clocks.time(cta, agent) << TIME) | threads.pc

    def note_write(self, threads, cell, cta, agent, lanes, again=False) -> None:
        """Check and note that each lane's agent writes its cell. again: [lanes] bool, it stores
        what is there already. Warps may do so by one instruction, in any order: copies of a result.
        """
        copies = again & (place_of(self.written[cell]) == threads.pc)
        self.after_write(threads, cell, cta, agent, lanes, "writes", copies)
        self.after_reads(threads, cell, cta, agent, lanes)
        self.end_write(threads.pc, cell, cta, agent)

    def end_write(self, place: int, cell, cta, agent) -> None:
        """The cells count as written by the agents, now."""
        time = self.clocks.time(cta, agent)
        self.written[cell] = (time << TIME) | (place << PLACE) | agent

    def begin_write(self, place: int, cell, agent) -> None:
        """Until `end_write` no one may touch the cells."""
        self.written[cell] = (IN_FLIGHT << TIME) | (place << PLACE) | agent

    def begin_read(self, place: int, cell, agent) -> None:
        """Until `end_read` no one may write them."""
        self.read[agent, cell] = (IN_FLIGHT << TIME) | place

    def end_read(self, place: int, cell, cta, agent) -> None:
        self.read[agent, cell] = (self.clocks.time(cta, agent) << TIME) | place

    def after_write(self, threads, cell, cta, knower, lanes, what: str, copies=False) -> None:
        """Raises Fault if an agent does not know of the last write to its cell, other than
        `copies`.
        """
        written, writer = self.written[cell], self.writer(cell)
        late = ((written >> TIME) > self.clocks.clock[cta, knower, writer]) & np.logical_not(copies)
        if late.any():
            bad = int(np.flatnonzero(late)[0])
            record = int(written[bad])
            line, who = threads.line_of(place_of(record)), self.clocks.who(record & 63)
            if record >> TIME >= IN_FLIGHT:
                kind = "product" if who == "the tensor core" else self.kind
                why = f"what the asynchronous {kind} of {line} is still filling"
            else:
                why = f"what {who} wrote at {line}, with no barrier in between"
            threads.fail(f"race in {self.name}: it {what} {why}", lanes[bad : bad + 1])

    def after_reads(self, threads, cell, cta, knower, lanes) -> None:
        """Raises Fault if an agent does not know of the reads of its cell since it was written."""
        for agent in range(self.clocks.agents):
            read = self.read[agent, cell]
            late = (read >> TIME) > self.clocks.clock[cta, knower, agent]
            if late.any():
                bad = int(np.flatnonzero(late)[0])
                line = threads.line_of(int(read[bad]) & ((1 << TIME) - 1))
                threads.fail(
                    f"race in {self.name}: it writes what {self.clocks.who(agent)} reads at "
                    f"{line}, with no barrier in between",
                    lanes[bad : bad + 1],
                )

    def after_fence(self, threads, cell, cta, starter, lanes) -> None:
        """Raises Fault if hardware that `starter` starts does not see the last write."""
        written, writer = self.written[cell], self.writer(cell)
        hidden = (written >> TIME) > self.clocks.fenced[cta, starter, writer]
        if hidden.any():
            bad = int(np.flatnonzero(hidden)[0])
            record = int(written[bad])
            threads.fail(
                f"{self.name}: it reads beside the warps what {self.clocks.who(record & 63)} "
                f"stored at {threads.line_of(place_of(record))}, with no fence.proxy.async in "
                f"between",
                lanes[bad : bad + 1],
            )
