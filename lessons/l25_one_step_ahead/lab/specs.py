"""The kernel of `same_bits` as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert. Attention is lesson 12's.

    python -m lessons.toolbox.kernels.compile_check lessons.l25_one_step_ahead.lab.specs
"""

from lessons.l07_kernel_fusion.epilogue import PLAIN, TENSOR_CORES
from lessons.toolbox.kernels.compile_check import KernelSpec

# Llama-3-8B's o_proj: 4096 values in, 4096 out
KERNELS = [
    KernelSpec(
        "lessons.l25_one_step_ahead.same_bits.linear:linear_kernel",
        name=f"linear_{dtype}" + ("_t4" if chips == (75,) else ""),
        signature={
            **dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"),
            **dict.fromkeys(
                ("num_rows", "num_columns", "size", "stride_x", "stride_weight"), "i32"
            ),
        },
        constexprs=dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tiles)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=("num_columns", "size", "stride_x", "stride_weight"),
        chips=chips,
    )
    for dtype, tiles, chips in (
        ("bf16", TENSOR_CORES, (80, 89, 90, 100)),
        ("bf16", PLAIN, (75,)),
        ("fp32", PLAIN, (75, 80, 89, 90, 100)),
    )
]
