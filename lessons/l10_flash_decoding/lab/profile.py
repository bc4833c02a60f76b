"""What `make profile LESSON=10` runs: one new token of one long sequence, in splits."""

import torch

from lessons.l03_kv_cache.optimized import decode_attention
from lessons.l10_flash_decoding import naive as lesson
from lessons.l10_flash_decoding.optimized import flash_decode

CONTEXT, HEADS, KV_HEADS, HEAD_DIM, SPLITS = 4096, 8, 2, 128, 8
GENERATOR = torch.Generator().manual_seed(10)
Q, K, V = (
    torch.randn(1, *shape, HEAD_DIM, generator=GENERATOR).bfloat16()
    for shape in ((HEADS,), (CONTEXT, KV_HEADS), (CONTEXT, KV_HEADS))
)
LENGTHS = torch.tensor([CONTEXT], dtype=torch.int32)


def optimized():
    return flash_decode(Q, K, V, LENGTHS, num_splits=SPLITS)


def naive():
    return lesson.flash_decode(Q, K, V, LENGTHS, num_splits=SPLITS)


def one_program():
    """Lesson 3's kernel: one program for each KV head, however long the sequence is."""
    return decode_attention(Q, K, V, LENGTHS)
