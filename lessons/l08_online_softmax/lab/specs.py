"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l08_online_softmax.lab.specs
"""

from lessons.l08_online_softmax.optimized import MAX_BLOCK, TILE_BYTES, TILE_STAGES, warps_for
from lessons.l08_online_softmax.partials import BLOCK_KEYS, STAGES, merge_warps
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l08_online_softmax"

# Rows that fit a block, up to vocabularies of 32000, and longer ones, such as 128256; "odd" are
# rows that start anywhere.
ROWS = dict.fromkeys(("num_columns", "stride_row"), "i32")
KERNELS = [
    KernelSpec(
        f"{ROOM}.optimized:block_softmax_kernel",
        name=f"block_{dtype}_{block_n}{odd}",
        signature={"scores_ptr": f"*{dtype}", "probs_ptr": f"*{dtype}", "lse_ptr": "*fp32", **ROWS},
        constexprs={"BLOCK_N": block_n},
        num_warps=warps_for(block_n),
        divisible_by_16=() if odd else tuple(ROWS),
    )
    for dtype in ("bf16", "fp32")
    for block_n in (4096, MAX_BLOCK)
    for odd in ("", "_odd")
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.optimized:online_softmax_kernel",
        name=f"online_{dtype}{odd}",
        signature={"scores_ptr": f"*{dtype}", "probs_ptr": f"*{dtype}", "lse_ptr": "*fp32", **ROWS},
        constexprs={"BLOCK_N": TILE_BYTES // size, "STAGES": TILE_STAGES},
        num_warps=32,
        divisible_by_16=() if odd else tuple(ROWS),
    )
    for dtype, size in (("bf16", 2), ("fp32", 4))
    for odd in ("", "_odd")
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.partials:partial_kernel",
        name=f"partial_{dtype}_{dim}",
        signature={
            "scores_ptr": f"*{dtype}",
            "v_ptr": f"*{dtype}",
            "outs_ptr": "*fp32",
            "lses_ptr": "*fp32",
            "num_rows": "i32",
            **dict.fromkeys(("num_keys", "split_size", "stride_scores", "stride_v"), "i32"),
        },
        constexprs={"HEAD_DIM": dim, "BLOCK_D": dim, "BLOCK_N": BLOCK_KEYS, "STAGES": STAGES},
        divisible_by_16=("num_keys", "split_size", "stride_scores", "stride_v"),
    )
    for dtype in ("bf16", "fp32")
    for dim in (64, 128)
]
KERNELS += [
    KernelSpec(
        f"{ROOM}.partials:merge_kernel",
        name=f"merge_{dtype}_{dim}_{splits}",
        signature={
            "outs_ptr": "*fp32",
            "lses_ptr": "*fp32",
            "out_ptr": f"*{dtype}",
            "lse_ptr": "*fp32",
            "num_splits": "i32",
            "num_rows": "i32",
        },
        constexprs={"HEAD_DIM": dim, "BLOCK_D": dim, "BLOCK_N": splits, "STAGES": STAGES},
        num_warps=merge_warps(dim),
        divisible_by_16=("num_rows",),
    )
    for dtype in ("bf16", "fp32")
    for dim, splits in ((64, 8), (128, BLOCK_KEYS))
]
