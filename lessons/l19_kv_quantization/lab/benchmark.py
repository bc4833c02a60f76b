"""Decode attention over codes beside the same over numbers, by context; and products of 8 bits on
both sides, by tokens.

    python -m lessons.toolbox.measure.bench 19

On a CPU no kernel reads codes, so a quantized cache saves memory and costs time there: that is what
the first figure shows.
"""

import random

import torch
from torch.nn.functional import linear

from lessons.l03_kv_cache.batch import new_batch
from lessons.l03_kv_cache.lab.workload import DTYPE, ON_GPU, THREADS, read_floor_s
from lessons.l12_paged_kv.kernels import stand_ins
from lessons.l12_paged_kv.optimized import paged_decode
from lessons.l19_kv_quantization.activations.w8a8 import to_eight_bits, w8a8_by_numbers, w8a8_matmul
from lessons.l19_kv_quantization.formats import FORMATS, row_bytes
from lessons.l19_kv_quantization.optimized import quantized_decode
from lessons.l19_kv_quantization.pool import blocks_read
from lessons.toolbox.measure.bench import Benchmark, on_gpu

HEADS, KV_HEADS, HEAD_DIM = (32, 8, 128) if ON_GPU else (6, 2, 64)
BATCH = 32 if ON_GPU else 4
CONTEXTS = [1024, 4096, 8192, 16384, 32768] if ON_GPU else [128, 512, 2048]
SIXTEEN = 16  # tokens of a block
SCALE = HEAD_DIM**-0.5
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
FP8 = FORMATS["fp8"]

# ---------------------------------------------------------------- a step


