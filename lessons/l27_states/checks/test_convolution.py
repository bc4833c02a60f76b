"""Proves that the convolution's kernels compute what naive.causal_conv does, and keep its state in
slots.
"""

import pytest
import torch

from lessons.l27_states import convolution
from lessons.l27_states.convolution import conv_prompts_kernel, conv_step_kernel
from lessons.l27_states.lab.testing import conv_by_heads, conv_inputs
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.numerics import prove

BF16 = torch.bfloat16
# lengths, C, W
CONVOLUTIONS = [([5], 3, 4), ([1, 0, 2, 70], 65, 4), ([33, 3], 20, 2), ([4, 1], 7, 1), ([9], 2, 40)]


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_convolution_of_packed_prompts(shape, dtype, seed, proof):
    given = conv_inputs(*shape, dtype, seed)
    errors = prove(convolution.conv_prompts, conv_by_heads, given, mutates=(2,))
    proof.record(conv_prompts_kernel, errors)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 9])
def test_the_convolution_of_a_step(width, seed, proof):
    x, weight, states, slots, *_ = conv_inputs([1, 1, 1, 1], 70, width, seed=seed)
    slots[1] = -1
    given = (x, weight, states.nan_to_num_(3.0), slots)
    errors = prove(convolution.conv_step, conv_by_heads, given, mutates=(2,))
    proof.record(conv_step_kernel, errors)


def test_the_convolution_stays_within_its_tensors(seed):
    """An empty prompt, one shorter than the state, and one that ends within a program's tokens."""
    x, weight, states, slots, *rest = conv_inputs([0, 2, 34], 70, 4, seed=seed)
    with in_bounds():
        convolution.conv_prompts(x, weight, states, slots, *rest)
        slots[1] = -1
        convolution.conv_step(x[-3:], weight, states, slots)
