"""What a quantized cache, and what W8A8, cost in quality on the embedded model: counted, not timed.

    python -m lessons.l19_kv_quantization.lab.quality      # writes results/counted/l19_quality.json

The measures are those of lesson 18's harness: loss, KL and flips on held-out code, beside the model
as it is. Four questions:

- formats: the three of the engine, and KIVI's two kinds of scales, in 8, 4 and 2 bits.
- scales: whole numbers with one scale for a tensor, page, token, head or channel.
- outliers: how large the largest channel and the first tokens are, in the model as it is and with a
  channel that outliers.py made an outlier ("synthetic"). Both compute the same function.
- w8a8: int8 and FP8 on both sides, α swept, in the model as it is and with two outlier channels.
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
from lessons.l18_weight_quantization.lab.quality import held_out_windows, predictions, quality
from lessons.l18_weight_quantization.linear import quantized
from lessons.l18_weight_quantization.methods.calibration import calibration_windows
from lessons.l19_kv_quantization.activations.outliers import (
    channel_ratio,
    with_loud_activations,
    with_loud_keys,
)
from lessons.l19_kv_quantization.activations.smoothquant import activation_maxima, smoothed
from lessons.l19_kv_quantization.activations.w8a8 import to_eight_bits, w8a8_by_numbers
from lessons.l19_kv_quantization.formats import FORMATS, row_bytes
from lessons.toolbox.model.checkpoint import load_tokenizer

ROOT = Path(__file__).parents[3]
OUT = ROOT / "results" / "counted" / "l19_quality.json"
MODEL = ROOT / "models" / "tiny"
WINDOWS, WINDOW = 12, 512
PAGE = 32  # tokens
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
LOUD_KEYS, LOUD_ACTIVATIONS = [3], [17, 200]  # channels that become outliers
KEY_FACTOR, ACTIVATION_FACTOR = 30.0, 100.0
Change = Callable[[Tensor], Tensor]  # [T, Hkv, D] -> what is left of it


# ---------------------------------------------------------------- caches


class WithCache:
    """A decoder whose K and V go through `k` and `v` before they are attended to, as in a cache
    that holds codes. Everything else is the decoder's.
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
    """x: [T, Hkv, D] after whole numbers of so many bits, with a scale and a low for each group.
    over: what shares them, one of SHARED. Pages are those that are complete; the rest is as it is,
    as in KIVI.
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


# ---------------------------------------------------------------- the four questions


def formats(measure: Callable, model: Decoder) -> dict:
    """The engine's formats, and KIVI's scales. bits: of a stored number, scales of 16 bits and
    all.
    """
    width, found = model.config.head_dim, {}
    for name, format in FORMATS.items():
        bits = 8 * row_bytes(format, width, 2) / width
        row = partial(by_row, name)
        found[name] = {"bits": bits, **measure(WithCache(model, row, row))}
    for bits in (4, 2):
        keys, values = partial(by_group, bits, "channel of a page"), partial(in_parts, bits)
        stored = bits + 2 * 16 / PAGE
        found[f"kivi {bits} bits"] = {"bits": stored, **measure(WithCache(model, keys, values))}
    return found


def scales(measure: Callable, model: Decoder, loud: Decoder) -> dict:
    """One part of the cache in codes at a time, by what shares a scale. In "loud" a channel of K is
    a synthetic outlier.
    """
    found = {}
    for bits in (8, 4):
        for over in SHARED:
            change = partial(by_group, bits, over)
            found[f"{over}, {bits} bits"] = {
                "k": measure(WithCache(model, change, as_it_is)),
                "v": measure(WithCache(model, as_it_is, change)),
                "k, a loud channel": measure(WithCache(loud, change, as_it_is)),
            }
    return found


@torch.inference_mode()
def outliers(model: Decoder, windows: Tensor) -> dict:
    """How uneven K, V and the inputs of linear layers are, by layer. channel: the largest channel
    over the one in the middle. first token, token: the norm of the first token, and of the largest
    of the others, over the one in the middle. channels: the largest magnitude of each channel of
    the first KV head.
    """
    count, seen = len(model.layers), {"k": [], "v": []}

    def attention(q, k, v, *arguments, **options):
        seen["k"].append(k)
        seen["v"].append(v)
        return attention_torch(q, k, v, *arguments, **options)

    maxima = activation_maxima(model, partial(run_all, model, windows, attention))
    found = {
        part: [channel_ratio(maxima[f"layers.{layer}.{part}"]) for layer in range(count)]
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    }
    # attention was called layer after layer, window after window
    return found | {
        part: [unevenness(x[i::count]) for i in range(count)] for part, x in seen.items()
    }


def unevenness(rows: list[Tensor]) -> dict:
    """K or V of a layer: [T, Hkv, D] of each window."""
    x = torch.stack(rows)
    norms, loudest = x.norm(dim=-1), x.abs().amax((0, 1))  # [windows, T, Hkv], [Hkv, D]
    return {
        "channel": channel_ratio(loudest),
        "first token": float(norms[:, 0].amax() / norms.median()),
        "token": float(norms[:, 1:].amax() / norms.median()),
        "channels": [round(y, 3) for y in loudest[0].tolist()],
    }


@torch.inference_mode()
def run_all(model: Decoder, windows: Tensor, attention: Callable = attention_torch) -> None:
    """The model over each window, [length] tokens."""
    for window in windows:
        model(window, whole_sequence(model, len(window), attention))


def w8a8(measure: Callable, models: dict[str, Decoder], windows: Tensor) -> dict:
    """Every linear layer but lm_head with codes on both sides. alpha None: not smoothed."""
    found = {}
    for kind, model in models.items():
        maxima = activation_maxima(model, partial(run_all, model, windows))
        for name in ("int8", "fp8"):
            for alpha in (None, *ALPHAS):
                if name == "fp8" and alpha not in (None, 0.5):
                    continue
                twin = model if alpha is None else smoothed(model, maxima, alpha)
                twin = quantized(twin, partial(codes_of, name), w8a8_by_numbers)
                label = f"{name}, {kind}, {'not smoothed' if alpha is None else f'alpha {alpha}'}"
                found[label] = measure(twin)
    return found


def codes_of(name: str, layer: str, linear: torch.nn.Linear):
    return to_eight_bits(linear.weight, name)


def main() -> int:
    torch.manual_seed(0)
    tokenizer, model = load_tokenizer(str(MODEL)), load_decoder(str(MODEL), "cpu").float()
    windows = held_out_windows(tokenizer, WINDOWS, WINDOW)
    calibration = calibration_windows(tokenizer, 8)
    reference = list(predictions(model, windows))

    def measure(changed) -> dict:
        measures = asdict(quality(changed, windows, reference))
        return {
            name: {key: round(value, 6) for key, value in measures[name].items()}
            for name in ("loss", "added_loss", "kl", "flips")
        }

    loud_keys = with_loud_keys(model, LOUD_KEYS, KEY_FACTOR)
    loud = with_loud_activations(model, LOUD_ACTIVATIONS, ACTIVATION_FACTOR)
    record = {
        "model": "models/tiny",
        "windows": WINDOWS,
        "window": WINDOW,
        "page": PAGE,
        "key_factor": KEY_FACTOR,
        "activation_factor": ACTIVATION_FACTOR,
        "outliers": {
            "as it is": outliers(model, calibration),
            "a loud channel of K": outliers(loud_keys, calibration),
            "loud activations": outliers(loud, calibration),
        },
        "formats": formats(measure, model),
        "w8a8": w8a8(measure, {"as it is": model, "loud activations": loud}, calibration),
        "scales": scales(measure, model, loud_keys),
    }
    record["reference"] = measure(model)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
