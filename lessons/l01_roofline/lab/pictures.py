"""The lesson's one picture: where prefill and decode of a model stand under a GPU's roofline.

    python -m lessons.l01_roofline.lab.pictures      writes roofline.svg beside this file

What it shows is predicted from data sheets.
"""

from pathlib import Path

from lessons.l01_roofline.calculators import Floor, decode_floor, prefill_floor
from lessons.l01_roofline.models import find_model
from lessons.l01_roofline.plan import peak_flops
from lessons.toolbox.draw.figure import ClassFigure, save_svg
from lessons.toolbox.draw.plotting import roofline
from lessons.toolbox.measure.hardware import lookup

MODEL, GPU, CONTEXT, BATCHES = "llama-3-8b", "h200", 2048, (1, 8, 64, 256)
SVG = Path(__file__).parent / "roofline.svg"
ALT = (
    "Roofline of an H200 from its data sheet. Decode steps of Llama-3-8B stand far left on the "
    "memory slope, those of larger batches further right; the prefill of 2048 tokens stands under "
    "the flat compute roof, right of the ridge."
)


def floors() -> dict[str, Floor]:
    """The work that the picture shows, by label."""
    model, chip = find_model(MODEL), lookup(GPU)
    machine = chip.memory_bytes_per_s, peak_flops(chip)
    found = {}
    for batch in BATCHES:
        found[f"decode, batch {batch}"] = decode_floor(model, batch, CONTEXT, *machine)
    found[f"prefill, {CONTEXT} tokens"] = prefill_floor(model, CONTEXT, *machine)
    return found


def draw() -> ClassFigure:
    """Every dot stands on the roof: it is what the roofline allows, not what was measured."""
    chip, work = lookup(GPU), floors()
    points = {}
    for label, floor in work.items():
        role = "naive" if "decode" in label else "optimized"
        points[label] = (role, floor.intensity, floor.flops / floor.seconds)
    alone = work["decode, batch 1"]
    share = alone.flops / alone.seconds / peak_flops(chip)
    return roofline(
        points,
        bandwidths={"memory": chip.memory_bytes_per_s},
        peaks={"16-bit matrix units": peak_flops(chip)},
        title=f"Decoding one sequence can use {share:.1%} of the GPU's arithmetic; prefill can use "
        f"all of it",
        caption=f"Predicted, not measured · {MODEL}, 16 bits, context {CONTEXT} · {chip.name}: "
        f"{chip.source}",
    )


if __name__ == "__main__":
    save_svg(draw(), SVG, alt=ALT)
