"""What `make profile LESSON=12` runs: one new token of four sequences in blocks of 16."""

import torch

from lessons.l12_paged_kv.naive import gathered_attention
from lessons.l12_paged_kv.optimized import paged_decode

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 2, 128
LENGTHS = torch.tensor([512, 384, 200, 33], dtype=torch.int32)
GENERATOR = torch.Generator().manual_seed(12)
BLOCKS = 4 * 512 // BLOCK
Q = torch.randn(4, HEADS, HEAD_DIM, generator=GENERATOR).bfloat16()
K, V = (
    torch.randn(BLOCKS, BLOCK, KV_HEADS, HEAD_DIM, generator=GENERATOR).bfloat16() for _ in range(2)
)
TABLE = torch.randperm(BLOCKS, generator=GENERATOR).to(torch.int32).view(4, -1)


def optimized():
    return paged_decode(Q, K, V, TABLE, LENGTHS)


def naive():
    return gathered_attention(Q, K, V, TABLE, torch.arange(5), LENGTHS)
