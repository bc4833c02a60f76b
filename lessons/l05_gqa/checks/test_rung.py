"""The rungs of this lesson: the same tokens and the same cache, whether heads are repeated or
not.
"""

import random
from dataclasses import replace

import pytest

from lessons.l02_naive_attention import naive as recompute
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import Rung, generate
from lessons.l03_kv_cache.lab.testing import CONFIG, DEVICE, check_steps, randomise
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.l05_gqa import optimized
from lessons.l05_gqa.naive import REPEATED
from lessons.l05_gqa.optimized import IN_GROUPS
from lessons.toolbox.proof.numerics import poison_

BY_KERNEL = LESSON_04_TORCH._replace(decode=optimized.decode)
OPS = {"repeated": REPEATED.stand_ins, "in groups": IN_GROUPS.stand_ins, "by the kernel": BY_KERNEL}


@pytest.mark.parametrize("steps", [[1, 1, 1, 1, 1, 1], [7, 1, 1], [5, 3, 1, 4, 1], [1, 70, 1]])
@pytest.mark.parametrize("name", OPS)
def test_cached_steps_equal_recomputing(name, steps, seed):
    """One by one, prefill then decode, chunks; one layer has a window of 5. Unused rows are NaN."""
    pool = KVPool(CONFIG, 1, 80, OPS[name], device=DEVICE)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    check_steps(pool, steps, seed)


@pytest.mark.parametrize("rung", [REPEATED, IN_GROUPS], ids=lambda rung: rung.name)
def test_a_cache_holds_the_kv_heads_alone(rung):
    """2 of 6 heads. A cache of repeated heads would serve the same tokens from three times the
    memory.
    """
    model = Decoder(CONFIG).to(DEVICE)
    pool = rung.new_cache(model, 1, 63)  # and the slot that is nobody's
    assert pool.allocated_bytes == 64 * CONFIG.kv_bytes_per_token(4) == 64 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_all_ways_give_the_same_tokens(num_kv_heads, seed):
    config = replace(CONFIG, vocab_size=97, num_key_value_heads=num_kv_heads)
    model = randomise(Decoder(config)).to(DEVICE)
    prompts = [random.choices(range(97), k=n) for n in (1, 9, 4)]
    want = recompute.generate(model, prompts, 8)
    for rung in (REPEATED, IN_GROUPS):
        assert generate(model, prompts, 8, rung=rung) == want
    kernel = Rung("kernel", BY_KERNEL, BY_KERNEL)
    assert generate(model, prompts, 4, rung=kernel) == [row[:4] for row in want]
