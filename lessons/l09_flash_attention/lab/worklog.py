"""What the five versions in CUDA C++ ask of each part of an H200, counted from their compiled code.

    python -m lessons.l09_flash_attention.lab.worklog

writes results/counted/l09_worklog.json, which pictures.py draws as worklog/versions.svg. No GPU is
needed, and nothing is timed: see lessons/PROFILING.md.
"""

import json
from pathlib import Path

import torch

from lessons.l09_flash_attention.worklog.cuda_flash import VERSIONS, flash_attention_cuda
from lessons.toolbox.draw.figure import (
    HATCHES,
    PALETTE,
    ClassFigure,
    frame,
    log_axis,
    number,
    style,
)
from lessons.toolbox.gpu.another_process import call

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "results" / "counted" / "l09_worklog.json"
SVG = Path(__file__).parents[1] / "worklog" / "versions.svg"
GPU = "h200"
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 1, 128
PARTS = ("L2 cache", "shared memory", "instructions issued", "matrix units")
ALT = (
    "For each of five versions, how long four parts of an H200 work at the least. Naive: the L2 "
    "cache most. Tiled and tensor cores: shared memory most. Swizzled and pipelined: issuing "
    "instructions."
)


def counted(version: str) -> dict:
    """One call of a version, on tokens of one sequence. To be called where kernels are compiled."""
    from lessons.toolbox.profile.__main__ import profiled

    generator = torch.Generator().manual_seed(9)
    q, k, v = (
        torch.randn(TOKENS, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    (profile,) = profiled(lambda: flash_attention_cuda(q, k, v, version=version), GPU)[0]
    total, moved = profile.total, profile.loaded_bytes + profile.stored_bytes
    return {
        "asked_bytes": 32 * total["sectors"],
        "least_bytes": moved,
        "passes": total["passes"],
        "least_passes": total["least_passes"],
        "issued": total["issued"],
        "registers": profile.assembled.get("registers"),
        "shared_bytes": profile.shared_bytes,
        "floors_s": {part: profile.floors_s().get(part, 0.0) for part in PARTS},
    }


def row(name: str, found: dict) -> str:
    """A version as a row of the table in worklog/README.md."""
    longest = max(found["floors_s"], key=found["floors_s"].get)
    cells = [
        name,
        f"{found['asked_bytes'] / 1e6:,.3g} MB",
        f"{found['passes']:,} / {found['least_passes']:,}" if found["passes"] else "0",
        f"{found['issued']:,}",
        f"{1e6 * found['floors_s'][longest]:.2g} µs, {longest}",
    ]
    return f"| {' | '.join(cells)} |"


@style()
def draw(record: dict | None = None) -> ClassFigure:
    """Bars: microseconds at the least, by version and part of the chip, on a logarithmic axis.

    record: None for the committed one.
    """
    record = record or json.loads(RECORD.read_text(encoding="utf-8"))
    worst = {name: max(found["floors_s"].values()) for name, found in record.items()}
    first, last = worst["naive"], worst["pipelined"]
    fig, ax = frame(
        f"From naive to pipelined the busiest part has {number(first / last)} times less to do",
        f"{TOKENS} tokens, {HEADS} heads of {HEAD_DIM}, bfloat16, causal · compiled code for an "
        "H200, counted on a CPU: bounds, not times",
        (13, 7),
    )
    for i, part in enumerate(PARTS):
        at = [k + 0.2 * (i - 1.5) for k in range(len(record))]
        times = [1e6 * found["floors_s"][part] for found in record.values()]
        ax.barh(at, times, 0.2, color=PALETTE[i], hatch=HATCHES[i], edgecolor="white", label=part)
    log_axis(ax.xaxis, 0.05, 1.2e6 * first)
    ax.set_yticks(range(len(record)), list(record))
    ax.invert_yaxis()
    ax.set_xlabel("time at the least (µs)")
    ax.legend(loc="lower right")
    return fig


def main() -> None:
    record = {name: call(f"{__spec__.name}:counted", name, chip=90) for name in VERSIONS}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(row(name, found) for name, found in record.items()))


if __name__ == "__main__":
    main()
