"""Products with quantized matrices: over the batch, and over the four shapes of a decoder's layer.

    python -m lessons.toolbox.measure.bench 18

Every provider multiplies the same numbers: small whole numbers with one scale, which 4 bits, 8
bits, FP8 and BF16 all hold exactly. So their outputs can be compared, and only bytes and work
differ. On a CPU stand_ins.py replaces the kernels, which are interpreted and not timed.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from lessons.l18_weight_quantization.kernels import stand_ins
from lessons.l18_weight_quantization.kernels.cuda_w4a16 import w4a16_cuda
from lessons.l18_weight_quantization.kernels.fp8 import fp8_matmul, quantize_rows
from lessons.l18_weight_quantization.naive import dequantize_matmul
from lessons.l18_weight_quantization.optimized import matmul
from lessons.l18_weight_quantization.weights import Float8Weight, GroupedInt, pack
from lessons.toolbox.measure.bench import Benchmark, Unavailable, on_gpu
from lessons.toolbox.measure.device import default_device, default_dtype
from lessons.toolbox.measure.hardware import this_machine, time_floor_s

ON_GPU = default_device().type == "cuda"
# On a CPU too: PyTorch's products with packed integers are fast in bfloat16 alone.
DTYPE = default_dtype() if ON_GPU else torch.bfloat16
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
GROUP = 128
SCALE = 2.0**-6
# Outputs and inputs of Llama-3-8B's merged matrices; on a CPU with a quarter of the width.
LLAMA_3_8B = {
    "o_proj": (4096, 4096),
    "qkv_proj": (6144, 4096),
    "down_proj": (4096, 14336),
    "gate_up_proj": (28672, 4096),
}
SHAPES = {
    name: shape if ON_GPU else (shape[0] // 4, shape[1] // 4) for name, shape in LLAMA_3_8B.items()
}
BY_SIZE = {rows * columns // 2**20: (rows, columns) for rows, columns in SHAPES.values()}
BATCHES = [1, 2, 4, 8, 16, 32, 48, 64, 92, 128, 184, 256] if ON_GPU else [1, 2, 4, 8, 16, 32, 64]
WIDEST = SHAPES["gate_up_proj"]
# FP8 × FP8 rounds x to 3 bits of mantissa: 2.6 % of it.
TOLERANCE = 4e-2


class Matrices(NamedTuple):
    """The same numbers in each format. All are [N, K]."""

    int4: GroupedInt
    int8: GroupedInt
    fp8: Float8Weight
    bf16: Tensor


@lru_cache(maxsize=1)
def matrices_of(shape: tuple[int, int], device: torch.device) -> Matrices:
    """Whole numbers from −7 to 7, times one scale."""
    rows, columns = shape
    whole = torch.randint(-7, 8, shape, device=device, dtype=torch.int8)
    scales = torch.full((rows, columns // GROUP), SCALE, dtype=torch.float16, device=device)
    a_row = scales[:, :1].contiguous()
    codes = (whole + 8).view(torch.uint8).unflatten(1, (-1, GROUP))
    return Matrices(
        int4=GroupedInt(pack(codes, 4), scales, None, 4, GROUP),
        int8=GroupedInt((whole.view(torch.uint8) ^ 128), a_row, None, 8, columns),
        fp8=Float8Weight(whole.to(DTYPE).to(torch.float8_e4m3fn), a_row.float()),
        bf16=whole.to(DTYPE) * SCALE,
    )


def inputs_of(num_rows: int, shape: tuple[int, int], device: torch.device) -> tuple:
    return torch.randn(num_rows, shape[1], dtype=DTYPE, device=device), matrices_of(shape, device)


# ---------------------------------------------------------------- providers

fast = matmul if ON_GPU else stand_ins.matmul


def dequantized(x: Tensor, weights: Matrices):
    """Write the whole matrix in x's type, then multiply."""
    return lambda: dequantize_matmul(x, weights.int4)


def with_4_bits(x: Tensor, weights: Matrices):
    return lambda: fast(x, weights.int4)


def with_8_bits(x: Tensor, weights: Matrices):
    return lambda: fast(x, weights.int8)


@on_gpu
def with_fp8(x: Tensor, weights: Matrices):
    """FP8 as storage: multiplied in x's type."""
    return lambda: matmul(x, weights.fp8)


@on_gpu
def fp8_with_fp8(x: Tensor, weights: Matrices):
    """x quantized row by row, within the time."""
    return lambda: fp8_matmul(x, weights.fp8)


@on_gpu
def by_columns(x: Tensor, weights: Matrices):
    """4 bits with scales stored by columns, so that neighbouring outputs' are loaded together."""
    scales = weights.int4.scales.T.contiguous().T
    weight = GroupedInt(weights.int4.codes, scales, None, 4, GROUP)
    return lambda: matmul(x, weight)


