"""Pools of codes (lesson 19) of a rank that has some of the tokens. Codes become numbers before
they are read, because lesson 19's kernels return no log-sum-exp.
"""

from lessons.l19_kv_quantization.kernels.latents.pool import RowPool
from lessons.l19_kv_quantization.pool import QuantizedLatentPool, QuantizedPool
from reference.parallel.shared_tokens import SharedLatentPool, SharedTokens


class SharedCodesPool(SharedTokens, QuantizedPool):
    """QuantizedPool of this rank's tokens."""


class SharedLatentCodesPool(SharedLatentPool, QuantizedLatentPool):
    """QuantizedLatentPool of this rank's tokens."""


class SharedRowPool(SharedLatentPool, RowPool):
    """RowPool of this rank's tokens."""


KINDS = (RowPool, SharedRowPool), (QuantizedLatentPool, SharedLatentCodesPool)


def shared_codes(kind: type) -> type:
    """The pool of this kind that shares tokens, or of the same format: kernels read none."""
    return next((twin for known, twin in KINDS if issubclass(kind, known)), SharedCodesPool)
