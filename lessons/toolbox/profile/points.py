"""What the time model is held against: kernels of the course that an H200 has timed.

    python -m lessons.toolbox.profile.points

predicts them all, and writes results/h200/time_model.json and .svg.

Two kinds of points. Nsight Compute's durations of the profiles' small launches (counters.json). And
medians of the benchmarks, of larger shapes: there the machine runs a sample of the grid's programs,
evenly spread (`counting(programs=SAMPLE)`), and the model takes the others to be like them. A
benchmark's stopwatch is a pair of events, which adds EVENTS_S to what the kernel takes, and a call
may be two launches.

The constants of `replay.py` were fitted on the launches alone, but for the rate of L2 and EVENTS_S,
so the benchmarks' errors are nearly those of points that the model has never seen.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lessons.toolbox.command import OneLineParser, run_command
from lessons.toolbox.draw.figure import save
from lessons.toolbox.measure.device import CHIP, compiled_chip, has_triton
from lessons.toolbox.profile import measured
from lessons.toolbox.profile.figure import model_figure

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "results" / "h200" / "time_model.json"
EVENTS_S = 1.3e-6  # fitted: the smallest copies of l01_scale_copy minus their prediction
SAMPLE = 6  # programs
ALT = "Predicted over measured times, nearly on the diagonal"


@dataclass(frozen=True)
class Point:
    """A benchmark's median: results/h200/{record}.json, its series, its x. call: runs the
    kernel.
    """

    record: str
    series: str
    x: int
    call: Callable

    @property
    def measured_s(self) -> float:
        file = RECORD.parent / f"{self.record}.json"
        points = json.loads(file.read_text(encoding="utf-8"))["series"][self.series]["points"]
        return next(point["median_s"] for point in points if point["x"] == self.x)


def half(*shape: int) -> torch.Tensor:
    """Zeros, because the values do not matter and the system gives no memory for them."""
    return torch.zeros(*shape, dtype=torch.bfloat16)


def of(module: str, name: str) -> Callable:
    return getattr(importlib.import_module(f"lessons.{module}"), name)


def decode(module: str, name: str, **options) -> Callable[[int], object]:
    """One new token over a context, heads 32/8 of 128."""

    def call(context: int):
        lengths = torch.tensor([context], dtype=torch.int32)
        k, v = half(1, context, 8, 128), half(1, context, 8, 128)
        return of(module, name)(half(1, 32, 128), k, v, lengths, **options)

    return call


def flash(tokens: int):
    tiles = of("l09_flash_attention.tiles", "tiles_for")(90, 128, 2)
    q, k, v = half(tokens, 32, 128), half(tokens, 8, 128), half(tokens, 8, 128)
    return of("l09_flash_attention.optimized", "flash_attention")(q, k, v, tiles=tiles)


FUSED = "l07_kernel_fusion.optimized"
TABLE = (
    ("l01_scale_copy", "one pass: Triton kernel", tuple(4**power for power in range(8, 14)),
     lambda x: of("l01_roofline.optimized", "scale_copy")(half(x), 2.0)),
    ("l07_add_rms_norm", "one kernel", (16, 256, 4096, 16384),
     lambda x: of(FUSED, "add_rms_norm")(half(x, 4096), half(x, 4096), half(4096), 1e-5)),
    ("l07_rms_norm", "one kernel", (512, 2048, 8192, 16384),
     lambda x: of(FUSED, "rms_norm")(half(2**26 // x, x), half(x), 1e-5)),
    ("l07_silu_mul", "one kernel", (16, 256, 4096, 16384),
     lambda x: of(FUSED, "silu_mul")(half(x, 14336), half(x, 14336))),
    ("l08_softmax", "Triton: one block or online", (1024, 4096, 32000, 65536),
     lambda x: of("l08_online_softmax.optimized", "softmax")(half(2**28 // x, x))),
    ("l09_causal_gqa", "flash_attention", (2048, 4096, 8192), flash),
    ("l10_context", "one program per KV head", (1024, 4096, 16384),
     decode("l05_gqa.optimized", "decode_attention")),
    ("l10_context", "one program per query head", (1024, 4096),
     decode("l03_kv_cache.optimized", "decode_attention")),
    ("l10_context", "split size 512", (1024, 4096, 16384, 65536),
     decode("l10_flash_decoding.optimized", "flash_decode", split_size=512)),
)  # fmt: skip


def larger() -> Iterator[Point]:
    """The benchmarks' points."""
    for record, series, xs, call in TABLE:
        for x in xs:
            yield Point(record, series, x, lambda call=call, x=x: call(x))


