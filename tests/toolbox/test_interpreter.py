"""Each rule of the interpreter: true with its patch, and shown to fail without it."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from lessons.toolbox.kernels.order import program_order
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import has_triton, interpreting
from lessons.toolbox.proof.numerics import NotEquivalent, prove

if not (has_triton() and interpreting()):
    pytest.skip("NOT RUN: kernels are compiled here, not interpreted", allow_module_level=True)

from lessons.toolbox.kernels import interpreter, patches

N = 256
FLOAT8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def cast_toward_zero_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(
        out_ptr + i,
        tl.cast(tl.load(x_ptr + i), out_ptr.dtype.element_ty, fp_downcast_rounding="rtz"),
    )


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, tl.where(x < y, x, -y))


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), tl.load(y_ptr + i), tl.load(z_ptr + i)))


@triton.jit
def constant_kernel(out_ptr, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N), tl.full([N], -1.25, tl.bfloat16))


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def reduce_kernel(x_ptr, out_ptr, argmax_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out_ptr + tl.arange(0, N), tl.sum(x, 1, dtype=tl.bfloat16))
    tl.store(out_ptr + N + tl.arange(0, N), tl.reduce(x, 1, larger))
    tl.store(argmax_ptr + tl.arange(0, N), tl.argmax(x, 1))


@triton.jit
def scan_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.cumsum(tl.load(x_ptr + i), 0, dtype=tl.bfloat16))


@triton.jit
def dot_kernel(x_ptr, y_ptr, out_ptr, K: tl.constexpr, PRECISION: tl.constexpr):
    i, k = tl.arange(0, 16), tl.arange(0, K)
    x = tl.load(x_ptr + i[:, None] * K + k[None, :])
    y = tl.load(y_ptr + k[:, None] * 16 + i[None, :])
    tl.store(out_ptr + i[:, None] * 16 + i[None, :], tl.dot(x, y, input_precision=PRECISION))


@triton.jit
def masked_load_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n))


@triton.jit
def maximum_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.maximum(x, y))
    tl.store(out_ptr + N + i, tl.minimum(x, y))


@triton.jit
def runtime_loop_kernel(out_ptr, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(out_ptr, total)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, except that one NaN is as good as another."""
    assert actual.dtype == expected.dtype
    actual, expected = actual.double(), expected.double()
    wrong = ~(
        (actual == expected) & (actual.signbit() == expected.signbit())
        | (actual.isnan() & expected.isnan())
    )
    assert not wrong.any(), (
        f"{int(wrong.sum())} wrong, first {actual[wrong][0]} instead of {expected[wrong][0]}"
    )


def float32_edges() -> torch.Tensor:
    """[4096] every magnitude and sign, halfway cases of bfloat16, subnormals, infinities, NaN."""
    bits = torch.randint(-(2**31), 2**31, (4000,))
    halfway = (torch.randint(-(2**15), 2**15, (88,)) << 16) | 0x8000
    special = torch.tensor(
        [
            0x00000000,
            -0x80000000,
            0x7F800000,
            -0x00800000,
            0x7FC00000,
            0x00000001,
            0x7F7FFFFF,
            0x3F808000,
        ]
    )
    return torch.cat([bits, halfway, special]).to(torch.int32).view(torch.float32)


def cast(x: torch.Tensor, dtype: torch.dtype, kernel=cast_kernel) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    kernel[(1,)](x, out, x.numel())
    return out


def two_bfloat16() -> tuple[torch.Tensor, torch.Tensor]:
    """A pair of [N], of mixed signs and close magnitudes, so that rounding and cancellation both
    happen.
    """
    return torch.randn(N).bfloat16(), torch.randn(N).bfloat16()


# ---------------------------------------------------------------- one check a rule


def check_casts():
    x = float32_edges()
    same(cast(x, torch.bfloat16), x.bfloat16())
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    same(cast(every, torch.float32), every.float())
    integers = torch.randint(-(2**31), 2**31, (1024,), dtype=torch.int32)
    same(cast(integers, torch.bfloat16), integers.float().bfloat16())
    small = torch.randn(N).mul(100).bfloat16()
    same(cast(small, torch.int32), small.float().to(torch.int32))


