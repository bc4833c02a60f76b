"""Wrong answers to lesson 12's exercises: real slips, and the hint for whoever made them."""

import math
from functools import partial

import torch

from lessons.l12_paged_kv.blocks import BlockPool
from solutions.l12_paged_kv import BlockManager
from tests.exercises.wrong import Answers

answers = Answers()

# ---------------------------------------------------------------- 12.1 predict


def up(x, y):
    return -(-x // y)


def slipped_plan(
    lengths,
    reserved_tokens,
    block_size,
    num_blocks,
    kv_bytes_per_token,
    *,
    blocks=up,
    reserved="each",
    share=lambda used, owned: 1 - used / owned,
    owned="blocks",
    at_once=up,
    memory="pool",
):
    """The five results with one slip, spelled by a switch."""
    counts = [blocks(length, block_size) for length in lengths]
    used, slots = sum(lengths), sum(counts) * block_size
    reservations = reserved_tokens * (len(lengths) if reserved == "each" else 1)
    whole = num_blocks * block_size
    per_sequence = at_once(reserved_tokens, block_size)
    memory_tokens = {"pool": whole, "owned": slots, "used": used, "blocks": num_blocks}[memory]
    return (
        counts,
        share(used, reservations),
        share(used, slots if owned == "blocks" else whole),
        num_blocks // per_sequence if per_sequence else num_blocks,
        memory_tokens * kv_bytes_per_token,
    )


PLANS = [
    (
        "rounds_down",
        dict(blocks=lambda x, y: max(1, x // y)),
        "The last tokens need a block too, even if they do not fill it: round up.",
    ),
    (
        "one_more",
        dict(blocks=lambda x, y: x // y + 1),
        "A length that fills its last block needs no other one.",
    ),
    ("one_reservation", dict(reserved="all"), "Every sequence has a reservation of its own."),
    (
        "share_that_is_used",
        dict(share=lambda used, owned: used / owned),
        "Asked is the share that is empty, not the share that is used.",
    ),
    (
        "empty_by_used",
        dict(share=lambda used, owned: owned / used - 1),
        "Divide by the slots that are owned, not by the tokens.",
    ),
    (
        "percent",
        dict(share=lambda used, owned: 100 * (1 - used / owned)),
        "The share is a number from 0 to 1.",
    ),
    (
        "of_the_whole_pool",
        dict(owned="pool"),
        "Free blocks are no waste: anybody can have them. Count owned blocks.",
    ),
    (
        "part_of_a_block",
        dict(at_once=lambda x, y: x / y),
        "A sequence takes whole blocks: round up before you divide.",
    ),
    ("bytes_in_use", dict(memory="used"), "The pool is reserved whole, whatever it holds."),
    ("bytes_of_owned", dict(memory="owned"), "The pool is reserved whole, free blocks included."),
    ("bytes_of_blocks", dict(memory="blocks"), "A block holds block_size tokens."),
]
for name, slip, hint in PLANS:
    answers.wrong("12.1", hint, name)(partial(slipped_plan, **slip))


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


@answers.wrong("12.2", "Your fork only counts: two sequences write into one block. Copy it first.")
class NeverCopies(BlockManager):
    def needs(self, sequence, held, tokens):
        return self.blocks_for(tokens) - len(self.tables.get(sequence, []))


@answers.wrong("12.2", "Your table never grows: where does the first token of a new block go?")
class NeverGrows(BlockManager):
    def needs(self, sequence, held, tokens):
        return super().needs(sequence, held, tokens) if not held else 0

    def grow(self, sequence, held, tokens):
        return super().grow(sequence, held, tokens) if not held else []


@answers.wrong("12.2", "You take a whole new table and forget the old one: its blocks are lost.")
class AllocatesAgain(BlockManager):
    def needs(self, sequence, held, tokens):
        return self.blocks_for(tokens)

    def grow(self, sequence, held, tokens):
        self.tables[sequence] = self.pool.take(self.needs(sequence, held, tokens))
        return []


@answers.wrong("12.2", "Whoever got a copy still counts as an owner of the old block: release it.")
class KeepsTheOld(BlockManager):
    def grow(self, sequence, held, tokens):
        copies = super().grow(sequence, held, tokens)
        self.pool.share(source for source, _ in copies)
        return copies


@answers.wrong(
    "12.2", "A pair is (from block, to block): you copy the empty block over the full one."
)
class CopiesBackwards(BlockManager):
    def grow(self, sequence, held, tokens):
        return [(target, source) for source, target in super().grow(sequence, held, tokens)]


@answers.wrong(
    "12.2", "A full block is not written any more. Which block does the next token go into?"
)
class CopiesFullBlocks(BlockManager):
    def needs(self, sequence, held, tokens):
        table = self.tables.get(sequence, [])
        is_shared = bool(table) and self.pool.owners[table[-1]] > 1 and tokens > held
        return self.blocks_for(tokens) - len(table) + is_shared

    def grow(self, sequence, held, tokens):
        table = self.tables.get(sequence, [])
        fresh = self.pool.take(self.needs(sequence, held, tokens))
        copies = []
        if len(fresh) > self.blocks_for(tokens) - len(table):
            copies = [(table[-1], fresh[0])]
            self.pool.release([table[-1]])
            table[-1] = fresh.pop(0)
        self.tables[sequence] = table + fresh
        return copies


@answers.wrong("12.2", "Parent and child have one list, so each sees what the other appends.")
class SharesOneTable(BlockManager):
    def fork(self, parent, child):
        super().fork(parent, child)
        self.tables[child] = self.tables[parent]

    def grow(self, sequence, held, tokens):
        table = self.tables.setdefault(sequence, [])
        fresh = self.pool.take(self.needs(sequence, held, tokens))
        copies = []
        if len(fresh) > self.blocks_for(tokens) - len(table):
            at = held // self.block_size
            copies = [(table[at], fresh[0])]
            self.pool.release([table[at]])
            table[at] = fresh.pop(0)
        table += fresh
        return copies


@answers.wrong(
    "12.2", "The child's blocks count one owner: the first who leaves frees them for both."
)
class CountsNobody(BlockManager):
    def fork(self, parent, child):
        self.tables[child] = list(self.tables[parent])


@answers.wrong(
    "12.2", "The child shares the parent's full blocks only, and misses the last tokens."
)
class SharesFullBlocks(BlockManager):
    def fork(self, parent, child):
        self.tables[child] = self.tables[parent][:-1]
        self.pool.share(self.tables[child])


@answers.wrong("12.2", "Some of the blocks that a sequence leaves are never free again.")
class LeaksOnFree(BlockManager):
    def free(self, sequence):
        self.pool.release(self.tables.pop(sequence)[:-1])


@answers.wrong("12.2", "free takes shared blocks from those who still read them.")
class FreesForAll(BlockManager):
    def free(self, sequence):
        for block in self.tables.pop(sequence):
            while self.pool.owners[block]:
                self.pool.release([block])


@answers.wrong("12.2", "needs forgets the block for the copy.")
class NeedsForgetsTheCopy(BlockManager):
    def grow(self, sequence, held, tokens):
        needed = BlockManager.needs(self, sequence, held, tokens)
        correct, self.needs = self.needs, lambda *_: needed
        try:
            return super().grow(sequence, held, tokens)
        finally:
            self.needs = correct

    def needs(self, sequence, held, tokens):
        return self.blocks_for(tokens) - len(self.tables.get(sequence, []))


@answers.wrong("12.2", "A pool with exactly as many free blocks as are needed is enough.")
class WantsOneToSpare(BlockManager):
    def grow(self, sequence, held, tokens):
        needed = self.needs(sequence, held, tokens)
        if needed and needed == self.num_free:
            self.pool.take(needed + 1)
        return super().grow(sequence, held, tokens)


@answers.wrong("12.2", "You take blocks one by one: a refused grow keeps those that it got.")
class TakesOneByOne(BlockManager):
    def grow(self, sequence, held, tokens):
        needed = self.needs(sequence, held, tokens)
        if needed > self.num_free:
            self.tables[sequence] = self.tables.get(sequence, []) + self.pool.take(self.num_free)
            self.pool.take(1)
        return super().grow(sequence, held, tokens)


@answers.wrong("12.2", "A block more than the tokens need, whenever the last one is full.")
class OneTooMany(BlockManager):
    def blocks_for(self, tokens):
        return tokens // self.block_size + 1


@answers.wrong("12.2", "Nothing is written where tokens equals held, so nothing is copied.")
class CopiesForNothing(BlockManager):
    def needs(self, sequence, held, tokens):
        return super().needs(sequence, held, max(tokens, held + 1 if held % self.block_size else 0))

    def grow(self, sequence, held, tokens):
        return super().grow(sequence, held, max(tokens, held + 1 if held % self.block_size else 0))


@answers.wrong(
    "12.2", "A sequence without blocks has no table: needs and a refused grow leave none."
)
class TablesOfNobody(BlockManager):
    def needs(self, sequence, held, tokens):
        self.tables.setdefault(sequence, [])
        return super().needs(sequence, held, tokens)


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


def slipped_decode(
    q,
    k_cache,
    v_cache,
    block_table,
    context_lens,
    *,
    page_of=lambda key, size: key // size,
    row_of=lambda key, size: key % size,
    block_of=lambda block, b, total: block,
    table_row=lambda b, total: b,
    length_of=lambda length, size: length,
    head_of=lambda h, group, heads: h // group,
    scale=True,
    maximum=True,
    empty=0.0,
    read_v="own strides",
    divide=True,
    lowest=-math.inf,
    dense=False,
):
    """Key by key in PyTorch, with one slip, spelled by a switch."""
    (_, num_heads, dim), (total, size, kv_heads, _) = q.shape, k_cache.shape
    out = torch.full_like(q, empty)
    if dense:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    if read_v == "K's strides":
        k_like = torch.empty_strided(k_cache.shape, k_cache.stride())
        base = v_cache._base if v_cache._base is not None else v_cache
        v_cache = base.as_strided(k_like.shape, k_like.stride())
    for b, length in enumerate(context_lens.tolist()):
        length = length_of(length, size)
        row = block_table[table_row(b, len(q))]
        places = []
        for key in range(length):
            block = int(row[min(page_of(key, size), len(row) - 1)])
            places.append((block_of(block, b, total) % total, row_of(key, size) % size))
        for head in range(num_heads if length else 0):
            kv = head_of(head, num_heads // kv_heads, kv_heads)
            k = torch.stack([k_cache[block, r, kv] for block, r in places])
            v = torch.stack([v_cache[block, r, kv] for block, r in places])
            scores = k @ q[b, head] * (dim**-0.5 if scale else 1.0)
            p = torch.exp(scores - (scores.max().clamp(min=lowest) if maximum else 0.0))
            out[b, head] = p @ v / (p.sum() if divide else 1.0)
    return out


KERNELS = [
    (
        "ignores_the_table",
        dict(block_of=lambda block, b, total: b),
        "Block b for sequence b: that was lesson 3. Which block does the table name?",
    ),
    (
        "one_page_for_a_tile",
        dict(page_of=lambda key, size: key // 16 * 16 // size),
        "All 16 keys of a tile from the page of the first: a tile may span several pages.",
    ),
    (
        "page_of_16",
        dict(page_of=lambda key, size: key // 16),
        "A page holds PAGE_SIZE keys, whatever BLOCK_N is.",
    ),
    (
        "row_of_the_tile",
        dict(row_of=lambda key, size: key % 16),
        "The row in a page is key mod PAGE_SIZE, not the place in the tile.",
    ),
    (
        "rows_backwards",
        dict(row_of=lambda key, size: size - 1 - key % size),
        "Rows in a page are in the order of the keys.",
    ),
    (
        "layer_in_the_block_id",
        dict(block_of=lambda block, b, total: 2 * block + 1),
        "A block's number is the same in all layers: a layer is another pool, not another block.",
    ),
    (
        "first_row_of_the_table",
        dict(table_row=lambda b, total: 0),
        "Every sequence has its own row of the table: sequence · max_blocks.",
    ),
    (
        "neighbours_row",
        dict(table_row=lambda b, total: (b + 1) % total),
        "This is the table of another sequence.",
    ),
    (
        "whole_pages",
        dict(length_of=lambda length, size: -(-length // size) * size),
        "The last page may be filled in part: mask by the length, not by the page.",
    ),
    (
        "last_key_lost",
        dict(length_of=lambda length, size: max(length - 1, 0)),
        "context_lens counts the query's own key.",
    ),
    (
        "heads_modulo",
        dict(head_of=lambda h, group, heads: h % heads),
        "Consecutive query heads share a KV head: h // GROUP.",
    ),
    ("no_scale", dict(scale=False), "The scores are not scaled by 1 / √D."),
    ("no_maximum", dict(maximum=False), "exp of a large score overflows: subtract the maximum."),
    ("empty_is_nan", dict(empty=float("nan")), "A sequence without keys gives zeros, not 0 / 0."),
    ("strides_of_k", dict(read_v="K's strides"), "You read V with K's strides."),
    ("not_divided", dict(divide=False), "Divide by the sum of the weights at the end."),
    (
        "max_from_0",
        dict(lowest=0.0),
        "Your maximum starts at a number. What if all scores are below it? Start at −inf.",
    ),
    (
        "dense_copies",
        dict(dense=True),
        "contiguous() copies the whole cache. Read it by its strides.",
    ),
]
for name, slip, hint in KERNELS:
    answers.wrong("12.3", hint, name)(partial(slipped_decode, **slip))


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


@answers.alternative("12.3")
def page_by_page(q, k_cache, v_cache, block_table, context_lens):
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


@answers.alternative("12.3")
def by_scores_first(q, k_cache, v_cache, block_table, context_lens):
    """All scores of a sequence, page by page; then a softmax; then the values, page by page."""
    size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = torch.zeros_like(q)
    for b, length in enumerate(context_lens.tolist()):
        parts = [
            (block_table[b, at // size], min(size, length - at)) for at in range(0, length, size)
        ]
        for head in range(q.shape[1] if parts else 0):
            scores = [k_cache[block, :n, head // group] @ q[b, head] for block, n in parts]
            weights = torch.softmax(torch.cat(scores) * q.shape[2] ** -0.5, 0)
            pieces = weights.split([n for _, n in parts])
            out[b, head] = sum(
                w @ v_cache[i, :n, head // group] for w, (i, n) in zip(pieces, parts)
            )
    return out
