"""Exercises of lesson 27: a state that forgets by channel, a chunk without a loop, a convolution
that may be cut anywhere, Mamba-2's step over slots, and when a snapshot of a state is worth its
bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise("27.1", "A state that forgets by channel", minutes=25, difficulty=2)
def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Kimi Linear's layer, one head, token by token. q, k, log_decay: [T, Dk], v: [T, Dv], beta:
    [T], state: [Dk, Dv] -> out: [T, Dv], the state after the last token: [Dk, Dv].

    Each token does, in this order:
        1. Row i of the state fades to exp(log_decay[t, i]) of what it was. So each channel of the
           keys forgets at a pace of its own.
        2. The state is asked for the key: read = stateᵀ k. What is missing is v − read. To the
           state is added k times beta times what is missing: entry [i, j] gets
           k[i] · beta · missing[j].
        3. out = stateᵀ q.
    T may be 0. `state` and the other arguments keep their values. Errors: none to raise.

    Example: Dk = Dv = 2, two tokens, log_decay of both [log 0.5, 0], beta 1, state
    [[4, 0], [0, 2]], q = k
        k = [1, 0], v = [3, 3]: the state fades to [[2, 0], [0, 2]]; read [2, 0], missing [1, 3]
            -> state [[3, 3], [0, 2]], out [3, 3]
        k = [0, 1], v = [1, 1]: it fades to [[1.5, 1.5], [0, 2]]; read [0, 2], missing [1, -1]
            -> state [[1.5, 1.5], [1, 1]], out [1, 1]
    """
    # SOLUTION
    out = torch.empty_like(v)
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None]
        missing = v[t] - state.T @ k[t]
        state = state + k[t][:, None] * (beta[t] * missing)
        out[t] = state.T @ q[t]
    return out, state.clone()
    # END


@exercise("27.2", "A chunk without a loop", minutes=40, difficulty=3)
def chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of one head by matrix products: the gated delta rule, C tokens at once. q, k: [C,
    Dk], v: [C, Dv], log_decay, beta: [C], state: [Dk, Dv] -> out: [C, Dv], the state after it.

    By steps 4 and 5 of the derivation; G_t is the sum of log_decay up to and with token t:
        (I + A) U = right side       A[t, s] = beta_t exp(G_t − G_s) (k_t · k_s) for s < t, else 0
                                     row t of the right side: beta_t (v_t − exp(G_t) stateᵀ k_t)
        out_t = exp(G_t) stateᵀ q_t + Σ_{s ≤ t} exp(G_t − G_s) (q_t · k_s) u_s
        state after = exp(G_C) state + Σ_s exp(G_C − G_s) k_s u_sᵀ
    torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True) solves the first line:
    it takes the diagonal as ones. Where s > t, G_t − G_s is positive and its exp may be infinite,
    so mask before the exp. Aim: no loop over tokens, so the number of operations is the same for
    each C. Errors: none to raise.

    Example: Dk = Dv = 1, two tokens, k = q = 1, v = 4 and 6, log_decay 0 and log 0.5, beta 0.5,
    state 2
        A = [[0, 0], [0.25, 0]], right side [0.5 (4 − 2), 0.5 (6 − 0.5 · 2)] = [1, 2.5]
        U = [1, 2.25]; out = [2 + 1, 0.5 · 2 + 0.5 · 1 + 2.25] = [3, 3.75]; state after 3.75
    """
    # SOLUTION
    total = log_decay.cumsum(0)
    lower = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    gaps = total[:, None] - total
    between = gaps.masked_fill(~lower, -torch.inf).exp()
    since_start = total.exp()[:, None]
    a = (beta[:, None] * between * (k @ k.T)).tril(-1)
    right = beta[:, None] * (v - since_start * (k @ state))
    u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    out = since_start * (q @ state) + (between * (q @ k.T)) @ u
    until_end = between[-1][:, None]
    return out, total[-1].exp() * state + (until_end * k).T @ u
    # END


@exercise("27.3", "A convolution that may be cut anywhere", minutes=20, difficulty=2)
def conv_piece(x: Tensor, weight: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """A piece of a prompt through the short convolution. x: [T, C], T at least 1; weight: [C, W], W
    at least 2; state: [C, W − 1], the last W − 1 inputs before this piece, oldest first, or None if
    nothing was before, which counts as zeros -> y: [T, C] and the state after the piece: [C, W −
    1].

    y[t, c] = Σ_i weight[c, i] · (input of channel c, W − 1 − i tokens before t). So the last column
    of weight is the token's own. A piece may be shorter than W − 1: then the new state begins with
    what is left of the old one. The new state must not share memory with x or `state`, because the
    caller writes into them. All tensors have one dtype, y and the new state too. No bias, no
    activation. Aim: no loop over tokens or channels; a loop over W is right. Errors: none to raise.

    Example: one channel, weight [1, 10, 100], state [5, 6], x = [7]
        y = 1 · 5 + 10 · 6 + 100 · 7 = 765, state after [6, 7]
    """
    # SOLUTION
    width = weight.shape[1]
    if state is None:
        inputs = pad(x.T, (width - 1, 0))
    else:
        inputs = torch.cat([state, x.T], dim=1)
    y = torch.zeros_like(x)
    for i in range(width):
        y += weight[:, i] * inputs[:, i : i + len(x)].T
    return y, inputs[:, len(x) :].clone()
    # END


@triton.jit
def mamba_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    states_ptr,
    slots_ptr,
    y_ptr,
    num_heads,
    stride_slot,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program per sequence and head. A head's state is [ROWS, COLUMNS], dense; the heads of a
    slot are dense, too. x, y: [B, H, ROWS], dt: [B, H], a, d: [H], b, c: [B, COLUMNS], all dense.
    """
    # In 64 bits, because a pool of states has more than 2^31 values.
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # SOLUTION 27.4
    row, column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    in_row, in_column = row < ROWS, column < COLUMNS
    inside = in_row[:, None] & in_column[None, :]
    at = sequence * num_heads + head
    slot = tl.load(slots_ptr + sequence)
    cell = head * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    state_ptr = states_ptr + slot * stride_slot + cell
    state = tl.load(state_ptr, mask=inside, other=0.0)
    x = tl.load(x_ptr + at * ROWS + row, mask=in_row, other=0.0)
    b = tl.load(b_ptr + sequence * COLUMNS + column, mask=in_column, other=0.0)
    c = tl.load(c_ptr + sequence * COLUMNS + column, mask=in_column, other=0.0)
    dt, a, d = tl.load(dt_ptr + at), tl.load(a_ptr + head), tl.load(d_ptr + head)
    state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
    y = tl.sum(state * c[None, :], axis=1) + d * x
    tl.store(state_ptr, state, mask=inside)
    tl.store(y_ptr + at * ROWS + row, y, mask=in_row)
    # END


