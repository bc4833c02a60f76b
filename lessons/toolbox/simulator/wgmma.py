"""Simulated matrix products of a warpgroup: they read shared memory until they have ended, in their
order, and give their value at a wait.
"""

import torch
from torch import Tensor

from lessons.toolbox.simulator.machine import Hazard, line, program, refuse
from lessons.toolbox.simulator.memory import Shared


class Pending:
    """The accumulator of a product in flight: it may be waited for or added to, nothing else."""

    def __init__(self, started: str):
        self.started, self.value = started, None

    def _unusable(self) -> Hazard:
        return refuse(f"the product of {self.started} is used before its warpgroup_mma_wait")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unusable()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise next(x for x in args if isinstance(x, cls))._unusable()


def warpgroup_mma(
    a, b: Shared, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False
):
    """a @ b (+ acc). a: [M, K], shared or a tensor; b: [K, N] shared; acc: [M, N] -> a Pending if
    it is asynchronous, else the value.
    """
    _check_shapes(a, b, acc)
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    accesses = [(x, x.begin(writes=False, what="the product")) for x in operands]
    result = Pending(line())

    def finish() -> None:
        left, right = (x.data if isinstance(x, Shared) else x for x in (a, b))
        result.value = left.float() @ right.float()
        if use_acc:
            result.value = result.value + (acc.value if isinstance(acc, Pending) else acc)
        for view, access in accesses:
            view.end(access)

    program().start("product", "the product", finish)
    if not is_async:
        return warpgroup_mma_wait(0, (result,))
    program().pause()
    return result


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """Wait until at most `num_outstanding` products of this partition are in flight. -> the values
    of deps; one that is still in flight stays a Pending.
    """
    if deps is None:
        raise refuse("warpgroup_mma_wait: deps must be given")
    here = program()
    mine, at = here.running, line()
    here.pause(
        lambda: here.outstanding("product", mine) <= num_outstanding,
        lambda: f"at {at} for its products",
    )
    values = tuple(x.value if isinstance(x, Pending) and x.value is not None else x for x in deps)
    return values[0] if len(values) == 1 else values


def _check_shapes(a, b, acc) -> None:
    if not isinstance(b, Shared):
        raise refuse("warpgroup_mma: b must be in shared memory")
    (m, k), (k_b, n) = a.shape, b.shape
    fits = k == k_b and a.dtype == b.dtype
    if fits and isinstance(acc, Tensor):
        fits = list(acc.shape) == [m, n] and acc.dtype == torch.float32
    if not fits:
        raise refuse(f"warpgroup_mma: a {list(a.shape)} {a.dtype}, b {b.shape} {b.dtype}")
