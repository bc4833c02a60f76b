"""Wrong answers to lesson 09's exercises: real slips, and the hint for each."""

import torch

from lessons.l08_online_softmax.naive import finish, from_scores, identity, merge
from lessons.l09_flash_attention.tiles import key_range
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 9.1 tiles in PyTorch

answers.slips(
    "9.1",
    """
    top_left_mask: Your mask is aligned top left: query i belongs to key i + Tk - T.
    - device=q.device) + num_keys - num_queries
    + device=q.device)

    strict_diagonal: Your diagonal is strict: a query sees its own key.
    - (distance < 0) | (distance >= window) if window else distance < 0
    + (distance <= 0) | (distance >= window) if window else distance <= 0

    no_mask: Tiles on the diagonal need a mask: some of their queries are before some of their keys.
    - scores = scores.masked_fill(hidden[:, None], -torch.inf)

    tail_dropped: The last partial tile of keys is never read.
    - for start_n in range(
    -     begin, min(num_keys, max(0, last + 1)) if causal else num_keys, tiles.block_n
    - ):
    + end = num_keys // tiles.block_n * tiles.block_n
    + for start_n in range(begin, min(end, max(0, last + 1)) if causal else end, tiles.block_n):

    tail_unmasked: Keys beyond the last one count: a padded key scores 0, which may beat all real
        scores.
    - key = torch.arange(cells.start, cells.stop, device=q.device)
    - k_tile, v_tile = (x[cells].to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    + key = start_n + torch.arange(tiles.block_n)
    + k_tile, v_tile = (x[cells].to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    + padding = (0, 0, 0, 0, 0, tiles.block_n - len(k_tile))
    + k_tile, v_tile = (torch.nn.functional.pad(x, padding) for x in (k_tile, v_tile))

    no_max: You exponentiate raw scores. What is exp(200) in float32?
    - torch.full((len(query), num_heads), -torch.inf
    + torch.full((len(query), num_heads), 0.0
    - torch.maximum(m_i, scores.amax(-1))
    + m_i

    frozen_max: You keep the first tile's maximum. What if a later tile holds a larger score?
    - torch.maximum(m_i, scores.amax(-1))
    + scores.amax(-1) if start_n == begin else m_i

    stale_acc: When the maximum grows, l is rescaled but acc is not.
    - acc * alpha[..., None]
    + acc

    stale_l: When the maximum grows, acc is rescaled but l is not.
    - l_i * alpha
    + l_i

    last_l: You divide by the last tile's sum. l adds up over all tiles.
    - l_i * alpha + p.sum(-1)
    + p.sum(-1)

    divided_twice: You divide in every tile and at the end, and never take a division back.
    - l_i = l_i * alpha + p.sum(-1)
    + if start_n > begin:
    +     acc = acc / l_i.clamp(min=1e-30)[..., None]
    + l_i = l_i * alpha + p.sum(-1)

    nan_for_no_key: −inf − −inf is NaN: a query without a key has no maximum to subtract.
    - m_new.masked_fill(m_new == -torch.inf, 0)
    + m_new

    zero_by_zero: A query that sees no key divides 0 by 0. Its output is 0.
    - l_i.masked_fill(l_i == 0, 1)
    + l_i

    scale_twice: The scale is in there twice.
    - k_tile) * scale
    + k_tile) * scale**2

    ignores_scale: softmax_scale is given, and you use 1 / √D all the same.
    - head_dim**-0.5 if softmax_scale is None else softmax_scale
    + head_dim**-0.5

    window_off_by_one: Your window holds one key too many: it counts the query's own.
    - (distance >= window)
    + (distance >= window + 1)

    heads_modulo: Query head h reads KV head h // group, not h % Hkv.
    - repeat_interleave(group, dim=1)
    + repeat(1, group, 1)

    one_block_too_many_skipped: You skip one tile of keys too many: the last query still sees into
        it.
    - max(0, last + 1)
    + max(0, last + 1 - 4)

    all_at_once: The numbers are right, but all scores exist at once.
    - for start_m in range(
    + tiles = type("OneTile", (), {"block_m": num_queries, "block_n": num_keys})
    + for start_m in range(

    visits_everything: You compute tiles that no query sees: time for nothing, and 0 · NaN is NaN.
    - max(0, first - window + 1) // tiles.block_n * tiles.block_n if window else 0
    + 0
    - min(num_keys, max(0, last + 1)) if causal else num_keys
    + num_keys

    sums_in_16_bits: Your sums are as narrow as the inputs: in bfloat16, 256 + 1 is 256.
    - torch.float64 if q.dtype == torch.float64 else torch.float32
    + q.dtype

    lse_in_log2: Your lse is the logarithm to base 2.
    - m_i + torch.log(l_i)
    + (m_i + torch.log(l_i)) * 1.4426950408889634

    lse_without_max: log l alone is relative to the maximum: lse = m + log l.
    - m_i + torch.log(l_i)
    + torch.log(l_i)

    returns_float32: out has q's dtype.
    - return out, lse
    + return out.float(), lse

    max_from_0: Your maximum starts at 0. What if all scores are far below 0?
    - torch.full((len(query), num_heads), -torch.inf
    + torch.full((len(query), num_heads), 0.0

    falsy_scale: 0.0 is a scale too: ask `is None`, not `or`.
    - head_dim**-0.5 if softmax_scale is None else softmax_scale
    + softmax_scale or head_dim**-0.5

    assumes_dense: You read q as if it were dense. It may be a slice of a wider tensor.
    - scale, group = (
    + q = torch.as_strided(q, q.shape, (num_heads * head_dim, head_dim, 1))
    + scale, group = (

    forgets_lse: Without the lse your output cannot be merged with another part's.
    - return out, lse
    + return out, torch.zeros_like(lse)
    """,
)