@on_gpu
def cuda_twin(x: Tensor, weights: Matrices):
    """optimized.cu, made for one row."""
    if len(x) > 16:
        raise Unavailable("every row reads the matrix again: not timed beyond 16 rows")
    try:
        w4a16_cuda(x, weights.int4)
    except RuntimeError as error:
        raise Unavailable(str(error)) from None
    return lambda: w4a16_cuda(x, weights.int4)


def dense(x: Tensor, weights: Matrices):
    """PyTorch's product with the matrix that was never quantized."""
    return lambda: linear(x, weights.bf16)


@on_gpu
def scaled_mm(x: Tensor, weights: Matrices):
    """torch._scaled_mm, cuBLASLt's FP8 product with a scale a row; x quantized by our kernel."""
    scales = weights.fp8.scales.T.contiguous()

    def run():
        values, x_scales = quantize_rows(x)
        return torch._scaled_mm(
            values,
            weights.fp8.values.T,
            scale_a=x_scales[:, None],
            scale_b=scales,
            out_dtype=x.dtype,
        )

    try:
        run()
    except RuntimeError as error:
        raise Unavailable(str(error).split("\n")[0]) from None
    return run


@on_gpu
def tinygemm(x: Tensor, weights: Matrices):
    """PyTorch's own int4 product, which torchao and gpt-fast call. It packs once, before the
    clock.
    """
    codes = (weights.bf16 / SCALE + 8).to(torch.uint8)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    scales = weights.int4.scales.to(x.dtype).T
    scales_and_shifts = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_shifts)
    except RuntimeError as error:
        raise Unavailable(str(error).split("\n")[0]) from None
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_shifts)


PROVIDERS = {
    "dequantize, then multiply": ("naive", dequantized),
    "4 bits": ("optimized", with_4_bits),
    "8 bits": ("optimized", with_8_bits),
    "FP8 weights": ("optimized", with_fp8),
    "FP8 × FP8": ("optimized", fp8_with_fp8),
    "4 bits, scales by columns": ("optimized", by_columns),
    "CUDA C++ twin": ("optimized", cuda_twin),
    f"{DTYPE_NAME} (PyTorch)": ("library", dense),
    "torch._scaled_mm": ("library", scaled_mm),
    "PyTorch int4 (tinygemm)": ("library", tinygemm),
}
NOT_DRAWN = ("FP8 weights", "FP8 × FP8", "4 bits, scales by columns", "CUDA C++ twin")
NOT_DRAWN += ("torch._scaled_mm", "PyTorch int4 (tinygemm)")

# ---------------------------------------------------------------- floors


def int4_bytes(shape: tuple[int, int], num_rows: int = 1) -> int:
    """Codes and scales once, x once, the result once."""
    rows, columns = shape
    codes, scales = rows * columns // 2, rows * columns // GROUP * 2
    return codes + scales + num_rows * (rows + columns) * DTYPE.itemsize


def product_flops(shape: tuple[int, int], num_rows: int = 1) -> int:
    return 2 * num_rows * shape[0] * shape[1]


def floor_s(shape: tuple[int, int], num_rows: int = 1) -> float:
    """Seconds to read 4-bit codes once, or to multiply in DTYPE, whichever takes longer."""
    work = int4_bytes(shape, num_rows), product_flops(shape, num_rows)
    return time_floor_s(*work, this_machine(), DTYPE)


BENCHMARKS = [
    Benchmark(
        name="l18_batch",
        title=f"4 bits beside {DTYPE_NAME}: {{beside}}",
        x_name="rows of x",
        x_values=BATCHES,
        quick_x_values=[1, 16],
        inputs=lambda rows, device: inputs_of(rows, WIDEST, device),
        providers=PROVIDERS,
        ylabel="one product",
        bytes_moved=lambda rows: int4_bytes(WIDEST, rows),
        flops=lambda rows: product_flops(WIDEST, rows),
        floor_s=lambda rows: floor_s(WIDEST, rows),
        floor_label="roofline of 4 bits",
        dtype=DTYPE_NAME,
        shape=f"gate_up_proj {WIDEST[1]} → {WIDEST[0]}, groups of {GROUP}",
        tolerance=TOLERANCE,
        not_drawn=NOT_DRAWN,
    ),
    Benchmark(
        name="l18_shapes",
        title="One row: 4 bits reach {floor_percent:.0f} % of the byte floor at {x} Mi weights",
        x_name="weights of the matrix (Mi)",
        x_values=sorted(BY_SIZE),
        quick_x_values=sorted(BY_SIZE)[:1],
        inputs=lambda size, device: inputs_of(1, BY_SIZE[size], device),
        providers=PROVIDERS,
        ylabel="one product with one row",
        bytes_moved=lambda size: int4_bytes(BY_SIZE[size]),
        floor_s=lambda size: floor_s(BY_SIZE[size]),
        floor_label="4-bit codes read once",
        dtype=DTYPE_NAME,
        shape=", ".join(f"{name} {k} → {n}" for name, (n, k) in SHAPES.items()),
        tolerance=TOLERANCE,
        not_drawn=NOT_DRAWN,
    ),
]
