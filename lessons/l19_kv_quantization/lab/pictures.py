"""The lesson's pictures: what scales of two kinds do to a page of K, how many sequences fit, where
a smaller cache saves nothing, the channels of an activation before and after SmoothQuant, and what
each cache loses.

    python -m lessons.l19_kv_quantization.lab.pictures

writes page.svg, fit.svg, loses.svg, outliers.svg, quality.svg and rotations.svg beside this file.
Nothing is timed. K and the activations are those of models/tiny on held-out code; sequences and
bytes are computed. The last two read results/counted/l19_quality.json and lab/rotations.py's
record.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l16_speculative_sampling.lab.workload import MODELS, held_out_prompts
from lessons.l19_kv_quantization.activations.smoothquant import smoothing_scales
from lessons.l19_kv_quantization.activations.w8a8 import to_eight_bits
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kivi.kivi import dequantize_keys, quantize_keys
from lessons.l19_kv_quantization.lab.quality import OUT
from lessons.l19_kv_quantization.lab.rotations import ALT as ROTATIONS_ALT
from lessons.l19_kv_quantization.lab.rotations import draw_rotations
from lessons.l19_kv_quantization.lab.savings import draw_fit, draw_loses, gain
from lessons.toolbox.draw.figure import (
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    save_svg,
    style,
)

__all__ = ["draw_fit", "draw_loses", "draw_outliers", "draw_page", "draw_quality", "gain"]

HERE = Path(__file__).parent
PAGE_ALT = (
    "Three maps of 32 tokens by 64 channels. The absolute values of K show upright stripes: a few "
    "channels are large for every token. The error with a scale for each token is spread over all "
    "channels, the error with a scale for each channel is faint."
)
FIT_ALT = (
    "Sequences that fit over the context, both axes logarithmic: three parallel falling lines for "
    "a cache of 16 bits, FP8 and INT4, each above the one before."
)
LOSES_ALT = (
    "How many times shorter a decode step is with an FP8 cache, over the context, for batches of "
    "1, 8 and 32: all begin near 1 at short contexts and approach 1.97."
)
OUTLIERS_ALT = (
    "Largest value of each channel, in rising order, before and after SmoothQuant. For the "
    "activations the steep end of the curve becomes flatter, for the weights a flat curve becomes "
    "steeper."
)
QUALITY_ALT = (
    "KL to the model as it is, by what has a scale of its own, for K, for V and for K with an "
    "outlier channel. For K a scale for each channel loses least, and a channel that was made an "
    "outlier changes nothing for it, while all other scales lose far more."
)

# ---------------------------------------------------------------- what the embedded model computes

PAGE = 32  # tokens
LOUD_LAYER = 2  # whose down_proj receives the largest outlier channel


@lru_cache
def embedded_model() -> Decoder:
    """models/tiny in float32 on the CPU, also where there is a GPU: the README quotes its
    numbers.
    """
    return Decoder.from_pretrained(str(MODELS / "tiny"))


@lru_cache
def seen(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a held-out prompt of PAGE tokens or more, rotated, as the cache stores them:
    [T, heads, D] each.
    """
    target, kept = embedded_model(), []

    def recorded(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        kept.append((q, k, v))
        return attention(q, k, v, scale, window=window)

    prompt = next(prompt for prompt in held_out_prompts(32) if len(prompt) >= PAGE)
    attend = whole_sequence(target, len(prompt), recorded)
    target.run_layers(target.embed_tokens(torch.tensor(prompt)), attend, range(layer + 1))
    return kept[layer]


@lru_cache
def received(layer: int, prompts: int = 6) -> tuple[Tensor, Tensor]:
    """What a layer's down_proj receives on held-out prompts: [T, K], and its weight: [N, K]."""
    target, kept = embedded_model(), []
    linear = target.layers[layer].mlp.down_proj
    hook = linear.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    try:
        for prompt in held_out_prompts(prompts):
            attend = whole_sequence(target, len(prompt))
            target.run_layers(target.embed_tokens(torch.tensor(prompt)), attend, range(layer + 1))
    finally:
        hook.remove()
    return torch.cat(kept), linear.weight


# ---------------------------------------------------------------- scales per token and per channel


def errors_of(page: Tensor) -> tuple[Tensor, Tensor]:
    """page: [32, D] -> |error| in INT4 with a scale for each token, and for each channel."""
    int4 = FORMATS["int4"]
    by_token = int4.dequantize(*int4.quantize(page))
    by_channel = dequantize_keys(*quantize_keys(page[:, None]))[:, 0]
    return (page - by_token).abs(), (page - by_channel).abs()


@style()
def draw_page(layer: int = 1, head: int = 1) -> ClassFigure:
    """A page of K as a map, and what two kinds of scales lose of it."""
    page = seen(layer)[1][:PAGE, head]
    by_token, by_channel = errors_of(page)
    lost = [float(error.norm() / page.norm()) for error in (by_token, by_channel)]
    fig, axes = frame(
        f"K has outlier channels: a scale for each channel loses {lost[1]:.1%} of it, "
        f"for each token {lost[0]:.1%}",
        f"models/tiny, layer {layer}, KV head {head}, {PAGE} tokens of held-out code; INT4",
        (11, 4.4),
        (1, 1, 1),
    )
    most = float(by_token.max())
    panels = [
        ("|K|: outlier channels", page.abs(), float(page.abs().max())),
        ("|error|, a scale for each token", by_token, most),
        ("|error|, a scale for each channel", by_channel, most),
    ]
    for ax, (title, values, top) in zip(axes, panels):
        image = ax.imshow(values.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=top)
        ax.set_title(title, loc="left")
        ax.set_xlabel("channel")
        fig.colorbar(image, ax=ax, shrink=0.9)
    axes[0].set_ylabel("token")
    return fig


# ---------------------------------------------------------------- outliers


def smoothing(x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """s of each channel, from the x themselves: [T, K], [N, K] -> [K]."""
    return smoothing_scales(x.abs().amax(0), [weight], alpha)


def product_error(x: Tensor, weight: Tensor, s: Tensor) -> tuple[float, float]:
    """Relative error of x · weightᵀ in INT8 after the channels were moved by s: [K], with one scale
    for all tokens, and with one for each. The weight has one for each row.
    """
    int8, exact = FORMATS["int8"], x @ weight.T
    rows = to_eight_bits(weight * s, "int8").dequantize()
    one = int8.dequantize(*int8.quantize((x / s).flatten())).view_as(x)
    each = int8.dequantize(*int8.quantize(x / s))
    one, each = (float((x @ rows.T - exact).norm() / exact.norm()) for x in (one, each))
    return one, each


@style()
def draw_outliers(alpha: float = 0.5, layer: int = LOUD_LAYER) -> ClassFigure:
    """The largest value of each channel, before and after its share has moved to the weight."""
    x, weight = received(layer)
    s = smoothing(x, weight, alpha)
    before, after = (values.abs().amax(0) for values in (x, x / s))
    loud = [float(values.max() / values.median()) for values in (before, after)]
    errors = [product_error(x, weight, by) for by in (torch.ones_like(before), s)]
    fig, axes = frame(
        f"α = {alpha:g}: largest channel {loud[0]:.0f} → {loud[1]:.1f} times the median, "
        f"INT8 error {errors[0][0]:.1%} → {errors[1][0]:.1%}",
        f"models/tiny, down_proj of layer {layer}, held-out code; one scale for all tokens (with "
        f"one for each: {errors[0][1]:.1%} to {errors[1][1]:.1%})",
        (11, 4.8),
        (1, 1),
    )
    order = before.argsort()
    panels = [
        ("activations", before, after),
        ("weights", *(values.abs().amax(0) for values in (weight, weight * s))),
    ]
    for ax, (title, first, second) in zip(axes, panels):
        rank = np.arange(len(order))
        ax.plot(rank, first[order], color=ROLES["naive"].colour, lw=1.5, label="before")
        ax.plot(rank, second[order], color=ROLES["optimized"].colour, lw=1.5, ls=":", label="after")
        log_axis(ax.yaxis, 0.05, 500)
        ax.set_title(title, loc="left")
        ax.set_xlabel("channel, sorted by its activations before")
        ax.grid(True)
        ax.legend(loc="upper left")
    axes[0].set_ylabel("largest |value| of the channel")
    return fig


# ---------------------------------------------------------------- quality

SHOWN = {  # what shares a scale, in results/counted/l19_quality.json -> as the figure says it
    "tensor": "one for all",
    "page": "a page",
    "token": "a token",
    "head of a token": "a token and head",
    "channel of a page": "a channel of a page",
}


def recorded() -> dict:
    """What lab/quality.py has counted last."""
    return json.loads(OUT.read_text(encoding="utf-8"))


@style()
def draw_quality(found: dict | None = None, bits: int = 4) -> ClassFigure:
    """How far the predictions move if K or V alone becomes codes, by what has a scale."""
    scales = (found or recorded())["scales"]
    rows = [scales[f"{over}, {bits} bits"] for over in SHOWN]
    row, channel = (scales[f"{over}, {bits} bits"] for over in list(SHOWN)[-2:])
    parts = {"k": "K", "v": "V", "k, a loud channel": "K with an outlier channel (added)"}
    loud = [entry["k, a loud channel"]["kl"]["mean"] for entry in (row, channel)]
    fig, ax = frame(
        f"With an outlier channel in K, a scale for each token and head has "
        f"{loud[0] / loud[1]:.0f} times the KL of one for each channel",
        f"counted · models/tiny, held-out code, {bits} bits with a scale and a low; K or V alone",
        (11, 5),
    )
    at, marks = np.arange(len(SHOWN)), "osD"
    labels = []
    for (part, name), colour, marker in zip(parts.items(), PALETTE, marks):
        values = [entry[part]["kl"]["mean"] for entry in rows]
        ax.plot(at, values, color=colour, marker=marker, ls=":", lw=1.5)
        labels.append((at[-1], values[-1], name, colour))
    drawn = [entry[part]["kl"]["mean"] for entry in rows for part in parts]
    log_axis(ax.yaxis, min(drawn) / 2, max(drawn) * 2)
    ax.set_xticks(at, SHOWN.values())
    ax.set_xlabel("what has a scale of its own")
    ax.set_ylabel("KL to the model as it is, nats\n(lower is better)")
    ax.grid(True)
    label_column(ax, labels)
    return fig


if __name__ == "__main__":
    save_svg(draw_page(), HERE / "page.svg", alt=PAGE_ALT)
    save_svg(draw_fit(), HERE / "fit.svg", alt=FIT_ALT)
    save_svg(draw_loses(), HERE / "loses.svg", alt=LOSES_ALT)
    save_svg(draw_outliers(), HERE / "outliers.svg", alt=OUTLIERS_ALT)
    save_svg(draw_quality(), HERE / "quality.svg", alt=QUALITY_ALT)
    save_svg(draw_rotations(), HERE / "rotations.svg", alt=ROTATIONS_ALT)
