"""Proves that steps with a cache equal recomputing everything: in turn, packed, on both rungs."""

import random
from dataclasses import replace

import pytest
import torch

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l03_kv_cache import generate as loop
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.lab.testing import CONFIG, DEVICE, check_steps, randomise
from lessons.l03_kv_cache.naive import CONCATENATED, ConcatCache
from lessons.l03_kv_cache.optimized import LESSON_03, PREALLOCATED
from lessons.l03_kv_cache.stand_ins import (
    LESSON_03_TORCH,
    attend_each,
    decode_attention_torch,
)
from lessons.toolbox.model.config import MLAConfig
from lessons.toolbox.proof.numerics import poison_

OPS = {"stand-ins": LESSON_03_TORCH, "kernels": LESSON_03}
CACHES = ("concat", *OPS)


def new_cache(name, config=CONFIG, room=3, dtype=torch.float32, **options):
    """An empty cache for one sequence. room: the pool's block before it grows, in tokens."""
    if name == "concat":
        return ConcatCache(config, 512, DEVICE)
    return KVPool(config, 1, room, OPS[name], dtype, DEVICE, **options)


# ---------------------------------------------------------------- one sequence

STEPS = [[1] * 8, [7, 1, 1], [5, 3, 1, 4, 1], [1, 70, 1]]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.sample(2)
def test_cached_steps_equal_recomputing(name, steps, seed):
    """One by one, prefill then decode, chunks (fewer queries than keys), and across a growth; one
    layer has a window of 5.
    """
    check_steps(new_cache(name), steps, seed)


@pytest.mark.parametrize("name", ["concat", "stand-ins"])
def test_in_float64_nothing_but_rounding_is_left(name, seed):
    cache = new_cache(name, dtype=torch.float64)
    check_steps(cache, [5, 1, 3, 1], seed, dtype=torch.float64)


@pytest.mark.parametrize("name", OPS)
def test_rows_not_in_use_are_never_read(name, seed):
    pool = new_cache(name, room=40)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    check_steps(pool, [3, 1, 4, 1], seed)
    for slots in (pool.k_slots, pool.v_slots):
        assert slots[:, :9].isfinite().all() and slots[:, 9:].isnan().all()


@pytest.mark.parametrize("v_head_dim", [8, 24])
@pytest.mark.parametrize("name", CACHES)
def test_heads_of_v_may_have_another_width(name, v_head_dim, seed):
    """As in DeepSeek's latent attention, lesson 6."""
    config = replace(
        CONFIG,
        num_attention_heads=4,
        head_dim=16,
        v_head_dim=v_head_dim,
        mla=MLAConfig(None, 8, 8, 8, v_head_dim),
        sliding_windows=(),
    )
    cache = new_cache(name, config)
    check_steps(cache, [5, 1, 3], seed, config)
    assert cache.written_bytes == 9 * 2 * 2 * (16 + v_head_dim) * 4  # tokens, layers, heads, bytes


def test_a_stage_of_a_pipeline_stores_its_own_layers(seed):
    pool = new_cache("stand-ins", layers=range(1, 2))
    assert len(pool.k_slots) == 1
    check_steps(pool, [6, 1, 3], seed, layers=range(1, 2))


# ---------------------------------------------------------------- would these tests notice?


def with_a_smaller_window(q, k_cache, v_cache, batch, scale, window):
    window = None if window is None else window - 1
    return attend_each(decode_attention_torch, q, k_cache, v_cache, batch, scale, window)


def over_the_last_row(q, k, v, k_slots, v_slots, batch, cos_sin_cache):
    early = replace(batch, slot_mapping=(batch.slot_mapping - 1).clamp(min=0))
    return LESSON_03_TORCH.write(q, k, v, k_slots, v_slots, early, cos_sin_cache)


def without_rotating_q(q, k, v, k_slots, v_slots, batch, cos_sin_cache):
    LESSON_03_TORCH.write(q, k, v, k_slots, v_slots, batch, cos_sin_cache)
    return q


def aligned_top_left(q, k_cache, v_cache, batch, scale, window):
    def attend(q, k, v, scale, window):
        behind = q.new_zeros(len(k) - len(q), *q.shape[1:])
        return attention(torch.cat([q, behind]), k, v, scale, window=window)[: len(q)]

    return attend_each(attend, q, k_cache, v_cache, batch, scale, window)


class ForgetsOnGrowth(KVPool):
    def reserve(self, tokens):
        grows = tokens > self.block_size
        super().reserve(tokens)
        if grows:
            self.k_slots.zero_()


