"""Wrong answers to lesson 28's exercises: slips of scores, ties, slots, lists and handicaps, and a
hint for each.
"""

import heapq
import math

import numpy as np
import torch

from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 28.1 the index score

answers.slips(
    "28.1",
    """
    no_relu: A product below zero counts as zero, head by head.
    - (q[:, head] @ k.T).clamp_(min=0)
    + (q[:, head] @ k.T)

    relu_of_the_sum: ReLU comes before the weight: a weight may be negative, and then so is the
        head's part.
    - products = (q[:, head] @ k.T).clamp_(min=0)
    - scores += products.mul_(weights[:, head, None])
    + products = q[:, head] @ k.T
    + scores += products.mul_(weights[:, head, None]).clamp_(min=0)

    no_weights: Each head has a weight for each query.
    - products.mul_(weights[:, head, None])
    + products

    weights_of_the_first_query: Each query has weights of its own.
    - weights[:, head, None]
    + weights[0, head]

    first_head: All heads are added up.
    - for head in range(q.shape[1]):
    + for head in range(1):

    mean_of_heads: The heads are added up, not averaged.
    - return scores.masked_fill_(unseen, -math.inf)
    + return (scores / q.shape[1]).masked_fill_(unseen, -math.inf)

    scaled_by_the_width: There is no 1/√D here: it is in the weights already.
    - products.mul_(weights[:, head, None])
    + products.mul_(weights[:, head, None] * k.shape[1] ** -0.5)

    sees_the_future: A query sees no key after its own position.
    - return scores.masked_fill_(unseen, -math.inf)
    + return scores

    zeros_for_unseen: A score of 0 may be higher than others. A key that is not seen gets -inf.
    - masked_fill_(unseen, -math.inf)
    + masked_fill_(unseen, 0.0)

    not_its_own_key: A query sees its own key, too.
    - torch.arange(len(k)) > positions[:, None]
    + torch.arange(len(k)) >= positions[:, None]

    queries_at_the_end: The positions are given. The queries need not be the last tokens.
    - torch.arange(len(k)) > positions[:, None]
    + torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]

    positions_from_the_start: The first query need not be at the start of the text.
    - torch.arange(len(k)) > positions[:, None]
    + torch.arange(len(k)) > torch.arange(len(q))[:, None]
    """,
)


@answers.wrong(
    "28.1", "No tensor may hold the products of all heads: take one head after the other."
)
def all_heads_at_once(q, weights, k, positions):
    products = torch.einsum("thd,nd->thn", q, k).relu()
    scores = torch.einsum("th,thn->tn", weights, products)
    return scores.masked_fill(torch.arange(len(k)) > positions[:, None], -math.inf)


@answers.wrong("28.1", "The scores are not normalised: the top k needs their order only.")
def softmax_of_scores(q, weights, k, positions):
    return head_by_head(q, weights, k, positions).softmax(-1)


@answers.alternative("28.1")
def head_by_head(q, weights, k, positions):
    scores = torch.zeros(len(q), len(k))
    for head in range(q.shape[1]):
        scores.addcmul_(weights[:, head, None], torch.relu(q[:, head] @ k.T))
    scores[torch.arange(len(k)) > positions[:, None]] = -math.inf
    return scores


@answers.alternative("28.1")
def query_by_query(q, weights, k, positions):
    rows = torch.full((len(q), len(k)), -math.inf)
    for t, position in enumerate(positions.tolist()):
        seen = k[: position + 1]
        rows[t, : position + 1] = weights[t] @ (q[t] @ seen.T).relu()
    return rows


# ---------------------------------------------------------------- 28.2 the top k

