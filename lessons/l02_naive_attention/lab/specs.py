"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l02_naive_attention.lab.specs
"""

from lessons.l02_naive_attention.optimized import MAX_KEYS, warps_for
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l02_naive_attention"

INTEGERS = ("num_queries", "num_keys", "window", "stride_sh", "stride_sq")

# A short row and the longest; Tk a multiple of 16, as in most prefills, and not, as in every other
# generation step.
KERNELS = [
    KernelSpec(
        f"{ROOM}.optimized:softmax_kernel",
        name=f"softmax_{dtype}_{block_n}{odd}",
        signature={
            "scores_ptr": f"*{dtype}",
            "probs_ptr": f"*{dtype}",
            "softmax_scale": "fp32",
            **dict.fromkeys(INTEGERS, "i32"),
        },
        constexprs={"CAUSAL": True, "BLOCK_N": block_n},
        num_warps=warps_for(block_n),
        divisible_by_16=() if odd else INTEGERS,
    )
    for dtype in ("bf16", "fp32")
    for block_n in (1024, MAX_KEYS)
    for odd in ("", "_odd")
]
