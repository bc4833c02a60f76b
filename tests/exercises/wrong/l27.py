"""Wrong answers to lesson 27's exercises: slips of states, chunks and slots; a hint for each."""

import torch
from torch.nn.functional import conv1d

from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 27.1 the recurrence

answers.slips(
    "27.1",
    """
    adds_the_value: What is added is the missing part. Yours adds the whole value, as linear
        attention does.
    - missing = v[t] - state.T @ k[t]
    + missing = v[t]

    fades_columns: A channel of the keys is a row of the state. Yours fades columns.
    - log_decay[t].exp()[:, None]
    + log_decay[t].mean().exp()

    fades_afterwards: The state fades first, then it is asked for the key.
    - state = state * log_decay[t].exp()[:, None]
    - missing = v[t] - state.T @ k[t]
    + missing = v[t] - state.T @ k[t]
    + state = state * log_decay[t].exp()[:, None]

    logarithm_as_factor: log_decay is a logarithm: multiply with its exp.
    - log_decay[t].exp()[:, None]
    + log_decay[t][:, None]

    no_beta: Only beta of what is missing is written.
    - (beta[t] * missing)
    + missing

    beta_of_the_value: beta weighs what is missing, not only the value.
    - missing = v[t] - state.T @ k[t]
    + missing = v[t] - state.T @ k[t] / beta[t]

    reads_first: The output is read after the token was written: a token sees itself.
    - missing = v[t] - state.T @ k[t]
    - state = state + k[t][:, None] * (beta[t] * missing)
    - out[t] = state.T @ q[t]
    + missing = v[t] - state.T @ k[t]
    + out[t] = state.T @ q[t]
    + state = state + k[t][:, None] * (beta[t] * missing)

    writes_into_its_argument: The caller still needs the state that it passed in.
    - state = state * log_decay[t].exp()[:, None]
    + state *= log_decay[t].exp()[:, None]

    asks_by_the_query: What is missing is asked for by the key; the query reads the output.
    - missing = v[t] - state.T @ k[t]
    + missing = v[t] - state.T @ q[t]
    """,
)


@answers.wrong("27.1", "Keys are rows and values columns. Yours is the transposed state.")
def transposed(q, k, v, log_decay, beta, state):
    if state.shape[0] != state.shape[1]:
        return by_tokens(q, k, v, log_decay, beta, state)
    out, after = by_tokens(q, k, v, log_decay, beta, state.T.contiguous())
    return out, after.T


@answers.wrong("27.1", "The state goes on: begin with the one that was passed in.")
def begins_with_zeros(q, k, v, log_decay, beta, state):
    return by_tokens(q, k, v, log_decay, beta, torch.zeros_like(state))


@answers.alternative("27.1")
def by_tokens(q, k, v, log_decay, beta, state):
    rows, state = [], state.clone()
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, log_decay, beta):
        state *= torch.exp(g_t).unsqueeze(1)
        state += torch.outer(k_t, beta_t * (v_t - k_t @ state))
        rows.append(q_t @ state)
    return (torch.stack(rows) if rows else torch.empty_like(v)), state


@answers.alternative("27.1")
def by_projections(q, k, v, log_decay, beta, state):
    """(I − β k kᵀ) diag(exp g) S + β k vᵀ: the same as a product of matrices."""
    out = torch.zeros_like(v)
    now, identity = state + 0, torch.eye(len(state), dtype=state.dtype)
    for t in range(len(q)):
        turned = identity - beta[t] * torch.outer(k[t], k[t])
        now = turned @ torch.diag(log_decay[t].exp()) @ now + beta[t] * torch.outer(k[t], v[t])
        out[t] = now.mT @ q[t]
    return out, now


# ---------------------------------------------------------------- 27.2 a chunk

answers.slips(
    "27.2",
    """
    masks_after_exp: exp(G_t − G_s) may be infinite where s > t, and infinity times 0 is NaN.
    - gaps.masked_fill(~lower, -torch.inf).exp()
    + gaps.exp() * lower

    sees_itself_in_a: A has zeros on its diagonal: what a token writes does not depend on itself.
    - u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    + a = beta[:, None] * between * (k @ k.T)
    + u = torch.linalg.solve(a + torch.eye(len(q), dtype=q.dtype), right)

    no_equations: What a token writes depends on what those before it wrote: solve for U.
    - u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    + u = right

    one_step_of_it: (I + A)⁻¹ is more than I − A.
    - u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)
    + u = right - a @ right

    does_not_see_itself: The output is read after the token was written, so s = t belongs to the sum.
    - (between * (q @ k.T)) @ u
    + (between * (q @ k.T)).tril(-1) @ u

    values_instead_of_u: The sum is over what was written, u, not over the values.
    - (between * (q @ k.T)) @ u
    + (between * (q @ k.T)) @ v

    state_does_not_fade: What the state says has faded by exp(G_t) when token t asks.
    - out = since_start * (q @ state)
    + out = q @ state

    state_is_not_asked: The state that the chunk begins with is asked for each key, too.
    - (v - since_start * (k @ state))
    + v

    old_state_stays: The old state has faded by the end of the chunk.
    - total[-1].exp() * state
    + state

    keys_do_not_fade: What was written early has faded by the end of the chunk.
    - (until_end * k).T @ u
    + k.T @ u

    beta_twice: The right side has beta already.
    - out = since_start
    + u = beta[:, None] * u
    + out = since_start

    columns_beta: beta_t goes with row t of A, the token that writes.
    - a = (beta[:, None] * between
    + a = (beta * between
    """,
)


