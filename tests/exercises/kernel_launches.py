"""How a learner's wrapper launches its kernel: grid and options, without running anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lessons.toolbox.measure.device import has_triton, interpreting

Launch = tuple[tuple[int, ...], dict[str, Any]]  # its grid, and the arguments that have names


@contextmanager
def launches() -> Iterator[list[Launch] | None]:
    """Within it launches of interpreted kernels are noted and not run. None where kernels are
    compiled, because their launcher shows no grid.
    """
    if not (interpreting() and has_triton()):
        yield None
        return
    from triton.runtime.interpreter import GridExecutor

    seen: list[Launch] = []

    def launch(this, *args, **options):
        named = dict(zip(this.arg_names, args)) | options
        grid = this.grid(named) if callable(this.grid) else this.grid
        grid = grid if isinstance(grid, (tuple, list)) else (grid,)
        seen.append((tuple(int(size) for size in grid), named))

    with mock.patch.object(GridExecutor, "__call__", launch):
        yield seen