@exercise("27.4", "Mamba-2's step over slots", minutes=40, difficulty=3)
def mamba_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    states: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences, by `mamba_kernel` above, which is yours to write; this
    wrapper is done. x: [B, H, P], dt: [B, H], a, d: [H], b, c: [B, N], states: [slots, H, P, N],
    slots: [B] int64 -> y: [B, H, P] and the states, of which only the B slots have changed. All
    float32.

    For each sequence and head, S being its state, [P, N]:
        S ← exp(dt · a) · S + dt · x bᵀ         entry [i, j] gets dt · x[i] · b[j]
        y = S c + d · x
    It is decayed linear attention: k = b and q = c, the same for all heads, v = dt · x, and the
    state is kept as [Dv, Dk], as Mamba's libraries keep it. Slots are in any order, no two are the
    same, and what is in others stays. P and N are any numbers; BLOCK_ROWS and BLOCK_COLUMNS are the
    next powers of two, and every load and store of a row or column has a mask. Errors: none to
    raise.

    Example: B = H = P = 1, N = 2, x 3, dt 0.5, a = 0, b = [2, 4], c = [1, 1], d = 10, slots [1],
    states[1] = [5, 6]
        S = [5 + 1.5 · 2, 6 + 1.5 · 4] = [8, 12], y = 8 + 12 + 10 · 3 = 50
    """
    (batch, heads, rows), columns = x.shape, b.shape[1]
    y, states = torch.full_like(x, float("nan")), states.clone()
    mamba_kernel[batch, heads](
        *(x, dt, a, b, c, d, states, slots, y, heads, states.stride(0)),
        ROWS=rows,
        COLUMNS=columns,
        BLOCK_ROWS=triton.next_power_of_2(rows),
        BLOCK_COLUMNS=triton.next_power_of_2(columns),
    )
    return y, states


@exercise(
    "27.5", "Predict: when a snapshot of a state is worth its bytes", minutes=25, difficulty=2
)
def best_interval(
    prompt: int,
    later: Sequence[tuple[int, int]],
    intervals: Sequence[int],
    state_bytes: float,
    token_s: float,
    byte_s: float,
) -> tuple[int | None, float]:
    """How often a prompt's state is to be kept for later requests that begin alike: (the interval
    in tokens, the seconds of the GPU that it saves), or (None, 0.0) if no interval saves any.

    A state cannot be cut, as K and V can: it is the state after some number of tokens, and of no
    other. With interval n, snapshots are kept after n, 2n, 3n … tokens of the prompt, up to and
    with its last token. Each has state_bytes, and each byte that is kept costs byte_s seconds of
    the GPU, because there is less room for others.
    later: one pair for each later request, (tokens that its beginning has in common with the
    prompt, tokens that it has in all). It begins from the longest snapshot that lies wholly in what
    they have in common. At least its last token is computed, because its logits are asked for. Each
    token that is not computed saves token_s seconds.
    What an interval saves is this over all later requests, minus the cost of its snapshots. Of two
    that save the same the larger one is taken, and saving nothing is no gain. intervals: whole
    numbers, 1 or more, in any order. Errors: none to raise.

    Example: a prompt of 100, later [(70, 90), (100, 100)], intervals [50, 100], 10 bytes, 1 s a
    token, 0.5 s a byte
        50: two snapshots cost 10 s; 50 tokens and 50 (of 100 in common one is computed, so the
            snapshot after 100 is one too long) are saved: 90 s
        100: one costs 5 s; 0 and 0 are saved: −5 s
        -> (50, 90.0)
    """
    # SOLUTION
    best, most = None, 0.0
    for interval in sorted(intervals, reverse=True):
        saved = 0
        for common, length in later:
            usable = min(common, length - 1)
            saved += usable // interval * interval
        cost = prompt // interval * state_bytes * byte_s
        gain = saved * token_s - cost
        if gain > most:
            best, most = interval, gain
    return best, most
    # END
