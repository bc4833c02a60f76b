"""The kernel's idea in PyTorch: q and k turn in place, and k goes to its slot. For machines where
kernels are interpreted.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.batch import Batch
from lessons.l03_kv_cache.stand_ins import LESSON_03_TORCH, store


def write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    batch: Batch,
    cos_sin_cache: Tensor,
) -> Tensor:
    """Rotate q and k in place, then store k and v. Shapes as in AttentionOps; returns q."""
    rope_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[batch.positions][:, None].to(q.dtype).chunk(2, dim=-1)
    turn_(q[..., -rope_dim:], cos, sin)
    turn_(k[..., -rope_dim:], cos, sin)
    store(k, v, k_slots, v_slots, batch.slot_mapping)
    return q


def turn_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn x: [T, H, D] in place, in the half-rotated layout. cos, sin: [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    # Kept aside, because the second half still needs the old first.
    turned = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)


LESSON_04_TORCH = LESSON_03_TORCH._replace(write=write)
