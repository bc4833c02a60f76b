"""What `make profile LESSON=28` runs: one token of each of two sequences, of whose 2048 keys 256
are chosen; naive: lesson 12's kernel over all of them.
"""

import torch

from lessons.l12_paged_kv.kernels.latents import paged_mla_decode
from lessons.l28_sparse_attention.optimized import choose_and_attend

SEQUENCES, CONTEXT, CHOSEN, PAGE_SIZE, HEADS = 2, 2048, 256, 64, 16
GENERATOR = torch.Generator().manual_seed(28)
BLOCKS = CONTEXT // PAGE_SIZE
TABLE = torch.randperm(SEQUENCES * BLOCKS, generator=GENERATOR).view(SEQUENCES, BLOCKS).int()
LENGTHS = torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32)
LATENTS = torch.randn(SEQUENCES * BLOCKS, PAGE_SIZE, 576, generator=GENERATOR).bfloat16()
Q = torch.randn(SEQUENCES, HEADS, 576, generator=GENERATOR).bfloat16()
Q_INDEX = torch.randn(SEQUENCES, 64, 128, generator=GENERATOR).bfloat16()
WEIGHTS = torch.randn(SEQUENCES, 64, generator=GENERATOR)
CODES = torch.randint(0, 127, (SEQUENCES * BLOCKS, PAGE_SIZE, 128), generator=GENERATOR).byte()
SCALES = torch.rand(SEQUENCES * BLOCKS, PAGE_SIZE, generator=GENERATOR)


def optimized():
    """Scores, list and attention: three launches, and the merge of splits."""
    index = Q_INDEX, WEIGHTS, CODES, SCALES
    choose_and_attend(Q, LATENTS, *index, TABLE, LENGTHS, CHOSEN, 192**-0.5)


def naive():
    """Full attention."""
    paged_mla_decode(Q, LATENTS, TABLE, LENGTHS, 192**-0.5)
