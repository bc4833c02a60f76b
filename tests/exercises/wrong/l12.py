"""Wrong answers to lesson 12's exercises: real slips, each with a hint."""

import torch

from lessons.l12_paged_kv.blocks import BlockPool
from lessons.toolbox.kernels.triton_ import tl, triton
from tests.exercises.wrong import Answers
from tests.exercises.wrong.attacks import attacks

answers = Answers()

# ---------------------------------------------------------------- 12.1 predict

answers.slips(
    "12.1",
    """
    rounds_down: The last tokens need a block too, even if they do not fill it: round up.
    - [-(-length // block_size) for length in lengths]
    + [max(1, length // block_size) for length in lengths]

    one_more: A length that fills its last block needs no other one.
    - [-(-length // block_size) for length in lengths]
    + [length // block_size + 1 for length in lengths]

    one_reservation: Every sequence has a reservation of its own.
    - reserved = reserved_tokens * len(lengths)
    + reserved = reserved_tokens

    share_that_is_used: Asked is the share that is empty, not the share that is used.
    - 1 - used / reserved, 1 - used / owned
    + used / reserved, used / owned

    empty_by_used: Divide by the slots that are owned, not by the tokens.
    - 1 - used / reserved, 1 - used / owned
    + reserved / used - 1, owned / used - 1

    percent: The share is a number from 0 to 1.
    - 1 - used / reserved, 1 - used / owned
    + 100 * (1 - used / reserved), 100 * (1 - used / owned)

    of_the_whole_pool: Free blocks are no waste: any sequence can have them. Count owned blocks.
    - owned = sum(blocks) * block_size
    + owned = num_blocks * block_size

    part_of_a_block: A sequence takes whole blocks: round up before you divide.
    - num_blocks // -(-reserved_tokens // block_size)
    + num_blocks // (reserved_tokens / block_size)

    bytes_in_use: The pool is reserved whole, whatever it holds.
    - num_blocks * block_size * kv_bytes_per_token
    + used * kv_bytes_per_token

    bytes_of_owned: The pool is reserved whole, free blocks included.
    - num_blocks * block_size * kv_bytes_per_token
    + owned * kv_bytes_per_token

    bytes_of_blocks: A block holds block_size tokens.
    - num_blocks * block_size * kv_bytes_per_token
    + num_blocks * kv_bytes_per_token
    """,
)


@answers.alternative("12.1")
def plan_by_counting(lengths, reserved_tokens, block_size, num_blocks, kv_bytes_per_token):
    counts = [len(range(0, length, block_size)) for length in lengths]
    empty = [block_size * n - length for n, length in zip(counts, lengths)]
    unused = sum(reserved_tokens - length for length in lengths)
    longest = len(range(0, reserved_tokens, block_size))
    return (
        counts,
        unused / (unused + sum(lengths)),
        sum(empty) / (sum(empty) + sum(lengths)),
        num_blocks // longest,
        kv_bytes_per_token * block_size * num_blocks,
    )


