"""The kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l16_speculative_sampling.lab.specs
"""

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
