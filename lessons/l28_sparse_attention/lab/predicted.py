"""How long a step's kernels take on an H100, predicted, over the context.

    python -m lessons.l28_sparse_attention.lab.predicted

writes results/counted/l28_step.json. The kernels' times are those of the toolbox's time model: it
runs their compiled code for a sample of the programs (lessons/PROFILING.md). Nothing is timed.
"""

import json
import sys
from pathlib import Path

from lessons.toolbox.gpu.another_process import call

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l28_step.json"
GPU = "h100"
CONTEXTS = (4096, 32768, 131072)
BATCH, HEADS, CHOSEN, PAGE_SIZE = 8, 128, 2048, 64
PARTS = "full", "indexer", "top k", "chosen rows"


def predicted(context: int) -> dict:
    """Seconds of full attention and of the three parts. To be called where kernels are compiled
    for a chip.
    """
    import torch

    from lessons.l12_paged_kv.kernels.latents import paged_mla_decode
    from lessons.l28_sparse_attention.index_scores import index_scores
    from lessons.l28_sparse_attention.optimized import sparse_mla
    from lessons.l28_sparse_attention.top_k import top_k
    from lessons.toolbox.profile.points import profiled_sample
    from lessons.toolbox.profile.time_model import predict

    blocks = context // PAGE_SIZE
    table = torch.arange(BATCH * blocks, dtype=torch.int32).view(BATCH, blocks)
    sequences = torch.arange(BATCH, dtype=torch.int32)
    lengths = torch.full((BATCH,), context, dtype=torch.int32)
    q = torch.zeros(BATCH, HEADS, 576, dtype=torch.bfloat16)
    latents = torch.zeros(BATCH * blocks, PAGE_SIZE, 576, dtype=torch.bfloat16)
    q_index = torch.zeros(BATCH, 64, 128, dtype=torch.bfloat16)
    weights = torch.zeros(BATCH, 64)
    codes = torch.zeros(BATCH * blocks, PAGE_SIZE, 128, dtype=torch.uint8)
    scales = torch.ones(BATCH * blocks, PAGE_SIZE)
    scores = torch.randn(BATCH, context)
    indices = torch.arange(CHOSEN, dtype=torch.int32).repeat(BATCH, 1) * (context // CHOSEN)
    places = table, sequences, lengths - 1, context
    calls = {
        "full": lambda: paged_mla_decode(q, latents, table, lengths, 0.07),
        "indexer": lambda: index_scores(q_index, weights, codes, scales, *places),
        "top k": lambda: top_k(scores, CHOSEN, lengths),
        "chosen rows": lambda: sparse_mla(q, latents, table, indices, sequences, 0.07),
    }
    found = {"context": context, "batch": BATCH}
    for name in PARTS:
        profiles = profiled_sample(calls[name], GPU)
        found[name] = sum(float(predict(each).seconds) * each.launches for each in profiles)
    return found


def main() -> int:
    found = [call(f"{__spec__.name}:predicted", context, chip=90) for context in CONTEXTS]
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for row in found:
        times = ", ".join(f"{name} {1e6 * row[name]:.1f}" for name in PARTS)
        print(f"{row['context']:6} keys, µs: {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
