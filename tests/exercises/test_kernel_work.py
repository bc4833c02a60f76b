"""Which answers `kernel_does_it` takes for a kernel's work, rule by rule."""

import numpy as np
import pytest
import torch

from lessons.toolbox.exercises.exercise import SOLUTIONS, all_exercises, has_kernel
from lessons.toolbox.exercises.loading import load_exercise
from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import has_triton, interpreting
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
    return torch.from_numpy(np.add(x.numpy(), y.numpy()))


def written_afterwards(x, y):
    out = right(x, y)
    out.numpy()[:3] += 1
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


def in_order_only(x, y):
    out = torch.empty_like(x)
    half_written_over[(triton.cdiv(len(x), 8),)](x, y, out, len(x), BLOCK=8)
    return out


@needs_interpreter
@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda x, y: x + y, "calls PyTorch's `add`"),
        (lambda x, y: torch.tensor([a.item() + b for a, b in zip(x, y.tolist())]), "PyTorch's"),
        (in_numpy, "no kernel stored 20 of its 20 elements"),
        (half_a_kernel, "no kernel stored 4 of its 20 elements"),
        (written_afterwards, "3 of its 20 elements were changed after the kernel's launch"),
        (copied_by_a_kernel, "no kernel loads anything of `x`"),
        (in_order_only, "your result depends on the order in which your kernel's programs run"),
        (lambda x, y: None, "NoneType, expected a tensor"),
    ],
    ids=["pytorch", "number_by_number", "numpy", "half", "changed", "copied", "order", "nothing"],
)
def test_what_is_no_kernels_work(answer, message):
    outcome = run_check(CHECK, lambda: answer, 0)
    assert outcome.status == FAIL and message in outcome.message, outcome.message


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
