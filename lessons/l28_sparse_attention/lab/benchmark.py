"""A decode step over the context: all latents and a mask, and the chosen ones alone.

    python -m lessons.toolbox.measure.bench 28

Both choose first, by the indexer's scores and their top k, and give the same result. On a CPU
PyTorch's indexing stands for the kernels, which would be interpreted.
"""

import torch
from torch import Tensor

from lessons.l03_kv_cache.lab.workload import DTYPE, ON_GPU, THREADS, read_floor_s
from lessons.l28_sparse_attention.index_scores import index_scores
from lessons.l28_sparse_attention.indexer import in_fp8
from lessons.l28_sparse_attention.optimized import choose_and_attend
from lessons.l28_sparse_attention.top_k import top_k
from lessons.toolbox.measure.bench import Benchmark

# DeepSeek-V3.2's layer on a GPU, a small one on a CPU
BATCH, HEADS, CHOSEN, PAGE_SIZE = (8, 128, 2048, 64) if ON_GPU else (1, 8, 256, 64)
RANK, ROPE, INDEX_HEADS, INDEX_DIM = 512, 64, 64, 128
CONTEXTS = [2048, 4096, 8192, 16384, 32768]
SCALE = 192**-0.5


def inputs_of(context: int, device: torch.device) -> tuple:
    """Sequences of one length, their pages in a random order."""
    blocks = context // PAGE_SIZE
    shape = BATCH * blocks, PAGE_SIZE
    latents = torch.randn(*shape, RANK + ROPE, dtype=DTYPE, device=device)
    table = torch.randperm(BATCH * blocks, device=device).view(BATCH, blocks).int()
    q = torch.randn(BATCH, HEADS, RANK + ROPE, dtype=DTYPE, device=device)
    q_index = torch.randn(BATCH, INDEX_HEADS, INDEX_DIM, device=device)
    weights = torch.randn(BATCH, INDEX_HEADS, device=device)
    keys = torch.randn(shape[0] * PAGE_SIZE, INDEX_DIM, device=device)
    q_index, weights, codes, scales = in_fp8(q_index, weights, keys)
    lengths = torch.full((BATCH,), context, dtype=torch.int32, device=device)
    index = q_index, weights, codes.view(*shape, INDEX_DIM), scales.view(shape)
    return q, latents, index, table, lengths


def choice_of(index: tuple, table: Tensor, lengths: Tensor) -> Tensor:
    """The list of each sequence: [B, CHOSEN], by the kernels, or by PyTorch on a CPU."""
    q_index, weights, codes, scales = index
    if ON_GPU:
        sequences = torch.arange(len(lengths), dtype=torch.int32, device=table.device)
        places = table, sequences, lengths - 1, table.shape[1] * PAGE_SIZE
        return top_k(index_scores(q_index, weights, codes, scales, *places), CHOSEN, lengths)
    rows = rows_of(table)
    numbers = codes.flatten(0, 1)[rows].view(torch.float8_e4m3fn).float()
    products = (q_index.float() @ numbers.mT).relu()
    scores = (weights[:, None] @ products)[:, 0] * scales.flatten()[rows]
    return scores.topk(CHOSEN, sorted=False).indices


def all_scores(q: Tensor, latents: Tensor, index: tuple, table: Tensor, lengths: Tensor):
    """Every row is read, and most of them are masked."""

    def run() -> Tensor:
        chosen = choice_of(index, table, lengths).long()
        rows = latents.flatten(0, 1)[rows_of(table)]
        mask = torch.full(rows.shape[:2], float("-inf"), dtype=q.dtype, device=q.device)
        return attended(q, rows, mask.scatter_(1, chosen, 0.0)[:, None])

    return run


def chosen_rows(q: Tensor, latents: Tensor, index: tuple, table: Tensor, lengths: Tensor):
    """The chosen rows alone."""
    if ON_GPU:
        arguments = q, latents, *index, table, lengths, CHOSEN, SCALE, RANK
        return lambda: choose_and_attend(*arguments)[0]

    def run() -> Tensor:
        chosen = choice_of(index, table, lengths)
        return attended(q, latents.flatten(0, 1)[rows_of(table).gather(1, chosen)], 0.0)

    return run


def rows_of(table: Tensor) -> Tensor:
    """The row of each key: [B, context]."""
    steps = torch.arange(PAGE_SIZE, device=table.device)
    return (table.long()[:, :, None] * PAGE_SIZE + steps).flatten(1)


def attended(q: Tensor, rows: Tensor, mask: Tensor | float) -> Tensor:
    """q: [B, H, rank + rope], rows: [B, K, rank + rope] -> [B, H, rank]."""
    return (q @ rows.mT * SCALE + mask).softmax(-1) @ rows[..., :RANK]


BENCHMARKS = [
    Benchmark(
        name="l28_step",
        title="{x} keys: reading the chosen rows alone is {speedup:.1f}x as fast as a mask",
        x_name="context",
        x_values=CONTEXTS,
        quick_x_values=CONTEXTS[:3],
        inputs=inputs_of,
        providers={
            "all scores and a mask": ("naive", all_scores),
            "chosen rows": ("optimized", chosen_rows),
        },
        floor_s=lambda context: read_floor_s(
            BATCH * (context * (INDEX_DIM + 4) + CHOSEN * (RANK + ROPE) * DTYPE.itemsize)
        ),
        floor_label="reading index keys and chosen rows once",
        dtype=str(DTYPE).removeprefix("torch."),
        shape=f"{BATCH} sequences, {HEADS} heads, {CHOSEN} chosen{THREADS}",
        tolerance=2e-2 if ON_GPU else 1e-4,
    )
]
