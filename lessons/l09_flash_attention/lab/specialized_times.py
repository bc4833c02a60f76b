"""How long attention takes on an H200 by five kernels, from pointers to Gluon: predictions of the
time model (`lessons.toolbox.profile`), not measurements.

    python -m lessons.l09_flash_attention.lab.specialized_times        (about 15 minutes)
        writes results/counted/l09_specialized.json

A few programs of each launch run on the machine; the model takes the others to be like them.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lessons.l09_flash_attention.hopper.gluon_flash import flash_attention_hopper
from lessons.l09_flash_attention.hopper.specialized.triton_flash import (
    TILES,
    flash_attention_specialized,
)
from lessons.l09_flash_attention.lab.traffic import Shape
from lessons.l09_flash_attention.optimized import flash_attention
from lessons.l09_flash_attention.tiles import Tiles, tiles_for
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.kernels.kernel_hash import kernel_hash

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l09_specialized.json"
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8192, 32, 8, 128
PROGRAMS = {True: 5, False: 1}  # causal ones differ in length
EIGHT_WARPS = Tiles(128, 64, 8, 3)  # optimized.py's: the request to specialise is ignored
KERNELS: dict[str, Callable] = {
    "pointers": partial(flash_attention, tiles=tiles_for(90, HEAD_DIM, 2), max_seqlen_q=TOKENS),
    "descriptors": partial(flash_attention_specialized, tiles=EIGHT_WARPS),
    "specialised": partial(flash_attention_specialized, tiles=TILES[90][HEAD_DIM]),
    "Gluon": flash_attention_hopper,
    "Gluon, three tiles": partial(flash_attention_hopper, stages=3),
}
ROOM = "lessons.l09_flash_attention"
SPLIT = f"{ROOM}.hopper.specialized.triton_flash:flash_descriptor_kernel"
HOPPER = f"{ROOM}.hopper.gluon_flash:flash_hopper_kernel"
SOURCES = {
    "pointers": f"{ROOM}.optimized:flash_kernel",
    "descriptors": SPLIT,
    "specialised": SPLIT,
    "Gluon": HOPPER,
    "Gluon, three tiles": HOPPER,
}


def predicted(name: str, causal: bool) -> dict:
    """Of one launch, and what bounds it. To be called where kernels are compiled."""
    from lessons.toolbox.gpu.arguments import WATCHERS
    from lessons.toolbox.gpu.counters import counting
    from lessons.toolbox.measure.hardware import lookup
    from lessons.toolbox.profile.counted import profiles
    from lessons.toolbox.profile.time_model import predict

    q, k, v = (
        torch.zeros(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    seen: list = []
    WATCHERS.append(seen.append)
    try:
        with counting(programs=PROGRAMS[causal]):
            KERNELS[name](q, k, v, causal=causal)
    finally:
        WATCHERS.remove(seen.append)
    profile = profiles(seen, lookup("h200"))[0]
    found = predict(profile)
    flops = Shape(TOKENS, TOKENS, HEADS, KV_HEADS, HEAD_DIM, 2, causal).flops
    pairs = profile.total["flops"] / (4 * 128 * 128 * HEAD_DIM)  # of tiles of 128 x 128
    return {
        "hash": kernel_hash(SOURCES[name]),
        "predicted_us": round(1e6 * found.seconds, 1),
        "tflops": round(flops / found.seconds / 1e12, 1),
        "share_of_peak": round(flops / found.seconds / lookup("h200").bf16_flops_per_s, 3),
        "instructions_a_tile": round(profile.total["issued"] / pairs),
        "threads": 32 * profile.warps,
        "busy": {unit: round(float(share), 2) for unit, share in found.busy.items()},
        "limit": found.limit,
    }


def main() -> None:
    shape = f"{TOKENS} tokens, {HEADS} heads on {KV_HEADS} of {HEAD_DIM}, bfloat16"
    written: dict = {"chip": "H200", "shape": shape, "causal": {}, "full": {}}
    for causal, part in ((False, "full"), (True, "causal")):
        for name in KERNELS:
            written[part][name] = call(f"{__spec__.name}:predicted", name, causal, chip=90)
            print(part, name, json.dumps(written[part][name]), flush=True)
    RECORD.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
