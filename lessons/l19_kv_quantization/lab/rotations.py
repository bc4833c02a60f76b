"""What rotations save of W4A4, beside SmoothQuant, on the same outliers: counted, not timed.

    python -m lessons.l19_kv_quantization.lab.rotations

writes results/cpu/l19_rotations.json, and lab/rotations.svg beside this file. Two models: the
embedded one as it is, and with two channels made 100 times as large after the norms (outliers.py),
which compute the same function. Four ways each, and two formats of 4 bits.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lessons.l02_naive_attention.decoder import Decoder
from lessons.l06_mla.deepseek import load_decoder
from lessons.l18_weight_quantization.lab.quality import held_out_windows, predictions, quality
from lessons.l18_weight_quantization.methods.calibration import calibration_windows
from lessons.l19_kv_quantization.activations.outliers import channel_ratio, with_loud_activations
from lessons.l19_kv_quantization.activations.rotations import (
    with_rotated_inputs,
    with_rotated_stream,
)
from lessons.l19_kv_quantization.activations.smoothquant import activation_maxima, smoothed
from lessons.l19_kv_quantization.activations.w4a4 import FORMATS, w4a4
from lessons.l19_kv_quantization.lab.quality import (
    ACTIVATION_FACTOR,
    LOUD_ACTIVATIONS,
    MODEL,
    ROOT,
    run_all,
)
from lessons.toolbox.draw.figure import PALETTE, ClassFigure, frame, log_axis, save_svg, style
from lessons.toolbox.measure.records import write_json
from lessons.toolbox.model.checkpoint import load_tokenizer

FILE = ROOT / "results" / "cpu" / "l19_rotations.json"
PICTURE = Path(__file__).with_name("rotations.svg")
WINDOWS, WINDOW = 6, 512
ALPHA = 0.5  # SmoothQuant's
KINDS = ("as it is", "two outlier channels")
WAYS = ("nothing", "SmoothQuant", "folded rotations", "and a transform before down_proj")
PARTS = {"q_proj": "self_attn.q_proj", "down_proj": "mlp.down_proj"}
ALT = (
    "KL of W4A4 in INT4 for four ways, of the model as it is and with two outlier channels: "
    "rotations reach the same KL with and without the outliers, and less than SmoothQuant."
)


def ways(model: Decoder, calibration: Tensor) -> Iterator[tuple[str, Decoder]]:
    """Twins with the same function, by WAYS. calibration: [count, length] tokens."""
    yield WAYS[0], model
    yield WAYS[1], smoothed(model, maxima_of(model, calibration), ALPHA)
    folded = with_rotated_stream(model)
    yield WAYS[2], folded
    yield WAYS[3], with_rotated_inputs(folded)


def maxima_of(model: Decoder, windows: Tensor) -> dict[str, Tensor]:
    """The largest |x| of each channel, [K], by the layer that receives it."""
    return activation_maxima(model, partial(run_all, model, windows))


def unevenness(model: Decoder, windows: Tensor) -> dict[str, float]:
    """The largest channel over the one in the middle, in the worst layer, by PARTS."""
    maxima = maxima_of(model, windows)
    found = {}
    for name, end in PARTS.items():
        ends = (end, f"{end}.linear")  # of a layer whose inputs are rotated
        found[name] = max(channel_ratio(x) for key, x in maxima.items() if key.endswith(ends))
    return found


def count(measure: Callable[[Decoder], dict], model: Decoder, calibration: Tensor) -> dict:
    """Every way and format of one model."""
    found = {}
    for way, twin in ways(model, calibration):
        row = {"channels": unevenness(twin, calibration[:2])}
        found[way] = row | {name: measure(w4a4(twin, name)) for name in FORMATS}
        print(way, {name: found[way][name]["kl"]["mean"] for name in FORMATS}, flush=True)
    return found


def recorded() -> dict:
    """What was counted last."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@style()
def draw_rotations(found: dict | None = None) -> ClassFigure:
    """KL of the four ways, INT4, both models, from the record."""
    found = found or recorded()
    kl = {
        kind: [1000 * found["models"][kind][way]["int4"]["kl"]["mean"] for way in WAYS]
        for kind in KINDS
    }
    fig, ax = frame(
        f"Two outlier channels: SmoothQuant leaves a KL of {kl[KINDS[1]][1]:.0f}, "
        f"rotations {kl[KINDS[1]][3]:.0f}",
        f"models/tiny, W4A4 in INT4, a scale for each token and output; {found['windows']} windows "
        f"of {found['window']} held-out tokens; bars: 95 %",
        (10.5, 4.6),
    )
    for (kind, values), colour, marker, shift in zip(kl.items(), PALETTE, "os", (-0.12, 0.12)):
        rows = [found["models"][kind][way]["int4"]["kl"] for way in WAYS]
        low, high = (
            [abs(1000 * row[end] - value) for row, value in zip(rows, values)]
            for end in ("low", "high")
        )
        places = [place + shift for place in range(len(WAYS))]
        bars = dict(xerr=(low, high), fmt=marker, color=colour, ms=9, capsize=3, label=kind)
        ax.errorbar(values, places, **bars)
    ax.set_yticks(range(len(WAYS)), WAYS)
    ax.set_ylim(len(WAYS) - 0.5, -0.5)
    every = [value for values in kl.values() for value in values]
    log_axis(ax.xaxis, 0.7 * min(every), 1.4 * max(every))
    ax.set_xlabel("KL to the model in 16 bits, thousandths of a nat (lower is better)")
    ax.grid(True, axis="x")
    ax.legend(loc="lower right")
    return fig


def main() -> int:
    torch.manual_seed(0)
    tokenizer, model = load_tokenizer(str(MODEL)), load_decoder(str(MODEL), "cpu").float()
    windows = held_out_windows(tokenizer, WINDOWS, WINDOW)
    calibration = calibration_windows(tokenizer, 8)
    reference = list(predictions(model, windows))

    def measure(changed: Decoder) -> dict:
        measures = asdict(quality(changed, windows, reference))
        return {
            name: {key: float(f"{value:.4g}") for key, value in measures[name].items()}
            for name in ("added_loss", "kl", "flips")
        }

    loud = with_loud_activations(model, LOUD_ACTIVATIONS, ACTIVATION_FACTOR)
    record = {
        "model": "models/tiny",
        "windows": WINDOWS,
        "window": WINDOW,
        "alpha": ALPHA,
        "activation_factor": ACTIVATION_FACTOR,
        "models": {
            kind: count(measure, twin, calibration) for kind, twin in zip(KINDS, (model, loud))
        },
    }
    write_json(FILE, record)
    save_svg(draw_rotations(), PICTURE, alt=ALT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
