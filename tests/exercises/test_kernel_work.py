"""Which answers `kernel_does_it` takes for a kernel's work, rule by rule."""

import numpy as np
import pytest
import torch

from lessons.toolbox.exercises.exercise import SOLUTIONS, all_exercises, has_kernel
from lessons.toolbox.exercises.loading import load_exercise
from lessons.toolbox.kernels.film import Film
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import has_triton, interpreting
from tests.exercises.kernel_film import assert_loads_once
from tests.exercises.kernel_work import kernel_does_it
from tests.exercises.running import FAIL, PASS, checks_of, run_check
from tests.exercises.wrong import answers_of
from tests.exercises.wrong.attacks import again_kernel

needs_interpreter = pytest.mark.skipif(
    not (has_triton() and interpreting()), reason="NOT RUN: the interpreter alone keeps accesses"
)
right = load_exercise(SOLUTIONS, all_exercises("0.2")[0])  # add(x, y)
[CHECK] = kernel_does_it(
    "0.2", lambda seed: dict(x=torch.ones(20), y=torch.ones(20))
).checks.values()


def in_numpy(x, y):
    """Here PyTorch computes nothing."""
    return torch.from_numpy(np.add(np.from_dlpack(x), np.from_dlpack(y)))


def by_numpys_functions(x, y):
    return torch.from_numpy(np.asarray(x) + np.asarray(y))


def written_afterwards(x, y):
    out = right(x, y)
    np.from_dlpack(out)[:3] += 1
    return out


def copied_by_a_kernel(x, y):
    out = in_numpy(x, y)
    again_kernel[(1,)](out, len(out), BLOCK=triton.next_power_of_2(len(out)))
    return out


def half_a_kernel(x, y):
    out = torch.full_like(x, 2.0)
    out[:16] = 0.0
    again_kernel[(1,)](out, 16, BLOCK=16)
    return out


@triton.jit
def half_written_over(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Its lanes go on to the end, and the next program stores the right numbers there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, 2 * BLOCK)
    own = tl.arange(0, 2 * BLOCK) < BLOCK
    y = tl.load(y_ptr + at, mask=(at < n) & own, other=0.0)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) + y, mask=at < n)


@triton.jit
def in_numpy_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, np.add(x, y), mask=at < n)


@triton.jit
def inside_out_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    x.handle.data += tl.load(y_ptr + at, mask=at < n, other=0.0).handle.data
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def imports_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    import operator

    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, operator.add(x, y), mask=at < n)


SHIFT = 0.0  # no tl.constexpr


@triton.jit
def shifted(x):
    return x + SHIFT


@triton.jit
def helped_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, shifted(x) + y, mask=at < n)


@triton.jit
def some_of_x_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Right where x is 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < 15, other=1.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x + y, mask=at < n)


@triton.jit
def twice_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n) + tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x / 2 + tl.load(y_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def twos_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Loads nothing."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.full((BLOCK,), 2.0, tl.float32), mask=at < n)


def by(kernel):
    def answer(x, y):
        out = torch.empty_like(x)
        kernel[(triton.cdiv(len(x), 8),)](x, y, out, len(x), BLOCK=8)
        return out

    return answer


def in_order_only(x, y):
    out = torch.empty_like(x)
    half_written_over[(triton.cdiv(len(x), 8),)](x, y, out, len(x), BLOCK=8)
    return out


@needs_interpreter
@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda x, y: x + y, "calls PyTorch's `add`"),
        (lambda x, y: torch.tensor([a.item() + 1 for a in x]), "PyTorch's"),
        (in_numpy, "no kernel stored 20 of its 20 elements"),
        (half_a_kernel, "no kernel stored 4 of its 20 elements"),
        (written_afterwards, "3 of its 20 elements were changed after the kernel's launch"),
        (copied_by_a_kernel, "no kernel loads anything of `x`"),
        (by(in_numpy_kernel), "your kernel `in_numpy_kernel` uses `np`, which no compiler knows"),
        (by(inside_out_kernel), "uses `.handle`, which no compiler knows"),
        (by(imports_kernel), "uses `import operator`, which no compiler knows"),
        (by(helped_kernel), "your kernel `shifted` uses `SHIFT`, which no compiler knows"),
        (lambda x, y: torch.tensor(x.tolist()) + y, "reads numbers by a tensor's `tolist`"),
        (lambda x, y: torch.from_numpy(x.numpy() + y.numpy()), "by a tensor's `numpy`"),
        (by_numpys_functions, "by a tensor's `__array__`"),
        (in_order_only, "your result depends on the order in which your kernel's programs run"),
        (lambda x, y: None, "NoneType, expected a tensor"),
    ],
    ids=[
        *("pytorch", "number_by_number", "numpy", "half", "changed", "copied"),
        *("numpy_inside", "handle", "import", "number_of_the_file"),
        *("tolist", "numpy_of_a_tensor", "numpy_function", "order", "nothing"),
    ],
)
def test_what_is_no_kernels_work(answer, message):
    outcome = run_check(CHECK, lambda: answer, 0)
    assert outcome.status == FAIL and message in outcome.message, outcome.message


LOADS = [
    (some_of_x_kernel, "leaves out 5 of 20 elements of"),
    (twice_kernel, "2 times"),
    (twos_kernel, "leaves out 20 of 20 elements of"),
]


@needs_interpreter
@pytest.mark.parametrize("kernel, message", LOADS[:2], ids=["some", "twice"])
def test_what_does_not_load_each_element_once(kernel, message):
    """That of `twos_kernel` has a rule of its own: no kernel loads anything of it."""
    once = kernel_does_it("0.2", lambda seed: dict(x=torch.ones(20), y=torch.ones(20)), once=("x",))
    outcome = run_check(once.checks[None], lambda: by(kernel), 0)
    assert outcome.status == FAIL and message in outcome.message, outcome.message


@needs_interpreter
@pytest.mark.parametrize("kernel, message", LOADS, ids=["some", "twice", "none"])
def test_a_film_of_what_does_not_load_each_element_once(kernel, message):
    x, y = torch.ones(20), torch.ones(20)
    with Film() as film:
        by(kernel)(x, y)
    with pytest.raises(AssertionError, match=message):
        assert_loads_once(film, x, "x")


@needs_interpreter
def test_a_film_of_what_loads_each_element_once():
    x, y = torch.ones(20), torch.ones(20)
    with Film() as film:
        right(x, y)
    assert_loads_once(film, x, "x")


@needs_interpreter
def test_a_kernels_work():
    outcome = run_check(CHECK, lambda: right, 0)
    assert outcome.status == PASS, outcome.message


def test_every_exercise_with_a_kernel_is_attacked():
    """With a kernel of Triton, or of CUDA C++; and its check alone rejects each attack."""
    for entry in all_exercises():
        lines = (SOLUTIONS / entry.file).read_text().splitlines()
        of_entry = [lines[number - 1] for number in entry.lines]
        if not (has_kernel(entry) or any("run_cuda(" in line for line in of_entry)):
            continue
        names = [answer.name for answer in answers_of(entry.lesson).wrong_for(entry.id)]
        assert {"pytorch_alone", "empty_kernel", "kernel_that_stores_it_again"} <= {*names}, (
            entry.id
        )
        assert "the_kernel_does_it" in [check.name for check in checks_of(entry)], entry.id
