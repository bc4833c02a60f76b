"""Answers whose values are right, and whose kernel does not do it: what kernel_work.py is for.

    attacks(answers, "12.3", in_pytorch)     in_pytorch: the exercise without a kernel

Three for each exercise with a kernel: PyTorch alone; PyTorch beside an empty kernel; PyTorch, whose
result a kernel loads and stores once more, with all inputs.
"""

from collections.abc import Callable
from functools import wraps

from torch import Tensor

from lessons.l00_gpu_and_triton.cuda_source import run_cuda
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers

HINT = "PyTorch did the work here. The kernel has to: a result leaves it by tl.store."


def attacks(answers: Answers, exercise_id: str, in_pytorch: Callable) -> None:
    """Register them for an exercise."""
    for attack in (pytorch_alone, empty_kernel, kernel_that_stores_it_again):
        answers.wrong(exercise_id, HINT, attack.__name__)(attack(in_pytorch))


def cuda_attacks(answers: Answers, exercise_id: str, in_pytorch: Callable) -> None:
    """The same for an exercise in CUDA C++ on float32."""
    nothing = followed_by(in_pytorch, lambda x: run_cuda(CUDA_NOTHING, "nothing", 1, 32, x))
    again = followed_by(in_pytorch, lambda x: run_cuda(CUDA_AGAIN, "again", 1, x.numel(), x))
    for name, attack in (
        ("pytorch_alone", in_pytorch),
        ("empty_kernel", nothing),
        ("kernel_that_stores_it_again", again),
    ):
        answers.wrong(exercise_id, CUDA_HINT, name)(attack)


CUDA_HINT = "PyTorch did the work here. The kernel has to: a result leaves it through `out`."
CUDA_NOTHING = 'extern "C" __global__ void nothing(float* x) {}'
CUDA_AGAIN = r"""
extern "C" __global__ void again(volatile float* x) { x[threadIdx.x] = x[threadIdx.x]; }
"""


def pytorch_alone(in_pytorch: Callable) -> Callable:
    return in_pytorch


def empty_kernel(in_pytorch: Callable) -> Callable:
    return followed_by(in_pytorch, lambda x: nothing_kernel[(1,)](x))


def kernel_that_stores_it_again(in_pytorch: Callable) -> Callable:
    def again(x: Tensor) -> None:
        same = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        again_kernel[(triton.cdiv(len(same), 1024),)](same, len(same), BLOCK=1024)

    return followed_by(in_pytorch, again)


def followed_by(in_pytorch: Callable, launch: Callable[[Tensor], None]) -> Callable:
    """The answer of PyTorch, and then a launch on it and on each input."""

    @wraps(in_pytorch)
    def answer(*args, **options):
        got = in_pytorch(*args, **options)
        for x in (got, *args, *options.values()):
            if isinstance(x, Tensor) and x.numel():
                launch(x)
        return got

    return answer


@triton.jit
def nothing_kernel(x_ptr):
    pass


@triton.jit
def again_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)
