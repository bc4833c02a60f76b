"""Attention without a cache that grows: a sum over keys becomes one matrix a head, the state.

    out, state = gated_delta_rule(q, k, v, log_decay, beta)           # a prompt
    out, state = gated_delta_rule(q, k, v, log_decay, beta, state)    # its next token

Read `linear_attention` (a sum over keys), then `linear_attention_recurrent` (the same, token by
token), then what the other three change about it: old tokens fade (`decayed_linear_attention`), a
value is overwritten instead of added to (`delta_rule`), or both (`gated_delta_rule`). `causal_conv`
is what such layers run before it. chunks.py computes the same in matrix products.

A prompt may be cut anywhere: pass on the state. A state that is passed in stays as it is; None is
zeros. States are float32, because each token adds to them; float64 inputs give a float64 state.
q and k come as the caller normalized and scaled them. Decays are logarithms, finite and at most 0.

Sources: Katharopoulos et al. 2020, Transformers are RNNs, section 3.4 (the state); Sun et al. 2023,
Retentive Network, section 2.1 (a decay for each head); Dao and Gu 2024, Mamba-2, section 3 (a decay
for each token); Schlag et al. 2021, Linear Transformers Are Secretly Fast Weight Programmers,
section 4.2 (the delta rule); Yang et al. 2024, Gated Delta Networks, equation 10 (both).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l08_online_softmax.naive import wide


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Causal attention whose scores are not exponentiated: out_t = Σ_{s ≤ t} (q_t · k_s) v_s.

    q, k: [T, H, Dk], v: [T, H, Dv] -> [T, H, Dv]. T² scores, as in lesson 2; no softmax, so no row
    of weights adds up to 1.
    """
    scores = torch.einsum("thd,shd->hts", wide(q), wide(k))
    scores = scores.tril()  # a token sees itself and what is before it
    out = torch.einsum("hts,shv->thv", scores, wide(v))
    return out.to(v.dtype)


def linear_attention_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, token by token: q_t is the same in all terms of the sum, so Σ k_s v_sᵀ is kept
    instead of the keys.

    q, k: [T, H, Dk], v: [T, H, Dv], state: [H, Dk, Dv] or None -> out: [T, H, Dv], state.
    """
    state = new_state(k, v, state)
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state + outer(k[t], v[t])
        out[t] = read(state, q[t])
    return out, state


def decayed_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What is older counts less: S ← exp(g) · S + k vᵀ, out = Sᵀ q.

    q, k: [T, H, Dk], v: [T, H, Dv], log_decay: [T, H], the g of each token; state: [H, Dk, Dv] or
    None -> out: [T, H, Dv], state. Mamba-2 is this with q = C, k = B, v = dt · x, g = dt · A;
    RetNet with the g of `retnet_log_decay`, the same for every token.
    """
    state = new_state(k, v, state)
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * decay_of(log_decay[t])
        state = state + outer(k[t], v[t])
        out[t] = read(state, q[t])
    return out, state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the state says of this key is replaced: S ← S + k (β (v − Sᵀ k))ᵀ, out = Sᵀ q.

    q, k: [T, H, Dk], v: [T, H, Dv], beta: [T, H], from 0 (nothing is written) to 1 (for a k of
    length 1, reading by k gives v afterwards); state: [H, Dk, Dv] or None -> out: [T, H, Dv],
    state.
    """
    state = new_state(k, v, state)
    out = torch.empty_like(v)
    for t in range(len(q)):
        missing = wide(v[t]) - read(state, k[t])
        state = state + outer(k[t], beta[t, :, None] * missing)
        out[t] = read(state, q[t])
    return out, state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both: S ← exp(g) · S, then S ← S + k (β (v − Sᵀ k))ᵀ, out = Sᵀ q.

    q, k: [T, H, Dk], v: [T, H, Dv], log_decay, beta: [T, H], state: [H, Dk, Dv] or None -> out:
    [T, H, Dv], in the dtype of v, and the state after the last token.
    """
    state = new_state(k, v, state)
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * decay_of(log_decay[t])
        missing = wide(v[t]) - read(state, k[t])
        state = state + outer(k[t], beta[t, :, None] * missing)
        out[t] = read(state, q[t])
    return out, state


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each channel mixes its last W inputs: y_t = Σ_i weight[i] · x_{t − W + 1 + i}.

    x: [T, C], weight: [C, W], its last column for the token itself; state: [C, W − 1], the inputs
    before the first token, oldest first, or None for zeros -> y: [T, C] and the last W − 1 inputs,
    both in the dtype of x. No bias, and no SiLU, which the caller applies.
    """
    num_tokens, width = len(x), weight.shape[1]
    if state is None:
        inputs = pad(x.T, (width - 1, 0))
    else:
        inputs = torch.cat([state.to(x.dtype), x.T], dim=1)  # [C, W − 1 + T]
    y = wide(x).new_zeros(x.shape)
    for i in range(width):
        shifted = inputs[:, i : i + num_tokens]  # [C, T]
        y += wide(weight[:, i]) * wide(shifted).T
    last = inputs[:, num_tokens:]
    return y.to(x.dtype), last.clone()


# ---------------------------------------------------------------- the pieces


def new_state(
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
) -> Tensor:
    """The state to begin with: a copy of `state`, or zeros. k: [T, H, Dk], v: [T, H, Dv] -> [H, Dk,
    Dv], float32 or float64.
    """
    if state is not None:
        return wide(state).clone()
    heads, key_dim = k.shape[1:]
    value_dim = v.shape[2]
    zeros = v.new_zeros(
        heads,
        key_dim,
        value_dim,
    )
    return wide(zeros)


def outer(
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """k vᵀ for each head: k: [H, Dk], v: [H, Dv] -> [H, Dk, Dv], in float32 at least."""
    rows = wide(k)[:, :, None]
    columns = wide(v)[:, None, :]
    return rows * columns


def read(
    state: Tensor,
    q: Tensor,
) -> Tensor:
    """Sᵀ q for each head: state: [H, Dk, Dv], q: [H, Dk] -> [H, Dv]."""
    return torch.einsum("hkv,hk->hv", state, wide(q))


def decay_of(
    log_decay: Tensor,
) -> Tensor:
    """What is left of a state: log_decay: [H] -> [H, 1, 1], between 0 and 1."""
    kept = wide(log_decay).exp()
    return kept[:, None, None]


def retnet_log_decay(
    num_heads: int,
) -> Tensor:
    """RetNet's constants: head h forgets the share 2^(−5 − h) with each token. -> [H] float32."""
    head = torch.arange(num_heads)
    forgotten = 2.0 ** (-5.0 - head)
    return torch.log1p(-forgotten)
