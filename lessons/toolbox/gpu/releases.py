"""What orders the programs of a launch: atomic operations that release what a program has written,
and acquire what others have.

Each program counts its releases, and a cell remembers how many its writer had behind it when it
wrote. A place of memory on which programs release remembers whose writes come with it. An acquire
there makes them known to a program, with all that those programs knew themselves.

Source: NVIDIA, PTX ISA 9.0, 8.8 (release and acquire patterns). Only an `atom` or `red` of the
scopes gpu and sys that says `release`, `acquire` or `acq_rel` counts. A fence beside a relaxed one
does not.
"""

import numpy as np

from lessons.toolbox.gpu.ptx import Instruction


class Releases:
    """Of one launch. Programs are counted from 1."""

    def __init__(self):
        self.done: dict[int, int] = {}  # program -> its releases
        self.known: dict[int, dict[int, int]] = {}  # program -> {another: how many it has seen}
        self.at: dict[int, dict[int, int]] = {}  # address -> the same, of what was released there

    def meet(self, program: int, address: int, acquires: bool, releases: bool) -> None:
        """A program's atomic operation on an address."""
        mine, here = self.known.setdefault(program, {}), self.at.setdefault(address, {})
        if acquires:
            merge(mine, here)
        if releases:
            self.done[program] = self.done.get(program, 0) + 1
            merge(here, mine | {program: self.done[program]})

    def of(self, programs: np.ndarray) -> np.ndarray | int:
        """How many releases programs, [lanes], have done: what a cell that they write remembers."""
        return np.array([self.done.get(int(p), 0) for p in programs]) if self.done else 0

    def known_to(self, programs: np.ndarray, writers: np.ndarray, when: np.ndarray) -> np.ndarray:
        """[lanes]: whether a program has acquired what a writer wrote after so many releases."""
        if not self.done:
            return np.zeros(len(programs), dtype=bool)
        pairs, which = np.unique(np.stack([programs, writers]), axis=1, return_inverse=True)
        seen = [self.known.get(int(p), {}).get(int(w), 0) for p, w in pairs.T]
        return when < np.array(seen)[which.reshape(-1)]


def merge(into: dict[int, int], other: dict[int, int]) -> None:
    """Keep of each program the later of both."""
    for program, many in other.items():
        into[program] = max(into.get(program, 0), many)


def orders(instruction: Instruction) -> tuple[bool, bool]:
    """Whether an atomic operation acquires, and whether it releases, between programs."""
    if not instruction.has("gpu", "sys"):
        return False, False
    return instruction.has("acquire", "acq_rel"), instruction.has("release", "acq_rel")