def check_float8_casts():
    for dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        scale = torch.tensor([largest / 4, 1e-2, 2.0**-8]).repeat_interleave(N * 5)
        # [16 N], the last ones saturate
        x = torch.cat([torch.randn(15 * N) * scale, torch.randn(N) * 1e6])
        x[-3:] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        same(cast(x, dtype), x.clamp(-largest, largest).to(dtype))  # clamp keeps NaN
        every = torch.arange(256).to(torch.uint8).view(dtype)
        for wide in (torch.float32, torch.float16, torch.bfloat16):
            same(cast(every, wide), every.to(wide))


def check_arithmetic():
    x, y = two_bfloat16()
    out = torch.empty(4, N, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, N)
    same(out, torch.stack([x + y, x - y, x * y, torch.where(x < y, x, -y)]))


def nearest_float32(exact: Fraction) -> float:
    """The float32 nearest to a rational number, by comparing it with its neighbours."""
    guess = np.float32(float(exact))
    around = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    return float(min(around, key=lambda value: abs(Fraction(float(value)) - exact)))


def check_fma():
    x, y = torch.randn(N), torch.randn(N)
    # what is left is the rounding error of the product: zero, if the product was rounded first
    z = -(x * y)
    out = torch.empty(N)
    fma_kernel[(1,)](x, y, z, out, N)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(x.tolist(), y.tolist(), z.tolist())
    ]
    same(out, torch.tensor([nearest_float32(value) for value in exact]))


def check_constants():
    out = torch.empty(N, dtype=torch.bfloat16)
    constant_kernel[(1,)](out, N)
    same(out, torch.full((N,), -1.25).bfloat16())


