"""The figure of prompts and answers apart, drawn from what the simulator wrote.

Its record is results/simulated/l26_apart.json, by `python -m reference.simulator.apart`.
"""

import json
from pathlib import Path

from lessons.toolbox.draw.figure import (
    ROLES,
    ClassFigure,
    frame,
    label_column,
    log_axis,
    style,
)

RECORD = Path(__file__).parents[3] / "results" / "simulated" / "l26_apart.json"
MIXED, APART, SLOW, MANY = (
    "mixed, chunks of 512",
    "apart 2:2, 400 Gb/s",
    "apart 2:2, 25 Gb/s",
    "apart 3:1, 400 Gb/s",
)
LOOKS = {
    MIXED: (ROLES["naive"].colour, "o", "-"),
    APART: (ROLES["optimized"].colour, "s", "-"),
    SLOW: ("#7A4FA3", "^", ":"),
    MANY: (ROLES["library"].colour, "D", "--"),
}
PANELS = {"ttft": "first token after the arrival", "second": "second token after the first",
          "itl": "any next token"}  # fmt: skip


def rows_of(prompt: int, way: str, record: Path = RECORD) -> list[dict]:
    """The runs of a way with prompts of this length, by their rates."""
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["prompt"] == prompt and row["way"] == way]


def earlier_up_to(prompt: int, record: Path = RECORD) -> float:
    """The highest rate up to which the 99th percentile of TTFT is lower apart 2:2 than mixed."""
    best = 0.0
    for mixed, apart in zip(rows_of(prompt, MIXED, record), rows_of(prompt, APART, record)):
        if apart["ttft_p99_ms"] >= mixed["ttft_p99_ms"]:
            break
        best = mixed["rate"]
    return best


@style()
def draw_apart(prompt: int = 4096, record: Path = RECORD) -> ClassFigure:
    """Three panels over the arrival rate: 99th percentiles of the first, second and next tokens."""
    up_to = earlier_up_to(prompt, record)
    fig, axes = frame(
        f"Two of four GPUs for prompts alone: first tokens come earlier than mixed up to {up_to:g} "
        "requests/s, and later above",
        f"simulated, not measured · Llama-3-8B on four H100s, prompts of {prompt} and answers of "
        "200 tokens in the mean; sent layer by layer",
        (14, 5.4),
        (1, 1, 1),
    )
    labels = []
    for ax, (key, what) in zip(axes, PANELS.items()):
        every = []
        for way, (colour, marker, dash) in LOOKS.items():
            rows = rows_of(prompt, way, record)
            rates = [row["rate"] for row in rows]
            values = [row[f"{key}_p99_ms"] for row in rows]
            every += values
            ax.plot(rates, values, color=colour, marker=marker, ls=dash)
            if key == "itl":
                labels.append((rates[-1], values[-1], way, colour))
        log_axis(ax.yaxis, min(every) / 1.6, max(every) * 1.6)
        ax.set_title(what, loc="left", fontsize=12)
        ax.set_xticks(rates)
        ax.grid(True)
        ax.set_xlabel("requests/s that arrive")
    axes[0].set_ylabel("99th percentile, ms\n(lower is better)")
    label_column(axes[2], labels)
    return fig