answers.slips(
    "28.2",
    """
    bits_as_they_are: Bits of negative numbers run the other way, and their sign comes first.
    - torch.where(bits >= 0, bits + 2**31, -1 - bits)
    + bits + 2**31

    signs_are_kept: Without the sign bit set, numbers from 0 on are below the turned negative ones.
    - torch.where(bits >= 0, bits + 2**31, -1 - bits)
    + torch.where(bits >= 0, bits, -1 - bits)

    two_zeros: -0.0 equals 0.0, but its bits are others.
    - torch.where(scores == 0, 0.0, scores).view(torch.int32)
    + scores.view(torch.int32)

    minus_infinity_is_a_key: -inf is a key that is not there.
    - order = torch.where(scores == -math.inf, -1, order)
    +

    highest_31_bits: The last bit decides, too.
    - for place in reversed(range(32)):
    + for place in reversed(range(1, 32)):

    31_bits: The highest of 32 bits is at place 31.
    - for place in reversed(range(32)):
    + for place in reversed(range(31)):

    more_than_k: k scores at the threshold or above are enough: at least k.
    - (order >= tried).sum()) >= k
    + (order >= tried).sum()) > k

    above_the_threshold: Those that equal the threshold count as well.
    - int((order >= tried).sum()) >= k
    + int((order > tried).sum()) >= k

    all_ties: Of the scores that equal the threshold only as many are taken as are still wanted.
    - equal & (equal.cumsum(0) <= ties)
    + equal

    no_ties: Scores that equal the threshold are chosen, too, until there are k.
    - above | (equal & (equal.cumsum(0) <= ties))
    + above

    last_ties: Of equal scores the lowest positions win.
    - (equal.cumsum(0) <= ties)
    + (equal.cumsum(0) > equal.sum() - ties)

    one_tie_less: The first of the equal ones counts as one.
    - (equal.cumsum(0) <= ties)
    + (equal.cumsum(0) < ties)

    fewer_than_k_are_none: With fewer than k keys all that are there are chosen.
    - return 0, (order >= 0).nonzero()[:, 0].tolist()
    + return 0, []

    fewer_than_k_are_all: A key with -inf is not chosen, also if there are fewer than k.
    - return 0, (order >= 0).nonzero()[:, 0].tolist()
    + return 0, list(range(len(scores)))

    by_score: The positions are ascending, in the order of the text.
    - return threshold, taken.nonzero()[:, 0].tolist()
    + found = taken.nonzero()[:, 0].tolist()
    + return threshold, sorted(found, key=lambda i: -float(scores[i]))
    """,
)


@answers.wrong("28.2", "The k-th highest is found by its bits here, without a sort.")
def by_sort(scores, k):
    kept = [
        i for i in scores.argsort(descending=True, stable=True).tolist() if scores[i] != -math.inf
    ]
    if len(kept) < k:
        return 0, sorted(kept)
    bits = int(torch.where(scores == 0, 0.0, scores)[kept[k - 1]].view(torch.int32))
    return (bits + 2**31 if bits >= 0 else -1 - bits), sorted(kept[:k])


def by_highest(highest):
    """A wrong answer: `highest(numbers, k)` gives the k-th highest number, and sorts for it."""

    def answer(scores, k):
        numbers = {i: whole_number(x) for i, x in enumerate(scores) if x != -math.inf}
        threshold = highest(list(numbers.values()), k) if len(numbers) >= k else 0
        above = [i for i, number in numbers.items() if number > threshold]
        equal = [i for i, number in numbers.items() if number == threshold]
        return threshold, sorted(above + equal[: k - len(above)])

    return answer


def list_sort(numbers, k):
    numbers.sort(reverse=True)
    return numbers[k - 1]


BITS_HINT = "The k-th highest is found by its bits here, without a sort, be it Python's or NumPy's."
for name, highest in (
    ("by_pythons_sorted", lambda numbers, k: sorted(numbers)[-k]),
    ("by_list_sort", list_sort),
    ("by_heap", lambda numbers, k: heapq.nlargest(k, numbers)[-1]),
    ("by_numpy", lambda numbers, k: int(np.sort(np.array(numbers))[-k])),
):
    answers.wrong("28.2", BITS_HINT, name)(by_highest(highest))


