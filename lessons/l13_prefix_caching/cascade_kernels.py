"""Cascade attention by lesson 10's two kernels: the shared prefix is a few more splits.

`split_decode_kernel` walks one split of the keys with the query heads of a KV head as the rows of a
tile. Nothing in it says that these rows belong to one sequence. So `prefix_splits` hands it the
queries of many sequences as if they were heads of one. Its results are put next to what each
sequence finds in its own suffix, and `combine_kernel` merges all of it.

Sources: as in cascade.py.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lessons.l05_gqa.arguments import MAX_GROUP, MAX_QUERY_TILE
from lessons.l05_gqa.tiles import has_matrix_units, tiles_for
from lessons.l10_flash_decoding.optimized import combine, split_decode
from lessons.l10_flash_decoding.splits import PROGRAMS_PER_SM, cdiv, plan_splits, sms_of
from lessons.l13_prefix_caching.cascade import rows_of_kv_heads, rows_of_sequences


def cascade_decode(
    q: Tensor,
    k_prefix: Tensor,
    v_prefix: Tensor,
    k_suffix: Tensor,
    v_suffix: Tensor,
    suffix_lens: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """One query a sequence over a shared prefix and its own suffix. q: [B, Hq, D] -> [B, Hq, D].

    k_prefix, v_prefix: [P, Hkv, D]; k_suffix, v_suffix: [B, capacity, Hkv, D]; suffix_lens: [B]
    int32 or int64. float32 inside. Raises ValueError.
    """
    check_prefix(k_prefix, v_prefix, k_suffix)
    num_splits = splits_for(q, k_suffix, len(q))
    own_out, own_lse = split_decode(
        q, k_suffix, v_suffix, suffix_lens, softmax_scale, num_splits=num_splits
    )
    if not len(k_prefix) or not len(q):
        return combine(own_out, own_lse, q.dtype)[0]
    out, lse = prefix_splits(q, k_prefix, v_prefix, softmax_scale)
    return combine(torch.cat([out, own_out], 2), torch.cat([lse, own_lse], 2), q.dtype)[0]


def prefix_splits(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """What all queries find in each split of the same keys. q: [B, Hq, D]; k, v: [P, Hkv, D] ->
    partial_out: [B, Hq, S, D], partial_lse: [B, Hq, S], float32.
    """
    (num_sequences, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    together = sequences_in_a_tile(num_heads // num_kv_heads, head_dim)
    num_tiles = cdiv(num_sequences, together)
    together = cdiv(num_sequences, num_tiles)  # equal tiles, because the last one is filled up
    q = pad(q, (0, 0, 0, 0, 0, num_tiles * together - num_sequences))
    # [tiles, Hkv · together · group, D]: the kernel takes them for the heads of `tiles` sequences.
    rows = torch.stack([rows_of_kv_heads(x, num_kv_heads).flatten(0, 1) for x in q.split(together)])
    # Stride 0: all tiles read the same keys, and none is copied.
    keys, values = (x.expand(num_tiles, *x.shape) for x in (k, v))
    lens = torch.full((num_tiles,), len(k), dtype=torch.int32, device=q.device)
    num_splits = splits_for(rows, keys, num_tiles)
    found = split_decode(rows, keys, values, lens, softmax_scale, num_splits=num_splits)
    out, lse = (
        torch.cat([rows_of_sequences(x.unflatten(0, (num_kv_heads, -1)), together) for x in xs])
        for xs in found
    )
    return out[:num_sequences], lse[:num_sequences]


def sequences_in_a_tile(group: int, head_dim: int) -> int:
    """How many sequences' queries fit into a program's tile of rows, which are in its registers."""
    block_d = tiles_for(group, head_dim, True)["BLOCK_D"]
    # Narrow heads run on 4 warps (`warps_for`), whose registers spill at 64 rows.
    most = 32 if block_d <= 64 else min(MAX_GROUP, MAX_QUERY_TILE // block_d)
    return max(1, most // group)


def splits_for(q: Tensor, keys: Tensor, num_sequences: int) -> int:
    """Enough splits to fill the GPU. q: [B, Hq, D]; keys: [B, capacity, Hkv, D]."""
    slots = sms_of(q.device) * PROGRAMS_PER_SM
    block_n = tiles_for(q.shape[1] // keys.shape[2], q.shape[2], has_matrix_units(q))["BLOCK_N"]
    return plan_splits(num_sequences * keys.shape[2], keys.shape[1], block_n, slots)


def check_prefix(k_prefix: Tensor, v_prefix: Tensor, k_suffix: Tensor) -> None:
    """Raise ValueError unless k_prefix, v_prefix: [P, Hkv, D] fit k_suffix: [B, capacity, Hkv, D].
    The rest is checked by `split_decode`.
    """
    shapes = [tuple(x.shape) for x in (k_prefix, v_prefix, k_suffix)]
    fits = k_prefix.ndim == 3 and k_prefix.shape == v_prefix.shape
    if not fits or k_suffix.ndim != 4 or k_prefix.shape[1:] != k_suffix.shape[2:]:
        raise ValueError(
            f"k_prefix, v_prefix, k_suffix: got {shapes}; accepted: [P, Hkv, D] twice, "
            f"[B, capacity, Hkv, D]"
        )
