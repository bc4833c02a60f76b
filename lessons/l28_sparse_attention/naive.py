"""Attention over chosen keys, the plain way: all scores, and a mask over what was not chosen.

    indices = top_k(index_scores(q_index, weights, k_index, positions), 2048)
    out = sparse_attention(q, k, v, indices)

A choice is a list of keys for each query: indices: [T, K] int32, positions in the text in
ascending order, then -1 for places that are not used. Who makes the list does not matter to the
attention: `window_with_sinks` (the last keys and the first), `top_k` of `index_scores` (DeepSeek's
indexer), or `top_k` of `oracle_scores` (what the model itself would look at most).

The two functions over pages read every row of a context, also those that were not chosen.
optimized.py reads the chosen rows alone.

Sources: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equations 1 and 2; Xiao et al. 2023, Efficient
Streaming Language Models with Attention Sinks, section 3.
"""

import math

import torch
from torch import Tensor

from lessons.l12_paged_kv.naive import gathered
from lessons.l19_kv_quantization.formats import wide
from lessons.toolbox.model.arguments import check_whole, refuse


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """q: [T, Hq, D], k: [N, Hkv, D], v: [N, Hkv, Dv] -> [T, Hq, Dv].

    indices: [T, K] int32 or int64, the keys of each query; -1: none. A query without keys gives
    zeros. Nothing is masked but by the list, so causality is up to the one who made it. Raises
    ValueError for a list that names other keys.
    """
    scale = softmax_scale
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    is_chosen = chosen(indices, len(k))[:, None]
    k = for_each_query_head(k, q)
    v = for_each_query_head(v, q)

    scores = torch.einsum("thd,nhd->thn", q, k)  # all of them
    scores = scale * scores
    scores = scores.masked_fill(~is_chosen, -math.inf)
    has_keys = is_chosen.any(-1, keepdim=True)
    scores = torch.where(has_keys, scores, 0.0)
    weights = scores.softmax(-1) * has_keys
    return torch.einsum("thn,nhd->thd", weights, v)


