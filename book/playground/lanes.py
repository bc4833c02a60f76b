"""What each lane of a warp asks of memory, recorded from compiled code that runs on the CPU."""

import itertools

import torch

from lessons.l00_gpu_and_triton import optimized
from lessons.toolbox.gpu.recorder import Step, record_warp

CHIP = 90
WARP, BLOCK = 32, 128  # each of a program's 128 threads has one element
DISTANCES = (1, 2, 3, 4, 8, 16, 32)  # of two elements that neighbours read, in elements
ITEM_BYTES = (1, 2, 4, 8)
COUNTS = (32, 22)  # elements: with 22 the mask is off from lane 22 on
DTYPES = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
KINDS = {"loaded": "load", "stored": "store"}


def recorded() -> list[dict[str, dict]]:
    """{"load": request, "store": request} of lesson 0's copy, for each distance, size and count. To
    be called where kernels are compiled.
    """
    return [one_warp(*way) for way in itertools.product(DISTANCES, ITEM_BYTES, COUNTS)]


def one_warp(distance: int, itemsize: int, count: int) -> dict[str, dict]:
    """What the first warp of the copy asks for. distance: in elements; itemsize: bytes of one."""
    x = torch.zeros(BLOCK * distance, dtype=DTYPES[itemsize])
    out = torch.empty(BLOCK, dtype=x.dtype)
    copy = optimized.every_nth_kernel[(1,)]
    recording = record_warp(lambda: copy(x, out, count, distance, BLOCK))
    steps = [step for step in recording.steps if step.request and step.request.kind in KINDS]
    return {KINDS[step.request.kind]: request_of(recording, step) for step in steps}


def request_of(recording, step: Step) -> dict:
    """{"lanes": those that ask, "bytes": the first byte that each asks for, counted from the start
    of the tensor, "sectors": how many of 32 bytes the warp asks for}.
    """
    asked = step.request
    _, first = recording.place_in(asked.address)
    return {
        "lanes": asked.lanes.tolist(),
        "bytes": first.tolist(),
        "sectors": asked.counted["sectors"],
    }
