"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l07_kernel_fusion.lab.specs
"""

from lessons.l07_kernel_fusion.epilogue import PLAIN, TENSOR_CORES
from lessons.l07_kernel_fusion.rows import MAX_ROW, SHORTEST_TILE, tile_of
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l07_kernel_fusion"

RMS_NORM = f"{ROOM}.optimized:rms_norm_kernel"
RMS_NORM_LONG = f"{ROOM}.optimized:rms_norm_long_kernel"
ADD_RMS_NORM = f"{ROOM}.optimized:add_rms_norm_kernel"
SILU_MUL = f"{ROOM}.optimized:silu_mul_kernel"
ARGUMENTS = {  # kernel: its pointers, its integers
    RMS_NORM: ("x weight out", "size stride_x num_rows"),
    RMS_NORM_LONG: ("x weight out", "size stride_x"),
    ADD_RMS_NORM: ("x residual weight out", "size stride_x stride_residual"),
    SILU_MUL: ("gate up out", "size stride_gate stride_up num_tiles"),
}


def spec(kernel: str, dtype: str, size: int, num_warps: int, **constexprs) -> KernelSpec:
    """How a kernel is launched on rows of `size` values. dtype: Triton's name, "bf16"."""
    pointers, integers = ARGUMENTS[kernel]
    name = kernel.split(":")[1].removesuffix("_kernel")
    family = "_gemma" if constexprs.get("GEMMA") else ""
    return KernelSpec(
        kernel,
        name=f"{name}{family}_{dtype}_{size}",
        constexprs=constexprs,
        num_warps=num_warps,
        signature={
            **{f"{pointer}_ptr": f"*{dtype}" for pointer in pointers.split()},
            **dict.fromkeys(integers.split(), "i32"),
            **({} if kernel == SILU_MUL else {"eps": "fp32"}),
        },
        divisible_by_16=tuple(n for n in integers.split() if not n.startswith("num_")),
    )


# hidden sizes of models from 1B to 405B parameters, a row that no program holds, Llama-3-8B's MLP
ROW_KERNELS = []
for dtype in ("bf16", "fp32"):
    for size in (2048, 4096, MAX_ROW):
        rows, block, warps = tile_of(size)
        ROW_KERNELS += [
            spec(RMS_NORM, dtype, size, warps, GEMMA=False, ROWS=rows, BLOCK=block),
            spec(ADD_RMS_NORM, dtype, size, warps, BLOCK=block),
        ]
    ROW_KERNELS += [
        spec(RMS_NORM, dtype, 4096, 8, GEMMA=True, ROWS=1, BLOCK=4096),
        spec(RMS_NORM_LONG, dtype, 2 * MAX_ROW, 16, GEMMA=False, BLOCK=MAX_ROW // 2),
        spec(SILU_MUL, dtype, 14336, 4, BLOCK=SHORTEST_TILE),
    ]

POINTERS = ("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "q_out_ptr", "k_out_ptr")
STRIDES = ("stride_qt", "stride_qh", "stride_kt", "stride_kh")
ROW_KERNELS += [
    KernelSpec(
        f"{ROOM}.qk_norm:qk_norm_kernel",
        name=f"qk_norm_{dtype}_{size}",
        signature={
            **dict.fromkeys(POINTERS, f"*{dtype}"),
            "eps": "fp32",
            **dict.fromkeys(
                ("num_tokens", "q_heads", "k_heads", "q_programs", "size", *STRIDES), "i32"
            ),
        },
        constexprs=dict(zip(("ROWS", "BLOCK"), tile_of(size))),
        num_warps=tile_of(size)[2],
        divisible_by_16=("size", *STRIDES),
    )
    for dtype in ("bf16", "fp32")
    for size in (64, 128)
]

# Llama-3-8B's MLP: 4096 values in, 14336 out
EPILOGUES = [
    KernelSpec(
        f"{ROOM}.epilogue:{name}_kernel",
        name=f"{name}_{dtype}" + ("_t4" if chips == (75,) else ""),
        signature={
            **{f"{pointer}_ptr": f"*{dtype}" for pointer in pointers.split()},
            **dict.fromkeys(("num_rows", "num_columns", "size", *strides.split()), "i32"),
        },
        constexprs=dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tiles)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=("num_columns", "size", *strides.split()),
        chips=chips,
    )
    for dtype, tiles, chips in (
        ("bf16", TENSOR_CORES, (80, 89, 90, 100)),
        ("bf16", PLAIN, (75,)),
        ("fp32", PLAIN, (75, 80, 89, 90, 100)),
    )
    for name, pointers, strides in (
        ("relu_linear", "x weight out", "stride_x stride_weight"),
        ("swiglu", "x gate_weight up_weight out", "stride_x stride_gate stride_up"),
    )
]
KERNELS = ROW_KERNELS + EPILOGUES