@answers.wrong("27.2", "Token by token: right, and a loop. Use products of matrices.")
def chunk_by_tokens(q, k, v, log_decay, beta, state):
    return by_tokens(q, k, v, log_decay[:, None], beta, state)


@answers.wrong(
    "27.2", "The product of powers is (I + A)⁻¹ on paper. With equal keys its terms cancel."
)
def by_powers(q, k, v, log_decay, beta, state):
    def solve(a, right):
        power, right = a, right - a @ right
        for _ in range(7):
            power = power @ power
            right = right + power @ right
        return right

    return chunk_with(solve, q, k, v, log_decay, beta, state)


def chunk_with(solve, q, k, v, log_decay, beta, state):
    """The chunk, with a way to solve (I + A) U = right."""
    count = len(q)
    total = torch.cumsum(log_decay, 0)
    hidden = torch.ones(count, count).triu(1).bool()
    between = torch.where(hidden, -torch.inf, total[:, None] - total[None, :]).exp()
    a = torch.einsum("t,ts,td,sd->ts", beta, between, k, k).tril(-1)
    asked = torch.einsum("t,td,dv->tv", total.exp(), k, state)
    u = solve(a, beta[:, None] * (v - asked))
    out = torch.einsum("t,td,dv->tv", total.exp(), q, state)
    out = out + torch.einsum("ts,td,sd,sv->tv", between, q, k, u)
    after = total[-1].exp() * state + torch.einsum("s,sd,sv->dv", between[-1], k, u)
    return out, after


@answers.alternative("27.2")
def by_inverse(q, k, v, log_decay, beta, state):
    def solve(a, right):
        return torch.linalg.inv(torch.eye(len(a), dtype=a.dtype) + a) @ right

    return chunk_with(solve, q, k, v, log_decay, beta, state)


@answers.alternative("27.2")
def by_solve(q, k, v, log_decay, beta, state):
    def solve(a, right):
        return torch.linalg.solve(torch.eye(len(a), dtype=a.dtype) + a, right)

    return chunk_with(solve, q, k, v, log_decay, beta, state)


# ---------------------------------------------------------------- 27.3 the convolution

answers.slips(
    "27.3",
    """
    weights_reversed: The last column of weight is the token's own, as in PyTorch's conv1d.
    - weight[:, i]
    + weight[:, width - 1 - i]

    sees_the_next_token: Begin W − 1 inputs before the token, not W − 2.
    - y += weight[:, i] * inputs[:, i : i + len(x)].T
    + y += weight[:, i] * pad(inputs, (0, 1))[:, i + 1 : i + 1 + len(x)].T

    state_is_forgotten: A piece goes on where the one before ended.
    - inputs = torch.cat([state, x.T], dim=1)
    + inputs = pad(x.T, (width - 1, 0))

    state_of_the_piece_alone: A piece shorter than W − 1 keeps a part of the old state.
    - return y, inputs[:, len(x) :].clone()
    + return y, pad(x.T, (width - 1, 0))[:, len(x) :].clone()

    state_backwards: The oldest input is first.
    - return y, inputs[:, len(x) :].clone()
    + return y, inputs[:, len(x) :].flip(1)

    shares_memory: The caller writes into x and the old state: copy what you keep.
    - return y, inputs[:, len(x) :].clone()
    + if len(x) >= width - 1:
    +     return y, x[len(x) - width + 1 :].T
    + return y, inputs[:, len(x) :].clone()

    four_weights: Mamba's convolution has four weights for each channel, but another one may have
        more: ask weight for its shape.
    - for i in range(width):
    + for i in range(min(width, 4)):

    zeros_in_float32: Zeros beside x have the dtype of x (x.new_zeros), or the state has another one.
    - inputs = pad(x.T, (width - 1, 0))
    + inputs = torch.cat([torch.zeros(len(weight), width - 1), x.T], dim=1)

    first_inputs: The state after a piece is its last inputs, not its first ones.
    - return y, inputs[:, len(x) :].clone()
    + return y, inputs[:, : width - 1].clone()
    """,
)


