"""The plain way: at every place of a text, try the bytes of every token.

Read it beside optimized.py. Both give the same masks, one bit a token: bit t % 32 of word t // 32
is 1 if token t may come next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lessons.l24_structured_outputs.matcher import Matcher, State


def token_mask(matcher: Matcher, state: State, tokens: Sequence[bytes | None]) -> Tensor:
    """Which tokens may come next: [ceil(V / 32)] int32. tokens: the bytes of each, None for
    none.
    """
    allowed = [bool(token) and matcher.read(token, state) is not None for token in tokens]
    return packed(torch.tensor(allowed))


def packed(allowed: Tensor) -> Tensor:
    """Bits of booleans: [..., V] -> [..., ceil(V / 32)] int32."""
    words = -(-allowed.shape[-1] // 32)
    padded = torch.nn.functional.pad(allowed.long(), (0, 32 * words - allowed.shape[-1]))
    bits = padded.unflatten(-1, (words, 32)) << torch.arange(32, device=allowed.device)
    # Bit 31 is the sign of an int32.
    return bits.sum(-1).to(torch.int32)


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """Booleans of bits: [..., words] int32 -> [..., vocab_size]."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, device=mask.device, dtype=torch.int32)
    return (bits & 1).flatten(-2)[..., :vocab_size].bool()


def apply_token_mask(logits: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """-inf for each token that its row's mask forbids, in place; returns logits.

    logits: [B, V]. mask: [R, ceil(V / 32)] int32. rows: [R] int64: the row of logits that each mask
    is for, each row at most once. Rows without a mask stay as they are.
    """
    allowed = unpacked(mask, logits.shape[1])
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return logits