def for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """x: [N, Hkv, D] with each head as often as query heads read it: [N, Hq, D]. q: [T, Hq, D]."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, dim=1)


def chosen(indices: Tensor, count: int) -> Tensor:
    """The mask of a list. indices: [T, K], -1: none -> [T, count] bool. Raises ValueError."""
    check_keys(indices, count)
    columns = torch.where(indices < 0, count, indices)
    mask = torch.zeros(
        len(indices),
        count + 1,
        dtype=torch.bool,
        device=indices.device,
    )
    mask.scatter_(1, columns.long(), True)
    return mask[:, :count]  # the last column took the places that are not used


def check_keys(indices: Tensor, count: int) -> None:
    """Raise ValueError if a list names keys that are not there. indices: [T, K]."""
    if not indices.numel():
        return
    least = int(indices.min())
    most = int(indices.max())
    if least < -1 or most >= count:
        got = f"{least} to {most}"
        refuse("indices", got, f"-1 to {count - 1}")


# ---------------------------------------------------------------- who chooses


def index_scores(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    positions: Tensor,
) -> Tensor:
    """DeepSeek's index score of a key for a query: Σ_h weights[t, h] · ReLU(q[t, h] · k[s]).

    q: [T, Hi, Di], weights: [T, Hi], k: [N, Di] -> [T, N] float32 (float64 if they are).
    positions: [T], where a query is in the text; it sees keys up to its own, the others get -inf.
    """
    products = torch.einsum("thd,nd->thn", wide(q), wide(k))
    products = products.relu()
    scores = torch.einsum("th,thn->tn", wide(weights), products)
    return unseen_to_minus_infinity(scores, positions)


def oracle_scores(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    positions: Tensor,
) -> Tensor:
    """How much weight the model gives each key, all heads together. q: [T, Hq, D], k: [N, Hkv, D],
    positions: [T] -> [T, N]; keys that a query does not see get -inf.

    To know it, all scores have been computed. So it saves nothing, and shows what the best choice
    of so many keys could do. DeepSeek trains the indexer to imitate it.
    """
    k = for_each_query_head(k, q)
    scores = torch.einsum("thd,nhd->htn", wide(q), wide(k))
    scores = softmax_scale * scores
    scores = unseen_to_minus_infinity(scores, positions)
    weights = scores.softmax(-1).sum(0)
    return unseen_to_minus_infinity(weights, positions)


def unseen_to_minus_infinity(scores: Tensor, positions: Tensor) -> Tensor:
    """scores: [..., T, N], with -inf for keys after a query's own position. positions: [T]."""
    keys = torch.arange(scores.shape[-1], device=scores.device)
    is_unseen = keys > positions[:, None]
    return scores.masked_fill(is_unseen, -math.inf)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The keys with the k highest scores. scores: [T, N] -> [T, k] int32, ascending, then -1.

    Of equal scores the lowest positions win; -0.0 equals 0.0. NaN counts as the highest, as in
    torch.topk, so that a fault is not hidden. A key with -inf is not there and is never chosen.
    Raises ValueError.
    """
    check_whole(k=k)
    ordered = scores.sort(
        dim=-1,
        descending=True,
        stable=True,
    )
    best = ordered.indices[:, :k]
    is_there = ordered.values[:, :k] != -math.inf
    rest = k - best.shape[1]
    best = torch.where(is_there, best, -1)
    best = torch.nn.functional.pad(best, (0, rest), value=-1)
    return ascending(best)


def ascending(keys: Tensor) -> Tensor:
    """Lists in the order of the text, -1 at the end: [T, K] -> [T, K] int32."""
    last = 2**31
    keys = keys.long()
    keys = torch.where(keys < 0, last, keys)
    keys = keys.sort(dim=-1).values
    keys = torch.where(keys == last, -1, keys)
    return keys.to(torch.int32)


def window_with_sinks(
    positions: Tensor,
    window: int,
    sinks: int = 0,
) -> Tensor:
    """The last `window` keys of each query, its own included, and the first `sinks` of the text.
    positions: [T] -> [T, sinks + window] int32, ascending, then -1. Raises ValueError.
    """
    check_whole(window=window)
    check_whole(0, sinks=sinks)
    own = positions.long()[:, None]
    begin = own - window + 1
    steps = torch.arange(window, device=own.device)
    last = begin + steps
    first = torch.arange(sinks, device=own.device)
    first = first.expand(len(own), sinks)
    first = torch.where(first < begin, first, -1)  # no key twice
    keys = torch.cat([first, last], dim=1)
    return ascending(keys)


# ---------------------------------------------------------------- over pages


def paged_index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor | None,
    block_table: Tensor,
    sequences: Tensor,
    positions: Tensor,
    max_context_len: int,
) -> Tensor:
    """`index_scores` of queries of several sequences, whose keys are in pages. q: [T, Hi, Di],
    weights: [T, Hi], keys: [num_blocks, block_size, Di] -> [T, max_context_len].

    scales: [num_blocks, block_size] if keys are codes of E4M3 in uint8, one scale a token; None if
    they are numbers. block_table: [B, max_blocks]; sequences, positions: [T], whose query it is and
    where it is. -inf after a query's position.
    """
    scores = wide(q).new_full((len(q), max_context_len), -math.inf)
    for t in range(len(q)):
        length = int(positions[t]) + 1
        blocks = block_table[sequences[t]]
        k = rows_of(keys, blocks, length)
        if scales is not None:
            factors = rows_of(scales[..., None], blocks, length)
            numbers = k.view(torch.float8_e4m3fn)
            k = numbers.to(factors.dtype) * factors
        one = slice(t, t + 1)
        scores[one, :length] = index_scores(
            q[one],
            weights[one],
            k,
            positions[one],
        )
    return scores


def rows_of(pages: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first rows of a sequence. pages: [num_blocks, block_size, D], blocks: [max_blocks], its
    row of the block table -> [length, D].
    """
    one_head = pages.unsqueeze(2)
    rows = gathered(one_head, blocks, length)
    return rows.squeeze(1)


def sparse_mla(
    q: Tensor,
    latents: Tensor,
    block_table: Tensor,
    indices: Tensor,
    sequences: Tensor,
    softmax_scale: float,
    kv_lora_rank: int = 512,
) -> Tensor:
    """Absorbed queries over chosen latents in pages. q: [T, H, rank + rope], latents: [num_blocks,
    block_size, rank + rope] -> [T, H, rank].

    block_table: [B, max_blocks]; indices: [T, K] as in `sparse_attention`; sequences: [T], whose
    query it is. Every row up to the last chosen one is read.
    """
    tokens, num_heads, _ = q.shape
    out = q.new_empty(tokens, num_heads, kv_lora_rank)
    for t in range(tokens):
        one = slice(t, t + 1)
        length = int(indices[one].max()) + 1
        blocks = block_table[sequences[t]]
        rows = rows_of(latents, blocks, length)
        rows = rows.unsqueeze(1)  # one KV head
        out[one] = sparse_attention(
            q[one],
            rows,
            rows[..., :kv_lora_rank],
            indices[one],
            softmax_scale,
        )
    return out
