"""The lesson's kernels as they are launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l00_gpu_and_triton.lab.specs
"""

from lessons.toolbox.kernels.compile_check import CHIPS, KernelSpec

ROOM = "lessons.l00_gpu_and_triton.optimized"


def scale(divisible: bool) -> KernelSpec:
    """divisible: n is a multiple of 16, so the mask never cuts a 16-byte load."""
    return KernelSpec(
        f"{ROOM}:scale_kernel",
        name=f"scale{'' if divisible else '_odd'}",
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "factor": "fp32"},
        constexprs={"BLOCK": 1024},
        divisible_by_16=("n",) if divisible else (),
    )


def every_nth(stride: int | None) -> KernelSpec:
    """stride 1 is known to the compiler, as Triton does it for arguments that are 1."""
    known = {} if stride is None else {"stride": stride}
    return KernelSpec(
        f"{ROOM}:every_nth_kernel",
        name=f"every_nth_{'any' if stride is None else stride}",
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"}
        | ({"stride": "i32"} if stride is None else {}),
        constexprs={"BLOCK": 1024} | known,
        divisible_by_16=("count",),
    )


def tile_product(precision: str, size: int) -> KernelSpec:
    """One tile of size × size × size. A T4 has no tf32."""
    return KernelSpec(
        f"{ROOM}:tile_product_kernel",
        name=f"tile_product_{precision}_{size}",
        signature={"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32"},
        constexprs={"M": size, "K": size, "N": size, "INPUT_PRECISION": precision},
        chips=(80, 89, 90, 100) if precision == "tf32" else CHIPS,
    )


KERNELS = [
    scale(True),
    scale(False),
    every_nth(1),
    every_nth(None),
    tile_product("ieee", 16),
    tile_product("tf32", 64),
    KernelSpec(
        f"{ROOM}:row_max_kernel",
        signature={
            "x_ptr": "*fp32",
            "out_ptr": "*fp32",
            **dict.fromkeys(("columns", "stride_row", "stride_column"), "i32"),
        },
        constexprs={"BLOCK": 1024},
    ),
    KernelSpec(
        f"{ROOM}:column_sums_kernel",
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32", "rows": "i32", "columns": "i32"},
        constexprs={"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 64},
        divisible_by_16=("columns",),
    ),
]
# A tile that the registers do not hold. It is never launched: the README reads its report.
SPILLING = tile_product("ieee", 64)
