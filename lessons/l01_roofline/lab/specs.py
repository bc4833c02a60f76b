"""Every kernel of the lesson as it is launched: what `compile_check` compiles for five GPU
generations, and tests assert.

    python -m lessons.toolbox.kernels.compile_check lessons.l01_roofline.lab.specs
"""

from lessons.l01_roofline.optimized import TILE_BYTES
from lessons.toolbox.kernels.compile_check import KernelSpec

ROOM = "lessons.l01_roofline"

COPY = [
    KernelSpec(
        f"{ROOM}.optimized:scale_copy_kernel",
        name=f"scale_copy_{dtype}",
        signature={"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "n": "i32", "factor": "fp32"},
        constexprs={"TILE": TILE_BYTES // size},
    )
    for dtype, size in (("fp16", 2), ("bf16", 2), ("fp32", 4))
]

MASKED_TYPES = {"x_ptr": "*bf16", "out_ptr": "*bf16", "n": "i32", "factor": "fp32"}
MASKED_SPEC = (f"{ROOM}.masked:masked_kernel", MASKED_TYPES, {"TILE": TILE_BYTES // 2})
MASKED = [
    KernelSpec(*MASKED_SPEC, name="masked_any_length"),
    # Where a length happens to be a multiple of 16, Triton compiles a second kernel that
    # knows it, and vectorises.
    KernelSpec(*MASKED_SPEC, name="masked_multiple_of_16", divisible_by_16=("n",)),
]

KERNELS = COPY + MASKED
