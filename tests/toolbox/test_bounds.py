"""Inside `in_bounds` a kernel touches only memory that it was given; all else runs as before."""

import pytest
import torch

from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.bounds import OutOfBounds, in_bounds
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="NOT RUN: kernels are compiled here")


@triton.jit
def copy(x_ptr, out_ptr, x_from, out_from, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + out_from + at, tl.load(x_ptr + x_from + at, mask=at < size), mask=at < size)


@triton.jit
def count(x_ptr, at, MODE: tl.constexpr):
    if MODE == "add":
        tl.atomic_add(x_ptr + at, 1)
    elif MODE == "cas":
        tl.atomic_cas(x_ptr + at, 0, 1)
    else:
        tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


@triton.jit
def copy_tile(x_ptr, out, rows, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, 16], [16, 1], [BLOCK, 16])
    out.store([0, 0], x.load([0, 0]))


def refuses(launch, message):
    """The kernel's own exception is the cause of the interpreter's."""
    with in_bounds(), pytest.raises(Exception) as caught:
        launch()
    error = caught.value.__cause__
    assert isinstance(error, OutOfBounds) and message in str(error), error


@pytest.mark.parametrize(
    "x_from, out_from, message",
    [
        (
            1,
            0,
            "read out of bounds: 1 of 8 addresses are in no tensor that it was given, the first ",
        ),
        (1, 0, "first one 0 bytes after the end of `x_ptr`"),
        (-2, 0, "read out of bounds: 2 of 8"),
        (-2, 0, "first one 8 bytes before the start of `x_ptr`"),
        (0, 3, "wrote out of bounds: 3 of 8"),
        (0, -1, "first one 4 bytes before the start of `out_ptr`"),
    ],
)
def test_beside_a_tensor(x_from, out_from, message):
    x, out = torch.zeros(8), torch.zeros(8)
    refuses(lambda: copy[(1,)](x, out, x_from, out_from, 8, 8), message)


@pytest.mark.parametrize("mode", ["add", "cas", "plain"])
def test_scalars_and_atomics(mode):
    x = torch.zeros(4, dtype=torch.int32)
    with in_bounds():
        count[(3,)](x, 3, mode)
    assert x.tolist() == [0, 0, 0, {"add": 3, "cas": 1, "plain": 3}[mode]]
    refuses(lambda: count[(1,)](x, 4, mode), "out of bounds: 1 of 1 addresses")


def test_what_stays_inside_runs_as_before():
    """Masked lanes do not count, nor do views: their memory is the whole tensor's."""
    x, out = torch.arange(12.0), torch.zeros(12)
    with in_bounds(), Accesses() as accesses:
        copy[(1,)](x[2:7], out[4:], 0, 0, 5, 64)
        copy[(1,)](x_ptr=x[2:7], out_ptr=out, x_from=5, out_from=0, size=2, BLOCK=2)
    assert out.tolist() == [7, 8, 0, 0, 2, 3, 4, 5, 6, 0, 0, 0]
    assert accesses.loads(x).sum() == 7 and accesses.outside(x, out) == 0


def test_tensor_descriptors():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = torch.rand(4, 16), torch.zeros(4, 16)
    with in_bounds():
        copy_tile[(1,)](x, TensorDescriptor.from_tensor(out, [8, 16]), 4, 8)
    assert torch.equal(out, x)
    wide = TensorDescriptor(out, [8, 16], [16, 1], [8, 16])
    refuses(lambda: copy_tile[(1,)](x, wide, 4, 8), "wrote out of bounds: 64 of 128")
    refuses(lambda: copy_tile[(1,)](x, wide, 5, 8), "read out of bounds: 16 of 80")


def test_nothing_stays_behind():
    from triton.runtime import interpreter

    memory = interpreter._interpreter
    before = memory.load, memory.store, interpreter.GridExecutor._init_args_hst
    with pytest.raises(ZeroDivisionError), in_bounds():
        raise ZeroDivisionError
    assert (memory.load, memory.store, interpreter.GridExecutor._init_args_hst) == before
