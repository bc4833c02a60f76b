"""What a layer with a state does in a step, in float64, which neither lesson 27's kernels nor their
stand-ins take: for proofs, where two orders of a sum must give one token. Signatures as there.

One token of each of B sequences is one token of a layer with B times as many heads and channels,
so naive.py's functions compute a batch of them without a loop over its sequences.
"""

import torch
from torch import Tensor

from lessons.l27_states.chunks import gated_delta_rule_chunked
from lessons.l27_states.naive import causal_conv, gated_delta_rule

FEW = 16  # tokens of a prompt up to which the recurrence takes no longer than a chunk's products


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """x: [B, C], weight: [C, W], states: [slots, C, W - 1], slots: [B] -> [B, C]."""
    weights = weight.repeat(len(x), 1)  # [B · C, W]
    y, held = causal_conv(x.reshape(1, -1), weights, states[slots].flatten(0, 1))
    states[slots] = held.view(len(x), *states.shape[1:])
    return y.view(x.shape)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """q, k: [B, H, Dk], v: [B, H, Dv], log_decay, beta: [B, H], states: [slots, H, Dk, Dv], slots:
    [B] -> [B, H, Dv].
    """
    each = (x.flatten(0, 1)[None] for x in (q, k, v, log_decay, beta))
    out, held = gated_delta_rule(*each, states[slots].flatten(0, 1))
    states[slots] = held.view(len(v), *states.shape[1:]).to(states.dtype)
    return out.view(v.shape)


def conv_prompts(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    max_seqlen: int,
) -> Tensor:
    """x: [T, C], B sequences one after the other; weight: [C, W], states: [slots, C, W - 1], slots:
    [B], cu_seqlens: [B + 1], has_state: [B] bool -> [T, C].
    """
    y = torch.empty_like(x)
    for rows, slot, held in of_each(cu_seqlens, slots, has_state):
        before = states[slot] if held else None
        y[rows], states[slot] = causal_conv(x[rows], weight, before)
    return y


def gated_delta_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    max_seqlen: int,
) -> Tensor:
    """q, k: [T, H, Dk], v: [T, H, Dv], log_decay, beta: [T, H], states: [slots, H, Dk, Dv], slots:
    [B], cu_seqlens: [B + 1], has_state: [B] bool -> [T, H, Dv].
    """
    out = torch.empty_like(v)
    for rows, slot, held in of_each(cu_seqlens, slots, has_state):
        count = rows.stop - rows.start
        rule = gated_delta_rule if count <= FEW else gated_delta_rule_chunked
        each = (x[rows] for x in (q, k, v, log_decay, beta))
        out[rows], after = rule(*each, states[slot] if held else None)
        states[slot] = after.to(states.dtype)
    return out


def of_each(cu_seqlens: Tensor, slots: Tensor, has_state: Tensor) -> list[tuple[slice, int, bool]]:
    """Of each sequence its rows, its slot, and whether the slot holds what came before."""
    ends = cu_seqlens.tolist()
    rows = map(slice, ends, ends[1:])
    return list(zip(rows, slots.tolist(), has_state.tolist()))
