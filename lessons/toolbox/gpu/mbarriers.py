"""mbarriers: counters in shared memory that warps and the copy engine arrive at.

An mbarrier waits for a number of arrivals and for a number of bytes. When both have come its phase
is complete and the next one begins. A waiting warp asks for the parity, 0 or 1, of the phase that
it wants to be complete. What was done before an arrival is known to all who wait for its phase.

Source: NVIDIA, PTX ISA 9.0, 9.7.14.15 (mbarrier).
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class State:
    """The mbarrier at one address, in every program: arrays [programs]."""

    expected: np.ndarray  # arrivals a phase; 0: there is no barrier
    left: np.ndarray  # arrivals that are missing
    bytes: np.ndarray  # bytes that are announced and have not come
    phase: np.ndarray  # phases that are complete
    arrived: np.ndarray  # [2, programs, agents]: what those who came know (`clocks`)
    complete: np.ndarray  # the same when the last phase was complete


class MemoryBarriers:
    """All mbarriers. changes: counts what a waiting warp might wait for."""

    def __init__(self, threads):
        self.threads = threads
        self.states: dict[int, State] = {}
        self.changes = 0

    def at(self, address: int, lanes: np.ndarray) -> State:
        """The state of an mbarrier. Raises Fault if it was not initialised in the lanes'
        programs.
        """
        state = self.states.get(address)
        if state is None or (state.expected[self.threads.cta[lanes]] == 0).any():
            self.threads.fail(f"there is no mbarrier at {address}", lanes)
        return state

    def init(self, address: int, count: int, lanes: np.ndarray) -> None:
        """Begin phase 0, with `count` arrivals a phase."""
        threads = self.threads
        if address not in self.states:
            numbers = [np.zeros(threads.num_programs, dtype=np.int64) for _ in range(4)]
            shape = (2, threads.num_programs, threads.clocks.agents)
            known = [np.zeros(shape, dtype=np.int64) for _ in range(2)]
            self.states[address] = State(*numbers, *known)
        state, where = self.states[address], threads.cta[lanes]
        state.expected[where] = state.left[where] = count
        state.phase[where] = state.bytes[where] = 0
        state.arrived[:, where] = state.complete[:, where] = 0

    def invalidate(self, address: int, lanes: np.ndarray) -> None:
        """The memory may hold something else."""
        self.at(address, lanes).expected[self.threads.cta[lanes]] = 0

    def arrive(self, address: int, lanes: np.ndarray, announced: int = 0, count: int = 1) -> None:
        """Each lane arrives `count` times; `announced` bytes are to come too. Raises Fault for an
        arrival that the phase does not expect.
        """
        threads = self.threads
        state, where = self.at(address, lanes), threads.cta[lanes]
        counts = np.bincount(where, minlength=threads.num_programs)
        if (state.left < counts * count).any():
            threads.fail(
                f"more arrivals at the mbarrier at {address} than its phase expects", lanes
            )
        state.bytes += counts * announced
        state.left -= counts * count
        self.tell(state, where, threads.warp_of_program[lanes])
        self.turn(state)

    def tell(self, state: State, where: np.ndarray, agents) -> None:
        """Who waits for this phase will know what these agents know now."""
        clocks = self.threads.clocks
        for told, part in zip(state.arrived, clocks.told(where, agents)):
            np.maximum.at(told, where, part)

    def bring(self, address: int, lanes: np.ndarray, count: int) -> None:
        """The copy engine has delivered `count` bytes for each lane's program."""
        state, where = self.at(address, lanes), self.threads.cta[lanes]
        state.bytes -= np.bincount(where, minlength=self.threads.num_programs) * count
        self.tell(state, where, self.threads.clocks.agent("the copy engine"))
        self.turn(state)

    def commit(self, address: int, lanes: np.ndarray) -> None:
        """The tensor core has done what the lanes committed: it arrives, once for each lane."""
        state, where = self.at(address, lanes), self.threads.cta[lanes]
        counts = np.bincount(where, minlength=self.threads.num_programs)
        if (state.left < counts).any():
            self.threads.fail(
                f"more arrivals at the mbarrier at {address} than its phase expects", lanes
            )
        state.left -= counts
        self.tell(state, where, self.threads.clocks.agent("the tensor core"))
        self.turn(state)

    def turn(self, state: State) -> None:
        """Complete the phases of programs where nothing is missing."""
        self.changes += 1
        done = (state.left == 0) & (state.bytes == 0) & (state.expected > 0)
        state.phase += done
        state.left = np.where(done, state.expected, state.left)
        state.complete = np.where(done[None, :, None], state.arrived, state.complete)

    def is_complete(self, address: int, parity: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """[lanes] bool: whether the last complete phase has the parity. The first wait for parity 1
        succeeds at once: the phase before the first counts as complete.
        """
        state = self.at(address, lanes)
        return (state.phase[self.threads.cta[lanes]] & 1) != (parity & 1)

    def acquire(self, address: int, lanes: np.ndarray) -> None:
        """The lanes' warps learn what those knew who arrived."""
        threads = self.threads
        where, agents = np.unique(
            np.stack([threads.cta[lanes], threads.warp_of_program[lanes]]), axis=1
        )
        threads.clocks.learn(where, agents, self.states[address].complete[:, where])
