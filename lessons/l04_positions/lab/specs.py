"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l04_positions.lab.specs
"""

from lessons.l04_positions.optimized import blocks_for
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l04_positions"

# Llama-3-8B (8 KV heads of 128, four queries each) in both layouts, and the embedded model (2 of
# 64, three queries each).
STRIDES = ("stride_qt", "stride_kt", "stride_vt", "stride_slot")
KERNELS = [
    KernelSpec(
        f"{ROOM}.optimized:rope_cache_kernel",
        name=f"rope_cache_{dtype}_{kv_heads}x{dim}_{layout}",
        signature={
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), f"*{dtype}"),
            "positions_ptr": "*i64",
            "slot_mapping_ptr": "*i64",
            "cos_sin_ptr": "*fp32",
            **dict.fromkeys(("num_positions", "num_kv_heads", *STRIDES), "i32"),
        },
        constexprs={"GROUP": group, "HEAD_DIM": dim, "LAYOUT": layout} | launch,
        num_warps=num_warps,
        divisible_by_16=STRIDES,
    )
    for kv_heads, group, dim, layout in (
        (8, 4, 128, "half"),
        (8, 4, 128, "interleaved"),
        (2, 3, 64, "half"),
    )
    for dtype in ("bf16", "fp32")
    for launch, num_warps in [blocks_for(kv_heads, group, dim)]
]
# The same model's q alone, and DeepSeek-V2's rotary coordinates: 128 heads of 64, interleaved, 192
# apart.
KERNELS += [
    KernelSpec(
        f"{ROOM}.optimized:rotate_kernel",
        name=f"rotate_{dtype}_{dim}_{layout}",
        signature={
            "x_ptr": f"*{dtype}",
            "positions_ptr": "*i64",
            "cos_sin_ptr": "*fp32",
            **dict.fromkeys(("num_positions", "num_heads", "stride_xt", "stride_xh"), "i32"),
        },
        constexprs={"HEAD_DIM": dim, "PAIRS": dim // 2, "BLOCK": 4096 // dim, "LAYOUT": layout},
        num_warps=2,
        divisible_by_16=("stride_xt", "stride_xh"),
    )
    for dim, layout in ((128, "half"), (64, "interleaved"))
    for dtype in ("bf16", "fp32")
]
