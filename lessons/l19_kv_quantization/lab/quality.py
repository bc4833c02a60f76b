"""What a quantized cache, and what W8A8, cost in quality on the embedded model: counted, not timed.

    python -m lessons.l19_kv_quantization.lab.quality      # writes results/counted/l19_quality.json

The measures are those of lesson 18's harness: loss, KL and flips on held-out code, beside the model as it
is. Four questions:

- formats: the three of the engine, and KIVI's two kinds of scales, in 8, 4 and 2 bits.
- scales: whole numbers with one scale for a tensor, page, token, head or channel.
- outliers: how loud the loudest channel and the first tokens are, in the model as it is and with a
  channel that outliers.py made loud ("synthetic"). Both compute the same function.
- w8a8: int8 and FP8 on both sides, α swept, in the model as it is and with two loud channels.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.optimized import attention_torch
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.calibration import calibration_windows
from lessons.l18_weight_quantization.lab.quality import held_out_windows, predictions, quality
from lessons.l18_weight_quantization.linear import quantized
from lessons.l19_kv_quantization.formats import FORMATS, row_bytes
from lessons.l19_kv_quantization.outliers import (
    channel_ratio,
    with_loud_activations,
    with_loud_keys,
)
from lessons.l19_kv_quantization.smoothquant import activation_maxima, smoothed
from lessons.l19_kv_quantization.w8a8 import to_eight_bits, w8a8_by_numbers
from lessons.toolbox.model.checkpoint import load_tokenizer

ROOT = Path(__file__).parents[3]
OUT = ROOT / "results" / "counted" / "l19_quality.json"
MODEL = ROOT / "models" / "tiny"
WINDOWS, WINDOW = 24, 512
PAGE = 32  # tokens
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
LOUD_KEYS, LOUD_ACTIVATIONS = [3], [17, 200]  # channels that become loud
KEY_FACTOR, ACTIVATION_FACTOR = 30.0, 100.0
Change = Callable[[Tensor], Tensor]  # [T, Hkv, D] -> what is left of it


# ---------------------------------------------------------------- caches


class WithCache:
    """A decoder whose K and V go through `k` and `v` before anybody attends to them, as in a cache that
    holds codes. Everything else is the decoder's.
    """

    def __init__(self, model: Decoder, k: Change, v: Change):
        self.model, self.k, self.v = model, k, v

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, attend) -> Tensor:
        """tokens: [T] -> hidden: [T, hidden_size]; `attend` of another cache is not asked."""
        attend = whole_sequence(self.model, len(tokens), self.attention)
        return self.model(tokens, attend)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *arguments, **options) -> Tensor:
        return attention_torch(q, self.k(k), self.v(v), *arguments, **options)


def as_it_is(x: Tensor) -> Tensor:
    return x


def by_row(name: str, x: Tensor) -> Tensor:
    """x: [T, Hkv, D] after the engine's format."""
    format = FORMATS[name]
    return format.dequantize(*format.quantize(x))


def by_group(bits: int, over: str, x: Tensor) -> Tensor:
    """x: [T, Hkv, D] after whole numbers of so many bits, with a scale and a low for each group. over:
    what shares them, one of SHARED. Pages are those that are complete; the rest is as it is, as in KIVI.
    """
    tokens = len(x)
    whole = tokens // PAGE * PAGE
    dims = SHARED[over]
    if not over.endswith("page"):
        return rounded(x, bits, dims)
    pages = x[:whole].unflatten(0, (-1, PAGE))  # [pages, 32, Hkv, D]
    return torch.cat([rounded(pages, bits, dims).flatten(0, 1), x[whole:]])


# what has one scale -> the dimensions that share it, from the last one on
SHARED = {
    "tensor": (-1, -2, -3),
    "page": (-1, -2, -3),
    "head of a page": (-1, -3),
    "token": (-1, -2),
    "head of a token": (-1,),
    "channel of a page": (-3,),
}


def rounded(x: Tensor, bits: int, dims: tuple[int, ...]) -> Tensor:
    """x: [...] after codes with a scale and a low over `dims`."""
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    step = (high - low) / (2**bits - 1)
    step = torch.where(step == 0, 1.0, step)
    return ((x - low) / step).round() * step + low


def in_parts(bits: int, x: Tensor) -> Tensor:
    """KIVI's V: a scale for each 32 channels of a token."""
    return rounded(x.unflatten(-1, (-1, PAGE)), bits, (-1,)).flatten(-2)
