"""Rules that the tests of all kernels of experts share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lessons.l23_experts.lab.moe_cases import problem, routes
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.measure.device import interpreting
from lessons.toolbox.proof.inputs import far_apart
from lessons.toolbox.proof.numerics import assert_same_bits

ARGUMENTS = ("x", "weights", "chosen", "gate_up", "down")


def assert_same_in_any_company(run: Callable, inputs: tuple) -> None:
    """A token's row has the same bits alone. run: (x, weights, chosen, *stacks) -> [T, H]; inputs:
    its arguments.
    """
    x, weights, chosen, *stacks = inputs
    together = run(*inputs)
    for token in range(len(x)):
        own = slice(token, token + 1)
        assert_same_bits(together[own], run(x[own], weights[own], chosen[own], *stacks))


def assert_far_rows(
    run: Callable[..., Tensor], argument: str, seed: int, plant: Callable[[], None]
) -> None:
    """The bits stay if the rows of one argument are further apart than an int32 counts; after
    plant(), which puts a kernel that counts in 32 bits in place, `run` leaves its tensors.
    """
    inputs = problem(routes([[2, 0], [1, 2], [2, 1]]), 3, 16, 16, torch.float16, seed)
    far = [far_apart(x) if name == argument else x for name, x in zip(ARGUMENTS, inputs)]
    with in_bounds():
        assert_same_bits(run(*far), run(*inputs))
        if not interpreting():
            return  # a kernel that leaves its tensors may end the process
        plant()
        with pytest.raises(Exception, match="out of bounds"):
            run(*far)
