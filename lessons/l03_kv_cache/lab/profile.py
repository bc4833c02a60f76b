"""What `make profile LESSON=03` runs: one new token for each of four sequences."""

import torch

from lessons.l02_naive_attention.naive import attention
from lessons.l03_kv_cache.optimized import append_rows, decode_attention

BATCH, CAPACITY, HEADS, KV_HEADS, HEAD_DIM = 4, 512, 8, 2, 128
GENERATOR = torch.Generator().manual_seed(3)
Q, K, V, NEW_K, NEW_V = (
    torch.randn(*shape, HEAD_DIM, generator=GENERATOR).bfloat16()
    for shape in [(BATCH, HEADS)] + 2 * [(BATCH, CAPACITY, KV_HEADS)] + 2 * [(BATCH, KV_HEADS)]
)
LENGTHS = torch.tensor([512, 384, 200, 33], dtype=torch.int32)
SLOTS = torch.arange(BATCH) * CAPACITY + LENGTHS - 1


def optimized():
    append_rows(NEW_K, NEW_V, K.flatten(0, 1), V.flatten(0, 1), SLOTS)
    return decode_attention(Q, K, V, LENGTHS)


def naive():
    """Each sequence by itself, its scores in memory."""
    lengths = enumerate(LENGTHS.tolist())
    return [attention(Q[b : b + 1], K[b, :n], V[b, :n]) for b, n in lengths]
