"""Checks of lesson 00's puzzles. Each exists because it rejects a named wrong answer
(wrong/l00.py).

A failure shows in letters what the kernel read and wrote.
"""

import pytest
import torch

from lessons.toolbox.gpu import nvrtc
from lessons.toolbox.gpu.arguments import ORDER
from lessons.toolbox.gpu.faults import Fault
from lessons.toolbox.measure.device import default_device, has_gpu
from tests.exercises.checking import assert_equal, call, check
from tests.exercises.kernel_film import assert_loads_once, assert_solves
from tests.exercises.kernel_work import kernel_does_it

DEVICE = default_device()


def random(seed, *shape):
    """Between 1 and 2, so that neither 0 nor an element of another place passes for one."""
    g = torch.Generator().manual_seed(seed)
    return (1 + torch.rand(*shape, generator=g)).to(DEVICE)


def why(cases):
    """{case: (…, why)} -> {case: why}"""
    return {case: reason for case, (*_, reason) in cases.items()}


# ---------------------------------------------------------------- vectors

COPY = {
    "full_blocks": (32, "two blocks without a tail"),
    "tail": (50, "the last program has 2 elements"),
    "short": (3, "less than a block"),
}


@check("0.1", why(COPY))
def test_copy(impl, case, seed):
    x = random(seed, COPY[case][0])
    assert_solves(impl, dict(x=x), x)


@check("0.2", why({case: COPY[case] for case in ("full_blocks", "tail")}))
def test_add(impl, case, seed):
    x, y = random(seed, 2, COPY[case][0])
    assert_solves(impl, dict(x=x, y=y), x + y)


# ---------------------------------------------------------------- rows

SUMS = {
    "example": ((2, 3), "the docstring's: BLOCK is 4, a row has 3"),
    "full": ((3, 8), "a row fills its block"),
    "long": ((5, 50), "14 places after each row"),
}


@check("0.3", why(SUMS))
def test_row_sums(impl, case, seed):
    x = random(seed, *SUMS[case][0])
    assert_solves(impl, dict(x=x), x.sum(dim=1), atol=1e-4)


@check("0.3")
def test_row_sums_load_once(impl, seed):
    x = random(seed, 3, 6)
    assert_loads_once(assert_solves(impl, dict(x=x), x.sum(dim=1), atol=1e-4), x, "x")


def view(case, seed):
    """A view whose elements are not contiguous."""
    if case == "every_second_column":
        return random(seed, 4, 12)[:, ::2]
    if case == "transposed":
        return random(seed, 5, 3).T
    return random(seed, 6, 7)[::2, 1:5]


@check(
    "0.4",
    {
        "every_second_column": "strides (12, 2)",
        "transposed": "strides (1, 3): a row's elements are far apart",
        "window": "strides (14, 1), columns 1 to 4 of every second row",
    },
)
def test_copy_rows(impl, case, seed):
    x = view(case, seed)
    assert_solves(impl, dict(x=x), x.contiguous())


# ---------------------------------------------------------------- tiles

OUTER = {
    "full_tiles": ((16, 8), "two tiles, no tail"),
    "tails": ((10, 13), "both sides have a tail"),
    "wide": ((3, 20), "one row of tiles"),
}


@check("0.5", why(OUTER))
def test_outer(impl, case, seed):
    rows, columns = OUTER[case][0]
    x, y = random(seed, rows), random(seed + 1, columns)
    assert_solves(impl, dict(x=x, y=y), x[:, None] * y[None, :])


@check("0.6", why(OUTER))
def test_transpose(impl, case, seed):
    x = random(seed, *OUTER[case][0])
    assert_solves(impl, dict(x=x), x.T.contiguous())


# ---------------------------------------------------------------- softmax, a long row

SOFTMAX = {
    "example": (torch.tensor([[1000.0, 1000.0, -1000.0]]), "exp(1000) does not fit float32"),
    "negative": (torch.tensor([[-8.0, -9.0, -10.0]] * 2), "a padding of 0 would be the largest"),
    "far_below": (
        torch.tensor([[-2e9, -2e9, -3e9]]),
        "a padding that is just very small would be the largest",
    ),
    "full": (torch.linspace(-2, 2, 24).view(3, 8), "three rows that fill their blocks"),
}


@check("0.7", why(SOFTMAX))
def test_softmax(impl, case, seed):
    x = SOFTMAX[case][0].to(DEVICE)
    assert_solves(impl, dict(x=x), torch.softmax(x, dim=1), atol=1e-6)


@check("0.7")
def test_softmax_loads_once(impl, seed):
    x = random(seed, 2, 5)
    assert_loads_once(assert_solves(impl, dict(x=x), torch.softmax(x, 1), atol=1e-6), x, "x")