@answers.alternative("9.1")
def by_partials(q, k, v, softmax_scale=None, causal=True, window=None, tiles=None):
    """Lesson 8's merge, a tile at a time."""
    out, lse = (
        q.new_empty(*q.shape[:2], v.shape[2]),
        q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    group, scale = (
        q.shape[1] // k.shape[1],
        q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
    )
    for m in range(0, len(q), tiles.block_m):
        rows = torch.arange(m, min(m + tiles.block_m, len(q)))
        begin, _, end = key_range(m, len(q), len(k), tiles, causal, window)
        for head in range(q.shape[1]):
            seen = identity(rows.shape, v.shape[2], lse.dtype)
            for n in range(begin, end, tiles.block_n):
                keys = torch.arange(n, min(n + tiles.block_n, len(k)))
                scores = (
                    q[rows, head].to(lse.dtype) @ k[keys, head // group].to(lse.dtype).T * scale
                )
                distance = rows[:, None] + len(k) - len(q) - keys
                hidden = (
                    (distance < 0) | (distance >= (window or len(k) + len(q)))
                    if causal
                    else distance != distance
                )
                seen = merge(
                    seen,
                    from_scores(
                        scores.masked_fill(hidden, -torch.inf), v[keys, head // group].to(lse.dtype)
                    ),
                )
            done, lse[rows, head] = finish(seen)
            out[rows, head] = done.to(q.dtype)
    return out, lse


# ---------------------------------------------------------------- 9.2 the kernel

answers.slips(
    "9.2",
    """
    no_sink: The sink is missing from the denominator.
    - m_i = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head)
    - l_i = tl.full((BLOCK_M,), 1.0, tl.float32)
    + m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    + l_i = tl.zeros((BLOCK_M,), tl.float32)

    sink_as_value: Your sink brings a value of 1. It has none: it only takes weight away.
    - acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    + acc = tl.full((BLOCK_M, BLOCK_D), 1.0, tl.float32)

    sink_scaled: The sink is a finished score: it is not multiplied by 1 / √D.
    - tl.load(sinks_ptr + head)
    + tl.load(sinks_ptr + head) * softmax_scale

    sink_in_every_tile: You count the sink once for each tile of keys. It is one score of the whole
        row.
    - m_i = m_new
    + l_i += tl.exp(tl.load(sinks_ptr + head) - m_new)
    + m_i = m_new

    sink_stays_max: The maximum stays the sink's: exp overflows, or loses everything, when keys
        score far higher.
    - m_new = tl.maximum(m_i, tl.max(scores, axis=1))
    + m_new = m_i

    first_sink: Every head uses head 0's sink.
    - sinks_ptr + head
    + sinks_ptr

    stale_sink: When the maximum grows, l, with the sink in it, has to be rescaled.
    - l_i * alpha + tl.sum
    + l_i + tl.sum

    stale_acc: When the maximum grows, l is rescaled but acc is not.
    - acc * alpha[:, None]
    + acc

    tail_dropped: The last partial tile of keys is never read.
    - range(0, num_keys, BLOCK_N)
    + range(0, num_keys // BLOCK_N * BLOCK_N, BLOCK_N)

    tail_unmasked: Keys beyond the last one score 0 and count. Set their scores to −inf.
    - scores = tl.where((key < num_keys)[None, :], scores, float("-inf"))

    padding_counted: You read and write BLOCK_D columns. Only HEAD_DIM exist: the rest belongs to
        the next row.
    - inside = (row < num_queries)[:, None] & (column < HEAD_DIM)[None, :]
    + inside = (row < num_queries)[:, None] & (column < BLOCK_D)[None, :]
    - held = (key < num_keys)[:, None] & (column < HEAD_DIM)[None, :]
    + held = (key < num_keys)[:, None] & (column < BLOCK_D)[None, :]
    - out = torch.empty_like(q)
    + # with room after the last row, so that the slip harms nothing else
    + q, k, v, out = (
    +     torch.cat([x.flatten(), x.new_ones(64)])[: x.numel()].view(x.shape) for x in (q, k, v, q)
    + )

    padding_scale: Your scale is 1 / √BLOCK_D: the padding of the head is counted.
    - q.shape[2] ** -0.5
    + triton.next_power_of_2(max(q.shape[2], 16)) ** -0.5

    first_rows_only: Only the first 16 rows are written: program_id(0) counts tiles, row counts
        queries.
    - element_ty), mask=inside)
    + element_ty), mask=inside & (row < 16)[:, None])

    max_from_0: Your maximum starts at 0. What if all scores are far below 0?
    - m_i = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks_ptr + head)
    - l_i = tl.full((BLOCK_M,), 1.0, tl.float32)
    + m_i = tl.zeros((BLOCK_M,), tl.float32)
    + l_i = tl.exp(m_i + tl.load(sinks_ptr + head))

    mask_of_-1e4: −1e4 hides no key where all scores are lower. Use −inf.
    - float("-inf")
    + -1e4

    next_head: You read BLOCK_D columns of k. From HEAD_DIM on they are the next head's, and 0 · NaN
        is NaN.
    - tl.load(k_ptr + k_cell, mask=held, other=0.0)
    + tl.load(k_ptr + k_cell, mask=k_cell < num_keys * num_heads * HEAD_DIM, other=0.0)

    narrow_sums: Your sums are as narrow as the inputs: in bfloat16, 256 + 1 is 256.
    - m_i = m_new
    + l_i, acc = l_i.to(v.dtype).to(tl.float32), acc.to(v.dtype).to(tl.float32)
    + m_i = m_new

    tf32: tl.dot rounds float32 inputs to TF32, 10 bits, unless you say input_precision="ieee".
    - tl.trans(k), input_precision="ieee")
    + tl.trans(k))
    - alpha[:, None], input_precision="ieee")
    + alpha[:, None])
    """,
)


@triton.jit
def one_query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    num_keys,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program for each query of each head, without tl.dot. The sink comes last."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK_D)
    cell = (tl.program_id(0) * num_heads + head) * HEAD_DIM + column
    q = tl.load(q_ptr + cell, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    m, l, acc = -1e30, 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_keys, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        held = (key < num_keys)[:, None] & (column < HEAD_DIM)[None, :]
        k_cell = (key[:, None] * num_heads + head) * HEAD_DIM + column[None, :]
        k = tl.load(k_ptr + k_cell, mask=held, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + k_cell, mask=held, other=0.0).to(tl.float32)
        scores = tl.sum(q[None, :] * k, axis=1) * HEAD_DIM**-0.5
        scores = tl.where(key < num_keys, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=0))
        p, alpha = tl.exp(scores - m_new), tl.exp(m - m_new)
        m, l, acc = (
            m_new,
            l * alpha + tl.sum(p, axis=0),
            acc * alpha + tl.sum(p[:, None] * v, axis=0),
        )
    sink = tl.load(sinks_ptr + head)
    top = tl.maximum(m, sink)
    share = tl.exp(m - top)
    acc = acc * share / (l * share + tl.exp(sink - top))
    tl.store(out_ptr + cell, acc.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@answers.alternative("9.2")
def query_by_query(q, k, v, sinks, block=16):
    out, block_d = torch.empty_like(q), triton.next_power_of_2(q.shape[2])
    one_query_kernel[q.shape[:2]](
        q, k, v, sinks, out, len(k), HEAD_DIM=q.shape[2], BLOCK_N=block, BLOCK_D=block_d
    )
    return out


def in_pytorch(q, k, v, sinks, block=16):
    """The softmax of all scores and the sink, without the sink's column."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * q.shape[2] ** -0.5
    whole = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(whole, dim=-1)[..., :-1], v.float()).to(
        q.dtype
    )


attacks(answers, "9.2", in_pytorch)


# ---------------------------------------------------------------- 9.3 predict

answers.slips(
    "9.3",
    """
    no_diagonal: The diagonal's tiles are visited too.
    - count * (count + 1) // 2
    + count * (count - 1) // 2

    no_skipping: Tiles above the diagonal are skipped.
    - count * (count + 1) // 2
    + count**2

    diagonal_without_mask: A tile on the diagonal is half hidden: it needs a mask.
    - return visited, visited - count
    + return visited, visited

    k_alone: You count k alone; v is read as well.
    - visited * block * 2 * row
    + visited * block * row

    a_row_a_tile: A tile holds `block` rows of k and of v.
    - visited * block * 2 * row
    + visited * 2 * row

    q_for_every_tile: q is loaded once: it stays in registers while the keys go by.
    - (num_tokens * row
    + (visited * block * row

    one_head: These bytes are of one head.
    - read = num_heads * (
    + read = (

    elements: You count elements, not bytes.
    - row = head_dim * itemsize
    + row = head_dim

    keys_once: Every tile of queries reads its keys again; k and v are not read once.
    - visited * block * 2 * row
    + count * block * 2 * row

    two_passes: Scores and probabilities are each written and read: four passes.
    - read, 4 * num_heads
    + read, 2 * num_heads

    scores_of_one_head: Each head has scores of its own.
    - read, 4 * num_heads * num_tokens**2
    + read, 4 * num_tokens**2

    scores_half: The naive matrix is whole: what is masked is stored as well.
    - read, 4 * num_heads * num_tokens**2 * itemsize
    + read, 4 * num_heads * num_tokens**2 * itemsize // 2

    rounded_counts: Half of a whole number as a float: large counts are rounded.
    - count * (count + 1) // 2
    + int(count * (count + 1) * 0.5)
    """,
)


@answers.alternative("9.3")
def by_two_triangles(num_tokens, num_heads, head_dim, itemsize, block):
    rows = num_tokens // block
    full = rows * (rows - 1) // 2
    values = num_tokens + 2 * block * (full + rows)
    return (
        full + rows,
        full,
        values * num_heads * head_dim * itemsize,
        num_heads * num_tokens * num_tokens * itemsize * 4,
    )


# ---------------------------------------------------------------- 9.4 which keys

answers.slips(
    "9.4",
    """
    as_given: More than one bug is left. Draw 4 queries after 3 cached keys.
    - first = start_m + num_keys - num_queries
    - begin, full_end, end = 0, num_keys // block_n * block_n, num_keys
    + first = start_m
    + begin, full_end, end = 0, num_keys, num_keys
    - first + block_m)
    + first + block_m - 1)
    - first - window + 1
    + first + block_m - window

    top_left: The first query belongs to key start_m + num_keys - num_queries.
    - first = start_m + num_keys - num_queries
    + first = start_m

    last_key_skipped: The tile's last query belongs to key first + block_m - 1, and sees it: end is
        one more.
    - first + block_m)
    + first + block_m - 1)

    one_block_too_many_skipped: You skip one tile too many: the last queries see into it.
    - first + block_m)
    + first + block_m - 4)

    ragged_end_unmasked: The last tile may be cut off by the end of the keys: it needs a mask.
    - num_keys // block_n * block_n
    + num_keys

    window_of_the_last_query: The tile's first query reaches furthest back, not its last.
    - first - window + 1
    + first + block_m - window

    window_off_by_one: A window of w reaches back to key position − w + 1.
    - first - window + 1
    + first - window + 2

    window_one_key_too_wide: Your window begins one key too early: it counts the query's own.
    - first - window + 1
    + first - window

    ignores_window: With a window, tiles far left of the diagonal are skipped as well.
    - if window is not None:
    + if False:

    diagonal_unmasked: full_end asks the tile's first query: it must see the whole tile of keys.
    - max(0, first + 1)
    + max(0, first + block_m)

    full_too_early: One tile less than possible goes without a mask.
    - max(0, first + 1)
    + max(0, first + 1 - block_n)

    negative_end: With more queries than keys a tile may see nothing: end is then 0, not negative.
    - max(0, first + block_m)
    + first + block_m
    """,
)


@answers.alternative("9.4")
def by_looking(start_m, num_queries, num_keys, tiles, causal=True, window=None):
    first, step = start_m + num_keys - num_queries, tiles.block_n
    whole = [
        n
        for n in range(0, num_keys, step)
        if n + step <= num_keys and (not causal or n + step - 1 <= first)
    ]
    full_end = whole[-1] + step if whole else 0
    seen = [j for j in range(num_keys) if not causal or j < first + tiles.block_m]
    reach = 0 if window is None else max(0, first - window + 1)
    return min(reach - reach % step, full_end), full_end, len(seen)
