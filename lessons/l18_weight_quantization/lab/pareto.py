"""The picture of bits against loss: every method on the embedded model, from the record of
methods.py.
"""

import numpy as np

from lessons.l18_weight_quantization.lab.methods import recorded
from lessons.l18_weight_quantization.lab.quality import WINDOW, WINDOWS
from lessons.toolbox.draw.figure import GREY, HALO, PALETTE, ClassFigure, frame, log_axis, style

PARETO_ALT = (
    "Added loss over bits a weight for rounding, AWQ and GPTQ on the embedded model: INT8 adds "
    "next to nothing, 4 bits in groups little, 4 bits with one scale for a matrix more than all "
    "others."
)

# {way: (its name, its colour, where the name is, beside the end of its line, in points)}
WAYS = {
    "rounding": ("INT4, rounded to nearest", PALETTE[5], (12, 0)),
    "AWQ": ("by AWQ", PALETTE[1], (12, 6)),
    "GPTQ": ("by GPTQ", PALETTE[0], (12, -7)),
}
# {format: (how many weights share a scale, where that is, beside the point of MARKED)}
SHARED = {
    "INT4, row": ("a row", (-10, 0)),
    "INT4 g128": ("128", (0, -26)),
    "INT4 g32": ("32", (-10, -10)),
}
MARKED = "GPTQ"
# {name in the record: (label, where it is, beside the point)}, what is not on a line
POINTS = {
    "int4-tensor": ("INT4, one scale for a matrix", (10, 0)),
    "nf4-double": ("NF4, double", (-9, -13)),
    "mxfp4": ("MXFP4", (0, 38)),
    "nvfp4": ("NVFP4", (10, 0)),
    "nf4": ("NF4", (10, 0)),
    "fp8-e5m2": ("E5M2", (9, 0)),
    "fp8-tensor": ("E4M3, tensor", (9, 11.5)),
    "fp8-row": ("E4M3, row", (9, -2)),
    "int8-row": ("INT8, row", (9, 0)),
    "gguf-q4_k": ("Q4_K and Q5_0", (9, 0)),
    "gguf-q5_k": ("Q5_K and Q5_1", (9, 0)),
    "gguf-q8_0": ("Q8_0", (9, 0)),
}
LEAST = 1e-4  # nats; what is smaller is drawn here
MANY_BITS = 7.5  # from here on the right panel
FAR = 20  # points


@style()
def draw_pareto(found: dict | None = None) -> ClassFigure:
    """Added loss over bits a weight, from the record, with 95 % intervals. INT4 with one scale for
    a row, for 128 and for 32 weights is a line for each way.
    """
    found = found or recorded()
    rows = {row["name"]: row for row in found["rows"]}
    loss = {
        row["way"]: row["added_loss"]["mean"]
        for row in rows.values()
        if row["format"] == "INT4 g128"
    }
    fig, (few, many) = frame(
        f"INT4, groups of 128: GPTQ adds {loss['GPTQ']:.3f} nats to the loss, AWQ "
        f"{loss['AWQ']:.3f}, rounding {loss['rounding']:.3f}",
        f"models/tiny, {WINDOWS * WINDOW:,} tokens of held-out code; bars: 95 %; on GPTQ's line: "
        f"weights that share a scale; smaller losses are drawn at {LEAST}",
        (11, 6),
        widths=(2.9, 1),
    )
    for way, (name, colour, offset) in WAYS.items():
        line = [row for row in rows.values() if row["way"] == way and row["format"] in SHARED]
        line.sort(key=lambda row: row["bits"])
        _draw_points(few, line, colour, "o-")
        end = line[-1]["bits"], line[-1]["added_loss"]["mean"]
        _beside(few, end, name, offset, colour, fontweight="bold")
        for row in line if way == MARKED else ():
            place = row["bits"], row["added_loss"]["mean"]
            _beside(few, place, *SHARED[row["format"]], colour)
    for name in (name for name in POINTS if name in rows):
        row, (label, offset) = rows[name], POINTS[name]
        ax = few if row["bits"] < MANY_BITS else many
        _draw_points(ax, [row], GREY, "D")
        place = row["bits"], max(row["added_loss"]["mean"], LEAST)
        _beside(ax, place, label, offset, GREY)
    for ax, limits in ((few, (3.55, 6.5)), (many, (7.9, 8.9))):
        log_axis(ax.yaxis, 0.8 * LEAST, 1.5)
        ax.set_xlim(*limits)
        ax.grid(True, axis="y")
        ax.set_xlabel("bits a weight")
    few.set_ylabel("added loss, nats a token (lower is better)")
    many.set_yticklabels([])
    return fig


def _draw_points(ax, rows: list[dict], colour: str, look: str) -> None:
    """Means with their intervals."""
    bits = [row["bits"] for row in rows]
    mean, low, high = (
        np.array([max(row["added_loss"][part], LEAST) for row in rows])
        for part in ("mean", "low", "high")
    )
    bars = (mean - low, high - mean)
    ax.errorbar(bits, mean, bars, fmt=look, color=colour, ms=7, capsize=3, elinewidth=1)


def _beside(ax, place: tuple, text: str, offset: tuple, colour: str, **look) -> None:
    """A text beside a point, `offset` points away: on its left if the offset is negative. A thin
    line leads to a text that is FAR, because it may be nearer to another point.
    """
    side = "center" if not offset[0] else "right" if offset[0] < 0 else "left"
    look = {"color": colour, "ha": side, "va": "center", "path_effects": HALO} | look
    if np.hypot(*offset) >= FAR:
        look["arrowprops"] = dict(arrowstyle="-", color=colour, lw=0.8, shrinkA=0, shrinkB=4)
    ax.annotate(text, place, offset, textcoords="offset points", **look)