def whole_number(score):
    bits = int((score + 0.0).view(torch.int32)) & 0xFFFFFFFF
    return bits | 0x80000000 if bits < 0x80000000 else bits ^ 0xFFFFFFFF


@answers.alternative("28.2")
def by_bisection(scores, k):
    """Halve the range of whole numbers instead of setting bits."""
    numbers = {i: whole_number(x) for i, x in enumerate(scores) if x != -math.inf}
    if len(numbers) < k:
        return 0, list(numbers)
    low, high = 0, 2**32  # at least k are >= low, fewer are >= high
    while high - low > 1:
        middle = (low + high) // 2
        enough = sum(number >= middle for number in numbers.values()) >= k
        low, high = (middle, high) if enough else (low, middle)
    wanted = k - sum(number > low for number in numbers.values())
    found = []
    for i, number in numbers.items():
        if number > low or (number == low and wanted > 0):
            found.append(i)
            wanted -= number == low
    return low, found


@answers.alternative("28.2")
def by_digits(scores, k):
    """Four passes of 8 bits, as the lesson's kernel."""
    numbers = [whole_number(x) if x != -math.inf else -1 for x in scores]
    wanted, prefix = k, 0
    if sum(number >= 0 for number in numbers) < k:
        return 0, [i for i, number in enumerate(numbers) if number >= 0]
    for shift in (24, 16, 8, 0):
        counts = [0] * 256
        for number in numbers:
            if number >= 0 and number >> shift >> 8 == prefix >> shift >> 8:
                counts[number >> shift & 255] += 1
        digit = 255
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        prefix |= digit << shift
    equal = [i for i, number in enumerate(numbers) if number == prefix][:wanted]
    return prefix, sorted(equal + [i for i, number in enumerate(numbers) if number > prefix])


# ---------------------------------------------------------------- 28.3 the rolling cache

answers.slips(
    "28.3",
    """
    no_sinks: The first `sinks` slots stay as they are.
    - token if token < sinks else sinks + (token - sinks) % window
    + token % (sinks + window)

    window_from_zero: The window begins after the sinks: count its tokens from there.
    - sinks + (token - sinks) % window
    + sinks + token % window

    window_too_long: The sinks are no part of the window.
    - sinks + (token - sinks) % window
    + sinks + (token - sinks) % max(1, window - 1)

    newest_is_kept: The slot of the oldest token is taken, not that of the newest.
    - slots[slot] = token
    + slots[slot] = token if slots[slot] is None else slots[slot]

    positions_in_the_text: Positions are counted within the cache.
    - return slots, [place[token] for token in used], place[seen - 1]
    + return slots, used, seen - 1

    positions_of_slots: The slots of the window are a ring, so their order is not that of the text.
    - {token: position for position, token in enumerate(sorted(used))}
    + {token: position for position, token in enumerate(used)}

    query_in_the_text: The query is at its own key's position, in the cache.
    - place[seen - 1]
    + seen - 1

    query_after_the_keys: The newest token's key is in the cache already, and its query is there.
    - place[seen - 1]
    + place[seen - 1] + 1

    one_token_too_many: Tokens 0 to seen - 1 have been written.
    - for token in range(seen):
    + for token in range(seen + 1):

    ages_from_the_newest: Position 0 is the first token of the text, not the newest.
    - enumerate(sorted(used))
    + enumerate(sorted(used, reverse=True))

    empty_slots_are_shown: Only used slots have a position.
    - [place[token] for token in used]
    + [place.get(token, 0) for token in slots]

    window_by_distance: A sink is as far from the query as it is in the cache, not as in the text.
    - return slots, [place[token] for token in used], place[seen - 1]
    + last = place[seen - 1]
    + return slots, [max(0, last - (seen - 1 - token)) for token in used], last
    """,
)


