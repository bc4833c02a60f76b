"""Figures of the lesson's own: loss beside KV bytes beside the time of a step, and the KV bytes of
real models.

    python -m lessons.l05_gqa.lab.figures [results/cpu]
        redraws FOLDER/l05_quality.svg from its two records
"""

import sys
from pathlib import Path

from lessons.l01_roofline.calculators import kv_bytes_per_token, sequences_that_fit, weight_bytes
from lessons.l01_roofline.planner.models import find_model
from lessons.l05_gqa.lab.traffic import MEMORY_SHARE, fitting
from lessons.toolbox.draw.figure import ROLES, ClassFigure, frame, number, save_svg, style
from lessons.toolbox.measure.hardware import lookup
from lessons.toolbox.measure.records import medians, read_json
from lessons.toolbox.model.checkpoint import REPOSITORY

ALT = (
    "Held-out loss over KV bytes a token for models/tiny with 6, 3, 2 and 1 KV heads: merging "
    "raises the loss, most of all to one head; a little more training takes most of that back."
)


@style()
def quality_figure(quality: dict, steps: dict) -> ClassFigure:
    """quality: the record of `quality`; steps: that of the benchmark l05_step, whose grouped times
    label the points.

    A hollow mark is a model as merged, a filled one the same after some more training.
    """
    times, series = medians(steps, "optimized"), quality["series"]
    trained, mqa = series["2 heads, as trained"], series["1 head, mean"]["points"]
    share = mqa[-1]["tokens"] / quality["trained_on_tokens"]
    facts = quality["fingerprint"]
    fig, ax = frame(
        f"Half the cache: averaging two KV heads moves the loss from "
        f"{trained['points'][0]['loss']:.2f} to {mqa[0]['loss']:.2f}, "
        f"{share:.1%} more training to {mqa[-1]['loss']:.2f}",
        f"models/tiny, {quality['held_out_tokens']} held-out tokens · hollow: as merged, filled: "
        f"after {share:.1%} of the tokens that it was trained on · step: time of a decode step "
        f"beside that of 2 heads, {steps['shape']} · {facts.get('cpu', facts['device'])} · "
        f"{facts['date']}",
        (11, 6.2),
    )
    for label, variant in series.items():
        x, losses = variant["kv_bytes"], [point["loss"] for point in variant["points"]]
        role = ROLES[
            "naive" if label.startswith("6") else "library" if "trained" in label else "optimized"
        ]
        mark = {"color": role.colour, "marker": role.markers["first" in label], "ms": 11, "mew": 2}
        if len(losses) > 1:
            ax.plot([x, x], [losses[0], losses[-1]], color=role.colour, lw=1.4)
            ax.plot(x, losses[-1], **mark)
        ax.plot(x, losses[0], mfc="white", **mark)
        text = f"{label}: {' → '.join(f'{loss:.2f}' for loss in [losses[0], *losses[1:][-1:]])}"
        if label.startswith("1"):  # two ways to merge into one head end close to each other
            place = ((14, 6 if "first" in label else -6), "left")
        elif "trained" in label:  # the model as it is: no mark of another stands below
            place = ((0, -16), "center")
        elif label.startswith("6"):  # the rightmost, with no room beside it
            place = ((0, 14), "center")
        else:
            place = ((14, 0), "left")
        ax.annotate(
            f"{text} · step {times[variant['num_kv_heads']] / times[2]:.2f}×",
            (x, losses[0]),
            place[0],
            ha=place[1],
            textcoords="offset points",
            va="center",
            color=role.colour,
            fontweight="bold",
        )
    sizes = sorted({variant["kv_bytes"] for variant in series.values()})
    every = [point["loss"] for variant in series.values() for point in variant["points"]]
    ax.set_xlim(0, sizes[-1] * 1.2)
    ax.set_ylim(min(every) - 0.35, max(every) + 0.25)
    ax.set_xticks(sizes, [number(size) for size in sizes])
    ax.grid(True, axis="y", alpha=0.3)
    ax.set_xlabel("KV bytes a token, all layers, 16 bits (lower is better)")
    ax.set_ylabel("held-out loss, nats a token\n(lower is better)")
    return fig


@style()
def sharing_figure(
    kv_heads: int = 8, context: int = 8192, name: str = "llama-3-70b", gpu: str = "h200"
) -> ClassFigure:
    """What a model's cache would be with 1, 2, 4 … KV heads, bar by bar, and the sequences that
    fit. kv_heads: the bar to mark. Raises ValueError for a number that does not share evenly.
    """
    model, chip = find_model(name), lookup(gpu)
    most = model.num_attention_heads
    counts = [1 << n for n in range(most.bit_length()) if most % (1 << n) == 0]
    if kv_heads not in counts:
        raise ValueError(f"kv_heads: got {kv_heads}; accepted: {', '.join(map(str, counts))}")
    per_head = kv_bytes_per_token(model) / model.num_key_value_heads
    # weights as they are, and the GPUs that the largest cache needs, so that only the cache changes
    gpus, _ = fitting(chip.memory_bytes, weight_bytes(model), most * per_head, context)
    usable, gib = gpus * MEMORY_SHARE * chip.memory_bytes, context * per_head / 2**30
    fit = {
        count: sequences_that_fit(usable, weight_bytes(model), count * per_head, context)
        for count in counts
    }
    fig, ax = frame(
        f"{kv_heads} KV heads: a sequence of {context} tokens keeps {kv_heads * gib:.3g} GiB, "
        f"and there is room for {fit[kv_heads]}",
        f"{name}, {most} query heads, 16 bits · on {gpus} {chip.name}, {MEMORY_SHARE:.0%} of their "
        f"memory, beside the weights · computed",
        (10, 4.6),
    )
    for y, count in enumerate(counts):
        role = ROLES["optimized" if count == kv_heads else "floor"]
        look = {"facecolor": role.colour if count == kv_heads else "#BBBBBB", "edgecolor": "white"}
        ax.barh(y, count * gib, 0.8, **look)
        ax.annotate(
            f"{count * gib:.3g} GiB, room for {fit[count]}",
            (count * gib, y),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=role.colour,
            fontweight="bold" if count == kv_heads else "normal",
        )
    kinds = {1: " (MQA)", most: " (MHA)", model.num_key_value_heads: " (as it is)"}
    ax.set_yticks(range(len(counts)), [f"{count}{kinds.get(count, '')}" for count in counts])
    ax.set_ylim(len(counts) - 0.4, -0.6)
    ax.set_xlim(0, most * gib * 1.35)
    ax.set_ylabel("KV heads")
    ax.set_xlabel(f"GiB of K and V for {context} tokens, lower is better")
    return fig


def main(folder: Path) -> None:
    records = [read_json(folder / f"{name}.json") for name in ("l05_quality", "l05_step")]
    save_svg(quality_figure(*records), folder / "l05_quality.svg", alt=ALT)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "results" / "cpu")
