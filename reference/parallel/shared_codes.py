"""Pools of codes (lesson 19) of a rank that has some of the tokens."""

from lessons.l19_kv_quantization.pool import QuantizedLatentPool, QuantizedPool
from reference.parallel.shared_tokens import SharedLatentPool, SharedTokens


class SharedCodesPool(SharedTokens, QuantizedPool):
    """QuantizedPool of this rank's tokens."""


class SharedLatentCodesPool(SharedLatentPool, QuantizedLatentPool):
    """QuantizedLatentPool of this rank's tokens."""
