"""The tables of the playground, by the lessons' own functions."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

from book.playground import packing

STATIC = Path(__file__).parents[1] / "static/playground"
# ---------------------------------------------------------------- lesson 1: a plan and its roof
MODELS = ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b")
CHIPS = ("a100", "h100", "h200", "b200", "rtx4090")
GPUS = (1, 2, 4, 8)
WEIGHT_BITS, KV_BITS = (16, 8, 4), (16, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1024, 4096, 16384, 65536)
INTENSITIES = (0.5, 4096)  # FLOP per byte, from where to where the picture goes
# ---------------------------------------------------------------- lesson 16: two distributions
WORDS = ("cat", "dog", "bird")
TENTHS = 10
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8)


def rounded(value: float) -> float:
    """Three digits, which is more than a slider's picture shows."""
    return float(f"{value:.3g}")


def roofline() -> dict:
    """For each position of the sliders: [sequences that run, ms to move the bytes, ms to compute,
    tokens/s, FLOP per byte, TFLOP/s]; null where not even one sequence fits.
    """
    from lessons.l01_roofline.planner.models import MODELS as SHAPES
    from lessons.toolbox.measure.hardware import CHIPS as KNOWN

    sliders = {
        "model": [f"{name}, {SHAPES[name].params / 1e9:.1f} billion weights" for name in MODELS],
        "chip": [KNOWN[name].name for name in CHIPS],
        "gpus": GPUS,
        "weight_bits": WEIGHT_BITS,
        "kv_bits": KV_BITS,
        "context": CONTEXTS,
        "batch": BATCHES,
    }
    ways = itertools.product(MODELS, CHIPS, GPUS, WEIGHT_BITS, KV_BITS, CONTEXTS, BATCHES)
    roofs = [[roof(chip, gpus) for gpus in GPUS] for chip in CHIPS]
    return {"sliders": sliders, "roofs": roofs, "rows": [planned(*way) for way in ways]}


def roof(chip: str, gpus: int) -> list[list[float]]:
    """Three points, [FLOP per byte, TFLOP/s]: where the picture begins, the ridge, its end."""
    from lessons.l01_roofline.planner.plan import peak_flops
    from lessons.toolbox.measure.hardware import attainable_flops, lookup, ridge_point

    known = lookup(chip)
    peak, bandwidth = gpus * peak_flops(known), gpus * known.memory_bytes_per_s
    at = INTENSITIES[0], ridge_point(peak, bandwidth), INTENSITIES[1]
    return [[rounded(x), rounded(attainable_flops(x, peak, bandwidth) / 1e12)] for x in at]


def planned(
    model: str, chip: str, gpus: int, weight_bits: int, kv_bits: int, context: int, batch: int
) -> list[float] | None:
    """One row of the table."""
    from lessons.l01_roofline.planner.models import find_model
    from lessons.l01_roofline.planner.plan import make_plan
    from lessons.toolbox.measure.hardware import lookup

    try:
        plan = make_plan(
            find_model(model), lookup(chip), batch, context, gpus, weight_bits, kv_bits
        )
    except ValueError:
        return None
    floor = plan.decode
    times = 1e3 * floor.memory_s, 1e3 * floor.compute_s
    rate = floor.flops / floor.seconds / 1e12
    return [plan.running, *map(rounded, (*times, plan.tokens_per_s, floor.intensity, rate))]


def speculation() -> dict:
    """By the tenths of p and q: {"4,3,3": {"2,5,3": [acceptance, the residual's tenths …]}}, and
    the tokens of a step by acceptance and count.
    """
    import torch

    from lessons.l16_speculative_sampling.more.speed import acceptance, expected_tokens
    from lessons.l16_speculative_sampling.naive import residual

    whole = [way for way in itertools.product(range(TENTHS + 1), repeat=3) if sum(way) == TENTHS]
    rows = {}
    for target in whole:
        p = torch.tensor(target, dtype=torch.float64) / TENTHS
        found = rows[key(target)] = {}
        for draft in whole:
            q = torch.tensor(draft, dtype=torch.float64) / TENTHS
            rest = residual(p, q)
            numbers = [float(acceptance(p, q)), *(rest / rest.sum()).tolist()]
            found[key(draft)] = [rounded(number) for number in numbers]
    alphas = [step / TENTHS for step in range(TENTHS + 1)]
    tokens = [[rounded(expected_tokens(alpha, count)) for count in COUNTS] for alpha in alphas]
    return {"words": WORDS, "tenths": TENTHS, "counts": COUNTS, "rows": rows, "tokens": tokens}


def key(tenths: tuple[int, ...]) -> str:
    """How the table names a distribution."""
    return ",".join(map(str, tenths))


def run() -> dict:
    """The recorded run of the front page's film, frame by frame."""
    from reference.trace.film import draw
    from reference.trace.film import run as film

    found = json.loads(film.RECORD.read_text(encoding="utf-8"))
    frames = [
        {
            "computed": frame.computed,
            "phase": frame.phase,
            "batch": frame.batch,
            "owners": frame.owners,
            "rows": frame.rows,
            "known": sorted(frame.known),
            "notes": frame.notes,
        }
        for frame in film.frames(found)
    ]
    return {
        "about": found["about"],
        "requests": found["requests"],
        "colours": draw.COLOURS,
        "frames": frames,
    }


def lanes() -> dict:
    """Loads and stores of one warp, recorded by the machine that runs compiled kernels."""
    from book.playground import lanes as recording
    from lessons.toolbox.gpu.another_process import call

    sliders = {
        "distance": recording.DISTANCES,
        "itemsize": recording.ITEM_BYTES,
        "count": recording.COUNTS,
        "access": ["load", "store"],
        "lane": list(range(recording.WARP)),
    }
    rows = call(f"{recording.__name__}:recorded", chip=recording.CHIP)
    return {"sliders": sliders, "rows": rows}


TABLES: dict[str, Callable[[], dict]] = {
    "roofline": roofline,
    "speculation": speculation,
    "run": run,
    "lanes": lanes,
}
LIVE = ("timeline", "blocks")  # pages that ask the lessons' Python itself
SCRIPTS = TABLES | {"course": packing.table}


def script(name: str) -> str:
    """A table as a script, because a page from a folder may not read other files."""
    data = json.dumps(SCRIPTS[name](), separators=(",", ":"))
    return (
        "// Computed by book/playground/tables.py.\n"
        f"window.PLAYGROUND = window.PLAYGROUND || {{}};\nwindow.PLAYGROUND.{name} = {data};\n"
    )


TRACE, VIEWER = STATIC / "trace.json", STATIC / "trace.html"


def record_trace() -> None:
    """The same run as the film's once more, with its times on this machine."""
    from reference.trace.film import run as film

    film.run_traced(TRACE)


def trace_page() -> str:
    """The engine's viewer with the recorded trace in it."""
    from reference.trace.recorder import page

    return page(TRACE)


def write() -> None:
    """All tables, into the folder that the book copies."""
    VIEWER.write_text(trace_page(), encoding="utf-8")
    for name in SCRIPTS:
        path = STATIC / f"{name}_data.js"
        path.write_text(script(name), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size // 1024} KB")
