"""Proves that the sum over keys, the recurrence and the chunks compute the same over any cut of a
prompt, and that the kernel of a step computes it too and touches no slot but its own.
"""

import random

import pytest
import torch

from lessons.l27_states import chunks, optimized
from lessons.l27_states.chunks import (
    decayed_linear_attention_chunked,
    gated_delta_rule_chunked,
    written,
    written_by_wy,
)
from lessons.l27_states.lab.testing import (
    KINDS,
    inputs,
    new_states,
    on_device,
    step_by,
    step_inputs,
)
from lessons.l27_states.naive import (
    causal_conv,
    decayed_linear_attention,
    delta_rule,
    gated_delta_rule,
    linear_attention,
    linear_attention_recurrent,
    retnet_log_decay,
)
from lessons.l27_states.optimized import state_step_kernel
from lessons.toolbox.kernels.bounds import in_bounds
from lessons.toolbox.proof.numerics import NotEquivalent, assert_same_bits, prove
from lessons.toolbox.proof.planted import with_bug

BF16 = torch.bfloat16


# ---------------------------------------------------------------- naive


def test_a_sum_over_keys_is_a_recurrence(seed):
    q, k, v, *_ = inputs(40, seed=seed)
    prove(lambda *x: linear_attention_recurrent(*x)[0], linear_attention, (q, k, v))


def test_each_rule_is_the_next_one_with_a_part_left_out(seed):
    q, k, v, g, beta = (x.double() for x in inputs(30, seed=seed))
    zeros, state = torch.zeros_like(g), new_states(1, 2, 16, 16, seed)[0].double()
    pairs = [
        (
            linear_attention_recurrent(q, k, v, state),
            decayed_linear_attention(q, k, v, zeros, state),
        ),
        (delta_rule(q, k, v, beta, state), gated_delta_rule(q, k, v, zeros, beta, state)),
        (linear_attention_recurrent(q, k, v, state), delta_rule(q, k, v, zeros, state)),
    ]
    for first, second in pairs[:2]:
        assert all(map(torch.equal, first, second))
    # nothing is written with beta 0: the state stays
    assert torch.equal(pairs[2][1][1], state) and not torch.equal(pairs[2][0][1], state)


def test_the_lessons_example_by_hand():
    """README.md, the table of the three tokens: adding mixes two values, the delta rule replaces
    one.
    """
    k = torch.tensor([[1.0, 0], [0, 1], [1, 0]])[:, None]
    v = torch.tensor([[2.0, 4], [6, 0], [0, 8]])[:, None]
    one, half = torch.ones(3, 1), torch.full((3, 1), 0.5)
    _, added = linear_attention_recurrent(k, k, v)
    assert added[0].tolist() == [[2, 12], [6, 0]]
    out, faded = decayed_linear_attention(k, k, v, half.log())
    assert faded[0].tolist() == [[0.5, 9], [3, 0]] and out[2, 0].tolist() == [0.5, 9]
    _, replaced = delta_rule(k, k, v, one)
    assert replaced[0].tolist() == [[0, 8], [6, 0]]
    out, both = gated_delta_rule(k, k, v, half.log(), one)
    assert both[0].tolist() == [[0, 8], [3, 0]] and out[2, 0].tolist() == [0, 8]


def test_reading_by_a_key_gives_the_value_that_was_written_last(seed):
    """The delta rule with beta 1, keys of length 1: whatever the state held."""
    _, k, v, *_ = (x.double() for x in inputs(20, seed=seed))
    k = torch.nn.functional.normalize(k, dim=-1)
    one = torch.ones(20, 2, dtype=torch.float64)
    out, _ = delta_rule(k, k, v, one, new_states(1, 2, 16, 16, seed)[0].double())
    torch.testing.assert_close(out, v, atol=1e-12, rtol=0)


