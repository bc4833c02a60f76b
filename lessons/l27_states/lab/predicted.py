"""How long a step of states takes on an H100, predicted, over the batch.

    python -m lessons.l27_states.lab.predicted

writes results/counted/l27_step.json. The kernel's times are those of the toolbox's time model: it
runs the compiled code for a sample of the programs (lessons/PROFILING.md). Nothing is timed.
"""

import json
import sys
from pathlib import Path

from lessons.l27_states.lab.costs import QWEN3_NEXT
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.measure.hardware import lookup

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l27_step.json"
GPU = "h100"
BATCHES = (1, 4, 16, 64, 256)


def predicted(batch: int) -> dict:
    """`gated_delta_step` of one layer. To be called where kernels are compiled for a chip."""
    import torch

    from lessons.l27_states.optimized import gated_delta_step
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    layer = QWEN3_NEXT.state
    q, k, v = (
        torch.zeros(batch, layer.heads, dim, dtype=torch.bfloat16)
        for dim in (layer.key_dim, layer.key_dim, layer.value_dim)
    )
    log_decay, beta = torch.zeros(batch, layer.heads), torch.zeros(batch, layer.heads)
    states = torch.zeros(batch, layer.heads, layer.key_dim, layer.value_dim)
    arguments = q, k, v, log_decay, beta, states, torch.arange(batch)
    profiles = profiled_sample(lambda: gated_delta_step(*arguments), GPU)
    moved = 2 * batch * layer.state_bytes
    return {
        "batch": batch,
        "bytes": moved,
        "kernel_s": sum(float(predict(each).seconds) * each.launches for each in profiles),
        "floor_s": moved / lookup(GPU).memory_bytes_per_s,
    }


def main() -> int:
    """Write the record."""
    rows = [call(f"{__spec__.name}:predicted", batch, chip=90) for batch in BATCHES]
    RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        kernel, floor = 1e6 * row["kernel_s"], 1e6 * row["floor_s"]
        print(f"{row['batch']:4} sequences: {kernel:8.1f} µs, reading and writing {floor:8.1f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
