"""KIVI: K with a scale for each channel, V with a scale for each token, in 4 bits, and the newest
tokens as they are.

In K the same few channels are large for every token, so a scale for each token is ruled by them and
all other channels lose their bits. A scale for each channel is not. But a channel's scale belongs
to many tokens, so it can only be known when all of them are there. KIVI waits until a group of 32
tokens is complete, and keeps what is not, and at least the last `residual` tokens, in full
precision.

    tokens        0 …… 31 | 32 …… 63 | 64 ………………… 107
                  codes     codes      full precision: residual 32, and 12 on the way to a group

When a token becomes codes depends on how many have come after it. This is why the engine has scales
a token instead:

- a page border: with pages of 32 tokens or a multiple, no group is in two pages. Other sizes would
  tear a group's scales from its codes when a block is shared or swapped.
- preemption by computing again: the prompt and the answer so far run in one piece, and their
  queries see more in full precision than they did at first. The tokens may come out differently.
- the prefix cache: a request that finds a page of codes reads codes where the first one read full
  precision.
- speculation: a rejected token can be taken back while it is in full precision. Afterwards it is in
  its group's scales for good, so `residual` has to be as long as a draft, at least. And even then
  a draft leaves a trace: it pushes older tokens over the border, and they stay codes.

Source: Liu et al. 2024, KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, section 3
(the algorithm: appendix A). There with 2 bits, G = 32 and R = 32 to 128.
"""

import torch
from torch import Tensor

from lessons.l02_naive_attention.naive import attention
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.toolbox.model.arguments import check_whole, refuse

GROUP = 32  # tokens that share the scales of K, and channels that share a scale of V
INT4 = FORMATS["int4"]


def quantize_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """k: [n · 32, Hkv, D] -> codes: [n · 32, Hkv, D / 2] uint8 and scales: [n, Hkv, D, 2]: scale
    and low of each channel of each group.
    """
    by_channel = k.unflatten(0, (-1, GROUP)).movedim(1, -1)  # [n, Hkv, D, 32]
    packed, scales = INT4.quantize(by_channel)
    numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    numbers = numbers.movedim(-1, 1).flatten(0, 1)  # [n · 32, Hkv, D]
    return numbers[..., 0::2] | numbers[..., 1::2] << 4, scales


def dequantize_keys(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, up to rounding: [n · 32, Hkv, D]."""
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).unflatten(0, (-1, GROUP))
    scale, low = scales[:, None].unbind(-1)
    return (numbers * scale + low).flatten(0, 1).to(scales.dtype)


def quantize_values(v: Tensor) -> tuple[Tensor, Tensor]:
    """v: [T, Hkv, D], D a multiple of 32 -> codes: [T, Hkv, D / 2] uint8 and scales: [T, Hkv, D /
    32, 2]: scale and low of each 32 channels of a token.
    """
    codes, scales = INT4.quantize(v.unflatten(-1, (-1, GROUP)))
    return codes.flatten(-2), scales


def dequantize_values(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse, up to rounding: [T, Hkv, D]."""
    return INT4.dequantize(codes.unflatten(-1, (-1, GROUP // 2)), scales).flatten(-2)


class KiviCache:
    """K and V of one sequence. residual: how many of the newest tokens are never codes.

    k, v: [tokens, Hkv, D], what is in full precision: the tokens from `coded` on.
    """

    def __init__(self, residual: int = GROUP):
        check_whole(residual=residual)
        self.residual = residual
        self.coded = 0
        self.groups: list[
            tuple[Tensor, ...]
        ] = []  # k codes, k scales, v codes, v scales of 32 tokens
        self.k = self.v = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v: [T, Hkv, D] of the next tokens. Groups that are complete, and older than the
        residual, become codes.
        """
        if k.shape[-1] % GROUP or v.shape[-1] % GROUP:
            refuse("k, v", (k.shape[-1], v.shape[-1]), f"heads of a multiple of {GROUP} values")
        self.k = k if self.k is None else torch.cat([self.k, k])
        self.v = v if self.v is None else torch.cat([self.v, v])
        while len(self.k) >= GROUP + self.residual:
            self.groups.append((*quantize_keys(self.k[:GROUP]), *quantize_values(self.v[:GROUP])))
            self.k, self.v = self.k[GROUP:], self.v[GROUP:]
            self.coded += GROUP

    def rewind(self, tokens: int) -> None:
        """Keep the first `tokens` tokens. Raises ValueError if one of the others is a code
        already.
        """
        if not self.coded <= tokens <= self.coded + len(self.k):
            refuse(
                "tokens",
                tokens,
                f"{self.coded} to {self.coded + len(self.k)}: older ones are codes",
            )
        self.k, self.v = self.k[: tokens - self.coded], self.v[: tokens - self.coded]

    def numbers(self) -> tuple[Tensor, Tensor]:
        """All of K and V as a query sees them now: [tokens, Hkv, D] each."""
        k = [dequantize_keys(*group[:2]) for group in self.groups]
        v = [dequantize_values(*group[2:]) for group in self.groups]
        return torch.cat([*k, self.k]), torch.cat([*v, self.v])

    def attend(self, q: Tensor, softmax_scale: float | None = None) -> Tensor:
        """The newest tokens over everything. q: [T, Hq, D] -> [T, Hq, D]. The definition of
        kivi_kernel.py's `kivi_decode`.
        """
        return attention(q, *self.numbers(), softmax_scale)
