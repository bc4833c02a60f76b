"""Who waits, and for what: barriers of a program's warps.

`bar.sync a, b` holds a thread until b threads (all of the program, without b) have come to barrier
a. Threads that have ended are not waited for.

Source: NVIDIA, PTX ISA 9.0, 9.7.14.1 (barrier).
"""

import numpy as np


class Barriers:
    """The barriers of all programs that run together."""

    def __init__(self, threads):
        self.threads = threads
        # (place behind the barrier, its number) -> who waits there
        self.waiting: dict[tuple[int, int], np.ndarray] = {}
        self.needed: dict[int, np.ndarray] = {}  # number -> threads a program that it takes

    def any_waiting(self) -> bool:
        return bool(self.waiting)

    def arrive(self, number: int, count: np.ndarray | None, place: int, mask) -> dict:
        """The threads of `mask` come to a barrier; `place`: where they go on. Returns the fronts
        that may do so now. count: threads that it takes, [count of threads]; None: all.
        """
        threads = self.threads
        if count is None and mask is None and not self.waiting:  # all threads at once
            self.meet(threads.alive)
            return {place: threads.alive.copy()}
        mask = threads.alive.copy() if mask is None else mask
        here = self.waiting.get((place, number))
        self.waiting[place, number] = mask if here is None else here | mask
        if count is not None:
            needed = np.zeros(threads.num_programs, dtype=np.int64)
            needed[threads.cta[mask]] = threads.spread(count)[mask]
            self.needed[number] = np.maximum(needed, self.needed.get(number, 0))
        return self.released(number)

    def released(self, number: int) -> dict[int, np.ndarray]:
        """The fronts of programs whose barrier `number` is complete."""
        threads, size = self.threads, (self.threads.num_programs, -1)
        came = np.zeros(threads.count, dtype=bool)
        for (_, at), mask in self.waiting.items():
            if at == number:
                came |= mask
        arrived = came.reshape(size).sum(1)
        needed = threads.alive.reshape(size).sum(1)
        if number in self.needed:
            counted = self.needed[number]
            needed = np.where(counted > 0, np.minimum(counted, needed), needed)
        complete = (arrived >= needed) & (arrived > 0)
        if not complete.any():
            return {}
        go = complete[threads.cta]
        self.meet(came & go)
        fronts: dict[int, np.ndarray] = {}
        for key in [key for key in self.waiting if key[1] == number]:
            mask = self.waiting.pop(key)
            if (mask & go).any():
                fronts[key[0]] = fronts.get(key[0], False) | (mask & go)
            if (mask & ~go).any():
                self.waiting[key] = mask & ~go
        if number in self.needed:
            self.needed[number] = np.where(complete, 0, self.needed[number])
        return fronts

    def meet(self, mask: np.ndarray) -> None:
        """The warps of a mask learn of each other's past."""
        threads = self.threads
        warps = mask.reshape(threads.num_programs, threads.warps, -1).any(2)
        threads.clocks.synchronize(warps)

    def woken(self, stalled: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """When no front is left: those whose barrier is complete because other threads have ended.
        Raises Fault if there is none. stalled: {place: who waits at an mbarrier}.
        """
        fronts: dict[int, np.ndarray] = {}
        for number in {at for _, at in self.waiting}:
            for place, mask in self.released(number).items():
                fronts[place] = fronts.get(place, False) | mask
        if not fronts:
            self.deadlock(stalled)
        return fronts

    def deadlock(self, stalled: dict[int, np.ndarray]) -> None:
        """Raises Fault: who waits where."""
        threads = self.threads
        masks = [*self.waiting.values(), *stalled.values()]
        program = min(int(threads.cta[mask.argmax()]) for mask in masks)
        parts = []
        for (place, number), mask in sorted(self.waiting.items()):
            here = int(mask[threads.cta == program].sum())
            if here:
                parts.append(f"{here} threads at barrier {number} of {threads.line_of(place - 1)}")
        for place, mask in sorted(stalled.items()):
            here = int(mask[threads.cta == program].sum())
            if here:
                parts.append(f"{here} threads at the mbarrier of {threads.line_of(place)}")
        name = threads.name_of(int(threads.programs[program]))
        threads.fail(
            f"deadlock in {name}: {' and '.join(parts)} wait for others that never come", []
        )
