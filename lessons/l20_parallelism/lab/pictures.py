"""The lesson's pictures: matrices that are cut, the mesh, a pipeline at work, a ring, memory and
tokens that ranks share, and how much of eight GPUs is left after they have talked.

    python -m lessons.l20_parallelism.lab.pictures

writes SVG files beside this file. Schedules are simulated, times are predictions of scaling.py.
"""

import sys
from pathlib import Path

from lessons.l01_roofline.planner.models import find_model
from lessons.l20_parallelism.lab.cuts import CUTS_ALT, draw_cuts
from lessons.l20_parallelism.lab.figures import draw_mesh, draw_ring
from lessons.l20_parallelism.lab.shared_memory import (
    SHARED_MEMORY_ALT,
    SHARED_TOKENS_ALT,
    draw_shared_memory,
    draw_shared_tokens,
)
from lessons.l20_parallelism.pipeline import Piece, bubble, decode_bubble, schedule, split_layers
from lessons.l20_parallelism.planner.links import machine_of
from lessons.l20_parallelism.planner.scaling import DEGREES, decode_step, efficiency, prefill
from lessons.l20_parallelism.planner.shares import Layout
from lessons.toolbox.draw.again import Picture, draw_again
from lessons.toolbox.draw.figure import (
    GREY,
    PALETTE,
    ROLES,
    ClassFigure,
    frame,
    label_column,
    style,
)
from lessons.toolbox.draw.plotting import gantt
from lessons.toolbox.measure.hardware import CHIPS

HERE = Path(__file__).parent
LAYERS, STAGES = 80, 4
STEPS = 3  # of decoding, in the picture


def gantt_rows(pieces: list[Piece], name: str, num_stages: int = STAGES) -> dict[str, list[tuple]]:
    """The rows that `gantt` draws: one a stage, a bar for each piece, named by its step."""
    rows = {f"{name}, stage {stage}": [] for stage in range(num_stages)}
    for piece in pieces:
        kind = f"micro-batch {piece.micro_batch}"
        rows[f"{name}, stage {piece.stage}"].append((piece.start, piece.end, kind))
    return rows


def draw_pipeline(micro_batches: int = 4) -> ClassFigure:
    """One batch through four stages, whole and in micro-batches: both have the same work."""
    stages = split_layers(LAYERS, STAGES)
    whole = schedule([micro_batches] * STAGES, 1)  # in the time of a micro-batch on a stage
    parts = schedule([1] * STAGES, micro_batches)
    rows = gantt_rows(whole, "whole") | {" ": []} | gantt_rows(parts, "cut")
    return gantt(
        rows,
        title=f"{LAYERS} layers on {STAGES} GPUs: idle {bubble(STAGES, 1):.0%} of the time, with "
        f"{micro_batches} micro-batches {bubble(STAGES, micro_batches):.0%}",
        xlabel="time in slots (a slot: one micro-batch through one stage)",
        caption=f"simulated: one prefill · {len(stages[0])} layers a stage · above the batch in "
        f"one piece, below in {micro_batches}",
    )


def draw_decode(few: int = 2) -> ClassFigure:
    """Decoding with fewer micro-batches than stages, and with as many."""
    rows: dict[str, list[tuple]] = {}
    for count in (few, STAGES):
        rows |= ({" ": []} if rows else {}) | gantt_rows(
            schedule([1] * STAGES, count, STEPS), f"m = {count}"
        )
    return gantt(
        rows,
        title=f"Decoding on {STAGES} stages: {few} micro-batches leave "
        f"{decode_bubble(STAGES, few):.0%} idle, {STAGES} none but at the ends",
        xlabel="time in slots (a slot: one micro-batch through one stage)",
        caption=f"simulated: {STEPS} tokens of each sequence · m: micro-batches in flight",
    )


