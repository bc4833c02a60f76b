"""What `make profile LESSON=09` runs: one head group of a prompt."""

import torch

from lessons.l09_flash_attention import fa1
from lessons.l09_flash_attention import naive as naive_version
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l09_flash_attention.tiles import chip_of, tiles_for

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 512, 4, 1, 128
GENERATOR = torch.Generator().manual_seed(9)
Q, K, V = (
    torch.randn(TOKENS, heads, HEAD_DIM, generator=GENERATOR).bfloat16()
    for heads in (HEADS, KV_HEADS, KV_HEADS)
)


def optimized():
    """With the tiles of the chip whose compiled code runs, on a CPU too."""
    tiles = tiles_for(chip_of(Q.device), HEAD_DIM, Q.itemsize)
    return flash_attention(Q, K, V, tiles=tiles)


def naive():
    return naive_version.attention(Q, K, V)


def first_flash():
    """FlashAttention's first order of loops: keys outside, queries inside."""
    return fa1.flash_attention_fa1(Q, K, V)
