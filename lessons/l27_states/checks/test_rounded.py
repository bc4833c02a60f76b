"""States of 16 bits in slots: kernels and stand-ins read them, compute in float32 and round what
they store once.
"""

from unittest import mock

import pytest
import torch

from lessons.l27_states import optimized, prompts, stand_ins
from lessons.l27_states.lab.testing import prompt_inputs, step_inputs
from lessons.toolbox.measure.device import has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="NOT RUN: needs Triton")
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def both(home, name: str, given: list, at: int, dtype: torch.dtype):
    """A kernel and its stand-in over states of a dtype, and the stand-in over the same numbers in
    float32. at: which of `given` are the states.
    """
    rounded = given[at].to(dtype)
    copies = [rounded.clone(), rounded.clone(), rounded.float()]
    functions = getattr(home, name), getattr(stand_ins, name), getattr(stand_ins, name)
    outs = []
    for function, states in zip(functions, copies):
        outs.append(function(*given[:at], states, *given[at + 1 :]))
    return list(zip(outs, copies)), rounded


def holds(home, name: str, given: list, at: int, dtype: torch.dtype) -> None:
    """Outputs are those of float32, states those of float32 rounded once; slots of no sequence keep
    their bits. Raises AssertionError.
    """
    (kernel, stand_in, exact), before = both(home, name, given, at, dtype)
    touched = given[at + 1][given[at + 1] >= 0]
    others = [slot for slot in range(len(before)) if slot not in touched]
    for out, states in (kernel, stand_in):
        torch.testing.assert_close(out, exact[0], atol=2e-5, rtol=2e-5)
        assert states.dtype == dtype
        # another order of a sum may fall on the other side of a rounding
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(
            states[touched].float(), exact[1][touched], atol=1e-3 * unit, rtol=unit
        )
        bits = (x[others].view(torch.int16) for x in (states, before))
        assert torch.equal(*bits)


@needs_triton
@each_dtype
def test_a_step_of_narrow_states(dtype, seed):
    given = step_inputs(3, 2, 20, 40, seed=seed)
    holds(optimized, "gated_delta_step", given, 5, dtype)
    given.pop(4)
    holds(optimized, "decayed_step", given, 4, dtype)


@needs_triton
@each_dtype
def test_prompts_of_narrow_states(dtype, seed):
    """Of two chunks: the state between them is not rounded."""
    given = prompt_inputs([40, 1, 7], 2, 20, 24, seed=seed)
    holds(prompts, "gated_delta_prompts", given, 5, dtype)
    given.pop(4)
    holds(prompts, "decayed_prompts", given, 4, dtype)


@needs_triton
def test_a_state_that_is_computed_in_16_bits_is_found(seed):
    """Faded before it becomes float32."""
    given = step_inputs(3, 2, 20, 40, seed=seed)

    def narrow(states, slots, log_decay):
        faded = states[slots] * log_decay.exp()[..., None, None]
        return faded.to(states.dtype).float()

    with mock.patch.object(stand_ins, "faded", narrow), pytest.raises(AssertionError):
        holds(optimized, "gated_delta_step", given, 5, torch.bfloat16)