@style()
def draw_scaling(
    model: str = "llama-3-70b", gpu: str = "h100", batch: int = 32, context: int = 4096
) -> ClassFigure:
    """Efficiency of tensor parallelism over its degree, for two links and two phases."""
    shape, chip = find_model(model), CHIPS[gpu]
    shares = {}
    for link, name in (("nvlink4", "NVLink 4"), ("pcie5", "PCIe 5")):
        machine = machine_of(chip, link)
        decodes = [decode_step(shape, machine, Layout(tp), batch, context) for tp in DEGREES]
        prefills = [prefill(shape, machine, Layout(tp), context) for tp in DEGREES]
        shares[f"decode, {name}"] = efficiency(decodes)
        shares[f"prefill, {name}"] = efficiency(prefills)
    at = DEGREES.index(8)
    fast, slow = (shares[f"prefill, {name}"][at] for name in ("NVLink 4", "PCIe 5"))
    fig, ax = frame(
        f"8 GPUs over NVLink decode {8 * shares['decode, NVLink 4'][at]:.1f}× as fast as one and "
        f"prefill {8 * fast:.1f}×, over PCIe prefill {8 * slow:.1f}×",
        f"PREDICTED from data sheets and NCCL's latencies, nothing measured · {model}, "
        f"{chip.name}, "
        f"16 bits · {batch} sequences, {context} tokens · boxes of 8, InfiniBand between",
        (11, 5.6),
    )
    ax.axvspan(8 * 2**0.5, 20, color="#EEEEEE", lw=0)
    ax.text(16, 1.04, "two boxes", ha="center", color=GREY)
    labels = [(DEGREES[-1], 1.0, "linear", ROLES["floor"].colour)]
    ax.axhline(1, color=ROLES["floor"].colour, ls="--", lw=1.6)
    looks = zip(shares.items(), (PALETTE[0], PALETTE[0], PALETTE[5], PALETTE[5]), "sDo^", "-:-:")
    for (name, values), colour, marker, dash in looks:
        ax.plot(DEGREES, values, color=colour, marker=marker, ls=dash)
        labels.append((DEGREES[-1], values[-1], name, colour))
    ax.set_xscale("log", base=2)
    ax.set_xticks(DEGREES, map(str, DEGREES))
    ax.minorticks_off()
    ax.set_xlabel("GPUs that share each layer (TP)")
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    ax.set_ylabel("efficiency: t(1) / (P · t(P))\n(higher is better)")
    ax.set(xlim=(0.9, 20), ylim=(0, 1.12))
    ax.grid(True, axis="y")
    label_column(ax, labels)
    return fig


PICTURES: dict[str, Picture] = {
    "cuts": (draw_cuts, CUTS_ALT),
    "mesh": (
        draw_mesh,
        "Sixteen numbered ranks: two replicas side by side, two stages below each other in each, "
        "four shards in a row. A frame is around each row of shards, arrows lead from stage to "
        "stage.",
    ),
    "pipeline": (
        draw_pipeline,
        "Above, one long bar on each of four stages, one after the other. Below, the same work in "
        "four short bars on each stage, shifted by one from stage to stage, which end much "
        "earlier.",
    ),
    "decode": (
        draw_decode,
        "Four stages decode. With two micro-batches, gaps as long as the bars are between the "
        "bars. With four, each stage works without a gap.",
    ),
    "ring": (
        draw_ring,
        "A table of four ranks by seven moments. In each cell four pieces with the number of ranks "
        "whose values they hold. The numbers grow from 1 to 4 along a diagonal until each rank has "
        "one 4, then the fours spread until all are 4.",
    ),
    "shared_memory": (draw_shared_memory, SHARED_MEMORY_ALT),
    "shared_tokens": (draw_shared_tokens, SHARED_TOKENS_ALT),
    "scaling": (
        draw_scaling,
        "Efficiency over the number of GPUs, four falling lines below the dashed line of linear "
        "scaling. Over NVLink they fall slowly until 8 GPUs, over PCIe the prefill falls at once, "
        "and with two boxes all are low.",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Draw every picture again, beside this file; returns the exit code."""
    return draw_again(__file__, __doc__, PICTURES, argv)


if __name__ == "__main__":
    sys.exit(main())
