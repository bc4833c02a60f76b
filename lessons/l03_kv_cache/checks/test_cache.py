"""What the caches copy, to the byte; where a step's tokens go; and what is refused."""

import random

import pytest
import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import SMALLEST_BUCKET, KVPool, bucket
from lessons.l03_kv_cache.lab.testing import CONFIG, DEVICE
from lessons.l03_kv_cache.naive import ConcatCache
from lessons.l03_kv_cache.optimized import LESSON_03
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH

BYTES_PER_TOKEN = CONFIG.kv_bytes_per_token(4)


def new_pool(num_blocks=1, block_size=8, ops=LESSON_03_TORCH, **options):
    return KVPool(CONFIG, num_blocks, block_size, ops, device=DEVICE, **options)


def feed(pool, steps):
    """Run so many tokens a step through all layers of a pool's only block."""
    held = 0
    for new in steps:
        pool.reserve(held + new)
        batch = new_batch([([0] * new, held)], pool.block_size, DEVICE)
        attend = pool.attending(batch)
        for layer in range(CONFIG.num_hidden_layers):
            q = torch.zeros(new, 6, 8, device=DEVICE)
            k, v = torch.zeros(2, new, 2, 8, device=DEVICE)
            attend(layer, q, k, v)
        held += new
    return pool


# ---------------------------------------------------------------- bytes


def test_concat_copies_quadratically():
    prompt = random.randint(1, 40)
    for n in (1, 10, 100):
        cache = ConcatCache(CONFIG, 200)
        for step in [prompt] + [1] * n:
            for layer in range(CONFIG.num_hidden_layers):
                cache.append(layer, *torch.zeros(2, step, 2, 8))
        assert len(cache.keys[1]) == prompt + n
        assert cache.written_bytes == BYTES_PER_TOKEN * (prompt + n)
        assert cache.growth_copy_bytes == BYTES_PER_TOKEN * sum(range(prompt, prompt + n))


def test_preallocated_never_copies():
    pool = feed(new_pool(block_size=130), [30] + [1] * 100)
    assert (pool.block_size, pool.growth_copy_bytes) == (130, 0)
    assert pool.written_bytes == BYTES_PER_TOKEN * 130


def test_buckets_copy_linearly():
    pool = feed(new_pool(block_size=64), [1] * 300)
    assert pool.block_size == 512
    assert pool.growth_copy_bytes == BYTES_PER_TOKEN * (64 + 128 + 256)
    assert pool.growth_copy_bytes < 2 * pool.written_bytes == 2 * BYTES_PER_TOKEN * 300


def test_what_a_pool_reserves():
    """One slot more than its blocks have: it is nobody's."""
    pool = new_pool(num_blocks=3, block_size=10)
    assert pool.bytes_per_token == BYTES_PER_TOKEN
    assert pool.allocated_bytes == BYTES_PER_TOKEN * (3 * 10 + 1)


def test_a_bucket_is_the_next_power_of_two():
    assert [bucket(n) for n in (1, 63, 64, 65, 128, 129, 1000)] == [64, 64, 64, 128, 128, 256, 1024]
    assert SMALLEST_BUCKET == 64


# ---------------------------------------------------------------- growing and moving


def filled_pool(seed, num_blocks=3, block_size=5):
    pool = new_pool(num_blocks, block_size)
    generator = torch.Generator().manual_seed(seed)
    for slots in (pool.k_slots, pool.v_slots):
        slots.copy_(torch.randn(slots.shape, generator=generator))
    return pool


def test_growth_keeps_every_block_and_counts_it_once(seed):
    pool = filled_pool(seed)
    old = [pool.blocks(slots).clone() for slots in (pool.k_slots, pool.v_slots)]
    pool.reserve(6)
    assert pool.block_size == len(pool.cos_sin_cache) == 64
    assert pool.growth_copy_bytes == BYTES_PER_TOKEN * 3 * 5
    for slots, before in zip((pool.k_slots, pool.v_slots), old):
        blocks = pool.blocks(slots)
        assert blocks.shape == (2, 3, 64, 2, 8)
        assert torch.equal(blocks[:, :, :5], before)
        # not empty memory: a batched decode multiplies what it masks by 0, and 0 · NaN is NaN
        assert not blocks[:, :, 5:].any()


def test_what_fits_moves_nothing(seed):
    pool = filled_pool(seed)
    places = pool.k_slots.data_ptr(), pool.v_slots.data_ptr()
    pool.reserve(5)
    assert (pool.k_slots.data_ptr(), pool.v_slots.data_ptr()) == places
    assert (pool.block_size, pool.growth_copy_bytes) == (5, 0)


