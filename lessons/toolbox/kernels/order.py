"""The order in which Triton's interpreter runs a kernel's programs.

A GPU promises none, so a kernel whose result depends on it is wrong, and a loop over the grid hides
that. Within `program_order(seed)` every launch runs its programs in a drawn order. With
`backwards=True` it is the same order from the end: of every two programs the other one comes first,
so two runs with equal results show that no pair depends on its order. On a GPU it changes nothing.
"""

import contextlib
import random
from collections.abc import Iterator
from itertools import product

from lessons.toolbox.measure.device import has_triton, interpreting

_orders: list["Order"] = []  # the innermost is the last


class Order:
    """The orders of the launches within one `program_order`, one after another."""

    def __init__(self, seed: int, backwards: bool):
        self.random, self.backwards = random.Random(seed), backwards
        self.programs: dict[tuple, tuple] = {}  # of the launch that runs: turn -> program

    def begin(self, grid: tuple[int, int, int]) -> None:
        """Draw the order of a new launch."""
        turns = list(product(*map(range, grid)))
        programs = self.random.sample(turns, len(turns))
        self.programs = dict(zip(turns, reversed(programs) if self.backwards else programs))


@contextlib.contextmanager
def program_order(seed: int, backwards: bool = False) -> Iterator[None]:
    """Run a block with the programs of every interpreted launch in an order drawn from `seed`."""
    _orders.append(Order(seed, backwards))
    try:
        yield
    finally:
        _orders.pop()


if has_triton() and interpreting():
    from lessons.toolbox.kernels.patches import mends

    @mends("InterpreterBuilder", "set_grid_idx", "self x y z")
    def order(original):
        """Programs may run in any order: within `program_order` they do."""

        def set_grid_idx(self, x, y, z):
            if not _orders:
                return original(self, x, y, z)
            if (x, y, z) == (0, 0, 0):  # the first program of a launch
                _orders[-1].begin(self.grid_dim)
            return original(self, *_orders[-1].programs[x, y, z])

        return set_grid_idx