def inputs_of(context: int, device: torch.device) -> tuple:
    """q: [B, Hq, D], the codes and scales of K and V, the numbers that they mean, and the step's
    batch, whose blocks are in random order.
    """
    count = context // SIXTEEN
    order = random.Random(1).sample(range(BATCH * count), BATCH * count)
    tables = [[order.pop() for _ in range(count)] for _ in range(BATCH)]
    shape = (BATCH * count, SIXTEEN, KV_HEADS, HEAD_DIM)
    coded, numbers = [], []
    for _ in range(2):
        codes, scales = FP8.quantize(torch.randn(shape, dtype=DTYPE, device=device))
        numbers.append(FP8.dequantize(codes, scales))
        by_head = scales.permute(2, 0, 1, 3).contiguous()
        coded += [codes, by_head.permute(1, 2, 0, 3)]
    q = torch.randn(BATCH, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    chunks = [([0], context - 1)] * BATCH
    make = new_batch if ON_GPU else stand_ins.paged_batch
    args = (SIXTEEN, device, tables) if ON_GPU else (SIXTEEN, tables, device)
    return q, coded, numbers, make(chunks, *args)


def numbers_first(q, coded, numbers, batch):
    """Naive: the pages become numbers in memory, then lesson 12 attends."""
    k_codes, k_scales, v_codes, v_scales = coded

    def run():
        blocks, small = blocks_read(batch, SIXTEEN)
        pairs = (k_codes, k_scales), (v_codes, v_scales)
        caches = [FP8.dequantize(*(x[blocks] for x in pair)) for pair in pairs]
        return attend(q, *caches, small)

    return run


def plain_pages(q, coded, numbers, batch):
    """Lesson 12 over a cache that was never quantized, of the same numbers."""
    return lambda: attend(q, *numbers, batch)


def attend(q, k_cache, v_cache, batch):
    if not ON_GPU:
        return stand_ins.decode(q, k_cache, v_cache, batch, SCALE, None)
    table, lens, most = batch.block_table, batch.context_lens, batch.max_context_len
    return paged_decode(q, k_cache, v_cache, table, lens, max_context_len=most)


@on_gpu
def in_the_kernel(q, coded, numbers, batch):
    """Codes are read where they are stored."""
    k_codes, k_scales, v_codes, v_scales = coded
    pages = k_codes, v_codes, k_scales, v_scales, batch.block_table
    lens, most = batch.context_lens, batch.max_context_len
    return lambda: quantized_decode(q, *pages, lens, FP8, max_context_len=most)


def kv_bytes(context: int) -> int:
    """Codes and scales of K and V of all sequences in one layer."""
    return 2 * BATCH * context * KV_HEADS * row_bytes(FP8, HEAD_DIM, DTYPE.itemsize)


if ON_GPU:
    STEP = {
        "FP8 pages, numbers first": ("naive", numbers_first),
        "FP8 pages, read in the kernel": ("optimized", in_the_kernel),
        f"{DTYPE_NAME} pages": ("library", plain_pages),
    }
    TITLE = f"FP8 pages beside {DTYPE_NAME} pages: {{beside}}"
else:
    STEP = {
        "FP8 pages, numbers first": ("naive", numbers_first),
        f"{DTYPE_NAME} pages": ("optimized", plain_pages),
    }
    SLOWER = "FP8 pages take {speedup:.1f}x as long as float32 at {x} tokens"
    TITLE = f"Without a kernel for codes {SLOWER}"

# ---------------------------------------------------------------- products

OUTPUTS, INPUTS = (14336, 4096) if ON_GPU else (1024, 384)


def product_inputs(tokens: int, device: torch.device) -> tuple:
    """x: [T, K] and a matrix [N, K] as codes of int8 and as the numbers that they mean."""
    weight = to_eight_bits(torch.randn(OUTPUTS, INPUTS, device=device), "int8")
    x = torch.randn(tokens, INPUTS, dtype=DTYPE, device=device)
    return x, weight, weight.dequantize().to(DTYPE)


def by_numbers(x, weight, matrix):
    """Codes of the activations made and undone."""
    return lambda: w8a8_by_numbers(x, weight)


def by_codes(x, weight, matrix):
    """Whole numbers multiplied as they are."""
    return lambda: w8a8_matmul(x, weight)


def by_linear(x, weight, matrix):
    """PyTorch's product of numbers."""
    return lambda: linear(x, matrix)


BENCHMARKS = [
    Benchmark(
        name="l19_context",
        title=TITLE,
        x_name="tokens of context",
        x_values=CONTEXTS,
        quick_x_values=CONTEXTS[:1],
        inputs=inputs_of,
        providers=STEP,
        ylabel="decode attention of one layer",
        bytes_moved=kv_bytes,
        floor_s=lambda context: read_floor_s(kv_bytes(context)),
        floor_label="codes and scales read once",
        dtype=DTYPE_NAME,
        shape=f"batch {BATCH}, heads {HEADS}/{KV_HEADS}, head_dim {HEAD_DIM}, blocks of {SIXTEEN}"
        f"{THREADS}",
        tolerance=3e-2 if ON_GPU else 1e-4,
    ),
    Benchmark(
        name="l19_products",
        title=f"8-bit codes multiplied, beside {DTYPE_NAME}: {{beside}}",
        x_name="tokens",
        x_values=[16, 64, 256, 1024, 4096] if ON_GPU else [16, 64, 256, 1024],
        quick_x_values=[64],
        inputs=product_inputs,
        providers={
            "W8A8, numbers first": ("naive", by_numbers),
            "W8A8, codes multiplied": ("optimized", by_codes),
            f"{DTYPE_NAME}, PyTorch": ("library", by_linear),
        },
        ylabel=f"a product with [{OUTPUTS}, {INPUTS}]",
        bytes_moved=lambda tokens: OUTPUTS * INPUTS,
        floor_s=lambda tokens: read_floor_s(OUTPUTS * INPUTS),
        floor_label="the codes of the matrix read once",
        dtype=DTYPE_NAME,
        shape=f"{OUTPUTS} outputs, {INPUTS} inputs{THREADS}",
        # Activations of 8 bits: 1 % beside the product of numbers.
        tolerance=3e-2,
    ),
]
