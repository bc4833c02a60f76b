"""How long packing takes on an H100, predicted: one launch a tensor, and many small copies.

    python -m lessons.l26_kv_transfer.lab.predicted

writes results/counted/l26_gather.json. The kernels' times are those of the toolbox's time model: it
runs their compiled code for a sample of the programs (lessons/PROFILING.md). Small copies are bound
by what issuing one takes, which is lesson 7's assumption. Nothing is timed.

`floor_s` reads and writes all bytes in memory. What half of the L2 cache holds is written later, so
16 blocks are predicted below that.
"""

import json
import sys
from pathlib import Path

from lessons.l07_kernel_fusion.lab.launches import LAUNCH_S
from lessons.l26_kv_transfer.costs import LINKS
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.measure.hardware import lookup

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l26_gather.json"
GPU = "h100"
BLOCKS = (1, 4, 16, 64, 256)
LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 32, 16, 8, 128  # Llama-3-8B, 16 bits


def predicted(count: int) -> dict:
    """`gather` of so many blocks. To be called where kernels are compiled for a chip."""
    import torch

    from lessons.l26_kv_transfer.lab.testing import pool_from
    from lessons.l26_kv_transfer.naive import block_bytes
    from lessons.l26_kv_transfer.optimized import gather
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    num_blocks = 2 * count
    shape = LAYERS, num_blocks * BLOCK_SIZE + 1, KV_HEADS, HEAD_DIM
    pool = pool_from(num_blocks, *(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)))
    blocks = list(range(0, num_blocks, 2))  # no two are neighbours
    profiles = profiled_sample(lambda: gather(pool, blocks), GPU)
    moved = count * block_bytes(pool)
    return {
        "blocks": count,
        "bytes": moved,
        "copies": count * 2 * LAYERS,
        "copies_s": count * 2 * LAYERS * LAUNCH_S,
        "launches": sum(profile.launches for profile in profiles),
        "kernel_s": sum(float(predict(each).seconds) * each.launches for each in profiles),
        "floor_s": 2 * moved / lookup(GPU).memory_bytes_per_s,  # read and written
        "pcie_s": moved / LINKS["PCIe 5.0"],
    }


def main() -> int:
    found = [call(f"{__spec__.name}:predicted", count, chip=90) for count in BLOCKS]
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found:
        print(
            f"{row['blocks']:4} blocks: {1e6 * row['copies_s']:8.0f} µs by {row['copies']} copies, "
            f"{1e6 * row['kernel_s']:6.1f} µs by {row['launches']} launches, at least "
            f"{1e6 * row['floor_s']:6.1f}; over PCIe {1e6 * row['pcie_s']:7.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
