"""The rung of this lesson: steps over a cache in splits, of heads and of latents."""

import pytest
import torch

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import generate
from lessons.l03_kv_cache.lab.testing import CONFIG, DEVICE, check_steps, randomise
from lessons.l04_positions.stand_ins import LESSON_04_TORCH
from lessons.l06_mla.deepseek import DeepseekDecoder, latent
from lessons.l06_mla.naive import LATENTS_TORCH
from lessons.l06_mla.optimized import AbsorbedPool
from lessons.l10_flash_decoding import mla, optimized
from lessons.l10_flash_decoding.naive import LESSON_10_TORCH
from lessons.l10_flash_decoding.optimized import IN_SPLITS
from lessons.toolbox.model.config import MLAConfig, ModelConfig
from lessons.toolbox.proof.numerics import poison_

BY_KERNEL = LESSON_04_TORCH._replace(decode=optimized.decode)


@pytest.mark.parametrize("ops", [LESSON_10_TORCH, BY_KERNEL], ids=["PyTorch", "the kernels"])
def test_cached_steps_equal_recomputing(ops, seed):
    """Prefill, then decode; one layer has a window of 5. Rows not in use are NaN."""
    pool = KVPool(CONFIG, 1, 16, ops, device=DEVICE)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    check_steps(pool, [6, 1, 1, 3, 1], seed)


def test_the_rung_gives_the_tokens_of_recomputation(seed):
    model = randomise(Decoder(CONFIG)).to(DEVICE)
    prompts = [torch.randint(11, (n,)).tolist() for n in (1, 30)]
    assert generate(model, prompts, 8, rung=IN_SPLITS) == lesson2.generate(model, prompts, 8)


def test_the_cache_of_latents_reads_in_splits(seed, monkeypatch):
    """Beside lesson 6's PyTorch: 4 new tokens behind 70, each by the split kernel."""
    monkeypatch.setattr(mla, "kernel_fits", lambda q: True)
    config = ModelConfig(
        "deepseek_v3",
        vocab_size=61,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        v_head_dim=12,
        num_key_value_heads=4,
        head_dim=24,
        intermediate_size=40,
        max_position_embeddings=256,
        mla=MLAConfig(None, 32, 8, 16, 12),
    )
    model = latent(DeepseekDecoder(config).eval().requires_grad_(False).to(DEVICE))
    tokens = torch.randint(0, 61, (74,)).tolist()
    in_splits = LATENTS_TORCH._replace(decode=mla.decode)
    pools = [AbsorbedPool.for_model(model, 1, 80, ops) for ops in (in_splits, LATENTS_TORCH)]
    held = 0
    for new in (70, 1, 1, 1, 1):
        batch = new_batch([(tokens[held : held + new], held)], 80, DEVICE)
        split, whole = (model(batch.tokens, pool.attending(batch)) for pool in pools)
        torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)
        held += new
