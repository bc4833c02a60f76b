"""What a block-scaled product should take on a B200: predicted from data sheets and from what the
kernel's compiled code asks of an SM, counted on our machine. Nothing here was measured on a GPU.

    python -m lessons.l19_kv_quantization.lab.block_scaled  # results/counted/l19_block_scaled.json

A step of a program (256 inputs of a tile) is as long as the busier of two parts of its SM:

    the tensor core   2 · 128 · BLOCK_N · 256 operations, at the data sheet's rate / SMs
    shared memory     passes of 128 bytes, one a clock: TMA writes a tile, the tensor core reads it

A product is as long as its waves of programs, or as memory needs for its bytes, whichever is more.
Assumed, because no Blackwell GPU was at hand: the data sheet's clock and dense rates; a pass a
clock as on Hopper, for writes and reads together; a copy's share of the data sheet's bandwidth and
a launch as on Hopper (profile/replay.py). L2 is taken to keep up with shared memory.

FP8 and bfloat16 beside it are the same tiles with wider numbers and no scales: a step of as many
bytes holds 128 and 64 inputs.
"""

import json
import math
from functools import cache

import torch

from lessons.l19_kv_quantization.activations.block_scaled.gluon_matmul import (
    BLOCK_K,
    BLOCK_M,
    block_scaled_matmul,
)
from lessons.l19_kv_quantization.activations.block_scaled.operands import BlockScaled, in_atoms
from lessons.toolbox.measure.hardware import CHIPS
from lessons.toolbox.proof.machine import ROOT

OUT = ROOT / "results" / "counted" / "l19_block_scaled.json"
B200 = CHIPS["b200"]
FP4_FLOPS = 2 * B200.fp8_flops_per_s  # NVIDIA HGX B200 data sheet: 72 PFLOP/s dense for 8 GPUs
ROW_BYTES = BLOCK_K // 2  # of a tile of codes, in every format
# format -> (operations a second, bytes of a number with its scales)
FORMATS = {
    "nvfp4": (FP4_FLOPS, 1 / 2 + 1 / 16),
    "mxfp4": (FP4_FLOPS, 1 / 2 + 1 / 32),
    "fp8": (B200.fp8_flops_per_s, 1),
    "bf16": (B200.bf16_flops_per_s, 2),
}
# tokens, outputs, inputs: gate and up of Llama-3-8B, and the product of Triton's tutorial
SHAPES = [(tokens, 28672, 4096) for tokens in (16, 128, 1024, 8192)] + [(16, 4096, 4096)]
SHAPES += [(8192, 8192, 8192)]


def zeros(rows: int, columns: int, name: str) -> BlockScaled:
    """Values do not matter for counts."""
    block, dtype = (16, torch.float8_e4m3fn) if name == "nvfp4" else (32, torch.uint8)
    scales = torch.zeros(rows, columns // block, dtype=torch.uint8).view(dtype)
    codes = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    return BlockScaled(codes, in_atoms(scales), torch.ones(rows))


@cache
def counted(name: str, block_n: int) -> dict:
    """{"passes", "flops", "instructions"} of one step of one program."""
    totals = []
    for steps in (5, 9):  # the difference leaves out what is done once
        launch = launch_of(zeros(BLOCK_M, steps * BLOCK_K, name), block_n, name)
        columns = {key: int(launch.counts.columns[key].sum()) for key in ("passes", "flops")}
        totals.append(columns | {"instructions": sum(launch.executed.values())})
    return {key: (totals[1][key] - totals[0][key]) // 4 for key in totals[0]}


def launch_of(a: BlockScaled, block_n: int, name: str):
    """A launch of one program, counted."""
    from lessons.toolbox.gpu.arguments import WATCHERS
    from lessons.toolbox.gpu.counters import counting

    seen = []
    WATCHERS.append(seen.append)
    try:
        with counting():
            block_scaled_matmul(a, zeros(block_n, a.shape[1], name), block_n)
    finally:
        WATCHERS.remove(seen.append)
    return seen[0]


def passes_of(name: str, block_n: int) -> int:
    """Of shared memory in a step."""
    if name in ("nvfp4", "mxfp4"):
        return counted(name, block_n)["passes"]
    return 2 * (BLOCK_M + block_n) * ROW_BYTES // 128  # written once, read once


def step_s(name: str, block_n: int) -> dict[str, float]:
    """{part of the SM: seconds of a step}."""
    rate, _ = FORMATS[name]
    inputs = {"fp8": BLOCK_K // 2, "bf16": BLOCK_K // 4}.get(name, BLOCK_K)
    flops = 2 * BLOCK_M * block_n * inputs
    return {
        "tensor core": flops / (rate / B200.sm_count),
        "shared memory": passes_of(name, block_n) / B200.clock_hz,
    }


def predicted(name: str, tokens: int, outputs: int, inputs: int, block_n: int) -> dict:
    """{"seconds", "limit"} of a product with tiles of 128 x block_n."""
    from lessons.toolbox.profile.replay import CONSTANTS

    _, size = FORMATS[name]
    depth = {"fp8": BLOCK_K // 2, "bf16": BLOCK_K // 4}.get(name, BLOCK_K)
    step = step_s(name, block_n)
    programs = math.ceil(tokens / BLOCK_M) * math.ceil(outputs / block_n)
    steps = math.ceil(programs / B200.sm_count) * math.ceil(inputs / depth)
    memory_bytes = (tokens + outputs) * inputs * size + 2 * tokens * outputs
    parts = {part: steps * seconds for part, seconds in step.items()}
    parts["memory"] = memory_bytes / (CONSTANTS.memory_share * B200.memory_bytes_per_s)
    limit = max(parts, key=parts.get)
    once = (CONSTANTS.launch + CONSTANTS.start) / B200.clock_hz
    return {"seconds": parts[limit] + once, "limit": limit, "block_n": block_n}


def best(name: str, tokens: int, outputs: int, inputs: int) -> dict:
    """The shorter of both tiles."""
    found = [predicted(name, tokens, outputs, inputs, block_n) for block_n in (128, 256)]
    chosen = min(found, key=lambda each: each["seconds"])
    tflops = 2 * tokens * outputs * inputs / chosen["seconds"] / 1e12
    return chosen | {"tflops": round(tflops, 1)}


def dot_scaled(a: tuple, b: tuple, is_nvfp4: bool, block_n: int, num_stages: int) -> torch.Tensor:
    """dot_scaled.py's product, to be called where kernels are compiled for a chip. a, b: codes,
    atoms and row_scale, atoms as uint8, because E4M3 cannot be pickled.
    """
    from lessons.l19_kv_quantization.activations.block_scaled import dot_scaled

    dtype = torch.float8_e4m3fn if is_nvfp4 else torch.uint8
    sides = [BlockScaled(codes, atoms.view(dtype), scale) for codes, atoms, scale in (a, b)]
    return dot_scaled.block_scaled_matmul(*sides, block_n, num_stages)


def main() -> int:
    record = {
        "command": "python -m lessons.l19_kv_quantization.lab.block_scaled",
        "what": "predicted for a B200 from its data sheet and from counts; not measured on a GPU",
        "steps": {
            f"{name} {block_n}": counted(name, block_n)
            | {f"{part}, ns": round(1e9 * s, 1) for part, s in step_s(name, block_n).items()}
            for name in ("nvfp4", "mxfp4")
            for block_n in (128, 256)
        },
        "predicted": {
            f"{tokens} of {outputs} x {inputs}": {
                name: best(name, tokens, outputs, inputs) for name in FORMATS
            }
            for tokens, outputs, inputs in SHAPES
        },
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