@answers.alternative("28.3")
def by_formula(seen, sinks, window):
    """Each slot's token by arithmetic, without writing all of the text."""
    slots = [token if token < seen else None for token in range(sinks + window)]
    for slot in range(sinks, sinks + window):
        rounds = (seen - 1 - slot) // window
        if slot < seen and rounds > 0:
            slots[slot] = slot + rounds * window
    count = min(seen, sinks + window)
    begin = seen - count
    rotary = [slot if slot < sinks else slots[slot] - begin for slot in range(count)]
    return slots, rotary, count - 1


@answers.alternative("28.3")
def by_a_queue(seen, sinks, window):
    slots, queue = [None] * (sinks + window), []
    for token in range(seen):
        free = None in slots
        slot = slots.index(None) if free else queue.pop(0)[1]
        slots[slot] = token
        if token >= sinks:
            queue.append((token, slot))
    ranks = [
        sum(other is not None and other < token for other in slots)
        for token in slots
        if token is not None
    ]
    return slots, ranks, max(ranks)


# ---------------------------------------------------------------- 28.4 the kernel

answers.slips(
    "28.4",
    """
    keys_are_counted: Which key is next is in the list. Yours reads the first keys of the text.
    - tl.load(indices_ptr + place, mask=place < num_keys, other=-1)
    + tl.where(place < num_keys, place % (2 * PAGE), -1)

    list_of_rows: A key's row is found through the block table.
    - block = tl.load(table_ptr + key // PAGE, mask=is_key, other=0).to(tl.int64)
    + block = (key // PAGE).to(tl.int64)

    block_in_32_bits: Block · page · D may be more than 2³¹: count in 64 bits.
    - block = tl.load(table_ptr + key // PAGE, mask=is_key, other=0).to(tl.int64)
    + block = tl.load(table_ptr + key // PAGE, mask=is_key, other=0)

    first_row_of_the_block: A key is in row key % PAGE of its block.
    - (block * PAGE + key % PAGE)
    + (block * PAGE)

    empty_places_are_keys: -1 is no key: its score is -inf.
    - scores = tl.where(is_key, scores, float("-inf"))
    +

    zero_for_empty_places: A score of 0 has a weight. An empty place has none.
    - tl.where(is_key, scores, float("-inf"))
    + tl.where(is_key, scores, 0.0)

    stops_at_the_first_hole: -1 may be between keys.
    - is_key = key >= 0
    + is_key = (key >= 0) & (tl.cumsum((key < 0).to(tl.int32), axis=0) == 0)

    last_tile_is_dropped: The last tile is not full, and its keys count.
    - for start in range(0, num_keys, BLOCK):
    + for start in range(0, num_keys // BLOCK * BLOCK, BLOCK):

    first_tile_alone: The list has more tiles than one.
    - for start in range(0, num_keys, BLOCK):
    + for start in range(0, BLOCK, BLOCK):

    no_scale: The scores are multiplied by 1/√D.
    - axis=1) * scale
    + axis=1)

    maximum_from_zero: The running maximum begins at -inf. From 0 on, exp of scores far below zero
        is 0, and so is their sum.
    - m_i = tl.full((), float("-inf"), tl.float32)
    + m_i = tl.zeros((), tl.float32)

    nan_of_empty_tiles: A tile without a key: -inf minus -inf is NaN.
    - safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    + safe = m_new

    no_maximum: Without the maximum exp overflows for large scores.
    - safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    + safe = 0.0

    sum_is_not_rescaled: Under a new maximum the old sum is worth alpha times as much.
    - l_i * alpha + tl.sum(p, axis=0)
    + l_i + tl.sum(p, axis=0)

    values_are_not_rescaled: Under a new maximum the old values are worth alpha times as much.
    - acc * alpha + tl.sum(p[:, None] * v, axis=0)
    + acc + tl.sum(p[:, None] * v, axis=0)

    not_divided: The weights must add up to 1.
    - tl.where(l_i > 0.0, acc / l_i, 0.0)
    + acc

    nan_without_keys: A list without keys gives zeros.
    - tl.where(l_i > 0.0, acc / l_i, 0.0)
    + acc / l_i

    values_from_keys: The values are in v.
    - v = tl.load(v_ptr + row
    + v = tl.load(k_ptr + row

    first_head: Each program has a query head of its own.
    - tl.store(out_ptr + head * DIM + column, out, mask=column < DIM)
    + tl.store(out_ptr + column, out, mask=column < DIM)
    """,
)


