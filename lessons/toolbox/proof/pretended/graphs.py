"""CUDA graphs on a pretended GPU: captured and replayed without one."""

import contextlib
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lessons.toolbox.proof.pretended.hosts import (
    NO_KERNEL,
    Hosts,
    as_meta,
    compute,
    writes_into_first,
)
from lessons.toolbox.proof.traps import poison_


class Graph:
    """torch.cuda.CUDAGraph: notes what runs while it captures, and runs it again. As on a GPU,
    nothing runs at capture, and results are poison until the first replay.
    """

    def __init__(self, *args, **options):
        self.runs = []  # functions without arguments

    def note(self, func, name: str, args: tuple, kwargs: dict):
        """Record an operation on hosts; returns the memory of its results."""
        run = partial(compute, func, name, args, kwargs, on_gpu=True)
        if writes_into_first(func) or "out" in kwargs:
            self.runs.append(run)
            return None
        shapes = kwargs | ({"device": "meta"} if "device" in kwargs else {})
        shapes = tree_map_only(Tensor, as_meta, (args, shapes))
        if not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            shapes[1]["device"] = "meta"
        results = tree_map_only(Tensor, memory_like, func(*shapes[0], **shapes[1]))
        if not name.startswith(NO_KERNEL):
            self.runs.append(lambda: fill(results, run()))
        return results

    def replay(self) -> None:
        """Run all that was noted, in order."""
        with torch.inference_mode():
            for run in self.runs:
                run()

    def reset(self) -> None:
        """Forget what was noted."""
        self.runs.clear()

    def pool(self) -> tuple[int, int]:
        """A name for its memory."""
        return (0, 0)


def memory_like(shape: Tensor) -> Tensor:
    """Poisoned memory for a result on "meta": [...]."""
    keep = Hosts.keep_values or not shape.is_floating_point()
    device = "cpu" if keep else "meta"
    return poison_(
        torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    )


def fill(results, computed) -> None:
    """Copy what a replay computed into the memory that the capture gave."""
    for result, new in zip(tree_leaves(results), tree_leaves(computed)):
        result.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, *args, **options):
    """torch.cuda.graph."""
    Hosts.captured_by = graph
    try:
        yield
    finally:
        Hosts.captured_by = None