def check_reductions():
    n = 16
    x = torch.randn(n, n).bfloat16()
    # in a row without a positive number the bit patterns sort the other way round
    x[0] = -x[0].abs() - 1
    out, argmax = torch.empty(2, n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int32)
    reduce_kernel[(1,)](x, out, argmax, n)
    same(out[1], x.amax(1))
    same(x.gather(1, argmax.long()[:, None]), x.amax(1, keepdim=True))
    exact = x.double().sum(1)
    # half a unit in the last of 8 bits
    assert ((out[0].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def check_scans():
    x = torch.randint(-8, 9, (16,)).bfloat16()  # whole numbers below 256 add exactly in bfloat16
    out = torch.empty_like(x)
    scan_kernel[(1,)](x, out, 16)
    same(out, x.float().cumsum(0).bfloat16())


def dot(x: torch.Tensor, y: torch.Tensor, precision: str = "ieee") -> torch.Tensor:
    out = torch.empty(16, 16)
    dot_kernel[(1,)](x, y, out, x.shape[1], precision)
    return out


def check_dot():
    whole = torch.randint(-6, 7, (32, 16)).float()  # exact in every type and any order of the sum
    for dtype in (torch.bfloat16, torch.float16, *FLOAT8):
        same(dot(whole.T.contiguous().to(dtype), whole.to(dtype)), whole.T @ whole)
    nan = whole.to(torch.float8_e4m3fn).view(torch.uint8)
    nan[3, 5] = 0x7F
    assert (
        dot(whole.T.contiguous().to(torch.float8_e4m3fn), nan.view(torch.float8_e4m3fn))[:, 5]
        .isnan()
        .all()
    )


def check_tf32():
    x, y = torch.randn(16, 32), torch.randn(32, 16)
    exact = x.double() @ y.double()
    error = {
        precision: float((dot(x, y, precision) - exact).norm() / exact.norm())
        for precision in ("ieee", "tf32")
    }
    assert error["ieee"] < 1e-6
    assert 1e-4 < error["tf32"] < 2e-3  # 10 bits of mantissa, cut off


def check_smallest_dot():
    with pytest.raises(
        triton.runtime.errors.InterpreterError,
        match="inner dimension is 8, the compiler accepts 16",
    ):
        dot(torch.randn(16, 8), torch.randn(8, 16))


def check_garbage():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        out = torch.zeros(16).to(dtype)
        masked_load_kernel[(1,)](torch.ones(16).to(dtype), out, 5, 16)
        assert (out[:5].float() == 1).all() and out[5:].float().isnan().all()
    out = torch.zeros(16, dtype=torch.int32)
    masked_load_kernel[(1,)](torch.ones(16, dtype=torch.int32), out, 5, 16)
    assert (out[:5] == 1).all() and (out[5:] > 1e9).all()


def extremes(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, expected), each [2, N]: maximum and minimum of two rows with NaN in the one, the other
    or both.
    """
    x, y = torch.randn(N).to(dtype), torch.randn(N).to(dtype)
    x[::5], y[::3] = float("nan"), float("nan")
    out = torch.empty(2, N, dtype=dtype)
    maximum_kernel[(1,)](x, y, out, N)
    return out, torch.stack([torch.fmax(x, y), torch.fmin(x, y)])


def check_maximum():
    for dtype in (torch.float32, torch.bfloat16):
        out, expected = extremes(dtype)
        same(out[0], expected[0])


def check_minimum():
    for dtype in (torch.float32, torch.bfloat16):
        out, expected = extremes(dtype)
        same(out[1], expected[1])


def check_index():
    out, n = torch.zeros(1, dtype=torch.int32), random.randint(5, 50)
    runtime_loop_kernel[(1,)](out, n)
    assert out.item() == n * (n - 1) // 2


@triton.jit
def first_program_kernel(order_ptr, turn_ptr):
    turn = tl.load(turn_ptr)
    tl.store(turn_ptr, turn + 1)
    tl.store(order_ptr + turn, tl.program_id(1) * 3 + tl.program_id(0))


def programs_run(**options) -> list[int]:
    """The numbers of the six programs of a launch, in the order in which they ran."""
    numbers, turn = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with program_order(**options):
        first_program_kernel[3, 2](numbers, turn)
    return numbers.tolist()


def check_order():
    orders = {tuple(programs_run(seed=seed)) for seed in range(20)}
    assert len(orders) > 10 and {tuple(sorted(order)) for order in orders} == {(0, 1, 2, 3, 4, 5)}
    forwards = programs_run(seed=3)
    assert forwards == programs_run(seed=3)
    assert forwards[::-1] == programs_run(seed=3, backwards=True)


CHECKS = {
    "order": [check_order],
    "casts": [check_casts],
    "float8_casts": [check_float8_casts],
    "arithmetic": [check_arithmetic],
    "fma": [check_fma],
    "constants": [check_constants],
    "reductions": [check_reductions],
    "scans": [check_scans],
    "dot": [check_dot, check_tf32, check_smallest_dot],
    "garbage": [check_garbage],
    "maximum": [check_maximum],
    "minimum": [check_minimum],
    "index": [check_index],
}


def needed(rule: str) -> bool:
    """Whether this Triton breaks the rule. 3.7 took the patch for `index` over; NumPy raises from
    2.4 on.
    """
    numpy_version = tuple(map(int, np.__version__.split(".")[:2]))
    return rule != "index" or (triton.__version__.startswith("3.6") and numpy_version >= (2, 4))


def test_every_rule_has_a_check():
    assert list(CHECKS) == [patch.rule for patch in interpreter.PATCHES]


@pytest.mark.parametrize(
    "check",
    [check for checks in CHECKS.values() for check in checks],
    ids=lambda check: check.__name__,
)
def test_rule_holds(check):
    check()


@pytest.mark.parametrize(
    "rule, check",
    [(rule, check) for rule, checks in CHECKS.items() for check in checks if needed(rule)],
)
def test_rule_breaks_without_its_patch(rule, check):
    with (
        interpreter.without(rule),
        pytest.raises(
            (
                AssertionError,
                triton.runtime.errors.InterpreterError,
                pytest.fail.Exception,
                AttributeError,
            )
        ),
    ):
        check()
    check()  # and the patch is back


def test_cast_toward_zero_is_left_alone():
    x = torch.randn(N)
    same(
        cast(x, torch.bfloat16, cast_toward_zero_kernel),
        (x.view(torch.int32) & -65536).view(torch.float32).bfloat16(),
    )


def test_float64_is_rounded_once():
    # 1 + 2^-8 is halfway between two bfloat16; a little more must go up, and would be lost in a
    # first rounding to float32.
    x = np.array(
        [1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40), 1 + 2.0**-8, 1e300, np.nan, 0.0]
    )
    bits = interpreter.convert(x, tl.float64, tl.bfloat16)
    expected = torch.tensor(
        [1 + 2.0**-7, -(1 + 2.0**-7), 1.0, float("inf"), float("nan"), 0.0]
    ).bfloat16()
    same(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), expected)


def test_another_triton_is_refused_in_one_line(monkeypatch):
    moved = interpreter.Patch("new", "", "InterpreterBuilder", "binary_op", "self a b", None)
    monkeypatch.setattr(patches, "PATCHES", [moved])
    with pytest.raises(interpreter.InterpreterMoved) as raised:
        interpreter.make_faithful()
    assert "\n" not in str(raised.value)
    assert (
        "InterpreterBuilder.binary_op: expected parameters (self a b), found (self lhs rhs op)"
        in str(raised.value)
    )


def test_unknown_rule_is_named():
    with (
        pytest.raises(KeyError, match=r"'bf17' is unknown; known: .*casts"),
        interpreter.without("bf17"),
    ):
        pass


# -------------------------------------------------------------- programs that depend on their order


@triton.jit
def overlapping_rows_kernel(x_ptr, out_ptr, N: tl.constexpr):
    """Each program writes its row and the next one's first half."""
    row, i = tl.program_id(0), tl.arange(0, N)
    x = tl.load(x_ptr + row * N + i)
    tl.store(out_ptr + row * N + i, x)
    tl.store(out_ptr + (row + 1) * N + i, x, mask=(i < N // 2) & (row + 1 < tl.num_programs(0)))


@triton.jit
def sum_without_atomics_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.load(out_ptr)
    tl.store(out_ptr, total + tl.sum(tl.load(x_ptr + tl.program_id(0) * N + i), 0))


@triton.jit
def running_row_kernel(x_ptr, out_ptr, N: tl.constexpr):
    """Each program adds its row to the sum that the program before has left."""
    row, i = tl.program_id(0), tl.arange(0, N)
    before = tl.load(out_ptr + (row - 1) * N + i, mask=row > 0, other=0.0)
    tl.store(out_ptr + row * N + i, before + tl.load(x_ptr + row * N + i))


def launched(kernel, out):
    def run(x):
        result = out(x)
        kernel[x.shape[0],](x, result, x.shape[1])
        return result

    return run


@pytest.mark.parametrize(
    "kernel, out, naive",
    [
        (overlapping_rows_kernel, torch.empty_like, torch.clone),
        (sum_without_atomics_kernel, lambda x: x.new_zeros(1), lambda x: x.sum().view(1)),
        (running_row_kernel, torch.empty_like, lambda x: x.cumsum(0)),
    ],
)
def test_a_kernel_that_depends_on_the_order_of_its_programs_fails_its_proof(
    kernel, out, naive, seed
):
    x = torch.ones(40, 16)
    x[0], x[1] = 1e8, -1e8  # the ones that are added between the two are lost
    x[2:] += torch.rand(38, 1)
    with pytest.raises(NotEquivalent):
        prove(launched(kernel, out), naive, [x])
    in_order = out(x)
    with interpreter.without("order"):  # a loop over the grid hides it
        kernel[40,](x, in_order, 16)
    if kernel is not overlapping_rows_kernel:
        torch.testing.assert_close(in_order.double(), naive(x.double()), rtol=1e-4, atol=1e-5)