@answers.wrong("27.3", "Token by token: right, and a loop. Add up W shifted pieces instead.")
def piece_by_tokens(x, weight, state):
    width = weight.shape[1]
    now = torch.zeros_like(weight[:, 1:]) if state is None else state
    rows = []
    for token in x:
        window = torch.cat([now, token[:, None]], dim=1)
        rows.append((window * weight).sum(1))
        now = window[:, 1:].clone()
    assert width > 1
    return torch.stack(rows), now


@answers.alternative("27.3")
def by_conv1d(x, weight, state):
    if state is None:
        state = x.new_zeros(weight.shape[0], weight.shape[1] - 1)
    inputs = torch.hstack([state, x.T])
    y = conv1d(inputs[None], weight[:, None], groups=len(weight))[0].T.contiguous()
    return y, inputs[:, inputs.shape[1] - weight.shape[1] + 1 :].clone()


@answers.alternative("27.3")
def by_unfold(x, weight, state):
    width = weight.shape[1]
    before = x.new_zeros(width - 1, x.shape[1]) if state is None else state.T
    inputs = torch.cat([before, x])
    windows = inputs.unfold(0, width, 1)  # [T, C, W]
    return (windows * weight).sum(-1), inputs[-(width - 1) :].T.clone()


# ---------------------------------------------------------------- 27.4 the kernel

answers.slips(
    "27.4",
    """
    slot_of_the_row: Sequence b's state is in slots[b], not in slot b.
    - slot = tl.load(slots_ptr + sequence)
    + slot = sequence

    first_head: Each head of a slot has a state of its own.
    - head * ROWS * COLUMNS + row
    + row

    rows_by_the_block: A row of a state is COLUMNS long in memory, however many the block has.
    - row[:, None] * COLUMNS + column
    + row[:, None] * BLOCK_COLUMNS % (ROWS * COLUMNS) + column

    reads_before: y is read from the new state.
    - state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
    - y = tl.sum(state * c[None, :], axis=1) + d * x
    + y = tl.sum(state * c[None, :], axis=1) + d * x
    + state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]

    no_dt: What is added is dt times x.
    - (dt * x)[:, None]
    + x[:, None]

    a_alone: The state fades by exp(dt · a): a long step forgets more.
    - tl.exp(dt * a)
    + tl.exp(a)

    no_exp: dt · a is a logarithm.
    - tl.exp(dt * a)
    + (1 + dt * a)

    forgets_d: The input also goes past the state, times d.
    - + d * x
    +

    b_and_c_swapped: b writes, c reads.
    - c = tl.load(c_ptr + sequence * COLUMNS + column, mask=in_column, other=0.0)
    + c = b
    + b = tl.load(c_ptr + sequence * COLUMNS + column, mask=in_column, other=0.0)

    state_is_not_stored: The next token needs the new state: store it in its slot.
    - tl.store(state_ptr, state, mask=inside)
    +

    b_of_the_head: b and c are the same for all heads of a sequence.
    - b = tl.load(b_ptr + sequence * COLUMNS + column
    + b = tl.load(b_ptr + (sequence + head) % tl.num_programs(0) * COLUMNS + column
    """,
)


def in_pytorch(x, dt, a, b, c, d, states, slots):
    after = states.clone()
    fade = (dt * a).exp()[..., None, None]
    now = states[slots] * fade + (dt[..., None] * x)[..., None] * b[:, None, None]
    after[slots] = now
    return (now * c[:, None, None]).sum(-1) + d[:, None] * x, after


attacks(answers, "27.4", in_pytorch)


@triton.jit
def row_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    states_ptr,
    slots_ptr,
    y_ptr,
    heads,
    stride_slot,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of a head's state."""
    sequence, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = sequence * heads + head
    slot = tl.load(slots_ptr + sequence)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    pointers = states_ptr + slot * stride_slot + (head * ROWS + row) * COLUMNS + column
    dt, x = tl.load(dt_ptr + at), tl.load(x_ptr + at * ROWS + row)
    b = tl.load(b_ptr + sequence * COLUMNS + column, mask=inside, other=0.0)
    c = tl.load(c_ptr + sequence * COLUMNS + column, mask=inside, other=0.0)
    kept = tl.exp(dt * tl.load(a_ptr + head))
    state = kept * tl.load(pointers, mask=inside, other=0.0) + dt * x * b
    tl.store(pointers, state, mask=inside)
    tl.store(y_ptr + at * ROWS + row, tl.sum(state * c, axis=0) + tl.load(d_ptr + head) * x)


