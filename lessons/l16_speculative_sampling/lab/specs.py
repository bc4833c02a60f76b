"""The kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l16_speculative_sampling.lab.specs
"""

from lessons.l16_speculative_sampling.more.split import PART
from lessons.l16_speculative_sampling.optimized import BLOCK_V
from lessons.toolbox.kernels.compile_check import KernelSpec


def spec(sure: bool, rows: int, dense: bool) -> KernelSpec:
    """verify_kernel for up to `rows` rows a sequence. dense: the rows of a vocabulary whose size is
    a multiple of 16.
    """
    strides = ("stride_p", "stride_q")
    return KernelSpec(
        "lessons.l16_speculative_sampling.optimized:verify_kernel",
        name=f"verify_{'ngrams' if sure else 'model'}_{rows}{'' if dense else '_odd'}",
        signature={
            "p_ptr": "*fp32",
            "drafted_ptr": "*i64",
            "u_ptr": "*fp32",
            "cu_rows_ptr": "*i32",
            "tokens_ptr": "*i64",
            "accepted_ptr": "*i32",
            **dict.fromkeys(("vocab_size", *strides), "i32"),
        }
        | ({} if sure else {"q_ptr": "*fp32"}),
        constexprs={"SURE": sure, "BLOCK_ROWS": rows, "BLOCK_V": BLOCK_V}
        | ({"q_ptr": None} if sure else {}),
        divisible_by_16=("vocab_size", *strides) if dense else (),
    )


KERNELS = [spec(sure, 8, dense) for sure in (False, True) for dense in (True, False)]
KERNELS += [spec(False, 1, True), spec(False, 16, True)]


def split_spec(kernel: str, sure: bool) -> KernelSpec:
    """A kernel of more/split.py for up to 8 rows a sequence and Llama 3's vocabulary."""
    emits = kernel == "emit_kernel"
    tensors = {"tokens_ptr": "*i64", "accepted_ptr": "*i32"} if emits else {}
    numbers = ("vocab_size", "stride_p", "stride_q", *(("num_parts",) if emits else ()))
    return KernelSpec(
        f"lessons.l16_speculative_sampling.more.split:{kernel}",
        name=f"{kernel.partition('_')[0]}_{'ngrams' if sure else 'model'}",
        signature={
            "p_ptr": "*fp32",
            "drafted_ptr": "*i64",
            "u_ptr": "*fp32",
            "cu_rows_ptr": "*i32",
            "masses_ptr": "*fp32",
            **tensors,
            **dict.fromkeys(numbers, "i32"),
        }
        | ({} if sure else {"q_ptr": "*fp32"}),
        constexprs={"SURE": sure, "BLOCK_ROWS": 8, "PART": PART}
        | ({"PARTS": 64} if emits else {})
        | ({"q_ptr": None} if sure else {}),
        divisible_by_16=("vocab_size", "stride_p", "stride_q"),
        options={"enable_fp_fusion": False} if emits else {},
    )


KERNELS += [
    split_spec(kernel, sure)
    for kernel in ("masses_kernel", "emit_kernel")
    for sure in (False, True)
]
