"""Which replica gets a request. A router knows what a real one knows: the prompt's prefix, and how
many requests each replica has. It does not know how long an answer will be.

loads: [N] float, requests on each replica; infinity marks one that is dead.
"""

from typing import Protocol

import numpy as np


class Asked(Protocol):
    """What a router sees of a request. prefix: requests of one name begin alike."""

    prefix: str | None


class Router(Protocol):
    """Chooses a replica that is alive; one at least is."""

    def choose(self, request: Asked, loads: np.ndarray) -> int:
        """The index of a replica."""


class RoundRobin:
    """One after the other."""

    def __init__(self):
        self.last = -1

    def choose(self, request: Asked, loads: np.ndarray) -> int:
        """As in Router."""
        self.last = (self.last + 1) % len(loads)
        while loads[self.last] == np.inf:
            self.last = (self.last + 1) % len(loads)
        return self.last


class LeastLoaded:
    """The one with the fewest requests, the first of several."""

    def choose(self, request: Asked, loads: np.ndarray) -> int:
        """As in Router."""
        return int(loads.argmin())


class PrefixAware:
    """The one that had this prefix last, because its cache may still hold it; the least loaded one,
    if that one is `slack` requests ahead of it.

    SGLang's router and vLLM's production stack weigh the same two against each other.
    """

    def __init__(self, slack: int = 4):
        self.slack = slack
        self.home: dict[str, int] = {}

    def choose(self, request: Asked, loads: np.ndarray) -> int:
        """As in Router."""
        least = int(loads.argmin())
        if request.prefix is None:
            return least
        home = self.home.get(request.prefix, least)
        if loads[home] > loads[least] + self.slack:
            home = least
        self.home[request.prefix] = home
        return home


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