@answers.alternative("27.4")
def row_for_row(x, dt, a, b, c, d, states, slots):
    (batch, heads, rows), columns = x.shape, b.shape[1]
    y, states = torch.full_like(x, float("nan")), states.clone()
    row_kernel[batch, heads, rows](
        *(x, dt, a, b, c, d, states, slots, y, heads, states.stride(0)),
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=triton.next_power_of_2(columns),
    )
    return y, states


@triton.jit
def sequence_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    states_ptr,
    slots_ptr,
    y_ptr,
    heads,
    stride_slot,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence, which walks over its heads and rows."""
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    b = tl.load(b_ptr + sequence * COLUMNS + column, mask=inside, other=0.0)
    c = tl.load(c_ptr + sequence * COLUMNS + column, mask=inside, other=0.0)
    for cell in range(0, heads * ROWS):
        head = cell // ROWS
        dt = tl.load(dt_ptr + sequence * heads + head)
        x = tl.load(x_ptr + sequence * heads * ROWS + cell)
        pointers = states_ptr + slot * stride_slot + cell * COLUMNS + column
        state = tl.load(pointers, mask=inside, other=0.0) * tl.exp(dt * tl.load(a_ptr + head))
        state += dt * x * b
        tl.store(pointers, state, mask=inside)
        y = tl.sum(state * c, axis=0) + tl.load(d_ptr + head) * x
        tl.store(y_ptr + sequence * heads * ROWS + cell, y)


@answers.alternative("27.4")
def sequence_by_sequence(x, dt, a, b, c, d, states, slots):
    (batch, heads, rows), columns = x.shape, b.shape[1]
    y, states = torch.full_like(x, float("nan")), states.clone()
    sequence_kernel[batch,](
        *(x, dt, a, b, c, d, states, slots, y, heads, states.stride(0)),
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=triton.next_power_of_2(columns),
    )
    return y, states


# ---------------------------------------------------------------- 27.5 snapshots

answers.slips(
    "27.5",
    """
    cuts_a_state: A state cannot be cut. Round what is in common down to a snapshot.
    - usable // interval * interval
    + usable if usable >= interval else 0

    rounds_up: A snapshot that is longer than what is in common has seen other tokens.
    - usable // interval * interval
    + -(-usable // interval) * interval

    skips_the_last_token: The last token is always computed: its logits are asked for.
    - min(common, length - 1)
    + common

    alike_ones_once: Two requests may be alike, and each of them saves.
    - for common, length in later:
    + for common, length in set(later):

    one_snapshot: Each snapshot costs, not only one.
    - prompt // interval * state_bytes * byte_s
    + state_bytes * byte_s

    costs_each_time: Snapshots are kept once, however many requests use them.
    - prompt // interval * state_bytes * byte_s
    + prompt // interval * state_bytes * byte_s * len(later)

    a_snapshot_at_the_start: The state after no token costs nothing: it is zeros.
    - prompt // interval * state_bytes
    + (prompt // interval + 1) * state_bytes

    rounds_snapshots_up: The last snapshot is the last multiple within the prompt.
    - prompt // interval * state_bytes
    + -(-prompt // interval) * state_bytes

    smaller_of_the_equal: Of two that save the same the larger one is taken.
    - sorted(intervals, reverse=True)
    + sorted(intervals)

    last_of_the_equal: The intervals are in any order: of equal ones ask for the larger, not for the
        last.
    - sorted(intervals, reverse=True)
    + intervals
    - if gain > most:
    + if gain >= most and gain > 0:

    no_gain_is_a_gain: To save nothing is no gain.
    - if gain > most:
    + if gain >= most and (gain > most or best is None):

    always_one: If no interval saves any, say None.
    - best, most = None, 0.0
    + best, most = None, float("-inf")
    """,
)


@answers.alternative("27.5")
def by_a_dictionary(prompt, later, intervals, state_bytes, token_s, byte_s):
    gains = {None: 0.0}
    for n in sorted(intervals):
        tokens = sum(n * (min(common, length - 1) // n) for common, length in later)
        gains[n] = tokens * token_s - (prompt // n) * state_bytes * byte_s
    top = max(gains.values())
    if top == 0.0:
        return None, 0.0
    best = max(n for n, gain in gains.items() if n is not None and gain == top)
    return best, top


@answers.alternative("27.5")
def one_by_one(prompt, later, intervals, state_bytes, token_s, byte_s):
    best = (0.0, 0)
    for interval in intervals:
        gain = 0.0
        for at in range(interval, prompt + 1, interval):
            gain -= state_bytes * byte_s
            users = sum(1 for common, length in later if at <= common and at < length)
            gain += users * interval * token_s
        best = max(best, (gain, interval)) if gain > 0 else best
    return (best[1] or None), best[0]
