"""A cache whose layers have formats of their own, and whose first and newest tokens stay in 16
bits: its bytes, and an `attend` over it.

Each query sees what it would see if tokens were decoded one by one: codes where they are codes by
then. So a text that runs in one pass gives what a server would compute token after token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.l02_naive_attention.rope import rotation
from lessons.l19_kv_quantization.formats import FORMATS, row_bytes
from lessons.toolbox.model.config import ModelConfig

GROUP = 32  # tokens of a scale of K, and channels of a scale of V, in KIVI
WIDE_BYTES = 2  # of a number in 16 bits, and of a scale
KIVI_BITS = {"kivi4": 4, "kivi2": 2}
NAMES = ("auto", *FORMATS, *KIVI_BITS)


@dataclass(frozen=True)
class Choice:
    """k, v: a name of NAMES for each layer. sinks, recent: tokens that stay in 16 bits."""

    k: tuple[str, ...]
    v: tuple[str, ...]
    sinks: int = 0
    recent: int = 0

    def codes(self, name: str, tokens):
        """Of so many tokens, how many from the first on are no longer in the newest part: the end
        of the codes. tokens: an int, or a tensor of them.
        """
        if name == "auto":
            return tokens * 0 + self.sinks
        end = tokens - self.recent - self.sinks
        if name in KIVI_BITS:
            end = end // GROUP * GROUP  # a group becomes codes when it is complete
        return self.sinks + (end.clamp(min=0) if isinstance(end, Tensor) else max(0, end))


# ---------------------------------------------------------------- bytes


def cache_bytes(choice: Choice, config: ModelConfig, context: int, batch: int) -> int:
    """K and V of so many sequences in all layers, scales and all."""
    width, heads = config.head_dim, config.num_key_value_heads
    total = 0
    for name in (*choice.k, *choice.v):
        coded = choice.codes(name, context) - choice.sinks
        total += (context - coded) * width * WIDE_BYTES + coded * coded_bytes(name, width)
    return int(batch * heads * total)


def coded_bytes(name: str, width: int) -> float:
    """Of a token and head. KIVI's K has a scale and a low for 32 tokens of a channel, its V for 32
    channels of a token, which is as many.
    """
    if name in KIVI_BITS:
        return width * (KIVI_BITS[name] / 8 + 2 * WIDE_BYTES / GROUP)
    return 0 if name == "auto" else row_bytes(FORMATS[name], width, WIDE_BYTES)


# ---------------------------------------------------------------- what a query sees


def in_codes(name: str, x: Tensor, is_k: bool, sinks: int) -> Tensor:
    """x: [T, Hkv, D] bfloat16 as the cache would give it back, if all of it from `sinks` on were
    codes. KIVI's K of a group that is not complete stays as it is.
    """
    if name == "auto":
        return x
    if name in FORMATS:
        return FORMATS[name].dequantize(*FORMATS[name].quantize(x))
    bits = KIVI_BITS[name]
    if not is_k:
        return grouped(x.unflatten(-1, (-1, GROUP)), bits, -1).flatten(-2)
    end = sinks + max(0, len(x) - sinks) // GROUP * GROUP
    if end <= sinks:
        return x
    groups = grouped(x[sinks:end].unflatten(0, (-1, GROUP)), bits, 1).flatten(0, 1)
    return torch.cat([x[:sinks], groups, x[end:]])


def grouped(x: Tensor, bits: int, over: int) -> Tensor:
    """x: [...] after codes of so many bits, a scale and a low over a dimension, in its dtype."""
    low = x.amin(over, keepdim=True)
    scale = ((x.amax(over, keepdim=True).float() - low.float()) / (2**bits - 1)).to(x.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = ((x.float() - low.float()) / scale.float()).round().clamp(0, 2**bits - 1)
    return (codes * scale.float() + low.float()).to(x.dtype)


class CodedCache:
    """K and V of one sequence in 16 bits, and an `attend` whose queries see codes where a cache of
    this choice would hold codes by then.
    """

    def __init__(self, config: ModelConfig, choice: Choice):
        self.config, self.choice = config, choice
        self.k: list[Tensor | None] = [None] * config.num_hidden_layers
        self.v = list(self.k)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next tokens. q: [T, Hq, D]; k, v: [T, Hkv, D] -> [T, Hq, D]."""
        held = 0 if self.k[layer] is None else len(self.k[layer])
        count = held + torch.arange(1, len(q) + 1)  # tokens when each query runs
        rotate = rotation(self.config, count - 1, q.dtype)
        q, k = rotate(q) * self.config.softmax_scale, rotate(k)
        for part, new in ((self.k, k.bfloat16()), (self.v, v.bfloat16())):
            part[layer] = new if held == 0 else torch.cat([part[layer], new])
        seen = [self.seen(name, layer, count) for name in ("k", "v")]
        (k_wide, k_codes, k_is_code), (v_wide, v_codes, v_is_code) = seen
        scores = torch.where(k_is_code, products(q, k_codes), products(q, k_wide))
        is_later = torch.arange(held + len(q)) >= count[:, None]
        p = scores.masked_fill(is_later, float("-inf")).softmax(-1)
        of_codes = torch.where(v_is_code, p, 0.0)
        return sums(of_codes, v_codes) + sums(p - of_codes, v_wide)

    def seen(self, part: str, layer: int, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(in 16 bits, after codes, which of both each query sees) of K or V of a layer: [Tk, Hkv,
        D] float32 twice, and [T, Tk].
        """
        stored, name = getattr(self, part)[layer], getattr(self.choice, part)[layer]
        coded = in_codes(name, stored, part == "k", self.choice.sinks)
        place, end = torch.arange(len(stored)), self.choice.codes(name, count)
        is_code = (place >= self.choice.sinks) & (place < end[:, None])
        return stored.float(), coded.float(), is_code


def products(q: Tensor, k: Tensor) -> Tensor:
    """q: [T, Hq, D], k: [Tk, Hkv, D] -> [Hq, T, Tk]."""
    group = q.shape[1] // k.shape[1]
    return torch.einsum("thd,khd->htk", q, k.repeat_interleave(group, 1))


def sums(p: Tensor, v: Tensor) -> Tensor:
    """p: [Hq, T, Tk], v: [Tk, Hkv, D] -> [T, Hq, D]."""
    group = p.shape[0] // v.shape[1]
    return torch.einsum("htk,khd->thd", p, v.repeat_interleave(group, 1))
