"""Proves that the chunks' kernels compute what the recurrence does, for packed prompts whose states
are in slots.
"""

import pytest
import torch

from lessons.l27_states import optimized, prompts
from lessons.l27_states.chunk_kernels import outputs_kernel, prepare_kernel, states_kernel
from lessons.l27_states.lab.testing import (
    DEVICE,
    KINDS,
    on_device,
    packed_by,
    prompt_inputs,
    starts,
)
from lessons.l27_states.naive import decayed_linear_attention, gated_delta_rule
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.numerics import assert_same_bits, poisoned, prove

BF16 = torch.bfloat16
# lengths of the packed prompts, H, Dk, Dv, chunk
PROMPTS = [
    ([1], 1, 16, 16, 16),
    ([16, 0, 17, 1, 40], 2, 16, 24, 16),
    ([65, 20], 1, 20, 40, 32),
    ([70], 1, 16, 33, 64),
    ([0], 1, 16, 16, 16),
    ([15, 15, 15], 1, 1, 2, 16),
    ([19], 1, 72, 80, 16),  # more rows and columns than a tile of outputs_kernel has, with tails
]


def proved(shape, dtype=torch.float32, kind="normal", seed=0, room=prompts):
    """The errors of both wrappers of packed prompts, with and without the delta rule."""
    *sizes, chunk = shape
    given = prompt_inputs(*sizes, dtype, kind, seed)
    delta = prove(
        lambda *x: room.gated_delta_prompts(*x, chunk=chunk),
        packed_by(gated_delta_rule),
        given,
        mutates=(5,),
    )
    given.pop(4)
    decayed = prove(
        lambda *x: room.decayed_prompts(*x, chunk=chunk),
        packed_by(decayed_linear_attention),
        given,
        mutates=(4,),
    )
    return delta, decayed


def recorded(proof, errors):
    """Both proofs, for the kernels that took part in them."""
    delta, decayed = errors
    proof.record(prepare_kernel, delta)
    for each in (delta, decayed):
        proof.record(states_kernel, each)
        proof.record(outputs_kernel, each)


@pytest.mark.parametrize("shape", PROMPTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_packed_prompts(shape, dtype, seed, proof):
    recorded(proof, proved(shape, dtype, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_prompts_of_hard_inputs(kind, seed, proof):
    recorded(proof, proved(([33, 20], 1, 16, 16, 32), kind=kind, seed=seed))


def test_prompts_stay_within_their_tensors(seed):
    *tensors, beta, states, slots, starts_, has_state = prompt_inputs([17, 0, 3], 2, 20, 24)
    rest = states, slots, starts_, has_state
    with in_bounds():
        prompts.gated_delta_prompts(*tensors, beta, *rest, chunk=16)
        prompts.decayed_prompts(*tensors, *rest, chunk=16)


def test_a_prompt_in_any_company_has_the_same_bits(seed):
    *tensors, states, slots, cu_seqlens, has_state = prompt_inputs(
        [20, 1, 33], 2, 16, 16, seed=seed
    )
    alone, together = states.clone(), states.clone()
    rest = (slots, cu_seqlens, has_state)
    out = prompts.gated_delta_prompts(*tensors, together, *rest, chunk=16)
    for b in range(3):
        rows, one = slice(cu_seqlens[b], cu_seqlens[b + 1]), slice(b, b + 1)
        part = (slots[one], starts([rows.stop - rows.start]), has_state[one])
        mine = prompts.gated_delta_prompts(*(x[rows] for x in tensors), alone, *part, chunk=16)
        assert_same_bits(mine, out[rows])
    assert_same_bits(alone, together)


def test_prompts_then_steps_are_one_prompt(seed):
    """A prompt in two pieces by the chunks' kernels, then tokens by the step's kernel."""
    *tensors, _, _, _, _ = prompt_inputs([40], 2, 16, 16, seed=seed)
    want, last = gated_delta_rule(*(x.double() for x in tensors))
    states, slots = poisoned((3, 2, 16, 16), device=DEVICE), on_device([1])
    found = []
    for begin, end in ((0, 20), (20, 37)):
        piece = [x[begin:end] for x in tensors]
        known = on_device([begin > 0], torch.bool)
        rest = (states, slots, starts([end - begin]), known)
        found.append(prompts.gated_delta_prompts(*piece, *rest, chunk=16))
    for t in range(37, 40):
        token = [x[t : t + 1] for x in tensors]
        found.append(optimized.gated_delta_step(*token, states, slots))
    torch.testing.assert_close(torch.cat(found).double(), want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(states[1].double(), last, atol=2e-6, rtol=2e-6)
    assert states[[0, 2]].isnan().all()
