"""A device whose clock only moves when something happens: a timer's mistakes show as exact numbers,
on every machine, at once.
"""


class VirtualDevice:
    """Queues work as a GPU does. `clock` gives seconds; `launch`, `synchronize` and `clock` are
    what a timer is handed.

    work_ms: what each launch costs the device; the k-th launch costs work_ms[k], the last entry
    repeats. The first entry is where compilation and cold caches go. launch_ms: what each launch
    costs the host. The device starts work when it is free, not before it is launched.
    """

    def __init__(self, work_ms: list[float], launch_ms: float = 0.01):
        self.work_ms, self.launch_ms = work_ms, launch_ms
        self.host_ms = 0.0  # the host's clock
        self.busy_until_ms = 0.0
        self.launches = 0
        self.synchronizations = 0

    def clock(self) -> float:
        """Seconds on the host's clock."""
        return self.host_ms / 1e3

    def launch(self) -> None:
        """Queue one piece of work and return."""
        self.host_ms += self.launch_ms
        cost = self.work_ms[min(self.launches, len(self.work_ms) - 1)]
        self.busy_until_ms = max(self.busy_until_ms, self.host_ms) + cost
        self.launches += 1

    def synchronize(self) -> None:
        """Return when all queued work is done."""
        self.host_ms = max(self.host_ms, self.busy_until_ms)
        self.synchronizations += 1
