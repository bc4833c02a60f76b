"""Bugs planted in the lessons' .cu files: the emulator names them, or the numbers are wrong.

Each bug is a replacement of text. The names of errors say which of the two is meant to catch it.
"""

from functools import partial

import pytest
import torch

from lessons.l08_online_softmax import cuda_softmax, naive
from lessons.l09_flash_attention import cuda_flash
from lessons.l09_flash_attention.naive import tiled_attention
from lessons.toolbox.cuda_cpu import compiling
from lessons.toolbox.cuda_cpu.emulator import CudaError
from lessons.toolbox.proof.numerics import NotEquivalent, draw, floor_for, prove

pytestmark = pytest.mark.skipif(
    bool(compiling.why_not_here()), reason=f"NOT RUN: {compiling.why_not_here()}"
)