def profiled_sample(call: Callable, gpu: str = "h200", together: int = 1) -> list:
    """Profiles of a sample of a call's programs. together: as in `counting`. Warns where the sample
    may say nothing about most of a grid.
    """
    from lessons.toolbox.gpu.arguments import WATCHERS
    from lessons.toolbox.gpu.counters import counting
    from lessons.toolbox.measure.hardware import lookup
    from lessons.toolbox.profile.counted import profiles

    seen: list = []
    WATCHERS.append(seen.append)
    try:
        with counting(programs=max(SAMPLE, 2 * together), together=together):
            call()
    finally:
        WATCHERS.remove(seen.append)
    for launch in seen:
        if is_one_index(launch.grid, launch.counts.programs):
            warnings.warn(
                f"{launch.kernel.name}: after the first, the {launch.ran} programs of the sample "
                f"have one index in the first dimension of the grid {launch.grid} that is not 1, "
                "so they say nothing about others",
                stacklevel=2,
            )
    return profiles(seen, lookup(gpu))


def is_one_index(grid: tuple[int, int, int], programs: np.ndarray) -> bool:
    """Whether programs, but for the first, share their index in the first dimension of the grid
    that is not 1: equal distances may be as long as it is, or a few times as long.

    example: grid (4, 5, 1), programs 0, 3, 7, 11, 15, 19 -> True, because all but 0 have index 3
    """
    fast = next((size for size in grid if size > 1), 1)
    return len(programs) > 3 and len(np.unique(programs[1:] % fast)) == 1


def predicted() -> Iterator[dict]:
    """Every point with its prediction."""
    from lessons.toolbox.profile.time_model import predict

    launches = measured.measured()
    for lesson in sorted({launch["lesson"] for launch in launches}):
        for theirs, ours in measured.pairs(lesson, launches):
            found = predict(ours)
            yield {
                "lesson": lesson,
                "name": f"{theirs['function']}: {theirs['kernel']}",
                "source": "counters.json",
                "measured_s": theirs["duration_s"],
                "predicted_s": float(found.seconds),
                "limit": found.limit,
            }
    for point in larger():
        found = [predict(profile) for profile in profiled_sample(point.call)]
        yield {
            "lesson": point.record[1:3],
            "name": f"{point.series}, {point.x}",
            "source": f"{point.record}.json",
            "measured_s": point.measured_s,
            "predicted_s": float(sum(each.seconds for each in found)) + EVENTS_S,
            "limit": max(found, key=lambda each: each.seconds).limit,
        }


def errors(points: list[dict]) -> list[float]:
    """|predicted / measured - 1|, ascending."""
    return sorted(abs(p["predicted_s"] / p["measured_s"] - 1) for p in points)


def ranked(points: list[dict]) -> tuple[int, int]:
    """(pairs in the right order, pairs): of points of one source whose times differ by 10 % or
    more.
    """
    right = pairs = 0
    for k, a in enumerate(points):
        for b in points[:k]:
            ratio = a["measured_s"] / b["measured_s"]
            if a["source"] == b["source"] and not 1 / 1.1 < ratio < 1.1:
                pairs += 1
                right += int((a["predicted_s"] > b["predicted_s"]) == (ratio > 1))
    return right, pairs


def summary(points: list[dict]) -> dict:
    """What is said of the model: errors of all points, of either source, and by what limits them;
    pairs.
    """
    right, pairs = ranked(points)
    kinds = {"all": points, "launches": [], "benchmarks": []}
    for point in points:
        kinds["launches" if point["source"] == "counters.json" else "benchmarks"].append(point)
        kinds.setdefault(point["limit"], []).append(point)
    return {
        "points": len(points),
        "pairs": pairs,
        "pairs_right": right,
        "errors": {
            name: {
                "points": len(some),
                "median": round(statistics.median(errors(some)), 3),
                "worst": round(errors(some)[-1], 3),
            }
            for name, some in kinds.items()
            if some
        },
    }


def run(options: argparse.Namespace) -> int:
    if not has_triton():
        raise ValueError("Triton is not installed, so no kernel can be compiled")
    if compiled_chip() != 90:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "lessons.toolbox.profile.points"]
        return subprocess.run(command, env=environment | {CHIP: "90"}, check=False).returncode

    points = []
    for point in predicted():
        points.append(point)
        error = point["predicted_s"] / point["measured_s"] - 1
        measured, said = 1e6 * point["measured_s"], 1e6 * point["predicted_s"]
        print(
            f"{point['lesson']} {point['name'][:44]:44} measured {measured:9.2f} µs, "
            f"predicted {said:9.2f} µs {error:+7.1%}  {point['limit']}",
            flush=True,
        )
    found = summary(points) | {"device": "NVIDIA H200", "table": points}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    save(model_figure(found), RECORD.with_suffix(""), alt=ALT)
    print(
        json.dumps(found["errors"], indent=1), found["pairs_right"], "of", found["pairs"], "pairs"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(
        prog="python -m lessons.toolbox.profile.points", description=__doc__.split("\n")[0]
    )
    return run_command("points", lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