def test_retnets_decays():
    """Equation 8 of its paper: 1 − 2^(−5 − h)."""
    kept = retnet_log_decay(3).exp()
    torch.testing.assert_close(kept, torch.tensor([31 / 32, 63 / 64, 127 / 128]))


def test_the_convolution_is_pytorchs(seed):
    x, weight = torch.randn(9, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    y, state = causal_conv(x, weight)
    want = torch.nn.functional.conv1d(x.T[None], weight[:, None], padding=3, groups=5)[0, :, :9]
    torch.testing.assert_close(y, want.T)
    assert torch.equal(state, x[-3:].T)


def rules():
    """{name: (function of the tensors of a prompt and a state, tensors that it takes)}."""
    found = {
        "sum": (linear_attention_recurrent, 3),
        "decay": (decayed_linear_attention, 4),
        "delta": (lambda q, k, v, g, b, s: delta_rule(q, k, v, b, s), 5),
        "both": (gated_delta_rule, 5),
    }
    for size in (1, 5, 16):
        found[f"decay, chunks of {size}"] = (
            lambda *x, size=size: decayed_linear_attention_chunked(*x, chunk=size),
            4,
        )
        found[f"both, chunks of {size}"] = (
            lambda *x, size=size: gated_delta_rule_chunked(*x, chunk=size),
            5,
        )
    return found


@pytest.mark.parametrize("name", rules())
def test_a_prompt_may_be_cut_anywhere(name, seed):
    """Also into pieces without a token. The state that was passed in stays as it is."""
    rule, count = rules()[name]
    tensors = [x.double() for x in inputs(37, seed=seed)][:count]
    state = new_states(1, 2, 16, 16, seed)[0].double()
    kept = state.clone()
    want, last = rule(*tensors, state)
    cuts = sorted(random.randint(0, 37) for _ in range(4))
    pieces, after = [], state
    for begin, end in zip([0, *cuts], [*cuts, 37]):
        piece, after = rule(*(x[begin:end] for x in tensors), after)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces), want, atol=1e-12, rtol=1e-11)
    torch.testing.assert_close(after, last, atol=1e-12, rtol=1e-11)
    assert torch.equal(state, kept)


def test_a_convolution_may_be_cut_anywhere(seed):
    """Pieces shorter than its state too: the state keeps what older pieces gave."""
    x, weight = torch.randn(11, 3), torch.randn(3, 4)
    want, last = causal_conv(x, weight)
    for cuts in ([1, 2, 3], [0, 0, 5], [2, 9, 11]):
        pieces, state = [], None
        for begin, end in zip([0, *cuts], [*cuts, 11]):
            piece, state = causal_conv(x[begin:end], weight, state)
            pieces.append(piece)
        assert torch.equal(torch.cat(pieces), want) and torch.equal(state, last)


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_chunks_equal_the_recurrence(kind, dtype, seed):
    for num_tokens, size in ((1, 64), (63, 64), (64, 64), (150, 64), (50, 7)):
        given = inputs(num_tokens, 2, 16, 24, torch.float32, kind, seed)
        q, k, v, g, beta = (x.to(dtype) for x in given)
        if dtype == BF16:
            g, beta = given[3:]
        state = new_states(1, 2, 16, 24, seed)[0]
        prove(
            lambda *x, size=size: gated_delta_rule_chunked(*x, chunk=size),
            gated_delta_rule,
            (q, k, v, g, beta, state.to(g.dtype)),
        )
        prove(
            lambda *x, size=size: decayed_linear_attention_chunked(*x, chunk=size),
            decayed_linear_attention,
            (q, k, v, g, state.to(g.dtype)),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_wy_form_is_forward_substitution(kind, seed):
    _, *tensors = (chunks.by_heads(x.double()) for x in inputs(64, kind=kind, seed=seed))
    state = new_states(1, 2, 16, 16, seed)[0].double()
    prove(written_by_wy, written, (*tensors, state))


def test_a_product_of_powers_is_no_inverse_here(seed):
    """(I + A)⁻¹ = (I − A)(I + A²)(I + A⁴) … in exact arithmetic. With 64 equal keys its terms grow
    to 10¹⁷ and cancel; forward substitution has none.
    """
    a = torch.ones(64, 64).tril(-1)
    identity = torch.eye(64)
    product, power = identity - a, a
    for _ in range(5):
        power = power @ power
        product = product @ (identity + power)
    exact = identity - torch.ones(64, 64).tril(-1).triu(-1)
    right = torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True)
    assert torch.equal(right, exact)
    assert (product - exact).abs().max() > 1e3