MAXIMUM = {
    "negative": (lambda x: -x[:, :32], "two whole tiles; a beginning of 0 would win"),
    "largest_first": (
        lambda x: -x.sort(dim=1).values,
        "the first tile holds the largest; in the tail a padding of 0 would win",
    ),
    "far_below": (lambda x: -1e30 * x, "a beginning or a padding of -1e9 would win"),
    "largest_last": (lambda x: x.sort(dim=1).values, "the last tile holds it"),
}


@check("0.8", why(MAXIMUM))
def test_long_row_max(impl, case, seed):
    x = MAXIMUM[case][0](random(seed, 3, 40)).contiguous()
    assert_solves(impl, dict(x=x), x.amax(dim=1))


@check("0.8")
def test_long_row_max_walks(impl, seed):
    x = random(seed, 2, 40)
    film = assert_solves(impl, dict(x=x), x.amax(dim=1))
    assert_loads_once(film, x, "x")
    if film is not None:
        most = max(len(access.addresses) for access in film.accesses)
        assert most <= 16, f"your kernel loads {most} elements at once; BLOCK is 16"


# ---------------------------------------------------------------- products

PRODUCT = {
    "one_tile": ((16, 16, 16), "one program, one step"),
    "long": ((16, 64, 16), "four steps add up"),
    "rectangle": ((32, 16, 48), "six programs, M, K and N differ"),
}


@check("0.9", why(PRODUCT))
def test_product(impl, case, seed):
    rows, inner, columns = PRODUCT[case][0]
    a, b = random(seed, rows, inner), random(seed + 1, inner, columns)
    assert_solves(impl, dict(a=a, b=b), (a.double() @ b.double()).float(), atol=1e-3)


ANY = {
    "example": ((1, 3, 1), "the docstring's: 3 elements times 3"),
    "tails": ((17, 20, 5), "each side has a tail"),
    "full_tiles": ((16, 32, 16), "no side has one"),
}


@check("0.10", why(ANY))
def test_any_product(impl, case, seed):
    rows, inner, columns = ANY[case][0]
    a, b = random(seed, rows, inner), random(seed + 1, inner, columns)
    assert_solves(impl, dict(a=a, b=b), (a.double() @ b.double()).float(), atol=1e-3)


# ---------------------------------------------------------------- CUDA C++


def not_run_without_nvrtc():
    if not has_gpu() and (reason := nvrtc.why_not_here()):
        pytest.skip(f"NOT RUN: {reason}")


def assert_sums(impl, x, want, seed):
    """The same in two orders of the programs; what is found in the compiled code is the message."""
    not_run_without_nvrtc()
    for order in (seed, seed + 1):
        ORDER.seed(order)
        try:
            got = call(impl, dict(x=x))
        except (nvrtc.CompileError, Fault) as error:
            raise AssertionError(str(error)) from None
        assert_equal(got, want, atol=1e-3, label="out")


@check("0.11", seconds=90)
def test_block_sum(impl, seed):
    x = random(seed, 256)
    assert_sums(impl, x, x.sum()[None], seed)


@check("0.12", seconds=90)
def test_warp_sums(impl, seed):
    x = random(seed, 2, 32)
    assert_sums(impl, x, x.sum(dim=1, keepdim=True).expand(2, 32), seed)


# ---------------------------------------------------------------- the kernel did it


def vectors(seed, *sizes):
    return {name: random(seed + i, n) for i, (name, n) in enumerate(zip("xy", sizes))}


def for_cuda(seed, *shape):
    not_run_without_nvrtc()
    return dict(x=random(seed, *shape))


def two_matrices(seed, rows, inner, columns):
    return dict(a=random(seed, rows, inner), b=random(seed + 1, inner, columns))


test_copy_kernel = kernel_does_it("0.1", lambda seed: vectors(seed, 20))
test_add_kernel = kernel_does_it("0.2", lambda seed: vectors(seed, 20, 20))
test_row_sums_kernel = kernel_does_it("0.3", lambda seed: dict(x=random(seed, 2, 5)))
test_copy_rows_kernel = kernel_does_it("0.4", lambda seed: dict(x=view("transposed", seed)))
test_outer_kernel = kernel_does_it("0.5", lambda seed: vectors(seed, 3, 10))
test_transpose_kernel = kernel_does_it("0.6", lambda seed: dict(x=random(seed, 3, 10)))
test_softmax_kernel = kernel_does_it("0.7", lambda seed: dict(x=random(seed, 2, 5)))
test_long_row_max_kernel = kernel_does_it("0.8", lambda seed: dict(x=random(seed, 2, 20)))
test_product_kernel = kernel_does_it("0.9", lambda seed: two_matrices(seed, 16, 32, 16))
test_any_product_kernel = kernel_does_it("0.10", lambda seed: two_matrices(seed, 3, 5, 17))
test_block_sum_kernel = kernel_does_it("0.11", lambda seed: for_cuda(seed, 256), once=("x",))
test_warp_sums_kernel = kernel_does_it("0.12", lambda seed: for_cuda(seed, 2, 32), once=("x",))
