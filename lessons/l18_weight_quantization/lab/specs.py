"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l18_weight_quantization.lab.specs
"""

import torch

from lessons.l18_weight_quantization.kernels import fp8
from lessons.l18_weight_quantization.kernels.operands import operand_of
from lessons.l18_weight_quantization.optimized import (
    FEW_ROWS,
    MORE_ROWS,
    PARTIALS_BLOCK,
    PLAIN,
    Tiles,
    constexprs_of,
)
from lessons.l18_weight_quantization.weights import (
    Float8Weight,
    GroupedInt,
    Mxfp4Weight,
    Nf4Weight,
    Nvfp4Weight,
    QuantizedWeight,
)
from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec

ROOM = "lessons.l18_weight_quantization"
WITH_MATRIX_UNITS = (80, 89, 90, 100)
N, K = 4096, 4096  # the output projection of Llama-3-8B
TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
TYPES |= {torch.uint8: "*u8", torch.int8: "*i8"}


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor without memory: only its shape and its type are asked for."""
    return torch.empty(shape, dtype=dtype, device="meta")


def grouped(bits: int, group_size: int, zeros: bool = False) -> GroupedInt:
    shape = N, K // group_size
    codes, scales = empty(N, K * bits // 8), empty(*shape, dtype=torch.float16)
    return GroupedInt(codes, scales, empty(*shape) if zeros else None, bits, group_size)


def float8(dtype: torch.dtype, *scales: int) -> Float8Weight:
    return Float8Weight(empty(N, K, dtype=dtype), empty(*scales, dtype=torch.float32))


FORMATS: dict[str, QuantizedWeight] = {
    "int4_g128": grouped(4, 128),
    "int4_g128_zeros": grouped(4, 128, zeros=True),
    "int4_g32": grouped(4, 32),
    "int8_row": grouped(8, K),
    "int8_g128_zeros": grouped(8, 128, zeros=True),
    "e4m3_row": float8(torch.float8_e4m3fn, N, 1),
    "e4m3_tiles": float8(torch.float8_e4m3fn, N // 128, K // 128),
    "e5m2_row": float8(torch.float8_e5m2, N, 1),
    "nf4": Nf4Weight(empty(N * K // 2), empty(N * K // 64, dtype=torch.float32), (N, K)),
    "mxfp4": Mxfp4Weight(empty(N, K // 2), empty(N, K // 32)),
    "nvfp4": Nvfp4Weight(
        empty(N, K // 2),
        empty(N, K // 16, dtype=torch.float8_e4m3fn),
        empty(1, dtype=torch.float32),
    ),
}


def matmul_spec(
    format_name: str, dtype: str, tiles: Tiles | None, chips: tuple[int, ...], splits: bool = False
) -> KernelSpec:
    """quantized_matmul_kernel as `matmul` launches it. tiles: None for those of few rows. splits:
    into float32 partials.
    """
    operand = operand_of(FORMATS[format_name])
    tiles = tiles or FEW_ROWS[operand.codes_a_byte]
    fixed = {"bias_ptr": None}
    strides = ["stride_x", "stride_words"]
    signature = {
        "x_ptr": f"*{dtype}",
        "words_ptr": "*u32",
        "out_ptr": "*fp32" if splits else f"*{dtype}",
    }
    for name, tensor in (("scales", operand.scales), ("zeros", operand.zeros)):
        if tensor is None:
            fixed[f"{name}_ptr"] = None
        else:
            signature[f"{name}_ptr"] = TYPES[tensor.dtype]
        for axis, stride in zip("ng", tensor.stride() if tensor is not None else (0, 0)):
            if stride == 1:  # a launch makes a constant of it
                fixed[f"stride_{name}_{axis}"] = 1
            else:
                signature[f"stride_{name}_{axis}"] = "i32"
    if operand.table is None:
        fixed["table_ptr"] = None
    else:
        signature["table_ptr"] = f"*{dtype}"
    if operand.tensor_scale is None:
        fixed["tensor_scale_ptr"] = None
    else:
        signature["tensor_scale_ptr"] = "*fp32"
    counts = ("num_rows", "num_outputs", "row_bytes", "steps_a_split")
    signature |= dict.fromkeys((*counts, *strides), "i32")
    return KernelSpec(
        f"{ROOM}.kernels.products:quantized_matmul_kernel",
        name=f"{format_name}_{dtype}_{tiles.block_m}x{tiles.block_n}" + "_split" * splits,
        signature=signature,
        constexprs=constexprs_of(operand, tiles) | fixed,
        num_warps=tiles.num_warps,
        divisible_by_16=("num_outputs", "row_bytes", *strides),
        chips=chips,
    )


# Decode: every format, on every chip that has the type. A T4 has no bfloat16 and no matrix unit
# that Triton uses.
KERNELS = [
    matmul_spec(name, "bf16", None, WITH_MATRIX_UNITS, splits=name == "int4_g128")
    for name in FORMATS
]
KERNELS += [
    matmul_spec("int4_g128", "fp16", None, WITH_MATRIX_UNITS),
    matmul_spec("int4_g128", "fp16", PLAIN, (75,)),
    matmul_spec("int8_row", "fp16", PLAIN, (75,)),
    matmul_spec("e4m3_row", "fp16", PLAIN, (75,)),
    matmul_spec("int4_g128", "fp32", PLAIN, tuple(CHIPS)),
]
# More rows.
KERNELS += [
    matmul_spec(name, "bf16", tiles, WITH_MATRIX_UNITS)
    for name in ("int4_g128", "int8_row", "e4m3_row")
    for tiles in MORE_ROWS.values()
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.kernels.products:add_partials_kernel",
        signature={
            "partials_ptr": "*fp32",
            "out_ptr": "*bf16",
            **dict.fromkeys(("num_values", "num_outputs", "num_splits"), "i32"),
        },
        constexprs={"bias_ptr": None, "BLOCK": PARTIALS_BLOCK},
        divisible_by_16=("num_values", "num_outputs"),
        chips=tuple(chip for chip in CHIPS if chip != 75),
    )
]


# ---------------------------------------------------------------- FP8 with FP8


def scaled_spec(kind: str, tiled: bool, tiles, chips: tuple[int, ...]) -> KernelSpec:
    """scaled_matmul_kernel as `scaled_matmul` launches it, for bfloat16 results."""
    counts, strides = ("num_rows", "num_outputs", "size"), ("stride_x", "stride_w")
    # scales of rows lie side by side, and all columns share them
    fixed = {"stride_scales_n": 1} if not tiled else {"stride_scales_k": 1}
    other = "stride_scales_k" if not tiled else "stride_scales_n"
    return KernelSpec(
        f"{ROOM}.kernels.fp8:scaled_matmul_kernel",
        name=f"scaled_{kind}_{'tiles' if tiled else 'row'}_{tiles.block_m}x{tiles.block_n}",
        signature={
            **dict.fromkeys(("x_ptr", "w_ptr"), f"*{kind}"),
            **dict.fromkeys(("x_scales_ptr", "w_scales_ptr"), "*fp32"),
            "out_ptr": "*bf16",
            **dict.fromkeys((*counts, *strides, other), "i32"),
        },
        constexprs={
            "bias_ptr": None,
            "SCALE_ROWS": fp8.TILE if tiled else 1,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": fp8.TILE,
            "NUM_STAGES": tiles.num_stages,
            **fixed,
        },
        num_warps=tiles.num_warps,
        divisible_by_16=(*counts[1:], *strides),
        chips=chips,
    )


KERNELS += [
    scaled_spec(kind, kind == "fp8e4nv", tiles, chips)
    for kind, chips in (("fp8e4nv", (89, 90, 100)), ("i8", WITH_MATRIX_UNITS))
    for tiles in (fp8.FEW_ROWS, fp8.MORE_ROWS)
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.kernels.fp8:quantize_rows_kernel",
        signature={
            "x_ptr": "*bf16",
            "values_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            "size": "i32",
            "stride_x": "i32",
        },
        constexprs={"LARGEST": fp8.LARGEST, "BLOCK": fp8.ROW_BLOCK},
        divisible_by_16=("size", "stride_x"),
        chips=(89, 90, 100),
    )
]
