"""Attention over chosen keys, the plain way: all scores, and a mask over those that were not chosen.

    indices = top_k(index_scores(q_index, weights, k_index, positions), 2048)
    out = sparse_attention(q, k, v, indices)

A choice is a list of keys for each query: indices: [T, K] int32, positions in the text in ascending
order, then -1 for places that are not used. Who makes the list does not matter to the attention:
`window_with_sinks` (the last keys and the first), `top_k` of `index_scores` (DeepSeek's indexer), or
`top_k` of `oracle_scores` (what the model itself would look at most).

The two functions over pages read every row of a context, also those that were not chosen. optimized.py
reads the chosen rows alone.

Sources: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equations 1 and 2; Xiao et al. 2023, Efficient
Streaming Language Models with Attention Sinks, section 3.
"""

import math

import torch
from torch import Tensor

from lessons.l12_paged_kv.naive import gathered
from lessons.l19_kv_quantization.formats import wide
from lessons.toolbox.model.arguments import check_whole


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
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    is_chosen = chosen(indices, len(k))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,nhd->thn", q, k) * scale  # all of them
    scores = scores.masked_fill(~is_chosen[:, None], -math.inf)
    has_keys = is_chosen.any(-1)[:, None, None]
    weights = torch.where(has_keys, scores, 0.0).softmax(-1) * has_keys
    return torch.einsum("thn,nhd->thd", weights, v)


def chosen(indices: Tensor, count: int) -> Tensor:
    """The mask of a list. indices: [T, K], -1: none -> [T, count] bool. Raises ValueError."""
    if indices.numel() and not -1 <= indices.min() <= indices.max() < count:
        raise ValueError(
            f"indices: got {int(indices.min())} to {int(indices.max())}; accepted: -1 to {count - 1}"
        )
    mask = torch.zeros(len(indices), count + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(1, torch.where(indices < 0, count, indices).long(), True)
    return mask[:, :count]  # the last column took the places that are not used


# ---------------------------------------------------------------- who chooses


def index_scores(q: Tensor, weights: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """DeepSeek's index score of each key for each query: Σ_h weights[t, h] · ReLU(q[t, h] · k[s]).

    q: [T, Hi, Di], weights: [T, Hi], k: [N, Di] -> [T, N] float32 (float64 if they are).
    positions: [T], where a query is in the text; it sees keys up to its own, the others get -inf.
    """
    products = torch.einsum("thd,nd->thn", wide(q), wide(k)).relu()
    scores = torch.einsum("th,thn->tn", wide(weights), products)
    return unseen_to_minus_infinity(scores, positions)


def oracle_scores(q: Tensor, k: Tensor, softmax_scale: float, positions: Tensor) -> Tensor:
    """How much weight the model gives each key, all heads together. q: [T, Hq, D], k: [N, Hkv, D],
    positions: [T] -> [T, N]; keys that a query does not see get -inf.

    To know it, all scores have been computed. So it saves nothing, and shows what the best choice
    of so many keys could do. DeepSeek trains the indexer to imitate it.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("thd,nhd->htn", wide(q), wide(k)) * softmax_scale
    weights = unseen_to_minus_infinity(scores, positions).softmax(-1)
    return unseen_to_minus_infinity(weights.sum(0), positions)


def unseen_to_minus_infinity(scores: Tensor, positions: Tensor) -> Tensor:
    """scores: [..., T, N], with -inf for keys after a query's own position. positions: [T]."""
    keys = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(keys > positions[:, None], -math.inf)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The keys with the k highest scores. scores: [T, N] -> [T, k] int32, ascending, then -1.

    Of equal scores the lowest positions win; -0.0 equals 0.0. NaN counts as the highest, as in
    torch.topk, so that a fault is not hidden. A key with -inf is not there and is never chosen.
    Raises ValueError.
    """
    check_whole(k=k)
    count = scores.shape[-1]
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    is_there = scores.gather(-1, order) != -math.inf
    order = torch.where(is_there, order, count).sort(dim=-1).values
    indices = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
    indices[:, : order.shape[1]] = torch.where(order == count, -1, order)
    return indices


def window_with_sinks(positions: Tensor, window: int, sinks: int = 0) -> Tensor:
    """The last `window` keys of each query, its own included, and the first `sinks` of the text.
    positions: [T] -> [T, sinks + window] int32, ascending, then -1. Raises ValueError.
    """
    check_whole(window=window)
    check_whole(0, sinks=sinks)
    own = positions.long()[:, None]
    first = torch.arange(sinks, device=own.device).expand(len(own), -1)
    last = own - window + 1 + torch.arange(window, device=own.device)
    first = torch.where(first < last[:, :1].clamp(min=0), first, -1)  # no key twice
    keys = torch.cat([first, last], dim=1)
    # what is not used goes to the end
    order = torch.where(keys < 0, 2**31, keys).sort(dim=-1).values
    return torch.where(order == 2**31, -1, order).to(torch.int32)


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
    rows = [wide(q).new_empty(0, max_context_len)]
    for t, (sequence, position) in enumerate(zip(sequences.tolist(), positions.tolist())):
        own = gathered(keys[:, :, None], block_table[sequence], position + 1)[:, 0]
        if scales is not None:
            factor = gathered(scales[:, :, None, None], block_table[sequence], position + 1)
            own = own.view(torch.float8_e4m3fn).to(factor.dtype) * factor[:, 0]
        one = index_scores(q[t, None], weights[t, None], own, positions[t, None])
        rest = max_context_len - one.shape[1]
        rows.append(torch.nn.functional.pad(one, (0, rest), value=-math.inf))
    return torch.cat(rows)


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
    outs = [q.new_empty(0, q.shape[1], kv_lora_rank)]
    for t, sequence in enumerate(sequences.tolist()):
        length = int(indices[t].max()) + 1 if indices.shape[1] else 0
        rows = gathered(latents[:, :, None], block_table[sequence], length)  # one KV head
        one = slice(t, t + 1)
        values = rows[..., :kv_lora_rank]
        outs.append(sparse_attention(q[one], rows, values, indices[one], softmax_scale))
    return torch.cat(outs)