WRONG = {
    "window off by one": (KVPool, LESSON_03_TORCH._replace(decode=with_a_smaller_window)),
    "overwrites the last row": (KVPool, LESSON_03_TORCH._replace(write=over_the_last_row)),
    "q is not rotated": (KVPool, LESSON_03_TORCH._replace(write=without_rotating_q)),
    "top-left chunk": (KVPool, LESSON_03_TORCH._replace(prefill=aligned_top_left)),
    "forgets on growth": (ForgetsOnGrowth, LESSON_03_TORCH),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cache_is_rejected(name, seed):
    pool, ops = WRONG[name]
    with pytest.raises(AssertionError):
        check_steps(pool(CONFIG, 1, 3, ops, device=DEVICE), [6, 1, 3, 1, 60], seed)


# ---------------------------------------------------------------- several sequences in one batch

ROOM = 16
MIXED = {  # tokens held before, and new ones, sequence by sequence
    "a decode, a chunk, a fresh prompt": [(6, 1), (4, 3), (0, 5)],
    "chunks": [(1, 2), (7, 4), (3, 6)],
    "prompts": [(0, 3), (0, 1), (0, 7)],
    "decodes": [(6, 1), (1, 1), (9, 1)],
}


def held_and_mixed(ops, mixed, dtype):
    """A model, a pool that holds the beginning of each text, the texts, and the step that is next.

    What a block does not hold yet is NaN.
    """
    config = replace(CONFIG, vocab_size=97, intermediate_size=64)
    model = randomise(Decoder(config)).to(DEVICE, dtype)
    texts = [random.choices(range(97), k=held + new) for held, new in mixed]
    pool = KVPool.for_model(model, len(texts), ROOM, ops)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    for b, (text, (held, _)) in enumerate(zip(texts, mixed)):
        if held:
            batch = new_batch([(text[:held], 0)], ROOM, DEVICE, block_tables=[[b]])
            model(batch.tokens, pool.attending(batch, first_block=b))
    chunks = [(text[held:], held) for text, (held, _) in zip(texts, mixed)]
    return model, pool, texts, new_batch(chunks, ROOM, DEVICE)


def one_at_a_time(model, texts, batch):
    """What each sequence gives alone, without a cache: hidden [T, hidden_size], logits [B, V]."""
    hidden, logits = [], []
    new = batch.cu_seqlens_q.diff().tolist()
    for text, count in zip(texts, new):
        tokens = torch.tensor(text, device=DEVICE)
        whole = model(tokens, whole_sequence(model, len(text)))
        hidden.append(whole[-count:])
        logits.append(model.logits(whole[-1:]))
    return torch.cat(hidden), torch.cat(logits)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.sample(2)
def test_a_mixed_batch_equals_one_at_a_time(ops, name, seed):
    dtype = torch.float64 if ops == "stand-ins" else torch.float32
    tolerance = 1e-10 if ops == "stand-ins" else 2e-4
    model, pool, texts, batch = held_and_mixed(OPS[ops], MIXED[name], dtype)
    hidden = model(batch.tokens, pool.attending(batch))
    logits = model.logits(hidden[batch.logits_at])
    want_hidden, want_logits = one_at_a_time(model, texts, batch)
    torch.testing.assert_close(hidden, want_hidden, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(logits, want_logits, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", OPS)
def test_each_new_token_is_stored_once(name, seed):
    """K and V of a step: as many bytes as its tokens have, and only their slots change."""
    model, pool, _, batch = held_and_mixed(OPS[name], [(6, 1), (4, 3), (0, 5)], torch.float32)
    before, written = pool.k_slots.clone(), pool.written_bytes
    model(batch.tokens, pool.attending(batch))
    assert pool.written_bytes - written == 9 * CONFIG.kv_bytes_per_token(4)
    changed = (pool.k_slots.nan_to_num() != before.nan_to_num()).any(-1).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == sorted(batch.slot_mapping.tolist())


def restarted(batch):
    counts = batch.cu_seqlens_q.diff().tolist()
    return torch.cat([torch.arange(count, device=DEVICE) for count in counts])


WRONG_STEPS = {
    "positions restart": lambda b: replace(b, positions=restarted(b)),
    "slots of the next sequence": lambda b: replace(b, slot_mapping=(b.slot_mapping + ROOM) % 48),
    "lengths without the new tokens": lambda b: replace(
        b, context_lens=b.context_lens - b.cu_seqlens_q.diff(), lengths=None
    ),
    "sequences cut at another place": lambda b: replace(
        b, cu_seqlens_q=torch.tensor([0, 2, 4, 9], dtype=torch.int32, device=DEVICE), lengths=None
    ),
    "logits of each first token": lambda b: replace(b, logits_at=b.cu_seqlens_q[:-1]),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_rejected(name, seed):
    mixed = [(6, 1), (4, 3), (1, 5)]
    model, pool, texts, right = held_and_mixed(LESSON_03_TORCH, mixed, torch.float64)
    _, want = one_at_a_time(model, texts, right)
    batch = WRONG_STEPS[name](right)
    hidden = model(batch.tokens, pool.attending(batch))
    logits = model.logits(hidden[batch.logits_at])
    assert not torch.allclose(logits, want, atol=1e-2, rtol=0)


# ---------------------------------------------------------------- the rungs


def test_a_rung_serves_with_kernels_on_a_gpu_alone():
    assert PREALLOCATED.ops(torch.device("cuda")) is LESSON_03
    assert PREALLOCATED.ops(torch.device("cpu")) is LESSON_03_TORCH


def test_another_pool_can_stand_in_for_the_default(monkeypatch):
    """That is how a solved exercise 3.2 serves the ladder."""

    class Another(KVPool):
        pass

    model = Decoder(CONFIG)
    monkeypatch.setattr(loop, "KVPool", Another)
    assert type(PREALLOCATED.new_cache(model, 1, 8)) is Another
    assert type(CONCATENATED.new_cache(model, 1, 8)) is ConcatCache
