"""How long FlashAttention takes on an H200 with products of 8 bits and of 16: predictions of the
time model (`lessons.toolbox.profile`), not measurements.

    python -m lessons.l09_flash_attention.lab.eight_bits        (some minutes)
        writes results/counted/l09_eight_bits.json

One program of BLOCK_M queries runs on the machine, with two numbers of keys. A program's clocks
grow with its keys by what a tile costs, so they are continued to those of every program of a
prompt. The programs go to the SMs in the grid's order, each to the one that is free first.
"""

import heapq
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from lessons.l09_flash_attention.hopper.fp8 import flash_attention_fp8
from lessons.l09_flash_attention.hopper.gluon_flash import BLOCK_M, flash_attention_hopper
from lessons.l09_flash_attention.hopper.gluon_fp8 import flash_attention_fp8_hopper
from lessons.toolbox.kernels.kernel_hash import kernel_hash
from lessons.toolbox.measure.device import CHIP, compiled_chip
from lessons.toolbox.measure.hardware import lookup

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l09_eight_bits.json"
MODULE = "lessons.l09_flash_attention.hopper"
HEADS, HEAD_DIM = 32, 128
TOKENS = (8192, 16384)
KEYS = (768, 1280)  # of the programs that run; all but the last tile have no mask
TILE = 128  # keys, of which the record counts clocks and instructions
SAMPLED = 132  # heads of the launch that is sampled: a program for each SM
KERNELS = {
    "Triton, 8 bits": (flash_attention_fp8, f"{MODULE}.fp8:flash_fp8_kernel"),
    "Gluon, 8 bits": (
        flash_attention_fp8_hopper,
        f"{MODULE}.gluon_fp8:flash_fp8_hopper_kernel",
    ),
    "Gluon, 16 bits": (flash_attention_hopper, f"{MODULE}.gluon_flash:flash_hopper_kernel"),
}


def counted(attend, keys: int, causal: bool) -> dict:
    """Of one program with BLOCK_M queries and some keys: clocks, and what it counts."""
    from lessons.toolbox.gpu.arguments import WATCHERS
    from lessons.toolbox.gpu.counters import counting
    from lessons.toolbox.profile.counted import profiles
    from lessons.toolbox.profile.time_model import predict

    q = torch.zeros(BLOCK_M, SAMPLED, HEAD_DIM, dtype=torch.bfloat16)
    kv = torch.zeros(keys, SAMPLED // 4, HEAD_DIM, dtype=torch.bfloat16)
    seen: list = []
    WATCHERS.append(seen.append)
    try:
        with counting(programs=1):
            attend(q, kv, kv, causal=causal)
    finally:
        WATCHERS.remove(seen.append)
    mine = [launch for launch in seen if "flash" in launch.kernel.name]
    profile = profiles(mine, lookup("h200"))[0]
    found = predict(profile)
    return {
        "clocks": float(found.clocks),
        "issued": float(profile.total["issued"]),
        "passes": float(profile.total["passes"]),
        "busy": {name: round(float(share), 2) for name, share in found.busy.items()},
        "limit": found.limit,
    }


def continued(runs: dict[int, dict], causal: bool) -> dict:
    """{tokens: prediction} of HEADS heads, and what a tile of TILE keys costs, from two programs
    with different numbers of keys.
    """
    (short, first), (long, second) = runs.items()
    tile = {
        k: (second[k] - first[k]) / (long - short) * TILE for k in ("clocks", "issued", "passes")
    }
    fixed = first["clocks"] - tile["clocks"] * short / TILE
    found: dict = {f"{name}_a_tile": round(value) for name, value in tile.items()}
    found |= {"busy": second["busy"], "limit": second["limit"]}
    for tokens in TOKENS:
        seconds = launch_s(tokens, causal, fixed, tile["clocks"])
        flops = 4 * tokens**2 * HEAD_DIM * HEADS / (2 if causal else 1)
        found[str(tokens)] = {
            "predicted_s": seconds,
            "tflops": round(flops / seconds / 1e12),
        }
    return found


def launch_s(tokens: int, causal: bool, fixed: float, tile: float) -> float:
    """Seconds of a launch whose programs take `fixed` clocks and `tile` more for each of their
    tiles: those of the busiest SM, which holds one at a time, and the launch itself.
    """
    from lessons.toolbox.profile.replay import CONSTANTS

    chip, blocks = lookup("h200"), tokens // BLOCK_M
    free_at = [0.0] * chip.sm_count
    for block in reversed(range(blocks)):  # the heaviest first, as in the kernels
        tiles = (block * BLOCK_M + BLOCK_M if causal else tokens) / TILE
        for _ in range(HEADS):
            heapq.heapreplace(free_at, free_at[0] + fixed + tiles * tile)
    return (max(free_at) + CONSTANTS.launch) / chip.clock_hz


def main() -> int:
    if compiled_chip() != 90:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "lessons.l09_flash_attention.lab.eight_bits"]
        return subprocess.run(command, env=environment | {CHIP: "90"}, check=False).returncode
    written: dict = {"chip": "H200", "shape": f"{HEADS} heads of {HEAD_DIM}", "kernels": {}}
    for name, (attend, kernel) in KERNELS.items():
        found: dict = {"hash": kernel_hash(kernel)}
        for causal in (True, False):
            runs = {keys: counted(attend, keys, causal) for keys in KEYS}
            found["causal" if causal else "full"] = continued(runs, causal)
        written["kernels"][name] = found
        print(name, json.dumps(found, indent=1), flush=True)
    RECORD.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