def in_pytorch(q, k, v, table, indices, block=16):
    keys = indices[indices >= 0].long()
    if not len(keys):
        return torch.zeros_like(q)
    page = k.shape[1]
    blocks = table[keys // page].long()
    rows_k, rows_v = k[blocks, keys % page], v[blocks, keys % page]
    return (q @ rows_k.T * q.shape[1] ** -0.5).softmax(-1) @ rows_v


attacks(answers, "28.4", in_pytorch)


@triton.jit
def two_loops_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    indices_ptr,
    scale,
    num_keys,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The maximum first, key by key; then the sums."""
    head = tl.program_id(0)
    column = tl.arange(0, DIM)
    q = tl.load(q_ptr + head * DIM + column, mask=column < DIM, other=0.0)
    most = tl.full((), float("-inf"), tl.float32)
    for place in range(0, num_keys):
        key = tl.load(indices_ptr + place, mask=place < num_keys, other=-1)
        block = tl.load(table_ptr + key // PAGE, mask=key >= 0, other=0).to(tl.int64)
        row = (block * PAGE + key % PAGE) * DIM + column
        k = tl.load(k_ptr + row, mask=(column < DIM) & (key >= 0), other=0.0)
        score = tl.where(key >= 0, tl.sum(q * k, axis=0) * scale, float("-inf"))
        most = tl.maximum(most, score)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((DIM,), tl.float32)
    for place in range(0, num_keys):
        key = tl.load(indices_ptr + place, mask=place < num_keys, other=-1)
        block = tl.load(table_ptr + key // PAGE, mask=key >= 0, other=0).to(tl.int64)
        row = (block * PAGE + key % PAGE) * DIM + column
        inside = (column < DIM) & (key >= 0)
        k = tl.load(k_ptr + row, mask=inside, other=0.0)
        v = tl.load(v_ptr + row, mask=inside, other=0.0)
        p = tl.where(key >= 0, tl.exp(tl.sum(q * k, axis=0) * scale - most), 0.0)
        total += p
        acc += p * v
    out = tl.where(total > 0.0, acc / total, 0.0)
    tl.store(out_ptr + head * DIM + column, out, mask=column < DIM)


@answers.alternative("28.4")
def maximum_first(q, k, v, table, indices, block=16):
    out = torch.empty_like(q)
    two_loops_kernel[len(q),](
        q,
        k,
        v,
        out,
        table,
        indices,
        q.shape[1] ** -0.5,
        len(indices),
        DIM=q.shape[1],
        PAGE=k.shape[1],
    )
    return out


@triton.jit
def all_heads_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    indices_ptr,
    scale,
    heads,
    num_keys,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all heads: each row is loaded once."""
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, DIM)
    is_head = head < heads
    at = head[:, None] * DIM + column[None, :]
    q = tl.load(q_ptr + at, mask=is_head[:, None], other=0.0)
    m_i = tl.full((BLOCK_H,), -1e30, tl.float32)
    l_i = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, DIM), tl.float32)
    for start in range(0, num_keys, BLOCK):
        place = start + tl.arange(0, BLOCK)
        key = tl.load(indices_ptr + place, mask=place < num_keys, other=-1)
        is_key = key >= 0
        block = tl.load(table_ptr + key // PAGE, mask=is_key, other=0).to(tl.int64)
        row = (block * PAGE + key % PAGE)[:, None] * DIM + column[None, :]
        k = tl.load(k_ptr + row, mask=is_key[:, None], other=0.0)
        v = tl.load(v_ptr + row, mask=is_key[:, None], other=0.0)
        scores = tl.sum(q[:, None, :] * k[None, :, :], axis=2) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        alpha, p = tl.exp(m_i - m_new), tl.exp(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v[None, :, :], axis=1)
        m_i = m_new
    out = tl.where((l_i > 0.0)[:, None], acc / l_i[:, None], 0.0)
    tl.store(out_ptr + at, out, mask=is_head[:, None])


@answers.alternative("28.4")
def all_heads(q, k, v, table, indices, block=16):
    heads, dim = q.shape
    out = torch.empty_like(q)
    all_heads_kernel[1,](
        q,
        k,
        v,
        out,
        table,
        indices,
        dim**-0.5,
        heads,
        len(indices),
        BLOCK_H=triton.next_power_of_2(heads),
        DIM=dim,
        PAGE=k.shape[1],
        BLOCK=block,
    )
    return out


# ---------------------------------------------------------------- 28.5 the crossing

answers.slips(
    "28.5",
    """
    index_is_free: The indexer reads something of every key: what a key gains is the difference.
    - handicap / (row_bytes - index_bytes)
    + handicap / row_bytes

    k_is_free: The chosen rows are read, too.
    - k * row_bytes + fixed_s * bytes_per_s / batch
    + fixed_s * bytes_per_s / batch

    no_launches: The launches are paid before anything is gained.
    - k * row_bytes + fixed_s * bytes_per_s / batch
    + k * row_bytes

    launches_of_each: A launch is for the whole batch.
    - fixed_s * bytes_per_s / batch
    + fixed_s * bytes_per_s

    batch_times_launches: More sequences share a launch, they do not add to it.
    - fixed_s * bytes_per_s / batch
    + fixed_s * bytes_per_s * batch

    seconds_as_bytes: Seconds times bytes_per_s are the bytes that could have been read meanwhile.
    - fixed_s * bytes_per_s / batch
    + fixed_s / batch

    equal_is_faster: Where both take the same time, none is faster.
    - math.floor(handicap / (row_bytes - index_bytes)) + 1
    + math.ceil(handicap / (row_bytes - index_bytes))

    never_right_after_k: Already one key that is left out may pay for the index rows of all.
    - return math.floor(handicap / (row_bytes - index_bytes)) + 1
    + return max(k + 2, math.floor(handicap / (row_bytes - index_bytes)) + 1)

    rounded_down: The crossing is between two contexts, and the longer one is the first to pay.
    - math.floor(handicap / (row_bytes - index_bytes)) + 1
    + math.floor(handicap / (row_bytes - index_bytes))

    always: If an index row is as large as a row, nothing is ever gained.
    - if index_bytes >= row_bytes:
    -     return None
    + if index_bytes >= row_bytes:
    +     return k

    chosen_by_the_batch: Each sequence has k rows of its own, and context keys of its own.
    - k * row_bytes + fixed_s
    + k * row_bytes / batch + fixed_s
    """,
)


@answers.alternative("28.5")
def from_k_on(row_bytes, index_bytes, k, batch, bytes_per_s, fixed_s):
    """Up to k keys it always loses, so count from there."""
    gain = batch * (row_bytes - index_bytes)
    if gain <= 0:
        return None
    lost = batch * k * index_bytes + fixed_s * bytes_per_s
    return k + int(lost // gain) + 1


@answers.alternative("28.5")
def step_by_step(row_bytes, index_bytes, k, batch, bytes_per_s, fixed_s):
    if row_bytes <= index_bytes:
        return None
    context = max(
        1, int((k * row_bytes + fixed_s * bytes_per_s / batch) / (row_bytes - index_bytes)) - 2
    )
    while batch * context * row_bytes <= (
        batch * (context * index_bytes + min(k, context) * row_bytes) + fixed_s * bytes_per_s
    ):
        context += 1
    return context
