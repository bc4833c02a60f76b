"""The rung of this lesson: prompts and chunks over a cache, read in tiles."""

import pytest
import torch

from lessons.l02_naive_attention import naive as lesson2
from lessons.l02_naive_attention.decoder import Decoder
from lessons.l03_kv_cache.cache import KVPool
from lessons.l03_kv_cache.generate import generate
from lessons.l03_kv_cache.lab.testing import CONFIG, DEVICE, check_steps
from lessons.l09_flash_attention import optimized
from lessons.l09_flash_attention.naive import LESSON_09_TORCH
from lessons.l09_flash_attention.optimized import FLASH_PROMPTS
from lessons.toolbox.proof.numerics import poison_

BY_KERNEL = LESSON_09_TORCH._replace(prefill=optimized.prefill)


@pytest.mark.parametrize("ops", [LESSON_09_TORCH, BY_KERNEL], ids=["PyTorch tiles", "the kernel"])
def test_a_cached_prompt_equals_the_whole(ops, seed):
    pool = KVPool(CONFIG, 1, 40, ops, device=DEVICE)
    poison_(pool.k_slots)
    poison_(pool.v_slots)
    check_steps(pool, [17, 5, 1, 3], seed)


def test_all_orders_give_the_same_tokens(seed):
    with torch.device(DEVICE):
        model = Decoder(CONFIG).double().eval().requires_grad_(False)
    prompts = [torch.randint(11, (n,)).tolist() for n in (1, 9, 30)]
    want = lesson2.generate(model, prompts, 6)
    if DEVICE.type == "cpu":  # on a GPU the kernel has no float64
        assert generate(model, prompts, 6, rung=FLASH_PROMPTS) == want
