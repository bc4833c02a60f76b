"""A prompt in chunks, in Triton: three kernels for the delta rule, two without it. prompts.py
launches them.

    prepare_kernel    every chunk at once: U₀ and W of chunks.written_by_wy, which need no state
    states_kernel     chunk after chunk: U = U₀ − W S₀, then the state after the chunk
    outputs_kernel    every chunk at once: what chunks.outputs returns

Only the middle one has to go through a prompt in order. Between kernels U, W and the state before
each chunk are in memory, in float32. A chunk's last rows, where a prompt ends inside it, are zeros:
a token with k = 0 writes nothing. Read chunks.py first; names and order are the same.
"""

from lessons.l09_flash_attention.optimized import rows_of_sequence
from lessons.toolbox.kernels.triton_ import tl, triton

# Each float32 factor as the sum of two tf32 numbers: three products on matrix units instead of one
# in float32 without them, and nearly its precision.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def load_tile(
    ptr, start, end, stride, first, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Rows from `start` and columns from `first` of a matrix [end, DIM] -> [ROWS, COLS], with zeros
    where it ends.
    """
    row, column = start + tl.arange(0, ROWS), first + tl.arange(0, COLS)
    inside = (row < end)[:, None] & (column < DIM)[None, :]
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def load_numbers(ptr, start, end, stride, SIZE: tl.constexpr):
    """A number for each row from `start` to `end` -> [SIZE] float32, then zeros."""
    row = start + tl.arange(0, SIZE)
    return tl.load(ptr + row * stride, mask=row < end, other=0.0).to(tl.float32)


@triton.jit
def store_tile(
    ptr, x, start, end, stride, first, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """The way back of load_tile. x: [ROWS, COLS]."""
    row, column = start + tl.arange(0, ROWS), first + tl.arange(0, COLS)
    inside = (row < end)[:, None] & (column < DIM)[None, :]
    at = ptr + row[:, None] * stride + column[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def decay_between(g, SIZE: tl.constexpr):
    """chunks.decay_between: g: [SIZE] -> exp(g_{s+1} + … + g_t) for s ≤ t, otherwise 0: [SIZE,
    SIZE].
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    terms = tl.where(row > column, g[:, None], 0.0)
    return tl.where(row >= column, tl.exp(tl.cumsum(terms, axis=0)), 0.0)


@triton.jit
def unit_lower_inverse(a, SIZE: tl.constexpr):
    """(I + a)⁻¹ for a strictly lower triangular a: [SIZE, SIZE], by forward substitution: row t of
    the inverse is row t of I, minus Σ_{s < t} a[t, s] · row s of the inverse.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for t in range(1, SIZE):
        weights = tl.sum(tl.where(row == t, a, 0.0), axis=0)  # row t of a: [SIZE]
        earlier = tl.sum(weights[:, None] * inverse, axis=0)
        inverse -= tl.where(row == t, earlier[None, :], 0.0)
    return inverse


@triton.jit
def chunk_of(cu_seqlens_ptr, num_tokens, sequence, index, SIZE: tl.constexpr):
    """A chunk's first token, the end of its sequence (both among all tokens), and its place among
    the stored states. Before sequence b there are at most start / SIZE + b chunks, because each
    sequence before it has at most one that is not full.
    """
    start, length = rows_of_sequence(cu_seqlens_ptr, sequence, num_tokens)
    place = start // SIZE + sequence + index
    return start + index * SIZE, start + length, place


@triton.jit(do_not_specialize=["num_tokens"])
def prepare_kernel(
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    u_ptr,
    w_ptr,
    num_tokens,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per head, chunk and sequence. u: [T, H, VALUE_DIM], w: [T, H, KEY_DIM] float32,
    dense.
    """
    head, heads = tl.program_id(0), tl.num_programs(0)
    start, end, _ = chunk_of(cu_seqlens_ptr, num_tokens, tl.program_id(2), tl.program_id(1), SIZE)
    if start < end:
        k = load_tile(k_ptr + head * stride_kh, start, end, stride_kt, 0, KEY_DIM, SIZE, BLOCK_K)
        g = load_numbers(log_decay_ptr + head, start, end, heads, SIZE)
        beta = load_numbers(beta_ptr + head, start, end, heads, SIZE)
        similar = tl.dot(k, tl.trans(k), input_precision=PRECISION)  # exact, if k has 16 bits
        row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        a = tl.where(row > column, beta[:, None] * decay_between(g, SIZE) * similar, 0.0)
        inverse = unit_lower_inverse(a, SIZE)
        of_state = beta * tl.exp(tl.cumsum(g, axis=0))
        k_ptr += head * stride_kh
        w_ptr += head * KEY_DIM
        # column by column, because a product of all would not fit into the registers
        for first in range(0, KEY_DIM, BLOCK_V):
            x = load_tile(k_ptr, start, end, stride_kt, first, KEY_DIM, SIZE, BLOCK_V)
            w = tl.dot(inverse, of_state[:, None] * x.to(tl.float32), input_precision=PRECISION)
            store_tile(w_ptr, w, start, end, heads * KEY_DIM, first, KEY_DIM, SIZE, BLOCK_V)
        v_ptr += head * stride_vh
        u_ptr += head * VALUE_DIM
        for first in range(0, VALUE_DIM, BLOCK_V):
            v = load_tile(v_ptr, start, end, stride_vt, first, VALUE_DIM, SIZE, BLOCK_V)
            u = tl.dot(inverse, beta[:, None] * v.to(tl.float32), input_precision=PRECISION)
            store_tile(u_ptr, u, start, end, heads * VALUE_DIM, first, VALUE_DIM, SIZE, BLOCK_V)


