"""How long decode over paged latents takes on an H200 with 128 heads, in Triton and in Gluon:
predictions of the time model (`lessons.toolbox.profile`), not measurements.

    python -m lessons.l12_paged_kv.lab.latent_times        (a few minutes)
        writes results/counted/l12_latents.json
    python -m lessons.l12_paged_kv.lab.latent_times few    (a minute)
        only its part for 16 heads, the kernels of latents.py and few_heads.py

One program of each launch runs on the machine; the model takes the others to be like it. Long
contexts are continued from two shorter ones, because the machine takes a second for a tile or two.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from lessons.l12_paged_kv.kernels import latents as in_triton
from lessons.l12_paged_kv.kernels.hopper.launch import paged_mla_hopper
from lessons.l12_paged_kv.kernels.latents import paged_mla_decode
from lessons.toolbox.kernels.kernel_hash import kernel_hash
from lessons.toolbox.measure.device import CHIP, compiled_chip
from lessons.toolbox.measure.hardware import lookup

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l12_latents.json"
HEADS, SEQUENCES, BLOCK = 128, 66, 64  # 66 · 2 blocks of heads: a program for each of 132 SMs
LONG = 8192  # tokens, to which the times of two shorter contexts are continued
MODULE = "lessons.l12_paged_kv.kernels"
KERNELS = {
    "Triton": (paged_mla_decode, f"{MODULE}.latents:paged_mla_kernel", (512, 1024)),
    "Gluon": (paged_mla_hopper, f"{MODULE}.hopper.gluon_mla:paged_mla_hopper_kernel", (1024, 2048)),
}


def predicted(decode, context: int) -> dict:
    """Of one launch at a context, and what bounds it."""
    from lessons.toolbox.gpu.arguments import WATCHERS
    from lessons.toolbox.gpu.counters import counting
    from lessons.toolbox.profile.counted import profiles
    from lessons.toolbox.profile.time_model import predict

    pages = SEQUENCES * context // BLOCK
    table = torch.arange(pages, dtype=torch.int32).view(SEQUENCES, -1)
    lengths = torch.full((SEQUENCES,), context, dtype=torch.int32)
    q, latents = (torch.zeros(*s, 576, dtype=torch.bfloat16)
                  for s in ((SEQUENCES, HEADS), (pages, BLOCK)))  # fmt: skip
    seen: list = []
    WATCHERS.append(seen.append)
    try:
        with counting(programs=1):
            decode(q, latents, table, lengths, 576**-0.5, num_splits=1)
    finally:
        WATCHERS.remove(seen.append)
    mine = [launch for launch in seen if "mla" in launch.kernel.name]
    profile = profiles(mine, lookup("h200"))[0]
    found = predict(profile)
    tiles = context // BLOCK
    return {
        "predicted_us": round(1e6 * found.seconds, 1),
        "clocks": round(found.clocks),
        "instructions_a_tile": round(profile.total["issued"] / profile.warps / tiles),
        "matrix_mflop_a_tile": round(profile.total["flops"] / tiles / 1e6, 2),
        "shared_passes_a_tile": round(profile.total["passes"] / tiles),
        "busy": {name: round(float(share), 2) for name, share in found.busy.items()},
        "limit": found.limit,
    }


def continued(found: dict[int, dict]) -> dict:
    """At a context of LONG, where a tile more costs what it costs between the two of `found`."""
    (short, first), (long, second) = found.items()
    tile_us = (second["predicted_us"] - first["predicted_us"]) / ((long - short) // BLOCK)
    us = second["predicted_us"] + tile_us * (LONG - long) / BLOCK
    tflops = 2 * (576 + 512) * LONG * HEADS * SEQUENCES / us / 1e6
    peak = lookup("h200").bf16_flops_per_s
    clocks = (second["clocks"] - first["clocks"]) / ((long - short) // BLOCK)
    return {
        "context": LONG,
        "clocks_a_tile": round(clocks),
        "predicted_us": round(us, 1),
        "tflops": round(tflops, 1),
        "share_of_peak": round(1e12 * tflops / peak, 3),
    }


def of_few_heads() -> dict[str, dict]:
    """16 heads over 64 sequences of 4096 tokens, by the kernel of many heads and by that of few."""
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    sequences, context = 64, 4096
    pages = sequences * context // BLOCK
    table = torch.arange(pages, dtype=torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), context, dtype=torch.int32)
    q, latents = (torch.zeros(*s, 576, dtype=torch.bfloat16)
                  for s in ((sequences, 16), (pages, BLOCK)))  # fmt: skip
    moved, peak = latents.nbytes, lookup("h200").memory_bytes_per_s
    found = {}
    for name, kernel, is_few in (
        ("many", f"{MODULE}.latents:paged_mla_kernel", False),
        ("few", f"{MODULE}.few_heads:grouped_mla_kernel", True),
    ):
        with patch.object(in_triton, "is_grouped", lambda *_, is_few=is_few: is_few):
            profile, *_ = profiled_sample(
                lambda: paged_mla_decode(q, latents, table, lengths, 576**-0.5)
            )
        guess = predict(profile)
        found[name] = {
            "hash": kernel_hash(kernel),
            "predicted_us": round(1e6 * guess.seconds, 1),
            "share_of_bandwidth": round(moved / guess.seconds / peak, 3),
            "busy": {unit: round(float(share), 2) for unit, share in guess.busy.items()},
        }
    return found


def main() -> int:
    if compiled_chip() != 90:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "lessons.l12_paged_kv.lab.latent_times", *sys.argv[1:]]
        return subprocess.run(command, env=environment | {CHIP: "90"}, check=False).returncode
    if "few" in sys.argv[1:]:
        written = json.loads(RECORD.read_text(encoding="utf-8")) | {"few heads": of_few_heads()}
        RECORD.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        return 0
    shape = f"{SEQUENCES} sequences, {HEADS} heads, latents of 512 + 64, blocks of {BLOCK}"
    written = {"chip": "H200", "shape": shape, "kernels": {}}
    for name, (decode, kernel, contexts) in KERNELS.items():
        found = {context: predicted(decode, context) for context in contexts}
        written["kernels"][name] = {"hash": kernel_hash(kernel), "at": found}
        written["kernels"][name] |= continued(found)
        print(name, json.dumps(written["kernels"][name], indent=1), flush=True)
    written["few heads"] = of_few_heads()
    RECORD.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
