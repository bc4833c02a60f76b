"""Context parallelism: each rank has a part of one long prompt, and K and V go round the ring.

    mine = positions(zigzag, num_tokens, group)
    out = ring_attention(q, k, v, zigzag, num_tokens, group)     # of the rows `mine`

Tensor parallelism splits heads, and every rank still holds all tokens. For a prompt of a million
tokens it is the tokens that have to be split. Everything but attention takes each token alone, so
only `attend` has to talk: a query needs the keys of all ranks. They come to it. In each of P − 1
steps a rank passes the K and V that it holds to its neighbour, and merges what its queries find in
those that came. Lesson 8's `merge` allows that, because parts of a row may be merged in any order.

Which tokens a rank has decides how much it works, because of the causal mask. With consecutive
parts (contiguous) the last rank's queries see nearly all keys and the first one's nearly none: of
P² shares the ranks do 1, 3, 5 … 2P − 1, and all wait for the last. zigzag gives rank r the parts r
and 2P − 1 − r of 2P, an early one and a late one. striped deals the tokens out like cards.

This is for prefill. In decoding one query would wait for a ring of steps; there, the *query* goes
to the ranks, and lesson 10's partial results come back.

Sources: Liu, Zaharia & Abbeel 2023, Ring Attention; Brandon et al. 2023, Striped Attention; the
zigzag of Llama 3 (Llama team 2024, section 3.3.2, "context parallelism").
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Attend
from lessons.l02_naive_attention.rope import apply_rope, rope_tables
from lessons.l08_online_softmax.naive import Partial, finish, from_scores, identity, merge, wide
from lessons.l09_flash_attention.naive import tile_scores
from lessons.l20_parallelism.processes.group import Group
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig

# ---------------------------------------------------------------- which tokens a rank has

Layout = Callable[[int, int, int], Tensor]  # (num_tokens, rank, size) -> positions, [T] ascending


def contiguous(num_tokens: int, rank: int, size: int) -> Tensor:
    """Consecutive tokens: [T]. The first ranks have one more where `size` does not divide them."""
    return torch.arange(num_tokens).tensor_split(size)[rank]


def zigzag(num_tokens: int, rank: int, size: int) -> Tensor:
    """The r-th part from the front and the r-th from the back, of 2P: [T]."""
    parts = torch.arange(num_tokens).tensor_split(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])


def striped(num_tokens: int, rank: int, size: int) -> Tensor:
    """Every P-th token: [T]."""
    return torch.arange(num_tokens)[rank::size]


LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def pairs(layout: Layout, num_tokens: int, size: int) -> list[int]:
    """The (query, key) pairs of each rank under a causal mask: its work."""
    # the query at position i sees the i + 1 keys up to itself
    return [int((layout(num_tokens, rank, size) + 1).sum()) for rank in range(size)]


def imbalance(layout: Layout, num_tokens: int, size: int) -> float:
    """The busiest rank's work over the mean, which is how much longer all ranks take."""
    work = pairs(layout, num_tokens, size)
    return max(work) * size / sum(work)


def longest(layout: Layout, num_tokens: int, size: int) -> int:
    """Tokens of the rank that has most of them."""
    return max(len(layout(num_tokens, rank, size)) for rank in range(size))


def ring_bytes(
    layout: Layout, num_tokens: int, size: int, kv_values: int, element_size: int
) -> int:
    """Bytes that a rank sends for one layer: its K and V, P − 1 times. kv_values: numbers of a
    token, Hkv · (D + Dv). An all-gather sends as many, but then every rank holds the K and V of
    all.
    """
    return (size - 1) * longest(layout, num_tokens, size) * kv_values * element_size


# ---------------------------------------------------------------- attention


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    num_tokens: int,
    group: Group,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks. q: [T, Hq, D], k: [T, Hkv, D],
    v: [T, Hkv, Dv] of the tokens that `layout` gives this rank of num_tokens -> [T, Hq, Dv].

    Computed in float32, or float64 for float64. window: only the last `window` keys count.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    size, rank = group.size, group.rank
    mine = layout(num_tokens, rank, size).to(q.device)
    # of one length on all ranks, so that a neighbour knows how much comes
    rows = longest(layout, num_tokens, size)
    k, v = _padded(k, rows), _padded(v, rows)
    shape = k.shape[1], q.shape[1] // k.shape[1] * len(q)  # [Hkv, group · T]
    found = identity(shape, v.shape[-1], wide(q).dtype, q.device)
    for step in range(size):
        keys = layout(num_tokens, (rank - step) % size, size).to(q.device)
        part = k[: len(keys)], v[: len(keys)]
        if not causal or (len(keys) and len(mine) and keys[0] <= mine[-1]):  # else all is masked
            found = merge(found, _attend_to(q, *part, mine, keys, scale, causal, window))
        if step < size - 1:
            # a real ring sends these while it computes: nothing here needs the result above
            k, v = (group.exchange(x, (rank + 1) % size, (rank - 1) % size) for x in (k, v))
    out = finish(found)[0]  # [Hkv, group · T, Dv]
    return out.view(q.shape[1], len(q), v.shape[-1]).transpose(0, 1).to(q.dtype)


def _attend_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> Partial:
    """What the queries at their positions: [T] find in the keys at theirs: [N], by KV head: m,
    l: [Hkv, group · T].
    """
    scores = tile_scores(wide(q), wide(k), queries, keys, scale, causal, window)  # [Hq, T, N]
    rows = scores.reshape(k.shape[1], -1, len(keys))  # the heads of a group are one matrix
    return from_scores(rows, v.transpose(0, 1))


def _padded(x: Tensor, rows: int) -> Tensor:
    """x: [T, H, D] with rows of zeros after it: [rows, H, D]."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


# ---------------------------------------------------------------- the seam


def attending(config: ModelConfig, layout: Layout, num_tokens: int, group: Group) -> Attend:
    """The decoder's `attend` for the prefill of one prompt whose tokens the ranks share.

    tokens[layout(num_tokens, rank, size)] go into the decoder on each rank, and out come the hidden
    states of these. To decode afterwards, a rank would store the k and v that are rotated here.
    Raises ValueError for a model that does more to its scores than to scale and mask them.
    """
    if config.has_score_rules:
        refuse("config", config.model_type, "a model without a soft-cap and without sinks")
    mine = layout(num_tokens, group.rank, group.size)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = config.local_rope if config.has_local_rope(layer) else config
        cos_sin = rope_tables(shape, mine.to(q.device), q.dtype, num_tokens)
        q, k = apply_rope(q, *cos_sin), apply_rope(k, *cos_sin)
        window, scale = config.sliding_window(layer), config.softmax_scale
        return ring_attention(q, k, v, layout, num_tokens, group, scale, True, window)

    return attend
