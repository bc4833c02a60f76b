"""The lesson's pictures: what scales of two kinds do to a page of K, how many sequences fit, where a
smaller cache saves nothing, and the channels of an activation before and after SmoothQuant.

    python -m lessons.l19_kv_quantization.lab.pictures

writes page.svg, fit.svg, loses.svg and outliers.svg beside this file. Nothing is timed. K and the
activations are those of models/tiny on held-out code; sequences and bytes are computed.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from lessons.l01_roofline.models import find_model
from lessons.l01_roofline.plan import Plan, make_plan
from lessons.l02_naive_attention.naive import attention, whole_sequence
from lessons.l16_speculative_sampling.lab.workload import embedded_pair, held_out_prompts
from lessons.l19_kv_quantization.formats import FORMATS
from lessons.l19_kv_quantization.kivi import dequantize_keys, quantize_keys
from lessons.l19_kv_quantization.lab.ways_out import bits_per_value, way
from lessons.l19_kv_quantization.smoothquant import smoothing_scales
from lessons.l19_kv_quantization.w8a8 import to_eight_bits
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    save_svg,
    size_number,
    style,
)
from lessons.toolbox.measure.hardware import CHIPS

HERE = Path(__file__).parent
PAGE_SVG, FIT_SVG, LOSES_SVG, OUTLIERS_SVG = (
    HERE / f"{name}.svg" for name in ("page", "fit", "loses", "outliers")
)
PAGE_ALT = (
    "Three maps of 32 tokens by 64 channels. The absolute values of K show upright stripes: a few "
    "channels are loud for every token. The error with a scale for each token is spread over all "
    "channels, the error with a scale for each channel is faint."
)
FIT_ALT = (
    "Sequences that fit over the context, both axes logarithmic: three parallel falling lines for a "
    "cache of 16 bits, FP8 and INT4, each above the one before."
)
LOSES_ALT = (
    "How many times shorter a decode step is with an FP8 cache, over the context, for batches of 1, 8 "
    "and 32: all begin near 1 at short contexts and approach 1.97."
)
OUTLIERS_ALT = (
    "Largest value of each channel, from quiet to loud, before and after SmoothQuant. For the "
    "activations the steep end of the curve becomes flatter, for the weights a flat curve becomes "
    "steeper."
)

# ---------------------------------------------------------------- what the embedded model computes

PAGE = 32  # tokens
LOUD_LAYER = 3  # whose down_proj receives the loudest channel


@lru_cache
def seen(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a held-out prompt of PAGE tokens or more, rotated, as the cache stores them: [T,
    heads, D] each.
    """
    target, kept = embedded_pair()[0], []

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
    target, kept = embedded_pair()[0], []
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
        f"K has loud channels: a scale for each channel loses {lost[1]:.1%} of it, a scale for each "
        f"token {lost[0]:.1%}",
        f"models/tiny, layer {layer}, KV head {head}, {PAGE} tokens of held-out code; INT4",
        (11, 4.4),
        (1, 1, 1),
    )
    most = float(by_token.max())
    panels = [
        ("|K|: loud channels stand upright", page.abs(), float(page.abs().max())),
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


# ---------------------------------------------------------------- bytes

NAMES = {"bf16": "16 bits", "fp8": "FP8", "int4": "INT4"}
LOOKS = (("naive", "o"), ("optimized", "s"), ("library", "^"))
CONTEXTS = [2**n for n in range(9, 18)]


def plan_for(model: str, gpus: int, context: int, cache: str) -> Plan:
    """A deployment on H200s with one of NAMES as cache."""
    shape = find_model(model)
    bits = bits_per_value(cache, shape.head_dim)
    return make_plan(shape, CHIPS["h200"], 1, context, gpus, bits_per_kv=bits)


@style()
def draw_fit(model: str = "llama-3-70b", gpus: int = 2, marked: int = 8192) -> ClassFigure:
    """Sequences that fit over the context, for three caches."""
    fits = {
        cache: [way("", plan_for(model, gpus, context, cache)).sequences for context in CONTEXTS]
        for cache in NAMES
    }
    here = {cache: counts[CONTEXTS.index(marked)] for cache, counts in fits.items()}
    fig, ax = frame(
        f"Contexts of {marked} tokens: {here['bf16']} sequences fit in 16 bits, {here['fp8']} in "
        f"FP8, {here['int4']} in INT4",
        f"computed · {model}, 16-bit weights, {gpus} x H200, 90 % of their memory; scales included",
        (10, 5),
    )
    labels = []
    for (cache, counts), (role, marker) in zip(fits.items(), LOOKS):
        colour, dash = ROLES[role].colour, ROLES[role].dash
        ax.plot(CONTEXTS, counts, color=colour, marker=marker, ls=dash)
        labels.append((CONTEXTS[-1], counts[-1], NAMES[cache], colour))
    ax.axvline(marked, color=GREY, lw=1, ls=":")
    _context_axis(ax)
    log_axis(ax.yaxis, 1, 4096)
    ax.set_ylabel("sequences that fit (higher is better)")
    ax.grid(True)
    label_column(ax, labels)
    return fig


def gain(model: str, batch: int, context: int, cache: str = "fp8") -> float:
    """How many times shorter a decode step can be with this cache, by the bytes that it reads."""
    plans = [plan_for(model, 1, context, kind) for kind in ("bf16", cache)]
    # Whether they fit does not matter here: `running` must be the batch.
    steps = [replace(plan, batch=batch, gpus=64).decode.bytes_moved for plan in plans]
    return steps[0] / steps[1]


@style()
def draw_loses(model: str = "llama-3-8b", batches: tuple[int, ...] = (32, 8, 1)) -> ClassFigure:
    """What an FP8 cache can save of a decode step, over the context."""
    low, high = gain(model, 1, CONTEXTS[0]), gain(model, batches[0], CONTEXTS[-1])
    fig, ax = frame(
        f"One sequence of {CONTEXTS[0]} tokens gains {low:.2f}×, {batches[0]} of "
        f"{size_number(CONTEXTS[-1])} gain {high:.2f}×: the weights are read in any case",
        f"predicted from bytes · {model}, 16-bit weights, FP8 cache with its scales",
        (10, 5),
    )
    labels = []
    for batch, colour, marker in zip(batches, PALETTE, "osD"):
        gains = [gain(model, batch, context) for context in CONTEXTS]
        ax.plot(CONTEXTS, gains, color=colour, marker=marker)
        labels.append((CONTEXTS[-1], gains[-1], f"batch {batch}", colour))
    most = 16 / bits_per_value("fp8", find_model(model).head_dim)
    ax.axhline(most, color=ROLES["floor"].colour, ls="--", lw=1.5)
    words = f"roof: the cache alone, {most:.2f}×"
    ax.annotate(words, (CONTEXTS[0], most), (0, 5), textcoords="offset points", color=GREY)
    _context_axis(ax)
    ax.set_ylim(0.95, 2.08)
    ax.set_ylabel("16 bits over FP8 (higher is better)")
    ax.grid(True)
    label_column(ax, labels)
    return fig


def _context_axis(ax: plt.Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(CONTEXTS, [size_number(context) for context in CONTEXTS])
    ax.set_xlabel("context, tokens")


# ---------------------------------------------------------------- outliers


def smoothing(x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """s of each channel, from the x themselves: [T, K], [N, K] -> [K]."""
    return smoothing_scales(x.abs().amax(0), [weight], alpha)


def product_error(x: Tensor, weight: Tensor, s: Tensor) -> tuple[float, float]:
    """Relative error of x · weightᵀ in INT8 after the channels were moved by s: [K], with one scale for
    all tokens, and with one for each. The weight has one for each row.
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
        f"α = {alpha:g}: the loudest channel falls from {loud[0]:.0f} to {loud[1]:.1f} times the "
        f"median, the INT8 error from {errors[0][0]:.1%} to {errors[1][0]:.1%}",
        f"models/tiny, down_proj of layer {layer}, held-out code; one scale for all tokens (with one for "
        f"each: {errors[0][1]:.1%} to {errors[1][1]:.1%})",
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
        ax.set_xlabel("channel, from quiet to loud activations")
        ax.grid(True)
        ax.legend(loc="upper left")
    axes[0].set_ylabel("largest |value| of the channel")
    return fig


if __name__ == "__main__":
    save_svg(draw_page(), PAGE_SVG, alt=PAGE_ALT)
    save_svg(draw_fit(), FIT_SVG, alt=FIT_ALT)
    save_svg(draw_loses(), LOSES_SVG, alt=LOSES_ALT)
    save_svg(draw_outliers(), OUTLIERS_SVG, alt=OUTLIERS_ALT)
