"""What `make profile LESSON=01` runs: a copy, which has nothing to compute."""

import torch

from lessons.l01_roofline.optimized import scale_copy

X = torch.arange(2**18, dtype=torch.float32)


def optimized():
    return scale_copy(X, 2.0)


def naive():
    """PyTorch's own, an operation at a time."""
    return X.clone().mul_(2.0)
