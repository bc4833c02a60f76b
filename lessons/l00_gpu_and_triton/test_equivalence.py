"""Proves that each Triton program computes what its loop over a grid in PyTorch does, in any shape
with a tail, and touches nothing beside its tensors.
"""

import pytest
import torch

from lessons.l00_gpu_and_triton import naive, optimized
from lessons.l00_gpu_and_triton.optimized import (
    column_sums_kernel,
    every_nth_kernel,
    row_max_kernel,
    scale_kernel,
    tile_product_kernel,
)
from lessons.toolbox.kernels.accesses import Accesses
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.measure.device import capability, default_device, interpreting
from lessons.toolbox.proof.planted import with_bug
from lessons.toolbox.proof.refusals import assert_message, assert_refused
from lessons.toolbox.proof.traps import poisoned, poisoned_empty

DEVICE = default_device()
SIZES = [1, 15, 16, 17, 50, 64]
KERNELS = {
    "scale": scale_kernel,
    "row_max": row_max_kernel,
    "column_sums": column_sums_kernel,
    "every_nth": every_nth_kernel,
    "tile_product": tile_product_kernel,
}


def in_wider(x):
    """x: [R, C] as every second column of memory that holds NaN elsewhere."""
    wide = poisoned((x.shape[0] + 1, 2 * x.shape[1] + 1), x.dtype)
    return wide[:-1, : 2 * x.shape[1] : 2].copy_(x)


def assert_equivalent(name, *arguments, atol=0.0, **options):
    """optimized.name(...) equals naive.name(...), with poison in every new tensor."""
    want = getattr(naive, name)(*arguments)
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments]
    if DEVICE.type == "cuda" and isinstance(arguments[0], torch.Tensor):
        # a copy is contiguous, and the kernel shall see the strides
        moved[0] = torch.empty_strided(
            arguments[0].shape, arguments[0].stride(), dtype=arguments[0].dtype, device=DEVICE
        ).copy_(arguments[0])
    with poisoned_empty(), in_bounds():
        got = getattr(optimized, name)(*moved, **options)
    torch.testing.assert_close(got.cpu(), want, atol=atol, rtol=0, equal_nan=False)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scale(n, dtype, seed, proof):
    x = torch.randn(n).to(dtype)
    assert_equivalent("scale", x, 2.0, block=16)
    proof.record(scale_kernel)


@pytest.mark.parametrize("columns", SIZES)
def test_row_max(columns, seed, proof):
    """All elements are negative, so a padding of 0 would win; also a transposed and a wider
    view.
    """
    x = -1 - torch.rand(5, columns)
    assert_equivalent("row_max", x)
    assert_equivalent("row_max", x.T.contiguous().T)
    assert_equivalent("row_max", in_wider(x))
    proof.record(row_max_kernel)


@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("columns", [1, 16, 50])
def test_column_sums(rows, columns, seed, proof):
    x = torch.randn(rows, columns)
    assert_equivalent("column_sums", x, atol=1e-5, block_rows=16, block_columns=16)
    proof.record(column_sums_kernel)


@pytest.mark.parametrize("stride", [1, 3, 32])
@pytest.mark.parametrize("count", [1, 17, 40])
def test_every_nth(stride, count, seed, proof):
    x = torch.randn((count - 1) * stride + 1)
    assert_equivalent("every_nth", x, stride, count, block=16)
    proof.record(every_nth_kernel)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("m, k, n", [(16, 16, 16), (16, 32, 64)])
def test_tile_product(m, k, n, precision, seed, proof):
    if precision == "tf32" and interpreting() is False and capability() < (8, 0):
        pytest.skip(
            "NOT RUN: needs a GPU that has TF32, of compute capability 8.0 or newer, or none"
        )
    a, b = torch.randn(m, k), torch.randn(k, n)
    assert_equivalent("tile_product", a, b, precision, atol=2e-5)
    proof.record(tile_product_kernel)


def test_tf32_is_a_thousandth_off(seed):
    """Two of the three decimal digits that the README names; float32 keeps seven."""
    a, b = torch.randn(16, 128), torch.randn(128, 16)
    exact = a.double() @ b.double()
    errors = [
        float((naive.tile_product(a, b, precision) - exact).abs().max())
        for precision in ("ieee", "tf32")
    ]
    assert errors[0] < 1e-5 < 2e-3 < errors[1] < 0.2


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: accesses are seen in the interpreter")
def test_each_element_is_loaded_once(seed):
    x = torch.randn(33, 50)
    with Accesses() as accesses:
        optimized.column_sums(x, block_rows=16, block_columns=16)
    assert (accesses.loads(x) == 1).all()
    with Accesses() as accesses:
        optimized.every_nth(x.view(-1), 7, 20)
    assert accesses.loads(x.view(-1)).nonzero().flatten().tolist() == list(range(0, 140, 7))


@pytest.mark.skipif(not interpreting(), reason="NOT RUN: a planted bug may touch foreign memory")
@pytest.mark.parametrize(
    "old, new, name, arguments",
    [
        ('other=-float("inf")', "other=0.0", "row_max", (-torch.rand(3, 17) - 1,)),
        (
            "at = start + column * stride_column",
            "at = row * columns + column",
            "row_max",
            (torch.arange(32.0).view(8, 4).T,),
        ),
        ("+= tl.sum(wide", "= tl.sum(wide", "column_sums", (torch.randn(70, 9),)),
        (
            "tl.dot(a, b, input_precision=INPUT_PRECISION)\n",
            "tl.dot(a, b)\n",
            "tile_product",
            (torch.randn(16, 64), torch.randn(64, 16)),
        ),
    ],
)
def test_a_planted_bug_is_found(old, new, name, arguments, tmp_path, seed):
    buggy = with_bug(optimized, tmp_path, old, new)
    got, want = getattr(buggy, name)(*arguments), getattr(naive, name)(*arguments)
    assert not torch.allclose(got, want, atol=1e-4, rtol=0)


def test_bad_input_is_refused():
    for name, arguments, wrong in [
        ("scale", dict(x=torch.zeros(4), factor=1.0), ("dtype", "device", "stride")),
        ("row_max", dict(x=torch.zeros(4, 3)), ("dtype", "device")),
        ("column_sums", dict(x=torch.zeros(4, 3)), ("dtype", "device", "stride")),
        ("every_nth", dict(x=torch.zeros(4), stride=1, count=3), ("dtype", "device", "stride")),
        ("tile_product", dict(a=torch.zeros(16, 16), b=torch.zeros(16, 16)), ()),
    ]:
        assert_refused(getattr(optimized, name), arguments, next(iter(arguments)), wrong)
    square = torch.zeros(16, 16)
    assert_refused(optimized.tile_product, dict(a=square, b=square), "b")
    assert_message(optimized.row_max, dict(x=torch.zeros(2, 0)), "x has 0 columns; accepted: 1 to")
    assert_message(
        optimized.every_nth, dict(x=torch.zeros(4), stride=2, count=3), "stride is 2, count 3"
    )
    assert_message(
        optimized.tile_product, dict(a=square, b=square, input_precision="fp8"), "'fp8'; accepted"
    )


@pytest.mark.parametrize("name", ["scale", "column_sums"])
def test_nothing_to_do(name):
    x = torch.empty(0) if name == "scale" else torch.empty(3, 0)
    assert getattr(optimized, name)(x.to(DEVICE), *([2.0] if name == "scale" else [])).numel() == 0
