"""The same layers in chunks: matrix products inside a chunk, a state between chunks.

Token by token, a prompt of T tokens is T small steps that wait for each other. In chunks of C it is
T / C steps, and each is made of products of [C, Dk] and [C, Dv] matrices. Read
`decayed_linear_attention_chunked`, then `gated_delta_rule_chunked`, which differs in one line.

Inside a chunk, t and s count its tokens, S₀ is the state before it, and G_t = g_1 + … + g_t. All
three layers write the same kind of thing into their state, k_s u_sᵀ for some u_s, so

    S_t = exp(G_t) S₀ + Σ_{s ≤ t} exp(G_t − G_s) k_s u_sᵀ                                     (1)
    out_t = S_tᵀ q_t = exp(G_t) S₀ᵀ q_t + Σ_{s ≤ t} exp(G_t − G_s) (q_t · k_s) u_s            (2)

Without a delta rule u = v. With it, u_t depends on the u before it (`written`).

Sources: Dao and Gu 2024, Mamba-2, section 6 (chunks; `decay_between` is its segsum); Yang et al.
2024, Parallelizing Linear Transformers with the Delta Rule, section 3.2 (the WY form).
"""

import torch
from torch import Tensor

from lessons.l08_online_softmax.naive import wide
from lessons.l27_states.naive import new_state


def decayed_linear_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """As naive.decayed_linear_attention. q, k: [T, H, Dk], v: [T, H, Dv], log_decay: [T, H], state:
    [H, Dk, Dv] or None -> out: [T, H, Dv], state. chunk: tokens of a chunk, 1 or more.
    """
    state, out = new_state(k, v, state), torch.empty_like(v)
    for start in range(0, len(q), chunk):
        rows = slice(start, start + chunk)
        q_c, k_c, u, g = (by_heads(x[rows]) for x in (q, k, v, log_decay))
        out[rows] = outputs(q_c, k_c, u, g, state).transpose(0, 1).to(v.dtype)
        state = state_after(k_c, u, g, state)
    return out, state


def gated_delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """As naive.gated_delta_rule. q, k: [T, H, Dk], v: [T, H, Dv], log_decay, beta: [T, H], state:
    [H, Dk, Dv] or None -> out: [T, H, Dv], state. chunk: tokens of a chunk, 1 or more.
    """
    state, out = new_state(k, v, state), torch.empty_like(v)
    for start in range(0, len(q), chunk):
        rows = slice(start, start + chunk)
        q_c, k_c, v_c, g, beta_c = (by_heads(x[rows]) for x in (q, k, v, log_decay, beta))
        u = written(k_c, v_c, g, beta_c, state)
        out[rows] = outputs(q_c, k_c, u, g, state).transpose(0, 1).to(v.dtype)
        state = state_after(k_c, u, g, state)
    return out, state


def written(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """What the delta rule writes. k: [H, C, Dk], v: [H, C, Dv], g, beta: [H, C], state: [H, Dk, Dv]
    -> u: [H, C, Dv].

    By definition u_t = β_t (v_t − (exp(g_t) S_{t−1})ᵀ k_t): the value, minus what the decayed state
    says of its key. Put (1) in for that state:

        u_t + Σ_{s < t} A[t, s] u_s = β_t (v_t − exp(G_t) S₀ᵀ k_t)
        A[t, s] = β_t exp(G_t − G_s) (k_t · k_s)  for s < t, otherwise 0

    These are C equations (I + A) U = right side, and each has only u that are known when its turn
    comes. So they are solved from the first row to the last: forward substitution.
    """
    between = decay_between(g)
    a = (beta[..., None] * between * (k @ k.mT)).tril(-1)
    from_state = g.cumsum(-1).exp()[..., None] * (k @ state)
    right = beta[..., None] * (v - from_state)
    # unitriangular: ones on the diagonal, as if I were added
    return torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)


def written_by_wy(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """`written` as the kernels do it, because all but its last line needs no state. Then all chunks
    of a prompt can be prepared at once. Arguments and result as there.

        (I + A)⁻¹ = inverse                                  [C, C]
        U = inverse · diag(β) · (V − diag(exp G) K S₀)       (the equations above, solved)
          = inverse · diag(β) V  −  inverse · diag(β exp G) K · S₀
          = U₀ − W S₀                                        U₀: [C, Dv], W: [C, Dk]
    """
    a = (beta[..., None] * decay_between(g) * (k @ k.mT)).tril(-1)
    identity = torch.eye(k.shape[1], dtype=k.dtype, device=k.device).expand_as(a)
    inverse = torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True)
    u_0 = inverse @ (beta[..., None] * v)
    w = inverse @ ((beta * g.cumsum(-1).exp())[..., None] * k)
    return u_0 - w @ state


def outputs(q: Tensor, k: Tensor, u: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Equation (2). q, k: [H, C, Dk], u: [H, C, Dv], g: [H, C], state: [H, Dk, Dv] -> [H, C,
    Dv].
    """
    inside = ((q @ k.mT) * decay_between(g)).tril() @ u
    return g.cumsum(-1).exp()[..., None] * (q @ state) + inside


def state_after(k: Tensor, u: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Equation (1) for the last token of a chunk. k: [H, C, Dk], u: [H, C, Dv], g: [H, C], state:
    [H, Dk, Dv] -> [H, Dk, Dv].
    """
    until_end = decay_between(g)[:, -1, :, None]  # exp(G_C − G_s): [H, C, 1]
    return g.sum(-1).exp()[:, None, None] * state + (k * until_end).mT @ u


def decay_between(g: Tensor) -> Tensor:
    """exp(g_{s+1} + … + g_t) where s ≤ t, otherwise 0. g: [..., C] -> [..., C, C], row t, column s.

    Each sum is made of its own terms. The difference of two long sums, G_t − G_s, would lose the
    small ones: after a decay of exp(−3000), G has no digits left for the next 0.01.
    """
    size = g.shape[-1]
    row = torch.arange(size, device=g.device)[:, None]
    column = torch.arange(size, device=g.device)
    terms = torch.where(row > column, g[..., :, None], 0)  # g_t in row t of all columns s < t
    return torch.where(row >= column, terms.cumsum(-2), -torch.inf).exp()


def by_heads(x: Tensor) -> Tensor:
    """[C, H, ...] -> [H, C, ...], in float32 at least."""
    return wide(x).transpose(0, 1)