@answers.alternative("12.1")
def plan_in_one_loop(lengths, reserved_tokens, block_size, num_blocks, kv_bytes_per_token):
    blocks, used = [], 0
    for length in lengths:
        blocks.append((length + block_size - 1) // block_size)
        used += length
    at_once, left = 0, num_blocks
    while left * block_size >= reserved_tokens:
        at_once += 1
        left -= (reserved_tokens + block_size - 1) // block_size
    reserved = (reserved_tokens * len(blocks) - used) / (reserved_tokens * len(blocks))
    owned = block_size * sum(blocks)
    pool = num_blocks * (block_size * kv_bytes_per_token)
    return blocks, reserved, (owned - used) / owned, at_once, pool


# ---------------------------------------------------------------- 12.2 the block manager

answers.slips(
    "12.2",
    """
    NeverCopies: Your fork only counts: two sequences write into one block. Copy it first.
    - len(table) + is_copied
    + len(table)

    NeverGrows: Your table never grows: where does the first token of a new block go?
    - at = held // self.block_size  # where the next token goes
    + at = held // self.block_size
    + if held:
    +     return 0
    - fresh = self.pool.take(
    + if held:
    +     return []
    + fresh = self.pool.take(

    AllocatesAgain: You take a whole new table and forget the old one: its blocks are lost.
    - return self.blocks_for(tokens) - len(table) + is_copied
    + return self.blocks_for(tokens)
    - fresh = self.pool.take(
    + table = []
    + fresh = self.pool.take(

    KeepsTheOld: A sequence that got a copy still counts as an owner of the old block: release it.
    - self.pool.release([table[at]])

    CopiesBackwards: A pair is (from block, to block): you copy the empty block over the full one.
    - (table[at], fresh[0])
    + (fresh[0], table[at])

    CopiesFullBlocks: A full block is not written any more. Which block does the next token go into?
    - len(table) + is_copied
    + len(table) + (bool(table) and tokens > held and self.pool.owners[table[-1]] > 1)
    - at = held // self.block_size
    - copies
    + at = -1
    + copies

    SharesOneTable: Parent and child have one list, so each sees what the other appends.
    - list(self.tables[parent])
    + self.tables[parent]
    - self.tables[sequence] = table + fresh
    + table += fresh
    + self.tables[sequence] = table

    CountsOneOwner: The child's blocks count one owner: the first sequence that leaves frees them
        for both.
    - self.pool.share(self.tables[child])

    SharesFullBlocks: The child shares the parent's full blocks only, and misses the last tokens.
    - list(self.tables[parent])
    + self.tables[parent][:-1]

    LeaksOnFree: Some of the blocks that a sequence leaves are never free again.
    - self.tables.pop(sequence)
    + self.tables.pop(sequence)[:-1]

    FreesForAll: free takes shared blocks from sequences that still read them.
    - self.pool.release(self.tables.pop(sequence))
    + for block in self.tables.pop(sequence):
    +     while self.pool.owners[block]:
    +         self.pool.release([block])

    NeedsForgetsTheCopy: needs forgets the block for the copy.
    - len(table) + is_copied
    + len(table)
    - fresh = self.pool.take(self.needs(sequence, held, tokens))
    + at = held // self.block_size
    + is_copied = held < tokens and at < len(table) and self.pool.owners[table[at]] > 1
    + fresh = self.pool.take(self.needs(sequence, held, tokens) + is_copied)

    WantsOneToSpare: A pool with exactly as many free blocks as are needed is enough.
    - fresh = self.pool.take(self.needs(sequence, held, tokens))
    + needed = self.needs(sequence, held, tokens)
    + fresh = self.pool.take(needed + (0 < needed == self.num_free))

    TakesOneByOne: You take blocks one by one: a refused grow keeps those that it got.
    - fresh = self.pool.take(self.needs(sequence, held, tokens))
    + needed = self.needs(sequence, held, tokens)
    + if needed > self.num_free:
    +     self.tables[sequence] = table + self.pool.take(self.num_free)
    + fresh = self.pool.take(needed)

    OneTooMany: A block more than the tokens need, whenever the last one is full.
    - -(-tokens // self.block_size)
    + tokens // self.block_size + 1

    CopiesForNothing: Nothing is written where tokens equals held, so nothing is copied.
    - tokens > held and
    + (tokens > held or held % self.block_size) and

    EmptyTables: A sequence without blocks has no table: needs and a refused grow leave none.
    - table = self.tables.get(sequence, [])
    - at
    + table = self.tables.setdefault(sequence, [])
    + at
    """,
)


@answers.alternative("12.2")
class ByListing:
    """Tables and owners from the tables alone; the pool is only told."""

    def __init__(self, num_blocks, block_size):
        self.pool = BlockPool(num_blocks)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables = {}

    num_free = property(lambda self: self.pool.num_free)

    def plan(self, sequence, held, tokens):
        """The table afterwards, None for each block that must be new."""
        table = self.tables.get(sequence, [])
        plan = table + [None] * (-(-tokens // self.block_size) - len(table))
        at = held // self.block_size
        others = [b for s, t in self.tables.items() if s != sequence for b in t]
        if held < tokens and plan[at] in others:
            plan[at] = None
        return plan

    def needs(self, sequence, held, tokens):
        return self.plan(sequence, held, tokens).count(None)

    def grow(self, sequence, held, tokens):
        plan, old = self.plan(sequence, held, tokens), self.tables.get(sequence, [])
        fresh = self.pool.take(plan.count(None))
        copies = []
        for index, block in enumerate(plan):
            if block is None:
                plan[index] = fresh.pop(0)
                if index < len(old):
                    copies.append((old[index], plan[index]))
                    self.pool.release([old[index]])
        self.tables[sequence] = plan
        return copies

    def fork(self, parent, child):
        self.tables[child] = [*self.tables[parent]]
        self.pool.share(self.tables[parent])

    def free(self, sequence):
        for block in self.tables.pop(sequence)[::-1]:
            self.pool.release([block])


# ---------------------------------------------------------------- 12.3 the kernel

answers.slips(
    "12.3",
    """
    ignores_the_table: Block b for sequence b: that was lesson 3. Which block does the table name?
    - page = tl.load(entry, mask=in_use, other=0).to(tl.int64)
    + page = sequence + 0 * key

    one_page_for_a_tile: All 16 keys of a tile from the page of the first: a tile may span several
        pages.
    - max_blocks + key // PAGE_SIZE
    + max_blocks + start // PAGE_SIZE + 0 * key

    page_of_16: A page holds PAGE_SIZE keys, whatever BLOCK_N is.
    - max_blocks + key // PAGE_SIZE
    + max_blocks + tl.minimum(key // BLOCK_N, max_blocks - 1)

    row_of_the_tile: The row in a page is key mod PAGE_SIZE, not the place in the tile.
    - page * stride_kblock + key % PAGE_SIZE * stride_kn
    + page * stride_kblock + (key - start) % PAGE_SIZE * stride_kn
    - page * stride_vblock + key % PAGE_SIZE * stride_vn
    + page * stride_vblock + (key - start) % PAGE_SIZE * stride_vn

    rows_backwards: Rows in a page are in the order of the keys.
    - page * stride_kblock + key % PAGE_SIZE * stride_kn
    + page * stride_kblock + (PAGE_SIZE - 1 - key % PAGE_SIZE) * stride_kn
    - page * stride_vblock + key % PAGE_SIZE * stride_vn
    + page * stride_vblock + (PAGE_SIZE - 1 - key % PAGE_SIZE) * stride_vn

    page_in_32_bits: Page · stride may be more than 2³¹: make the page int64 before you multiply.
    - page = tl.load(entry, mask=in_use, other=0).to(tl.int64)
    + page = tl.load(entry, mask=in_use, other=0)

    layer_in_the_block_id: A block's number is the same in all layers: a layer is another pool, not
        another block.
    - out, block_table,
    + out,
    + (2 * block_table + 1) % len(k_cache),

    first_row_of_the_table: Every sequence has its own row of the table: sequence · max_blocks.
    - block_table_ptr + sequence * max_blocks + key
    + block_table_ptr + key

    neighbours_row: This is the table of another sequence.
    - block_table_ptr + sequence * max_blocks
    + block_table_ptr + (sequence + 1) % tl.num_programs(0) * max_blocks

    whole_pages: The last page may be filled in part: mask by the length, not by the page.
    - length = tl.load(context_lens_ptr + sequence)
    + length = tl.cdiv(tl.load(context_lens_ptr + sequence), PAGE_SIZE) * PAGE_SIZE

    last_key_lost: context_lens counts the query's own key.
    - length = tl.load(context_lens_ptr + sequence)
    + length = tl.maximum(tl.load(context_lens_ptr + sequence) - 1, 0)

    heads_modulo: Consecutive query heads share a KV head: h // GROUP.
    - head // GROUP * stride_kh
    + head % (tl.num_programs(1) // GROUP) * stride_kh
    - head // GROUP * stride_vh
    + head % (tl.num_programs(1) // GROUP) * stride_vh

    no_scale: The scores are not scaled by 1 / √D.
    - head_dim**-0.5,
    + 1.0,

    no_maximum: exp of a large score overflows: subtract the maximum.
    - m_i = tl.full((), float("-inf"), tl.float32)
    + m_i = tl.full((), 0.0, tl.float32)
    - m_new = tl.maximum(m_i, tl.max(scores, axis=0))
    + m_new = m_i

    empty_is_nan: A sequence without keys gives zeros, not 0 / 0.
    - tl.where(length > 0, acc / l_i, 0.0)
    + acc / l_i

    strides_of_k: You read V with K's strides.
    - page * stride_vblock + key % PAGE_SIZE * stride_vn
    + page * stride_kblock + key % PAGE_SIZE * stride_kn
    - head // GROUP * stride_vh
    + head // GROUP * stride_kh

    not_divided: Divide by the sum of the weights at the end.
    - acc / l_i
    + acc

    max_from_0: Your maximum starts at a number. What if all scores are below it? Start at −inf.
    - m_i = tl.full((), float("-inf"), tl.float32)
    + m_i = tl.full((), 0.0, tl.float32)

    dense_copies: contiguous() copies the whole cache. Read it by its strides.
    - out = q.new_full(
    + k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    + out = q.new_full(
    """,
)


@answers.wrong("12.3", "You copy all pages to one place first. Read them where they are.")
def gathers(q, k_cache, v_cache, block_table, context_lens):
    group = q.shape[1] // k_cache.shape[2]
    out = torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        blocks = block_table[b, : -(-length // k_cache.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        for head in range(q.shape[1] if length else 0):
            scores = k[:, head // group] @ q[b, head] * q.shape[2] ** -0.5
            out[b, head] = scores.softmax(0) @ v[:, head // group]
    return out


def in_pytorch(q, k_cache, v_cache, block_table, context_lens):
    """A page is a tile: lesson 8's state, page after page, views instead of copies."""
    (_, num_heads, dim), (_, size, kv_heads, _) = q.shape, k_cache.shape
    out = torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        rows = q[b].view(kv_heads, num_heads // kv_heads, dim)
        m, l, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros_like(rows)
        for start in range(0, length, size):
            block = block_table[b, start // size]
            k, v = (x[block, : length - start] for x in (k_cache, v_cache))
            scores = torch.einsum("hgd,nhd->hgn", rows, k) * dim**-0.5
            m_new = torch.maximum(m, scores.amax(-1))
            alpha, p = torch.exp(m - m_new), torch.exp(scores - m_new[..., None])
            l = l * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + torch.einsum("hgn,nhd->hgd", p, v)
            m = m_new
        if length:
            out[b] = (acc / l[..., None]).view(num_heads, dim)
    return out


attacks(answers, "12.3", in_pytorch)


@triton.jit
def page_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    lens_ptr,
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
    """A page is a tile, padded to BLOCK_N rows."""
    b, head = tl.program_id(0), tl.program_id(1)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    at = (b * tl.num_programs(1) + head) * HEAD_DIM + d
    q = tl.load(q_ptr + at, mask=d < HEAD_DIM, other=0.0)
    length = tl.load(lens_ptr + b)
    m, l, acc = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
    for page in range(0, tl.cdiv(length, PAGE_SIZE)):
        block = tl.load(table_ptr + b * max_blocks + page).to(tl.int64)
        held = (n < PAGE_SIZE) & (page * PAGE_SIZE + n < length)
        mask = held[:, None] & (d < HEAD_DIM)[None, :]
        k_row = k_ptr + block * stride_kblock + n[:, None] * stride_kn + head // GROUP * stride_kh
        v_row = v_ptr + block * stride_vblock + n[:, None] * stride_vn + head // GROUP * stride_vh
        s = tl.sum(q[None, :] * tl.load(k_row + d[None, :], mask=mask, other=0.0), axis=1)
        s = tl.where(held, s / tl.sqrt(HEAD_DIM * 1.0), -float("inf"))
        new = tl.maximum(m, tl.max(s, axis=0))
        p = tl.exp(s - new)
        v = tl.load(v_row + d[None, :], mask=mask, other=0.0)
        acc = acc * tl.exp(m - new) + tl.sum(p[:, None] * v, axis=0)
        l = l * tl.exp(m - new) + tl.sum(p, axis=0)
        m = new
    tl.store(out_ptr + at, acc / tl.where(length > 0, l, 1.0), mask=d < HEAD_DIM)


@answers.alternative("12.3")
def page_by_page(q, k_cache, v_cache, block_table, context_lens):
    out = torch.empty_like(q)
    page_kernel[q.shape[:2]](
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        context_lens,
        block_table.shape[1],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=q.shape[1] // k_cache.shape[2],
        HEAD_DIM=q.shape[2],
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_N=triton.next_power_of_2(k_cache.shape[1]),
        BLOCK_D=triton.next_power_of_2(q.shape[2]),
    )
    return out


@triton.jit
def two_passes_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    lens_ptr,
    stride_table,
    stride_kblock,
    stride_kn,
    stride_kh,
    stride_vblock,
    stride_vn,
    stride_vh,
    scale,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program for each sequence and KV head, all its query heads one after the other. The keys of
    a head are read twice, one by one: once for the maximum, once for the weights.
    """
    b, kv_head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_D)
    length, inside = tl.load(lens_ptr + b), d < HEAD_DIM
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        at = (b * tl.num_programs(1) * GROUP + head) * HEAD_DIM + d
        q = tl.load(q_ptr + at, mask=inside, other=0.0) * scale
        largest = tl.full((), float("-inf"), tl.float32)
        for key in range(0, length):
            page = tl.load(table_ptr + b * stride_table + key // PAGE_SIZE).to(tl.int64)
            k_at = page * stride_kblock + key % PAGE_SIZE * stride_kn + kv_head * stride_kh + d
            k = tl.load(k_ptr + k_at, mask=inside, other=0.0)
            largest = tl.maximum(largest, tl.sum(q * k, axis=0))
        total, out = tl.full((), 0.0, tl.float32), tl.zeros((BLOCK_D,), tl.float32)
        for key in range(0, length):
            page = tl.load(table_ptr + b * stride_table + key // PAGE_SIZE).to(tl.int64)
            k_at = page * stride_kblock + key % PAGE_SIZE * stride_kn + kv_head * stride_kh + d
            v_at = page * stride_vblock + key % PAGE_SIZE * stride_vn + kv_head * stride_vh + d
            k = tl.load(k_ptr + k_at, mask=inside, other=0.0)
            weight = tl.exp(tl.sum(q * k, axis=0) - largest)
            total += weight
            out += weight * tl.load(v_ptr + v_at, mask=inside, other=0.0)
        tl.store(out_ptr + at, out / tl.maximum(total, 1e-30), mask=inside)


@answers.alternative("12.3")
def in_two_passes(q, k_cache, v_cache, block_table, context_lens):
    out, kv_heads = torch.empty_like(q), k_cache.shape[2]
    two_passes_kernel[len(q), kv_heads](
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        context_lens,
        block_table.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        q.shape[2] ** -0.5,
        GROUP=q.shape[1] // kv_heads,
        PAGE_SIZE=k_cache.shape[1],
        HEAD_DIM=q.shape[2],
        BLOCK_D=triton.next_power_of_2(q.shape[2]),
    )
    return out
