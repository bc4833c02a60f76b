"""Kernels of a few lines whose film is known, and what tests call in the process that compiles. It
imports little, because that process imports it for each film.
"""

import importlib
import os

import torch

from lessons.toolbox.gpu import another_process
from lessons.toolbox.kernels.film import Film
from lessons.toolbox.kernels.triton_ import tl, triton


@triton.jit
def rows(x_ptr, out_ptr, columns, WRONG: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    # WRONG: the mask lets one column too many through
    x = tl.load(x_ptr + row * columns + column, mask=column < columns + WRONG, other=0.0)
    tl.store(out_ptr + row, tl.sum(x))


@triton.jit
def wide(x_ptr, out_ptr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + 1)


@triton.jit
def pipelined(x_ptr, out_ptr, steps):
    at = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for step in tl.range(steps, num_stages=3):
        total += tl.load(x_ptr + step * 128 + at)
    tl.store(out_ptr + at, total)


@triton.jit
def boxes(x, out):
    tile = x.load([tl.program_id(0) * 8, 16])
    out.store([tl.program_id(0) * 8, 0], tile)


@triton.jit
def through_memory(first_ptr, second_ptr, out_ptr):
    tl.store(first_ptr, 5)
    tl.debug_barrier()
    tl.store(out_ptr + tl.load(second_ptr), 1)


@triton.jit
def racing(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def ignoring(x_ptr, THIS: tl.constexpr):
    tl.store(x_ptr, 1.0)


@triton.jit
def accepted_by_the_interpreter(x_ptr):
    best = 0  # an integer before the loop and a float in it: no type for the compiler
    for _ in range(2):
        best = best + tl.load(x_ptr) * 0.5
    tl.store(x_ptr, best)


# ---- called where kernels are compiled


def film_here() -> tuple[str, list, str]:
    """Called in the other process: a film without another one, of a kernel that leaves its
    tensors.
    """
    x, out = torch.zeros(2, 5), torch.zeros(2)
    with Film() as kept:
        try:
            rows[(2,)](x, out, 5, 1, BLOCK=8)
        except Exception as error:
            fault = str(error)
    found = [
        (a.kind, a.program[0], len(set(a.addresses.tolist())), len(set(a.outside)))
        for a in kept.accesses
    ]
    return kept.source, found, fault


def change_the_course() -> int:
    """What a call leaves behind."""
    another_process.RUNS = ()
    os.environ["LEFT"] = "behind"
    return os.getpid()


def see_the_course() -> tuple[int, bool, str | None]:
    module = importlib.import_module("lessons.toolbox.gpu.another_process")
    return os.getppid(), bool(module.RUNS), os.environ.get("LEFT")
