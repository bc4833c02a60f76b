"""What `make profile LESSON=19` runs: one new token over a cache of 8-bit whole numbers."""

from lessons.l12_paged_kv.lab.profile import LENGTHS, TABLE, K, Q, V
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.l19_kv_quantization.formats import Int8
from lessons.l19_kv_quantization.lab.testing import coded_cache
from lessons.l19_kv_quantization.naive import dequantized_decode
from lessons.l19_kv_quantization.optimized import quantized_decode

FORMAT = Int8()
(K_CODES, K_SCALES), (V_CODES, V_SCALES) = (coded_cache(FORMAT, x) for x in (K, V))
CODED = Q, K_CODES, V_CODES, K_SCALES, V_SCALES, TABLE, LENGTHS, FORMAT


def optimized():
    return quantized_decode(*CODED)


def naive():
    return dequantized_decode(*CODED)


def bfloat16():
    """Lesson 12's kernel over the same tokens."""
    return paged_decode(Q, K, V, TABLE, LENGTHS)
