"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l02_naive_attention.lab.specs
"""

from lessons.l02_naive_attention.batched.fused import LARGE_PART, SLOTS
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

# ---------------------------------------------------------------- sampling

ASKED = dict.fromkeys(("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"), "*fp64")
ROW = {"scores_ptr": "*fp32", "maxima_ptr": "*fp32"}
LISTS = {"masses_ptr": "*i64", "counts_ptr": "*i32", "lists_ptr": "*fp32"}
NARROW = {"ranges_ptr": "*fp32", "narrow_ptr": "*fp32"}
SIZES = {"vocab_size": "i32", "stride_s": "i32"}
PARTS = 32  # of Llama 3's vocabulary


def sampling_spec(kernel: str, tensors: dict[str, str], **constexprs: int) -> KernelSpec:
    """A kernel of batched/ as a batch of many rows launches it."""
    module = "draw_kernel" if kernel == "draw_kernel" else "sample_kernels"
    return KernelSpec(
        f"{ROOM}.batched.{module}:{kernel}",
        name=kernel.removesuffix("_kernel"),
        signature=tensors | SIZES,
        constexprs={"PART": LARGE_PART} | constexprs,
        num_warps=8,
        divisible_by_16=tuple(SIZES),
    )


KERNELS += [
    sampling_spec("largest_kernel", ROW),
    sampling_spec("bands_kernel", ROW | ASKED | {"bands_ptr": "*fp32"}, PARTS=PARTS),
    sampling_spec("narrow_kernel", ROW | ASKED | {"bands_ptr": "*fp32"} | NARROW, PARTS=PARTS),
    sampling_spec("lists_kernel", ROW | ASKED | NARROW | LISTS, PARTS=PARTS),
    sampling_spec(
        "draw_kernel",
        ROW
        | ASKED
        | LISTS
        | dict.fromkeys(("stream_ptr", "drawn_ptr", "tokens_ptr"), "*i64")
        | {"num_parts": "i32"},
        PARTS=PARTS,
        COLS=SLOTS // PARTS,
    ),
    KernelSpec(
        f"{ROOM}.batched.sample_kernels:penalize_kernel",
        name="penalize",
        signature={
            "scores_ptr": "*fp32",
            **dict.fromkeys(("tokens_ptr", "counts_ptr", "distinct_ptr"), "*i64"),
            **dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp64"),
            "width": "i32",
            "stride_s": "i32",
        },
        constexprs={"BLOCK": 1024},
        options={"enable_fp_fusion": False},
    ),
]
