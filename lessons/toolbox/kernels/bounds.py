"""A kernel that reads or writes beside its tensors fails, with a message, in Triton's interpreter.

    with in_bounds():
        rms_norm(x, weight, 1e-5)     # OutOfBounds: … the first 4 bytes after the end of `out_ptr`

On a GPU such an access returns garbage, spoils another tensor or ends the process. The interpreter
does the same to Python: mostly nothing happens, now and then the process crashes. Here each address
under a true mask must be in the memory of a tensor that the kernel was given.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from torch import Tensor

from lessons.toolbox.kernels.launches import watching_launches
from lessons.toolbox.measure.device import has_triton, interpreting

# the interpreter's function -> what it does, and where its pointers, values and mask stand
ACCESSES = {
    "load": ("read", 0, 2, 1),
    "store": ("wrote", 0, 1, 2),
    "atomic_rmw": ("wrote", 1, 2, 3),
    "atomic_cas": ("wrote", 0, 2, None),
}


class OutOfBounds(IndexError):
    """Says how many addresses are outside, and where the first one is."""


@contextmanager
def in_bounds() -> Iterator[None]:
    """Within it an interpreted kernel raises OutOfBounds instead of touching foreign memory. Does
    nothing where kernels are compiled.
    """
    if not (has_triton() and interpreting()):
        yield
        return
    # here, because Triton may not be installed
    from triton.runtime import interpreter

    memory = interpreter._interpreter
    given: dict[str, tuple[int, int]] = {}  # argument -> its first address, the one after its last

    def launch(kernel: str, tensors: dict[str, Tensor]) -> None:
        given.clear()
        for name, x in tensors.items():
            storage = x.untyped_storage()
            given[name] = storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    guarded = {
        name: _guard(getattr(memory, name), given, *where) for name, where in ACCESSES.items()
    }
    with watching_launches(launch), mock.patch.multiple(memory, **guarded):
        yield


def _guard(original: Callable, given: dict, verb: str, at: int, value: int, mask_at: int | None):
    def access(*args):
        pointers, mask = args[at], True if mask_at is None else args[mask_at]
        touched = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)].astype(np.int64)
        _check(touched, args[value].itemsize, verb, given)
        return original(*args)

    return access


def is_inside(
    addresses: np.ndarray, itemsize: int, given: dict[str, tuple[int, int]]
) -> np.ndarray:
    """Which elements are in the memory that was given, as bool. addresses: [...] int64, of their
    first bytes; given: {argument: its first address, the one after its last}.
    """
    inside = np.zeros(addresses.shape, bool)
    for start, end in given.values():
        inside |= (addresses >= start) & (addresses <= end - itemsize)
    return inside


def _check(touched: np.ndarray, itemsize: int, verb: str, given: dict) -> None:
    inside = is_inside(touched, itemsize, given)
    if inside.all():
        return
    outside = touched[~inside]
    beside = []  # (bytes between the tensor and the first address, in words)
    for name, (start, end) in given.items():
        before, after = start - int(outside[0]), int(outside[0]) - end
        beside.append((before, f"{before} bytes before the start of `{name}`"))
        beside.append((after, f"{after} bytes after the end of `{name}`"))
    nearest = min((entry for entry in beside if entry[0] > -itemsize), default=(0, "anywhere"))
    raise OutOfBounds(
        f"the kernel {verb} out of bounds: {len(outside)} of {len(touched)} addresses are in no "
        f"tensor that it was given, the first one {nearest[1]}"
    )
