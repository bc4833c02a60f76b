"""The kernels' wrappers once more, in PyTorch's operations: for a CPU, where kernels would be
interpreted, and for machines without Triton.

    layer = wrappers(device)                     # this module, or the kernels on a GPU
    out = layer.gated_delta_step(q, k, v, log_decay, beta, states, slots)

A step is one batch of small products, and states go from slots and back by indexing. A prompt goes
through chunks.py, one sequence after the other. Arguments, results and errors as in optimized.py,
prompts.py and convolution.py.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from lessons.l08_online_softmax.naive import wide
from lessons.l27_states import naive
from lessons.l27_states.arguments import (
    check_channels,
    check_prompts,
    check_sequences,
    check_slots,
    check_step,
)
from lessons.l27_states.chunks import (
    decayed_linear_attention_chunked,
    gated_delta_rule_chunked,
)


def wrappers(device: torch.device) -> SimpleNamespace:
    """The six functions of this module, by kernels where these are compiled."""
    if device.type != "cuda":
        return SimpleNamespace(**{name: globals()[name] for name in NAMES})
    # here, because a CPU needs no Triton
    from lessons.l27_states import convolution, optimized, prompts

    homes = optimized, prompts, convolution
    found = {name: getattr(home, name) for home in homes for name in NAMES if hasattr(home, name)}
    return SimpleNamespace(**found)


NAMES = (
    "gated_delta_step",
    "decayed_step",
    "gated_delta_prompts",
    "decayed_prompts",
    "conv_step",
    "conv_prompts",
)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """As optimized.gated_delta_step. q, k: [B, H, Dk], v: [B, H, Dv], log_decay, beta: [B, H],
    states: [slots, H, Dk, Dv], slots: [B] -> [B, H, Dv]. Raises ValueError.
    """
    check_step(q, k, v, log_decay, beta, states, slots)
    used = slots >= 0
    state = faded(states, slots[used], log_decay[used])
    missing = wide(v[used]) - torch.einsum("bhkv,bhk->bhv", state, wide(k[used]))
    written = wide(beta[used])[..., None] * missing
    return stored(state, q, k, written, states, slots, v)


def decayed_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """As optimized.decayed_step. q, k: [B, H, Dk], v: [B, H, Dv], log_decay: [B, H], states:
    [slots, H, Dk, Dv], slots: [B] -> [B, H, Dv]. Raises ValueError.
    """
    check_step(q, k, v, log_decay, None, states, slots)
    used = slots >= 0
    state = faded(states, slots[used], log_decay[used])
    return stored(state, q, k, wide(v[used]), states, slots, v)


def gated_delta_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """As prompts.gated_delta_prompts. q, k: [T, H, Dk], v: [T, H, Dv], states: [slots, H, Dk, Dv]
    -> [T, H, Dv]. Raises ValueError.
    """
    check_prompts(q, k, v, log_decay, beta, states, slots, cu_seqlens, has_state, max_seqlen)
    tensors = (q, k, v, log_decay, beta)
    return each_prompt(gated_delta_rule_chunked, tensors, v, states, slots, cu_seqlens, has_state)


def decayed_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """As prompts.decayed_prompts. q, k: [T, H, Dk], v: [T, H, Dv], states: [slots, H, Dk, Dv] ->
    [T, H, Dv]. Raises ValueError.
    """
    check_prompts(q, k, v, log_decay, None, states, slots, cu_seqlens, has_state, max_seqlen)
    rule = decayed_linear_attention_chunked
    return each_prompt(rule, (q, k, v, log_decay), v, states, slots, cu_seqlens, has_state)


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """As convolution.conv_step. x: [B, C], weight: [C, W], states: [slots, C, W − 1], slots: [B] ->
    [B, C]. Raises ValueError.
    """
    check_channels(x, weight, states)
    check_slots(slots, len(states), len(x), least=-1, x=x)
    used = slots >= 0
    inputs = torch.cat([states[slots[used]], x[used, :, None]], dim=2)
    y = torch.zeros_like(x)
    y[used] = (wide(inputs) * wide(weight)).sum(-1).to(x.dtype)
    states[slots[used]] = inputs[:, :, 1:]
    return y


def conv_prompts(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """As convolution.conv_prompts. x: [T, C], weight: [C, W], states: [slots, C, W − 1] -> [T, C].
    Raises ValueError.
    """
    check_channels(x, weight, states)
    check_sequences(cu_seqlens, max_seqlen, has_state, x)
    check_slots(slots, len(states), len(cu_seqlens) - 1, least=0, x=x)

    def rule(piece: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return naive.causal_conv(piece, weight, state)

    return each_prompt(rule, (x,), x, states, slots, cu_seqlens, has_state)


# ---------------------------------------------------------------- the pieces


def faded(states: Tensor, slots: Tensor, log_decay: Tensor) -> Tensor:
    """The states of these slots, before the new token. slots: [B], log_decay: [B, H] -> [B, H, Dk,
    Dv].
    """
    return wide(states[slots]) * wide(log_decay).exp()[..., None, None]


def stored(
    state: Tensor, q: Tensor, k: Tensor, u: Tensor, states: Tensor, slots: Tensor, v: Tensor
) -> Tensor:
    """Write k uᵀ, store the states and read by q. state: [used, H, Dk, Dv], u: [used, H, Dv]; q, k,
    v: of all rows -> [B, H, Dv], zeros for padding.
    """
    used = slots >= 0
    state = state + wide(k[used])[..., None] * u[..., None, :]
    states[slots[used]] = state.to(states.dtype)
    out = torch.zeros_like(v)
    out[used] = torch.einsum("bhkv,bhk->bhv", state, wide(q[used])).to(v.dtype)
    return out


def each_prompt(rule, tensors, like, states, slots, cu_seqlens, has_state) -> Tensor:
    """A rule for one sequence, prompt after prompt. tensors: [T, ...] each -> shaped as `like`."""
    out = torch.empty_like(like)
    starts = cu_seqlens.tolist()
    known = [True] * len(slots) if has_state is None else has_state.tolist()
    for slot, begin, end, is_known in zip(slots.tolist(), starts, starts[1:], known):
        pieces = (x[begin:end] for x in tensors)
        out[begin:end], states[slot] = rule(*pieces, states[slot] if is_known else None)
    return out
