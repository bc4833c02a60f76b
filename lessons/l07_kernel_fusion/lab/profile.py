"""What `make profile LESSON=07` runs: the small operations of a layer, for 64 tokens."""

import torch

from lessons.l07_kernel_fusion import naive as eager
from lessons.l07_kernel_fusion import optimized as fused

ROWS, SIZE = 64, 2048
GENERATOR = torch.Generator().manual_seed(7)
X, RESIDUAL, GATE, UP = (torch.randn(ROWS, SIZE, generator=GENERATOR).bfloat16() for _ in range(4))
WEIGHT = torch.ones(SIZE).bfloat16()
EPS = 1e-5


def optimized():
    fused.add_rms_norm(X.clone(), RESIDUAL.clone(), WEIGHT, EPS)
    fused.silu_mul(GATE, UP)


def naive():
    eager.add_rms_norm(X.clone(), RESIDUAL.clone(), WEIGHT, EPS)
    eager.silu_mul(GATE, UP)
