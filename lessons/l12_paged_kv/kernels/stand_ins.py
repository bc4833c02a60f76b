"""Attention over pages in PyTorch: what generates where kernels would be interpreted.

Read `Reads`, then `read_blocks`. For single queries a block table is a sparse matrix: a row for
each query head, and in it a column for each key that this head reads. So attention over pages is
three operations on sparse matrices, and none of them copies K or V:

    scores = Q Kᵀ, only where the matrix has entries
    p = softmax(scores), row by row
    out = p V

Sequences of all lengths go together. Prompts gather their blocks, sequence by sequence, and so do
single queries where there are few of them.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

from lessons.l03_kv_cache.batch import Batch, new_batch, sequences
from lessons.l04_positions.stand_ins import LESSON_04_TORCH

# Entries whose keys are copied at once, where they have to be: more than a core's cache holds would
# be written to memory, and asked of the system anew in every layer.
PIECE = 4096
# Single queries up to which each gathers its blocks, as a prompt does: making the sparse matrix
# takes as long as a layer's attention of some sequences.
FEW = 2


class Reads(NamedTuple):
    """Which keys the query heads read, as a sparse matrix of N entries in H = R · Hq rows.

    The columns are the rows of a cache seen as [num_blocks · block_size · Hkv, D]: a row a key.
    """

    columns: Tensor  # [N] int64, row after row
    starts: Tensor  # [H + 1] int64: where each row begins in `columns`, and the end
    places: Tensor  # [N] int64: where each entry stands if all rows are padded to the longest
    longest: int  # entries of the longest row


@dataclass
class WorkList:
    """The single queries of a step, R of them, and the blocks that they read. A block may have
    several readers.
    """

    blocks: Tensor  # [W] int64: the blocks of all readers, one reader after the other
    begins: list[int]  # of each reader: where its blocks begin in `blocks`
    lengths: list[int]  # of each reader: tokens of its sequence, with the new one
    rows: Tensor  # [R] int64: the rows of q that belong to them
    block_size: int
    known: dict[tuple, Reads] = field(default_factory=dict)

    def reads(self, num_heads: int, num_kv_heads: int, window: int | None) -> Reads:
        """What the heads read. Made once a step, because all layers with one window share it."""
        key = (num_heads, num_kv_heads, window)
        if key not in self.known:
            self.known[key] = new_reads(self, *key)
        return self.known[key]


def new_reads(work: WorkList, num_heads: int, num_kv_heads: int, window: int | None) -> Reads:
    """The sparse matrix of these queries. Each of its rows is contiguous in `slots` below, so an
    entry's number differs from its slot's place by one number a row.
    """
    slots = (work.blocks[:, None] * work.block_size + torch.arange(work.block_size)).flatten()
    num_readers = len(work.lengths)
    length = torch.tensor(work.lengths)
    seen = length if window is None else length.clamp(max=window)
    first = torch.tensor(work.begins) * work.block_size + length - seen  # key, in `slots`

    counts = seen.repeat_interleave(num_heads)
    ends = counts.cumsum(0)
    starts = ends - counts
    num_entries, longest = int(ends[-1]), int(seen.max())
    head = torch.arange(num_heads) // (num_heads // num_kv_heads)

    def of_each_entry(of_row: Tensor) -> Tensor:
        return of_row.repeat_interleave(counts, output_size=num_entries)

    entry = torch.arange(num_entries)
    slot = slots[entry + of_each_entry(first.repeat_interleave(num_heads) - starts)]
    return Reads(
        columns=slot * num_kv_heads + of_each_entry(head.repeat(num_readers)),
        starts=torch.cat([starts, ends[-1:]]),
        places=entry + of_each_entry(torch.arange(len(counts)) * longest - starts),
        longest=longest,
    )


def paged_batch(
    chunks: Sequence[tuple[Sequence[int], int]],
    block_size: int,
    block_tables: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> Batch:
    """`new_batch` with the list of what its single queries read. Arguments and errors as there."""
    batch = new_batch(chunks, block_size, device, block_tables)
    work = work_list(chunks, block_size, block_tables)
    return replace(batch, work_list=work)


def work_list(
    chunks: Sequence[tuple[Sequence[int], int]],
    block_size: int,
    block_tables: Sequence[Sequence[int]],
) -> WorkList:
    """The work of the sequences that run one token."""
    blocks, begins, lengths, rows, row = [], [], [], [], 0
    for (new, held), table in zip(chunks, block_tables):
        if len(new) == 1:
            begins.append(len(blocks))
            lengths.append(held + 1)
            blocks += table[: held // block_size + 1]
            rows.append(row)
        row += len(new)
    return WorkList(torch.tensor(blocks), begins, lengths, torch.tensor(rows), block_size)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """One new token of each sequence. q: [B, Hq, D] -> [B, Hq, Dv]; k_cache, v_cache: [num_blocks,
    block_size, Hkv, …].
    """
    if len(q) <= FEW:
        return prefill(q, k_cache, v_cache, batch, softmax_scale, window)
    return read_blocks(q, k_cache, v_cache, batch.work_list, softmax_scale, window)


def read_blocks(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: WorkList,
    softmax_scale: float,
    window: int | None = None,
) -> Tensor:
    """Each query over its blocks. q: [R, Hq, D] -> [R, Hq, Dv]; caches as in `decode`."""
    num_queries, num_heads, head_dim = q.shape
    reads = work.reads(num_heads, k_cache.shape[2], window)
    keys = cache_rows(k_cache)[:, :head_dim]
    scores = products(q.flatten(0, 1), keys, reads) * softmax_scale
    # Padded for the softmax only, because PyTorch has none for rows of different lengths.
    padded = scores.new_full((num_queries * num_heads, reads.longest), -torch.inf)
    padded.view(-1).scatter_(0, reads.places, scores)
    p = padded.softmax(-1).view(-1).index_select(0, reads.places).to(v_cache.dtype)
    out = embedding_bag(
        reads.columns,
        cache_rows(v_cache),
        reads.starts,
        mode="sum",
        per_sample_weights=p,
        include_last_offset=True,
    )
    return out[:, : v_cache.shape[-1]].unflatten(0, (num_queries, num_heads))


def cache_rows(slots: Tensor) -> Tensor:
    """A cache as one row a key, not copied. slots: [num_blocks, block_size, Hkv, D] ->
    [num_blocks · block_size · Hkv, D or wider].

    Wider where a row is the front of a wider one: a value of lesson 6 is the front of its latent.
    Then the whole row is returned, because a dense cache need not be copied.
    """
    num_blocks, block_size, num_kv_heads, _ = slots.shape
    width = slots.stride(2)
    if slots.stride() != (block_size * num_kv_heads * width, num_kv_heads * width, width, 1):
        return slots.reshape(-1, slots.shape[-1])
    return slots.as_strided((num_blocks * block_size * num_kv_heads, width), (width, 1))


def products(q: Tensor, keys: Tensor, reads: Reads) -> Tensor:
    """The entries of Q Kᵀ. q: [H, D]; keys: [slots, D] -> [N], float32 at least."""
    if can_sample(q.dtype):
        return chosen_products(q, keys, reads.starts, reads.columns)
    q, heads = q.float(), torch.arange(len(q))
    rows = heads.repeat_interleave(reads.starts.diff(), output_size=len(reads.columns))
    pieces = zip(rows.split(PIECE), reads.columns.split(PIECE))
    return torch.cat([(q.index_select(0, r) * keys.index_select(0, c)).sum(-1) for r, c in pieces])


def chosen_products(q: Tensor, keys: Tensor, starts: Tensor, columns: Tensor) -> Tensor:
    """`products` by PyTorch's product for sparse results. q: [H, D]; keys: [slots, D]; starts and
    columns as in Reads -> [N].
    """
    entries = q.new_zeros(len(columns))
    wanted = torch.sparse_csr_tensor(
        starts, columns, entries, (len(q), len(keys)), check_invariants=False
    )
    return torch.sparse.sampled_addmm(wanted, q, keys.T, beta=0).values()


@cache
def can_sample(dtype: torch.dtype) -> bool:
    """Whether this PyTorch computes chosen entries of a product in the dtype. Tried, because no
    list says so.
    """
    with warnings.catch_warnings():
        # PyTorch says once that its sparse matrices are new, and once that it does not check them.
        warnings.simplefilter("ignore")
        try:
            one = torch.ones(1, 1, dtype=dtype)
            chosen_products(one, one, torch.tensor([0, 1]), torch.tensor([0]))
        except (RuntimeError, NotImplementedError):
            return False
    return True


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Any number of new tokens of each sequence. q: [T, Hq, D] -> [T, Hq, Dv]; caches as in
    `decode`.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    work = batch.work_list
    has_list = len(work.rows) > FEW
    if has_list:
        singles = read_blocks(q[work.rows], k_cache, v_cache, work, softmax_scale, window)
        out[work.rows] = singles
    for b, (rows, length) in enumerate(sequences(batch)):
        if rows.stop - rows.start > 1 or not has_list:
            k, v = (gathered(cache, batch, b, length) for cache in (k_cache, v_cache))
            out[rows] = chunk_attention(q[rows], k, v, softmax_scale, window)
    return out


def gathered(cache: Tensor, batch: Batch, b: int, length: int) -> Tensor:
    """The first `length` rows of sequence b. cache: [num_blocks, block_size, Hkv, D] -> [length,
    Hkv, D].
    """
    blocks = batch.block_table[b, : -(-length // cache.shape[1])]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: int | None
) -> Tensor:
    """The last tokens of a sequence over all of it. q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv,
    Dv] -> [Tq, Hq, Dv]. PyTorch's fused attention, because no N×N scores are stored.
    """
    held = len(k) - len(q)
    sees = None  # a single query sees all
    if window is not None or (held and len(q) > 1):
        position = torch.arange(len(k), device=q.device)
        distance = position[held:, None] - position
        sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=sees, is_causal=not held and sees is None, scale=softmax_scale,
        enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)


LESSON_12_TORCH = LESSON_04_TORCH._replace(prefill=prefill, decode=decode)
