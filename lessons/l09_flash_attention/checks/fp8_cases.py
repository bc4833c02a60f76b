"""What the tests of the 8-bit Hopper kernel have in common: the twin, the proof, inputs."""

import numpy as np
import torch

from lessons.l09_flash_attention.checks.gluon_cases import DEVICE, check_lse
from lessons.l09_flash_attention.hopper import gluon_fp8
from lessons.l09_flash_attention.hopper.fp8 import attention_fp8_by_tiles
from lessons.toolbox.gpu.instructions.tensor_cores import product_in_14_bits
from lessons.toolbox.proof.numerics import assert_close_to_oracle, assert_same_bits

KERNEL = gluon_fp8.flash_attention_fp8_hopper
# A weight whose exp differs in the last bit may get another code of E4M3, 6 % away.
FLOOR = 2e-3


def in_14_bits(a, b):
    """Products of codes, added as Hopper adds them: 32 in an instruction. [H, M, K], [H, K, N] ->
    [H, M, N].
    """
    a, b = (x.float().cpu().numpy() for x in (a, b))
    total = np.zeros((*a.shape[:2], b.shape[2]), dtype=np.float32)
    for k in range(0, a.shape[2], 32):
        part = a[..., k : k + 32], b[:, k : k + 32]
        total = product_in_14_bits(*part, total, ("e4m3", "e4m3"))
    return torch.from_numpy(total).double().to(DEVICE)


def proved(q, k, v, causal, kernel=KERNEL):
    """The errors against the twin that has the same codes and adds their products in as many bits.
    Two calls give the same bits; the log-sum-exp is held to 1e-5 · max(1, |lse|).
    """
    out, lse = kernel(q, k, v, causal=causal)
    twin, exact = attention_fp8_by_tiles(q, k, v, causal=causal, multiply=in_14_bits)
    errors = assert_close_to_oracle(out, twin.bfloat16(), twin, floor=FLOOR)
    check_lse(lse, exact)
    for again, first in zip(kernel(q, k, v, causal=causal), (out, lse)):
        assert_same_bits(again, first)
    return errors


def of_different_sizes(given):
    """Heads whose largest values, and so whose scales, are 1, 1/3, 1/9, … of the first's."""
    sizes = 3.0 ** -torch.arange(given[0].shape[1], device=DEVICE)
    return [x * sizes[: x.shape[1], None].bfloat16() for x in given]
