"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l24_structured_outputs.lab.specs
"""

from lessons.l24_structured_outputs.optimized import BLOCK
from lessons.toolbox.kernels.compile_check import KernelSpec


def token_mask_spec(dtype: str, chips: tuple[int, ...]) -> KernelSpec:
    """token_mask_kernel as `apply_token_mask` launches it."""
    return KernelSpec(
        "lessons.l24_structured_outputs.kernels:token_mask_kernel",
        name=f"token_mask_{dtype}",
        signature={
            "logits_ptr": f"*{dtype}",
            "mask_ptr": "*i32",
            "rows_ptr": "*i64",
            **dict.fromkeys(("vocab_size", "stride_logits", "stride_mask"), "i32"),
        },
        constexprs={"BLOCK": BLOCK},
        num_warps=4,
        divisible_by_16=("vocab_size", "stride_logits"),
        chips=chips,
    )


# Engines sample in float32. A T4 has no bfloat16.
KERNELS = [
    token_mask_spec("fp32", (75, 90)),
    token_mask_spec("bf16", (80, 89, 100)),
]
