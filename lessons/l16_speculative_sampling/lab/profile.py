"""What `make profile LESSON=16` runs: the verification of four drafted tokens over a vocabulary of
Llama 3's size, in several programs a sequence; `naive`, one program a sequence, beside it.
"""

import torch

from lessons.l16_speculative_sampling import optimized as one_launch
from lessons.l16_speculative_sampling.more.split import verify_split

SEQUENCES, ROWS, VOCAB_SIZE = 1, 5, 128256
GENERATOR = torch.Generator().manual_seed(16)
TOTAL = SEQUENCES * ROWS
P, Q = (3 * torch.randn(2, TOTAL, VOCAB_SIZE, generator=GENERATOR)).softmax(-1)
Q = (P + Q) / 2  # a draft that is right in about half of its mass
DRAFTED = torch.multinomial(Q, 1, generator=GENERATOR).squeeze(1)
U = torch.rand(TOTAL, 2, generator=GENERATOR)
CU_ROWS = torch.arange(SEQUENCES + 1, dtype=torch.int32) * ROWS


def optimized():
    return verify_split(P, Q, DRAFTED, U, CU_ROWS, ROWS)


def naive():
    return one_launch.verify(P, Q, DRAFTED, U, CU_ROWS, ROWS)
