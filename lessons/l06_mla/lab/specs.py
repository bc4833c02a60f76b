"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l06_mla.lab.specs
"""

from lessons.l06_mla.optimized import tiles_for
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l06_mla"

# DeepSeek-V2-Lite has 16 heads, V2 and V3 have 128. Not for sm_75: a tile of 576 values a row
# passes its 64 KB in any form.
STRIDES = ("stride_qb", "stride_qh", "stride_kb", "stride_kn")
KERNELS = [
    KernelSpec(
        f"{ROOM}.optimized:mla_decode_kernel",
        name=f"mla_decode_{dtype}_{heads}_sm{chips[0]}",
        signature={
            "q_ptr": f"*{dtype}",
            "kv_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "lse_ptr": "*fp32",
            "context_lens_ptr": "*i32",
            "softmax_scale": "fp32",
            "num_heads": "i32",
            **dict.fromkeys(STRIDES, "i32"),
        },
        constexprs={"RANK": 512, "ROPE": 64, "BLOCK_H": tiles.block_h, "BLOCK_N": tiles.block_n},
        chips=chips,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=(*STRIDES, "num_heads"),
    )
    for dtype, itemsize, heads in (("bf16", 2, 16), ("bf16", 2, 128), ("fp32", 4, 16))
    for chips, shared in (((80, 90, 100), 163 * 1024), ((89,), 99 * 1024))
    for tiles in [tiles_for(heads, itemsize, shared)]
]
