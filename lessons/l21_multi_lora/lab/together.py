"""What q, k and v cost on an H200 one by one and together, predicted from their compiled code.

    python -m lessons.l21_multi_lora.lab.together

writes results/counted/l21_together.json, which MORE.md quotes. Nothing is timed: see
lessons/PROFILING.md.
"""

import json
from pathlib import Path

import torch

from lessons.l21_multi_lora.batch import AdapterBatch
from lessons.l21_multi_lora.optimized import add_lora
from lessons.l21_multi_lora.together import SliceWeights, add_lora_together
from lessons.toolbox.gpu.another_process import call
from lessons.toolbox.measure.hardware import CHIPS

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l21_together.json"
SIZE, OUTPUTS = 4096, (4096, 1024, 1024)  # q, k and v of Llama-3-8B
ADAPTERS, RANK = 16, 16
LEAST_BYTES = 2 * ADAPTERS * RANK * (len(OUTPUTS) * SIZE + sum(OUTPUTS))


def predicted(rows: int) -> dict:
    """{way: {"launches", "predicted_s", "floor_share"}} of a step. To be called where kernels are
    compiled.
    """
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    weights = SliceWeights.empty(ADAPTERS, RANK, SIZE, OUTPUTS, torch.bfloat16, "cpu")
    weights.ranks.fill_(RANK)
    x = torch.zeros(rows, SIZE, dtype=torch.bfloat16)
    outs = [torch.zeros(rows, count, dtype=torch.bfloat16) for count in OUTPUTS]
    batch = AdapterBatch.of([row % ADAPTERS for row in range(rows)])

    def one_by_one():
        for out, layer in zip(outs, weights.layers()):
            add_lora(out, x, layer, batch)

    def together():
        add_lora_together(outs, x, weights, batch)

    found = {}
    for way in (one_by_one, together):
        profiles = profiled_sample(way)
        seconds = sum(float(predict(p).seconds) * p.launches for p in profiles)
        found[way.__name__] = {
            "launches": sum(p.launches for p in profiles),
            "predicted_s": seconds,
            "floor_share": LEAST_BYTES / CHIPS["h200"].memory_bytes_per_s / seconds,
            "registers": max(p.assembled.get("registers", 0) for p in profiles),
            "spill_bytes": max(p.assembled.get("spill_bytes", 0) for p in profiles),
        }
    return found


def main() -> None:
    record = {str(rows): call(f"{__spec__.name}:predicted", rows, chip=90) for rows in (16, 64)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
