"""What a layer with a state does in a step, in float64, which neither lesson 27's kernels nor their
stand-ins take: for proofs, where two orders of a sum must give one token. Signatures as there.

One token of each of B sequences is one token of a layer with B times as many heads and channels,
so naive.py's functions compute a batch of them without a loop over its sequences.
"""

from torch import Tensor

from lessons.l27_states.chunks import gated_delta_rule_chunked
from lessons.l27_states.naive import causal_conv, gated_delta_rule
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

    def rule(*each: Tensor | None) -> tuple[Tensor, Tensor]:
        is_short = len(each[0]) <= FEW
        return (gated_delta_rule if is_short else gated_delta_rule_chunked)(*each)

    tensors = (q, k, v, log_decay, beta)
    return each_prompt(rule, tensors, v, states, slots, cu_seqlens, has_state)
