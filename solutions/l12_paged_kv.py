"""Exercises of lesson 12: what blocks leave empty, who owns which block, and attention that reads
the block table.
"""

from torch import Tensor

from lessons.l12_paged_kv.blocks import BlockPool, OutOfBlocks  # noqa: F401
from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise("12.1", "Predict: what stays empty", minutes=15, difficulty=1)
def memory_plan(
    lengths: list[int],
    reserved_tokens: int,
    block_size: int,
    num_blocks: int,
    kv_bytes_per_token: int,
) -> tuple[list[int], float, float, int, int]:
    """How sequences that hold `lengths` tokens fit into a pool of num_blocks blocks of block_size
    tokens, and in reservations of reserved_tokens each.

    Returns, in this order:
        how many blocks each sequence owns
        the share of the reserved slots that holds no token, 0 to 1
        the share of the slots in owned blocks that holds no token, 0 to 1
        how many sequences of reserved_tokens tokens the pool's blocks would hold at once
        the bytes of the whole pool, free blocks included
    Nothing is shared. All sequences fit. Errors: none to raise.

    Example: lengths [5, 8], 16 tokens reserved each, 10 blocks of 4 tokens, 100 bytes a token
        blocks [2, 2]; reserved 32 slots for 13 tokens: 19/32; owned 16 slots: 3/16
        16 tokens take 4 blocks, so 2 at once; 40 slots are 4000 bytes
        -> ([2, 2], 0.59375, 0.1875, 2, 4000)
    Write down your guess first: prompts of 200, 500 and 100 tokens, 2048 reserved each, 1000 blocks
    of 16, Llama-2-7B (32 layers of 32 KV heads, 128 values each, 16 bits).
    """
    # SOLUTION
    blocks = [-(-length // block_size) for length in lengths]
    used = sum(lengths)
    reserved = reserved_tokens * len(lengths)
    owned = sum(blocks) * block_size
    at_once = num_blocks // -(-reserved_tokens // block_size)
    pool_bytes = num_blocks * block_size * kv_bytes_per_token
    return blocks, 1 - used / reserved, 1 - used / owned, at_once, pool_bytes
    # END


@exercise(
    "12.2",
    "The block manager: grow, fork, free",
    minutes=50,
    difficulty=3,
    replaces="lessons.l12_paged_kv.blocks:BlockManager",
)
class BlockManager:
    """Which blocks belong to which sequence. This lesson's rung runs on yours.

    self.pool is a BlockPool, which is done:
        pool.num_free            free blocks
        pool.owners[block]       how many owners a block has
        pool.take(count)         a list of free blocks, each with one owner now; OutOfBlocks if
                                 there are fewer, and then it takes none
        pool.share(blocks)       each gets one owner more
        pool.release(blocks)     each loses one; a block without an owner is free
    self.tables[sequence] is the list of a sequence's blocks, in the order of its tokens.

    A sequence that holds n tokens owns ceil(n / block_size) blocks, never one more. Forked
    sequences share their blocks. Before one of them writes a token into a block that others own
    too, it must get its own copy: copy on write.

    Example: blocks of 4, sequence 0 holds 6 tokens in blocks [0, 1]
        fork(0, 1)          tables {0: [0, 1], 1: [0, 1]}
        needs(1, 6, 7)   -> 1, for the copy
        grow(1, 6, 7)    -> [(1, 2)]: copy block 1 to block 2; tables[1] is [0, 2]
        grow(0, 6, 7)    -> []: no other sequence owns block 1 now
        grow(0, 7, 9)    -> []: token 9 is the first of a new block; tables[0] is [0, 1, 3]
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def can_grow(self, sequence: int, held: int, tokens: int) -> bool:
        """Whether `grow` with the same arguments would succeed."""
        return self.needs(sequence, held, tokens) <= self.num_free

    def needs(self, sequence: int, held: int, tokens: int) -> int:
        """How many free blocks grow(sequence, held, tokens) would take. Changes nothing.

        A sequence without a table is new, and holds 0 tokens.
        """
        # SOLUTION
        table = self.tables.get(sequence, [])
        at = held // self.block_size  # where the next token goes
        is_written = tokens > held and at < len(table)
        is_copied = is_written and self.pool.owners[table[at]] > 1
        return self.blocks_for(tokens) - len(table) + is_copied
        # END

    def grow(self, sequence: int, held: int, tokens: int) -> list[tuple[int, int]]:
        """Give a sequence that holds `held` tokens room for `tokens` in all, at least as many.

        Returns the copies to make, (from block, to block), before anything is written: an empty
        list, or one pair. Raises OutOfBlocks if there are too few free blocks, and then changes
        nothing.
        """
        # SOLUTION
        table = self.tables.get(sequence, [])
        fresh = self.pool.take(self.needs(sequence, held, tokens))
        added = self.blocks_for(tokens) - len(table)
        copies = []
        if len(fresh) > added:  # one more than the table grows by: it is for a copy
            at = held // self.block_size
            copies = [(table[at], fresh[0])]
            self.pool.release([table[at]])
            table[at] = fresh.pop(0)
        self.tables[sequence] = table + fresh
        return copies
        # END

    def fork(self, parent: int, child: int) -> None:
        """A new sequence `child` that holds what `parent` holds. Takes no block."""
        # SOLUTION
        self.tables[child] = list(self.tables[parent])
        self.pool.share(self.tables[child])
        # END

    def free(self, sequence: int) -> None:
        """Forget a sequence. Blocks that no other sequence owns are free."""
        # SOLUTION
        self.pool.release(self.tables.pop(sequence))
        # END


@triton.jit
def paged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    block_table_ptr,
    context_lens_ptr,
    softmax_scale,
    max_blocks,
    stride_kblock,
    stride_kn,
    stride_kh,
    stride_vblock,
    stride_vn,
    stride_vh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per sequence and query head. q, out: [B, Hq, HEAD_DIM] and block_table: [B,
    max_blocks], all dense; head h reads KV head h // GROUP.

    BLOCK_N keys at a time, whatever PAGE_SIZE is, so a tile may span several pages. BLOCK_D is
    the power of two that holds HEAD_DIM values.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    row = (sequence * tl.num_programs(1) + head) * HEAD_DIM
    q = tl.load(q_ptr + row + column, mask=column < HEAD_DIM, other=0.0) * softmax_scale
    length = tl.load(context_lens_ptr + sequence)
    # SOLUTION 12.3
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    m_i = tl.full((), float("-inf"), tl.float32)
    l_i = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        in_use = key < length
        entry = block_table_ptr + sequence * max_blocks + key // PAGE_SIZE
        page = tl.load(entry, mask=in_use, other=0).to(tl.int64)
        inside = in_use[:, None] & (column < HEAD_DIM)[None, :]
        k_row = page * stride_kblock + key % PAGE_SIZE * stride_kn
        v_row = page * stride_vblock + key % PAGE_SIZE * stride_vn
        k = tl.load(k_ptr + k_row[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + v_row[:, None] + column[None, :], mask=inside, other=0.0)
        scores = tl.where(in_use, tl.sum(q[None, :] * k, axis=1), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(scores - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        m_i = m_new
    out = tl.where(length > 0, acc / l_i, 0.0)
    tl.store(out_ptr + row + column, out, mask=column < HEAD_DIM)
    # END


@exercise("12.3", "A decode kernel that reads the block table", minutes=50, difficulty=3)
def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, context_lens: Tensor
) -> Tensor:
    """One query per sequence over its blocks, by `paged_kernel` above, which is yours to write;
    this wrapper is done. q: [B, Hq, D] float32 -> [B, Hq, D].

    k_cache, v_cache: [num_blocks, block_size, Hkv, D] float32, dense in the last dimension, with
    their own strides. block_table: [B, max_blocks] int32: key i of sequence b is in row i mod
    block_size of block block_table[b, i // block_size]. context_lens: [B] int32, keys of each
    sequence, its own included; 0 gives zeros. block_size is any number from 1 on. Rows after a
    sequence's keys hold NaN, and what follows its blocks in the table is not its own. Scores
    are scaled by 1 / √D; keep a running maximum, sum and weighted values, as lesson 8. Every load
    has a mask and `other=`. Page numbers times strides need int64. Aim: no copy of K or V. Errors:
    none to raise.

    Example, one head, D = 1, blocks of 2, q = [0], table [[3, 1]], length 3: all scores are 0, so
    the result is the mean of v_cache[3, 0], v_cache[3, 1] and v_cache[1, 0].
    """
    (num_sequences, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    out = q.new_full(q.shape, float("nan"))
    paged_kernel[num_sequences, num_heads](
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        context_lens,
        head_dim**-0.5,
        block_table.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_N=16,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
    return out