@triton.jit(do_not_specialize=["num_tokens"])
def states_kernel(
    k_ptr,
    u_ptr,
    w_ptr,
    log_decay_ptr,
    cu_seqlens_ptr,
    has_state_ptr,
    states_ptr,
    slots_ptr,
    before_ptr,
    num_tokens,
    stride_kt,
    stride_kh,
    stride_ut,
    stride_uh,
    stride_slot,
    DELTA: tl.constexpr,
    HAS_STATE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per head, BLOCK_V columns of a state and sequence; it goes from chunk to chunk.
    before: [chunks, H, KEY_DIM, VALUE_DIM] float32, the state before each chunk. With the delta
    rule u holds U₀, and U afterwards; without it u is v.
    """
    head, heads, sequence = tl.program_id(0), tl.num_programs(0), tl.program_id(2)
    first = tl.program_id(1) * BLOCK_V
    start, end, place = chunk_of(cu_seqlens_ptr, num_tokens, sequence, 0, SIZE)
    slot = tl.load(slots_ptr + sequence)
    states_ptr += slot * stride_slot + head * KEY_DIM * VALUE_DIM
    rows = KEY_DIM
    if HAS_STATE:
        # a matrix of no rows: nothing is loaded
        rows = tl.where(tl.load(has_state_ptr + sequence) != 0, KEY_DIM, 0)
    state = load_tile(states_ptr, 0, rows, VALUE_DIM, first, VALUE_DIM, BLOCK_K, BLOCK_V)
    state = state.to(tl.float32)
    k_ptr += head * stride_kh
    u_ptr += head * stride_uh
    for token in range(start, end, SIZE):
        before = before_ptr + (place * heads + head) * KEY_DIM * VALUE_DIM
        store_tile(before, state, 0, KEY_DIM, VALUE_DIM, first, VALUE_DIM, BLOCK_K, BLOCK_V)
        k = load_tile(k_ptr, token, end, stride_kt, 0, KEY_DIM, SIZE, BLOCK_K)
        u = load_tile(u_ptr, token, end, stride_ut, first, VALUE_DIM, SIZE, BLOCK_V).to(tl.float32)
        g = load_numbers(log_decay_ptr + head, token, end, heads, SIZE)
        if DELTA:
            w = load_tile(
                w_ptr + head * KEY_DIM, token, end, heads * KEY_DIM, 0, KEY_DIM, SIZE, BLOCK_K
            )
            u -= tl.dot(w, state, input_precision=PRECISION)
            store_tile(u_ptr, u, token, end, stride_ut, first, VALUE_DIM, SIZE, BLOCK_V)
        row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
        until_end = tl.exp(tl.sum(tl.where(row > column, g[:, None], 0.0), axis=0))
        faded = k.to(tl.float32) * until_end[:, None]
        added = tl.dot(tl.trans(faded), u, input_precision=PRECISION)
        state = tl.exp(tl.sum(g)) * state + added
        place += 1
    store_tile(states_ptr, state, 0, KEY_DIM, VALUE_DIM, first, VALUE_DIM, BLOCK_K, BLOCK_V)


@triton.jit(do_not_specialize=["num_tokens"])
def outputs_kernel(
    q_ptr,
    k_ptr,
    u_ptr,
    log_decay_ptr,
    cu_seqlens_ptr,
    before_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_ut,
    stride_uh,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per head and BLOCK_V columns, chunk and sequence. out: [T, H, VALUE_DIM]. It goes
    through the keys' coordinates by BLOCK_K, so that a tile of the state is small: then many
    columns fit into the registers, and q and k are read for few blocks of them.
    """
    blocks = tl.cdiv(VALUE_DIM, BLOCK_V)
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_V
    start, end, place = chunk_of(
        cu_seqlens_ptr, num_tokens, tl.program_id(2), tl.program_id(1), SIZE
    )
    if start < end:
        q_ptr += head * stride_qh
        k_ptr += head * stride_kh
        u_ptr += head * stride_uh
        before_ptr += (place * num_heads + head) * KEY_DIM * VALUE_DIM
        scores = tl.zeros([SIZE, SIZE], tl.float32)
        out = tl.zeros([SIZE, BLOCK_V], tl.float32)
        for i in range(0, KEY_DIM, BLOCK_K):
            q = load_tile(q_ptr, start, end, stride_qt, i, KEY_DIM, SIZE, BLOCK_K)
            k = load_tile(k_ptr, start, end, stride_kt, i, KEY_DIM, SIZE, BLOCK_K)
            state = load_tile(before_ptr, i, KEY_DIM, VALUE_DIM, first, VALUE_DIM, BLOCK_K, BLOCK_V)
            scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
            out = tl.dot(q.to(tl.float32), state, out, input_precision=PRECISION)
        u = load_tile(u_ptr, start, end, stride_ut, first, VALUE_DIM, SIZE, BLOCK_V).to(tl.float32)
        g = load_numbers(log_decay_ptr + head, start, end, num_heads, SIZE)
        out *= tl.exp(tl.cumsum(g, axis=0))[:, None]
        # decay_between is 0 where a token would see a later one
        scores *= decay_between(g, SIZE)
        out = tl.dot(scores, u, out, input_precision=PRECISION)
        out_ptr += head * VALUE_DIM
        store_tile(out_ptr, out, start, end, num_heads * VALUE_DIM, first, VALUE_DIM, SIZE, BLOCK_V)
