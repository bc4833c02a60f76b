"""What a layer with a state does in a step, in float64, which neither lesson 27's kernels nor their
stand-ins take: for proofs, where two orders of a sum must give one token. Signatures as there.

One token of each of B sequences is one token of a layer with B times as many heads and channels,
so naive.py's functions compute a batch of them without a loop over its sequences.
"""

from collections.abc import Callable

from torch import Tensor

from lessons.l27_states.chunks import (
    decayed_linear_attention_chunked,
    gated_delta_rule_chunked,
)
from lessons.l27_states.naive import causal_conv, decayed_linear_attention, gated_delta_rule
from lessons.l27_states.stand_ins import each_prompt

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
    return one_token(gated_delta_rule, (q, k, v, log_decay, beta), states, slots)


def decayed_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, slots: Tensor
) -> Tensor:
    """q, k: [B, H, Dk], v: [B, H, Dv], log_decay: [B, H], states: [slots, H, Dk, Dv], slots: [B]
    -> [B, H, Dv].
    """
    return one_token(decayed_linear_attention, (q, k, v, log_decay), states, slots)


def one_token(rule: Callable, each: tuple[Tensor, ...], states: Tensor, slots: Tensor) -> Tensor:
    """A rule for one token of each of B sequences. each: q, k: [B, H, Dk], v: [B, H, Dv], then [B,
    H] -> [B, H, Dv].
    """
    side_by_side = (x.flatten(0, 1)[None] for x in each)
    out, held = rule(*side_by_side, states[slots].flatten(0, 1))
    states[slots] = held.view(len(slots), *states.shape[1:]).to(states.dtype)
    return out.view(each[2].shape)


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

    def rule(piece: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return causal_conv(piece, weight, state)

    return each_prompt(rule, (x,), x, states, slots, cu_seqlens, has_state)


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

    rules = gated_delta_rule, gated_delta_rule_chunked
    rest = states, slots, cu_seqlens, has_state
    return packed_prompts(rules, (q, k, v, log_decay, beta), *rest)


def decayed_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
    max_seqlen: int,
) -> Tensor:
    """q, k: [T, H, Dk], v: [T, H, Dv], log_decay: [T, H], states: [slots, H, Dk, Dv], slots: [B],
    cu_seqlens: [B + 1], has_state: [B] bool -> [T, H, Dv].
    """
    rules = decayed_linear_attention, decayed_linear_attention_chunked
    return packed_prompts(rules, (q, k, v, log_decay), states, slots, cu_seqlens, has_state)


def packed_prompts(
    rules: tuple[Callable, Callable],
    each: tuple[Tensor, ...],
    states: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    has_state: Tensor,
) -> Tensor:
    """A rule over packed prompts. rules: token by token for few tokens, and in chunks. each: q, k:
    [T, H, Dk], v: [T, H, Dv], then [T, H] -> [T, H, Dv].
    """
    by_token, in_chunks = rules

    def rule(*piece: Tensor | None) -> tuple[Tensor, Tensor]:
        return (by_token if len(piece[0]) <= FEW else in_chunks)(*piece)

    return each_prompt(rule, each, each[2], states, slots, cu_seqlens, has_state)