# ---------------------------------------------------------------- kernels: the step

# B, H, Dk, Dv
STEPS = [(1, 1, 16, 16), (3, 2, 128, 128), (4, 3, 20, 40), (2, 1, 1, 1), (2, 2, 64, 33)]


@pytest.mark.parametrize("shape", STEPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_step_of_states_in_slots(shape, dtype, seed, proof):
    """Other slots hold poison, and keep it; a row of padding gives zeros."""
    *tensors, states, slots = step_inputs(*shape, dtype, seed=seed)
    given = (*tensors, states, slots)
    proof.record(
        state_step_kernel,
        prove(optimized.gated_delta_step, step_by(gated_delta_rule), given, mutates=(5,)),
    )
    given = (*tensors[:4], states, slots)
    proof.record(
        state_step_kernel,
        prove(optimized.decayed_step, step_by(decayed_linear_attention), given, mutates=(4,)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_hard_inputs(kind, seed, proof):
    given = step_inputs(3, 2, 16, 16, kind=kind, seed=seed)
    proof.record(
        state_step_kernel,
        prove(optimized.gated_delta_step, step_by(gated_delta_rule), given, mutates=(5,)),
    )


def test_a_step_in_any_company_has_the_same_bits(seed):
    *tensors, states, _ = step_inputs(4, 2, 16, 40, seed=seed)
    slots = on_device([5, 0, 3, 1])
    states.normal_()
    alone, together = states.clone(), states.clone()
    out = optimized.gated_delta_step(*tensors, together, slots)
    for b in range(4):
        row = [x[b : b + 1] for x in tensors]
        one = optimized.gated_delta_step(*row, alone, slots[b : b + 1])
        assert_same_bits(one[0], out[b])
    assert_same_bits(alone, together)


def test_a_step_stays_within_its_tensors(seed):
    """Of sizes that are no powers of two."""
    given = step_inputs(3, 2, 20, 40, seed=seed)
    with in_bounds():
        prove(optimized.gated_delta_step, step_by(gated_delta_rule), given, mutates=(5,))


# ---------------------------------------------------------------- wrong versions must fail

BUGS = {
    "the state of the row, not of the slot": ("ptr + slot * stride_slot", "ptr + b * stride_slot"),
    "beta is forgotten": ("v = beta * (v - tl.sum", "v = (v - tl.sum"),
    "it does not fade": ("    state *= tl.exp(log_decay)\n", ""),
    "the output without this token": (
        "out = tl.sum(state * q[:, None], axis=0)",
        "out = tl.sum((state - k[:, None] * v[None, :]) * q[:, None], axis=0)",
    ),
    "columns of the first program": ("DIM + column[None, :]", "DIM + column[None, :] % 32"),
    "padding is written": (
        "tl.store(state_ptr, state.to(states_ptr.dtype.element_ty), mask=inside & is_used)",
        "tl.store(state_ptr + (slot < 0) * stride_slot, state, mask=inside)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_step_is_found(bug, seed, tmp_path):
    """Each stays inside the states, so what it computes is only wrong."""
    wrong = with_bug(optimized, tmp_path, *BUGS[bug])
    given = step_inputs(3, 2, 16, 40, seed=seed)
    with pytest.raises(NotEquivalent):
        prove(wrong.gated_delta_step, step_by(gated_delta_rule), given, mutates=(5,))
