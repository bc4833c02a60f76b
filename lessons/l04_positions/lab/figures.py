"""The lesson's figures, for the notebook and the README: computed from the lesson's own functions,
measured nowhere but one.

Wavelengths, the clock hands of a few pairs, scores over the distance, ALiBi's biases, what each
scaling stretches, and the loss beyond the trained context as `extrapolation` measured it.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from matplotlib.patches import Circle, Wedge

from lessons.l02_naive_attention.rope import rope_inv_freq
from lessons.l04_positions.alibi import alibi_bias, alibi_slopes
from lessons.l04_positions.naive import inverse_frequencies
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    number,
    size_number,
    style,
)
from lessons.toolbox.draw.plotting import class_plot
from lessons.toolbox.model.config import ModelConfig, RopeScaling

# The rotations of Llama 3.1: trained on 8192 tokens, stretched for 131072.
LLAMA_3 = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072, rope_theta=500000.0)
SCALINGS = {
    "as trained": None,
    "linear, 8×": RopeScaling("linear", 8.0),
    "Llama 3.1, 8×": RopeScaling("llama3", 8.0),
    "YaRN, 8×": RopeScaling("yarn", 8.0),
}
LOOKS = {
    "as trained": ("naive", "-"),
    "linear, 8×": ("floor", ":"),
    "Llama 3.1, 8×": ("optimized", "-"),
    "YaRN, 8×": ("library", "--"),
}


@style()
def clock_hands(
    rotary_dim: int = 8,
    positions: tuple[int, ...] = (0, 1, 2, 3, 10, 100, 1000),
    theta: float = 10000.0,
) -> ClassFigure:
    """One dial a pair and position: the hand's angle is position · frequency. Rows: pairs; columns:
    positions.
    """
    frequencies = inverse_frequencies(rotary_dim, theta).tolist()
    fig, ax = frame(
        "Position as clock hands: fast pairs tell neighbours apart, slow ones tell chapters apart",
        f"{rotary_dim} coordinates are {len(frequencies)} pairs, theta = {theta:g} · a pair's hand "
        f"has turned by "
        "position · frequency · a score sees the angle between two hands, so the distance alone",
        (10.5, 5.6),
    )
    for row, frequency in enumerate(frequencies):
        for column, position in enumerate(positions):
            angle = position * frequency
            ax.add_patch(
                Circle((column, -row), 0.4, facecolor="white", edgecolor="#999999", lw=1.2)
            )
            ax.plot(
                [column, column + 0.36 * math.sin(angle)],
                [-row, -row + 0.36 * math.cos(angle)],
                lw=3,
                solid_capstyle="round",
                color=PALETTE[row % len(PALETTE)],
            )
        ax.text(
            len(positions) - 0.3,
            -row,
            f"one turn in {number(2 * math.pi / frequency)} tokens",
            va="center",
            color=PALETTE[row % len(PALETTE)] if row != 1 else "#9A6A00",
            fontweight="bold",
        )
    ax.set_xticks(range(len(positions)), [f"position {p}" if p == 0 else str(p) for p in positions])
    ax.set_yticks(
        [-row for row in range(len(frequencies))],
        [f"pair {row}" for row in range(len(frequencies))],
    )
    ax.set_xlim(-0.6, len(positions) + 2.2)
    ax.set_ylim(-len(frequencies) + 0.4, 0.6)
    ax.set_aspect("equal")
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.spines[:].set_visible(False)
    return fig


@style()
def two_clocks(
    query_position: int = 3,
    distance: int = 2,
    rotary_dim: int = 8,
    theta: float = 10000.0,
    shift: int = 100,
) -> ClassFigure:
    """A query's hand and a key's in one dial, one dial a pair; below them the same two tokens
    `shift` positions later. The sector between the hands is what a score sees, and it is the same.
    """
    frequencies = inverse_frequencies(rotary_dim, theta).tolist()
    score = sum(math.cos(distance * frequency) for frequency in frequencies) / len(frequencies)
    fig, ax = frame(
        f"{distance} tokens apart: score {score:.3f} of 1, wherever the two tokens stand",
        f"thick: the query, dashed: the key, shaded: the angle between them · q = k, {rotary_dim} "
        f"coordinates, θ = {theta:g} · score: the mean cosine of the shaded angles · computed",
        (10, 5.4),
    )
    for row, later in enumerate((0, shift)):
        at = query_position + later, query_position + later - distance
        for pair, frequency in enumerate(frequencies):
            colour = PALETTE[pair % len(PALETTE)]
            query, key = (90 - math.degrees(position * frequency) for position in at)
            ax.add_patch(Circle((pair, -row), 0.42, facecolor="white", edgecolor="#999999", lw=1.2))
            if distance * frequency < 2 * math.pi:  # else the sector is a whole turn and more
                ends = sorted((query, key))
                ax.add_patch(Wedge((pair, -row), 0.4, *ends, facecolor=colour, alpha=0.25, lw=0))
            for angle, dash, width in ((query, "-", 3.5), (key, (0, (2, 1.5)), 2.5)):
                x, y = math.cos(math.radians(angle)), math.sin(math.radians(angle))
                ends = [pair, pair + 0.39 * x], [-row, -row + 0.39 * y]
                ax.plot(*ends, ls=dash, lw=width, color=colour)
        ax.text(-0.65, -row, f"query at {at[0]}\nkey at {at[1]}", ha="right", va="center")
    for pair, frequency in enumerate(frequencies):
        ax.text(pair, 0.6, f"pair {pair}: θ{chr(0x2080 + pair)} = {frequency:g}", ha="center")
    ax.set_xlim(-1.9, len(frequencies) - 0.4)
    ax.set_ylim(-1.6, 0.9)
    ax.set_aspect("equal")
    ax.axis("off")
    return fig


@style()
def alibi_images(num_heads: int = 12, tokens: int = 24, columns: int = 6) -> ClassFigure:
    """What each head's bias multiplies an attention weight with, exp(bias), dark = 1: [num_heads]
    small images, query by key.
    """
    slopes = alibi_slopes(num_heads)
    weights = alibi_bias(slopes, tokens, tokens).exp().tril().numpy()
    rows, gap = math.ceil(num_heads / columns), 6
    fig, ax = frame(
        f"ALiBi: each of {num_heads} heads looks back a different way",
        f"exp(-slope · distance), {tokens} queries (down) by {tokens} keys (right), dark = 1 · "
        f"slopes of "
        f"{num_heads} heads as published: those of 8, then every other one of 16 · computed",
        (10.5, 1.4 + 1.75 * rows),
    )
    for head, image in enumerate(weights):
        row, column = divmod(head, columns)
        left, top = column * (tokens + gap), row * (tokens + gap)
        ax.imshow(
            image,
            cmap="Blues",
            vmin=0,
            vmax=1,
            extent=(left, left + tokens, top + tokens, top),
            interpolation="nearest",
        )
        ax.text(left, top - 0.8, f"head {head}: {number(float(slopes[head]))}", va="bottom")
    ax.set_xlim(-1, columns * (tokens + gap))
    ax.set_ylim(rows * (tokens + gap) - gap + 1, -5)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return fig


@style()
def stretch_plot(config: ModelConfig = LLAMA_3) -> ClassFigure:
    """Wavelength of each pair under each scaling, against the trained context: which pairs are
    stretched, which left alone.
    """
    found = {
        label: 2
        * math.pi
        / rope_inv_freq(replace(config, rope_scaling=scaling), torch.device("cpu")).double().numpy()
        for label, scaling in SCALINGS.items()
    }
    same = int((found["Llama 3.1, 8×"] < 1.001 * found["as trained"]).sum())
    context = SCALINGS["Llama 3.1, 8×"].original_max_position_embeddings
    fig, ax = frame(
        f"Llama 3.1 leaves {same} of {len(found['as trained'])} pairs alone, and stretches only "
        f"the slow ones",
        f"head_dim {config.head_dim}, theta {number(config.rope_theta)}, trained on {context} "
        f"tokens · a pair that "
        "never completes a turn in training meets new angles beyond it · computed",
        (10, 5.8),
    )
    for label, wavelengths in found.items():
        role, dash = LOOKS[label]
        ax.plot(range(len(wavelengths)), wavelengths, color=ROLES[role].colour, ls=dash, lw=2.4)
    labels = [
        # lines that end together are named in their order
        (len(w) - 1, w[-1] * (1 + 1e-6 * n), label, ROLES[LOOKS[label][0]].colour)
        for n, (label, w) in enumerate(found.items())
    ]
    ax.axhline(context, color=GREY, ls=":", lw=1.4)
    log_axis(ax.yaxis, 3, 1.6 * max(w.max() for w in found.values()))
    ax.text(0, context * 1.15, f"trained context, {context} tokens", color=GREY, va="bottom")
    ax.set_xlabel("pair of coordinates")
    ax.set_ylabel("wavelength (tokens for one turn)")
    ax.grid(True, axis="y", alpha=0.3)
    label_column(ax, labels)
    return fig


def extrapolation_plot(record: dict) -> ClassFigure:
    """The loss by position of `extrapolation.measure`, its record, with a line where the trained
    context ends. Two labels say that their models were trained on.
    """
    share = f"{record['share']:.1%}"
    names = {"ALiBi": f"ALiBi, {share} more training", "RoPE": f"RoPE, the same {share}"}
    series, within, beyond = {}, {}, {}
    context = record["trained_context"]
    for label, found in record["series"].items():
        points = found["points"]
        series[names.get(label, label)] = found["role"], [(p["loss"],) * 3 for p in points]
        within[label] = np.mean([p["loss"] for p in points if p["x"] <= context])
        beyond[label] = np.mean([p["loss"] for p in points if p["x"] > context])
    fig = class_plot(
        record["x"],
        series,
        xlabel="position in the text (tokens)",
        ylabel="loss (nats per token)",
        title=f"Beyond {context} tokens: loss {beyond['as trained']:.2f} as trained, "
        f"{beyond['YaRN']:.2f} with YaRN; ALiBi from {within['ALiBi']:.2f} to "
        f"{beyond['ALiBi']:.2f}",
        caption=f"{record['fingerprint']['device']} · models/tiny · {record['windows']} windows of "
        f"held-out text, stretched {record['factor']:g}×",
    )
    ax = fig.axes[0]
    ax.set_xscale("linear")  # positions are counted, not doubled
    ax.set_xlim(0, 1.02 * max(record["x"]))
    ax.set_xticks(
        ticks := range(context // 2, max(record["x"]) + 1, context // 2), map(size_number, ticks)
    )
    ax.axvline(context, color=GREY, ls=":", lw=1.4)
    ax.annotate(
        "trained context",
        (context, ax.get_ylim()[1]),
        (-6, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=GREY,
    )
    return fig
