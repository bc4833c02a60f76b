"""Proves that the stand-ins for a CPU compute what the recurrence does, in the same slots; and that
a CPU gets them.
"""

import pytest
import torch

from lessons.l27_states import stand_ins
from lessons.l27_states.checks.test_prompts import PROMPTS
from lessons.l27_states.lab.testing import (
    KINDS,
    conv_by_heads,
    conv_inputs,
    packed_by,
    prompt_inputs,
    step_by,
    step_inputs,
)
from lessons.l27_states.naive import decayed_linear_attention, gated_delta_rule
from lessons.toolbox.proof.numerics import prove

DTYPES = (torch.float32, torch.bfloat16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, dtype, seed):
    given = step_inputs(3, 2, 20, 40, dtype, kind, seed)
    prove(stand_ins.gated_delta_step, step_by(gated_delta_rule), given, mutates=(5,))
    given.pop(4)
    prove(stand_ins.decayed_step, step_by(decayed_linear_attention), given, mutates=(4,))


@each_dtype
@pytest.mark.parametrize("shape", PROMPTS, ids=str)
def test_prompts(shape, dtype, seed):
    given = prompt_inputs(*shape[:-1], dtype, seed=seed)
    prove(stand_ins.gated_delta_prompts, packed_by(gated_delta_rule), given, mutates=(5,))
    given.pop(4)
    prove(stand_ins.decayed_prompts, packed_by(decayed_linear_attention), given, mutates=(4,))


@each_dtype
def test_convolutions(dtype, seed):
    given = conv_inputs([5, 1, 0, 40], 6, 4, dtype, seed)
    prove(stand_ins.conv_prompts, conv_by_heads, given, mutates=(2,))
    x, weight, states, slots, *_ = conv_inputs([1, 1, 1], 6, 4, dtype, seed)
    slots[1] = -1
    given = (x, weight, states.nan_to_num(3.0), slots)
    prove(stand_ins.conv_step, conv_by_heads, given, mutates=(2,))


def test_a_cpu_gets_the_stand_ins():
    layer = stand_ins.wrappers(torch.device("cpu"))
    assert layer.gated_delta_step is stand_ins.gated_delta_step
    on_gpu = stand_ins.wrappers(torch.device("cuda"))
    assert sorted(vars(on_gpu)) == sorted(vars(layer)) == sorted(stand_ins.NAMES)
    assert on_gpu.conv_step is not layer.conv_step
