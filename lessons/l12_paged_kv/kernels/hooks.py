"""What the two kernels of this lesson leave open: where a key is, how a tile is loaded, who sees
whom, and which keys a program has.

Each is a small Triton function that is handed to a kernel as a `tl.constexpr`. The compiler puts
its lines into the kernel, so a hook costs nothing at run time, and there is one body to read, to
prove and to tune. This lesson has two functions for ROW_OF, SEES and SPLIT_OF each. Lesson 17 (a
tree of tokens) and lesson 19 (a cache of 8 or 4 bits) bring others.

    ROW_OF(table_ptr, sequence, key, is_used, PAGE_SIZE) -> block, row    int64, where a key is
    LOAD(ptr, offset, column, mask, scale_ptr, slot) -> [N, D]            rows of K
    LOAD_V                                                                rows of V, the same
    SEES(query, key, view) -> bool  [M, N]                                view: here the window
    SPLIT_OF(items_ptr, context_lens_ptr, window, split_size, heads, BLOCK_N)
        -> sequence, its length, begin, end, place: which keys a program of decode_kernel has, and
           where head 0 writes what it found; the other heads follow num_programs(1) places apart
"""

from lessons.l10_flash_decoding.optimized import keys_of_split
from lessons.toolbox.kernels.triton_ import tl, triton

NO_WINDOW = 2**30  # keys: more than any context has


@triton.jit
def paged_row(table_ptr, sequence, key, is_used, PAGE_SIZE: tl.constexpr):
    """Key i of a sequence is in row i mod PAGE_SIZE of block table[i // PAGE_SIZE].

    table_ptr: the sequence's own row of the block table. key: [N] int32. is_used: [N], because what
    follows a sequence's blocks is no block's number.
    """
    place = key.to(tl.uint32)  # because a remainder of signed numbers takes five instructions
    block = tl.load(table_ptr + place // PAGE_SIZE, mask=is_used, other=0)
    # int64, because block · stride passes 2^31 in a pool of some gigabytes, and row · stride where
    # the same row of all blocks lies together
    return block.to(tl.int64), (place % PAGE_SIZE).to(tl.int64)


@triton.jit
def contiguous_row(table_ptr, sequence, key, is_used, PAGE_SIZE: tl.constexpr):
    """Lessons 3 to 11: sequence b owns block b, which holds all of its keys. sequence: int64."""
    return sequence, key.to(tl.int64)


@triton.jit
def plain_load(ptr, offset, column, mask, scale_ptr, slot):
    """Rows as they are in the cache. offset: [N, 1] and column: [1, D], in elements; mask: [N, D].

    scale_ptr (at the scales of the KV head) and slot: [N] (which slot of the pool) are for caches
    that store scales.
    """
    return tl.load(ptr + offset + column, mask=mask, other=0.0)


@triton.jit
def causal(query, key, window):
    """A query sees every key up to its own. query: [M, 1] and key: [1, N], positions."""
    return key <= query


@triton.jit
def in_window(query, key, window):
    """A query sees the last `window` keys up to its own."""
    return (key <= query) & (key > query - window)


@triton.jit
def equal_split(items_ptr, context_lens_ptr, window, split_size, heads, BLOCK_N: tl.constexpr):
    """Program (·, split, sequence): the same number of splits for every sequence. Partial results:
    [B, Hq, S].
    """
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(1)
    length = tl.load(context_lens_ptr + sequence).to(tl.int32)
    # Tiles begin at multiples of BLOCK_N, so that none cuts a page of that size in two.
    first = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    begin, end = keys_of_split(split, num_splits, split_size, length, length - first, BLOCK_N)
    return sequence, length, begin, end, sequence * heads * num_splits + split


@triton.jit
def listed_split(items_ptr, context_lens_ptr, window, split_size, heads, BLOCK_N: tl.constexpr):
    """Program (·, item): lesson 10's list of splits by length. sequence −1: nothing to do. Partial
    results: [Hq, I].
    """
    item = items_ptr + tl.program_id(1) * 4
    sequence = tl.load(item).to(tl.int64)
    length = tl.load(context_lens_ptr + tl.maximum(sequence, 0)).to(tl.int32)
    place = tl.load(item + 3).to(tl.int64)
    return sequence, length, tl.load(item + 1), tl.load(item + 2), place
