"""Two pictures of bytes: how many sequences fit, and where a smaller cache saves nothing. Computed.

pictures.py saves them.
"""

from dataclasses import replace

import matplotlib.pyplot as plt

from lessons.l01_roofline.planner.models import find_model
from lessons.l01_roofline.planner.plan import Plan, make_plan
from lessons.l19_kv_quantization.lab.ways_out import bits_per_value, way
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    size_number,
    style,
)
from lessons.toolbox.measure.hardware import CHIPS

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
        f"predicted from bytes, whether or not they fit on one GPU · {model}, 16-bit weights, "
        "FP8 cache with its scales",
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