def test_a_table_for_longer_contexts_stays_as_long():
    """Of a sequence over several blocks, lesson 12."""
    pool = new_pool(num_blocks=3, block_size=5, max_context_len=200)
    pool.reserve(6)
    assert len(pool.cos_sin_cache) == 200


def test_move_copies_the_rows_in_use_and_nothing_else(seed):
    pool = filled_pool(seed)
    before = [slots.clone() for slots in (pool.k_slots, pool.v_slots)]
    pool.move(2, 0, tokens=3)
    for slots, old in zip((pool.k_slots, pool.v_slots), before):
        want = old.clone()
        want[:, 0:3] = old[:, 10:13]
        assert torch.equal(slots, want)


# ---------------------------------------------------------------- where tokens go


def test_a_batch_of_three_by_hand():
    """A decode, a chunk and a prompt, in blocks of 8 slots."""
    batch = new_batch([([7], 5), ([1, 2], 3), ([4, 5, 6], 0)], 8)
    assert batch.tokens.tolist() == [7, 1, 2, 4, 5, 6]
    assert batch.positions.tolist() == [5, 3, 4, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [5, 8 + 3, 8 + 4, 16, 17, 18]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 3, 6]
    assert batch.context_lens.tolist() == [6, 5, 3]
    assert batch.logits_at.tolist() == [0, 2, 5]
    assert (batch.max_seqlen_q, batch.max_context_len) == (3, 6)
    assert batch.block_table is None and batch.tree is None


def test_a_sequence_over_several_blocks():
    """Lesson 12's: blocks of 2 slots, in any order; what comes after a table is not a block."""
    batch = new_batch([([7, 8], 3), ([1], 0)], 2, block_tables=[[4, 0, 3], [2]])
    assert batch.slot_mapping.tolist() == [0 * 2 + 1, 3 * 2 + 0, 2 * 2 + 0]
    assert batch.block_table[0].tolist() == [4, 0, 3]
    assert batch.block_table[1, 0] == 2 and (batch.block_table[1, 1:] > 10**6).all()


@pytest.mark.parametrize("ops", [LESSON_03_TORCH, LESSON_03], ids=["stand-ins", "kernels"])
def test_a_token_at_slot_minus_one_is_kept_nowhere(ops, seed):
    pool = new_pool(num_blocks=2, ops=ops)
    batch = new_batch([([1, 2], 0)], 8, DEVICE)
    batch.slot_mapping[0] = -1
    q = torch.randn(2, 6, 8, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 8, device=DEVICE)
    ops.write(q, k, v, pool.k_slots[0], pool.v_slots[0], batch, pool.cos_sin_cache)
    for slots in (pool.k_slots[0], pool.v_slots[0]):
        written = pool.blocks(slots).flatten(0, 1).flatten(1).any(-1)
        assert written.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("chunks", [[([1], 2), ([1], 0)], [([1], 2), ([1, 2], 0)]])
def test_single_new_tokens_are_decoded_and_all_else_is_prefilled(chunks):
    used = []

    def recording(name):
        read = getattr(LESSON_03_TORCH, name)
        return lambda *inputs: used.append(name) or read(*inputs)

    ops = LESSON_03_TORCH._replace(prefill=recording("prefill"), decode=recording("decode"))
    pool = new_pool(num_blocks=2, ops=ops)
    batch = new_batch(chunks, 8, DEVICE)
    count = len(batch.tokens)
    q, kv = torch.zeros(count, 6, 8, device=DEVICE), torch.zeros(count, 2, 8, device=DEVICE)
    pool.attending(batch)(0, q, kv, kv.clone())
    assert used == ["decode" if count == 2 else "prefill"]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
def test_a_pool_needs_room(name):
    with pytest.raises(ValueError, match=f"{name}: got 0; accepted: 1 or more"):
        new_pool(**{name: 0})


BAD_CHUNKS = {
    "no sequence": ([], None, "chunks, block_tables: got 0 and 0; accepted: one or more"),
    "no new token": ([([1], 0), ([], 3)], None, r"chunks\[1\]: got 0 new tokens after 3"),
    "more than a block": ([([1], 8)], None, r"chunks\[0\]: got 1 new tokens after 8; .* most 8"),
    "more than its blocks": ([([1] * 4, 13)], [[0, 1]], "at most 16 together"),
    "a negative length": ([([1], -1)], None, r"chunks\[0\]: got 1 new tokens after -1"),
    "a table too few": ([([1], 0), ([2], 0)], [[0]], "got 2 and 1; accepted"),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_a_batch_refuses(name):
    chunks, block_tables, message = BAD_CHUNKS[name]
    with pytest.raises(ValueError, match=message) as error:
        new_batch(chunks, 8, block_tables=block_tables)
    assert "\n" not in str(error.value)
