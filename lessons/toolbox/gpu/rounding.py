"""What the manual leaves open about numbers, drawn: the error of approximations, the order of sums.

A GPU gives the same result for the same input each time, but the manual does not say which. So one
seed decides for the whole process: an approximation is off by an amount that depends on its result
and the seed, never by more than the manual allows, and a tensor core adds in an order that depends
on the seed. A kernel that is right for several seeds relies on neither.

    LADDER_ROUNDING=7      that seed; 0: every result is the nearest, sums go in order
"""

import os
import random
from functools import cache

import numpy as np

VARIABLE = "LADDER_ROUNDING"


class Rounding:
    """The seed in force."""

    def __init__(self):
        given = os.environ.get(VARIABLE, "")
        self.seed = int(given) if given.isdigit() else random.SystemRandom().getrandbits(16)

    def approximated(self, exact: np.ndarray, units: float) -> np.ndarray:
        """float64 -> float32, off by at most `units` of 2^-23 of the number. Half a unit is left
        for the rounding itself.
        """
        near = exact.astype(np.float32)
        if not self.seed:
            return near
        mixed = (near.view(np.uint32) ^ np.uint32(self.seed)) * np.uint32(2654435761)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
        drawn = (mixed >> np.uint32(8)).astype(np.float64) * 2.0**-23 - 1  # [-1, 1)
        moved = (exact * (1 + drawn * (units - 0.5) * 2.0**-23)).astype(np.float32)
        return np.where(np.isfinite(near), moved, near)

    def sum_order(self, count: int) -> np.ndarray:
        """In which order `count` products are added."""
        return _order(self.seed, count)


@cache
def _order(seed: int, count: int) -> np.ndarray:
    if not seed:
        return np.arange(count)
    return np.random.default_rng([seed, count]).permutation(count)


ROUNDING = Rounding()
