"""How long a step of one layer takes on an H200 when it chooses its keys, predicted from the
compiled code.

    python -m lessons.l28_sparse_attention.lab.predicted

writes results/counted/l28_predicted.json, which MORE.md quotes. A layer of DeepSeek-V3.2: 128 heads
over latents, an indexer with 64 heads of 128 codes, lists of 2048 keys. The time model runs a
sample of the programs (lessons/PROFILING.md); nothing is timed.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from lessons.l27_states.lab.predicted import kernels_of
from lessons.l28_sparse_attention.index_scores import index_scores
from lessons.l28_sparse_attention.optimized import sparse_mla
from lessons.l28_sparse_attention.top_k import top_k
from lessons.toolbox.gpu.another_process import call

RECORD = Path(__file__).parents[3] / "results" / "counted" / "l28_predicted.json"
BATCHES, CONTEXTS = (1, 8, 64), (32768,)
CHOSEN, PAGE_SIZE, HEADS, LATENT = 2048, 64, 128, 576
INDEX_HEADS, INDEX_DIM = 64, 128


def of_step(batch: int, context: int) -> Callable:
    """A step of sequences of the same length, whose pages are their own."""
    blocks = context // PAGE_SIZE
    pages = batch * blocks

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    index = (
        zeros(batch, INDEX_HEADS, INDEX_DIM),
        zeros(batch, INDEX_HEADS, dtype=torch.float32),
        zeros(pages, PAGE_SIZE, INDEX_DIM, dtype=torch.uint8),
        zeros(pages, PAGE_SIZE, dtype=torch.float32),
    )
    table = torch.arange(pages, dtype=torch.int32).view(batch, blocks)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    q, latents = zeros(batch, HEADS, LATENT), zeros(pages, PAGE_SIZE, LATENT)
    sequences = torch.arange(batch, dtype=torch.int32)
    scores = torch.randn(batch, context)  # zeros would all be ties, and meet in one bin
    lists = torch.stack([torch.randperm(context)[:CHOSEN].sort()[0] for _ in sequences]).int()

    def run() -> None:
        """The parts of choose_and_attend, each with inputs of its own: of a sample of the programs
        there are no whole scores or lists.
        """
        index_scores(*index, table, sequences, lengths - 1, context)
        top_k(scores, CHOSEN, lengths)
        sparse_mla(q, latents, table, lists, sequences, 192**-0.5)

    return run


def predicted(batch: int, context: int) -> dict:
    """What the record holds of a step. To be called where kernels are compiled for a chip."""
    kernels = kernels_of(of_step(batch, context))
    return {
        "predicted_s": sum(each["predicted_s"] for each in kernels.values()),
        "kernels": kernels,
    }


def main() -> None:
    record = {
        "what": "predicted by lessons/toolbox/profile for an H200, not measured",
        "command": "python -m lessons.l28_sparse_attention.lab.predicted",
    }
    for context in CONTEXTS:
        for batch in BATCHES:
            found = call(f"{__spec__.name}:predicted", batch, context, chip=90)
            record.setdefault(str(context), {})[str(batch)] = found
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(context, batch, f"{1e6 * found['predicted_s']:.1f} µs", flush=True)


if __name__ == "__main__":
    main()
